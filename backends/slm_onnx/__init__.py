"""The ONNX Runtime backend: builds an ONNX graph from a GGUF file, for any execution provider."""

BACKEND = "onnx"
INSTALL_HINT = "pip install 'slm-core[onnx]'"
