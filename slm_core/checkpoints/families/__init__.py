"""Declarations of directories: one file for each ``model_type`` of a configuration.

A family's module defines ``recipe``, which reads a configuration and lists the sources of GGUF's tensors.
"""
