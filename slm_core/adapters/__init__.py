"""Low-rank adapters (LoRA; Hu et al., arXiv:2106.09685): read, checked, written, and listed for a model."""

from slm_core.adapters.adapter import Adapter, AdapterSet, AdapterUse, LowRank, stacked
from slm_core.adapters.base_model import BaseModel
from slm_core.adapters.gguf_adapters import write_adapter
from slm_core.adapters.loaded import LoadedAdapters, check_scales, unknown_adapter
from slm_core.adapters.merging import merge
from slm_core.adapters.reading import read_adapter

__all__ = [
    "Adapter",
    "AdapterSet",
    "AdapterUse",
    "BaseModel",
    "LoadedAdapters",
    "LowRank",
    "check_scales",
    "merge",
    "read_adapter",
    "stacked",
    "unknown_adapter",
    "write_adapter",
]
