"""internlm2: InternLM 2 and 2.5, a llama by other names."""

from slm_core.architectures.llama import spec

__all__ = ["spec"]
