"""qwen2_5_vl: Qwen2.5-VL. Its text model is that of Qwen2-VL."""

from slm_core.checkpoints.families.qwen2_vl import recipe

__all__ = ["recipe"]
