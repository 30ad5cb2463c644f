"""The ONNX Runtime backend: a GGUF becomes an ONNX graph that any execution provider can run."""

BACKEND = "onnx"
INSTALL_HINT = "pip install 'slm-core[onnx]'"
