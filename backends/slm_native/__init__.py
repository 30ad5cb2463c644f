"""The native engine: GGUF models on NumPy and on C++ kernels."""
