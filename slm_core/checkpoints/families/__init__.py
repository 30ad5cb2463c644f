"""What directories hold, declared: one file for each ``model_type`` of a configuration, found by being here.

A family's module defines ``recipe``, which reads a configuration and lists the sources of GGUF's tensors.
"""
