"""The native engine: GGUF models on NumPy, on C++ kernels, and on torch."""
