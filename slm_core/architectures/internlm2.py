"""internlm2: InternLM 2 and 2.5, the same as llama."""

from slm_core.architectures.llama import spec

__all__ = ["spec"]
