"""The llama.cpp backend: llama-cpp-python's low-level functions behind slm-core's contract."""

BACKEND = "llamacpp"
INSTALL_HINT = "pip install 'slm-core[llamacpp]'"
