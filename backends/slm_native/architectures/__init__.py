"""Architectures: one file each, whose ``spec`` turns metadata into a ``ModelSpec``. Files are found, not listed."""

from slm_native.architectures._registry import architecture_names, read_spec

__all__ = ["architecture_names", "read_spec"]
