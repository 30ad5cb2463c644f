"""Adapters: read, checked, written, and listed for a model.

They are low-rank changes of a model's matrices (LoRA; Hu et al., arXiv:2106.09685) or control vectors (representation
engineering; Zou et al., arXiv:2310.01405).
"""

from slm_core.adapters.adapter import Adapter, AdapterSet, AdapterUse, Direction, LowRank, stacked, summed_directions
from slm_core.adapters.base_model import BaseModel
from slm_core.adapters.control_vectors import check_layer_range, write_control_vector
from slm_core.adapters.gguf_adapters import write_adapter
from slm_core.adapters.loaded import MAX_SCALE, LoadedAdapters, check_scales, unknown_adapter
from slm_core.adapters.merging import merge
from slm_core.adapters.reading import read_adapter

__all__ = [
    "MAX_SCALE",
    "Adapter",
    "AdapterSet",
    "AdapterUse",
    "BaseModel",
    "Direction",
    "LoadedAdapters",
    "LowRank",
    "check_layer_range",
    "check_scales",
    "merge",
    "read_adapter",
    "stacked",
    "summed_directions",
    "unknown_adapter",
    "write_adapter",
    "write_control_vector",
]
