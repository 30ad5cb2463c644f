"""qwen2_5_vl: Qwen2.5-VL. Its text model is the same as Qwen2-VL's."""

from slm_core.checkpoints.families.qwen2_vl import recipe

__all__ = ["recipe"]
