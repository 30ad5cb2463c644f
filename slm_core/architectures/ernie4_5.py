"""ernie4_5: ERNIE 4.5, dense. A llama."""

from slm_core.architectures.llama import spec

__all__ = ["spec"]
