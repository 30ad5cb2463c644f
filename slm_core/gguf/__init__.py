"""GGUF, the model file format of ggml: reads it without copying, and writes it tensor by tensor."""

import sys

if sys.byteorder != "little":  # before NumPy views of a mapped file could show other numbers than are in it
    raise ImportError(
        "slm-core needs a little-endian processor: numbers in model files are little-endian,"
        " and are mapped without conversion"
    )

from slm_core.gguf.file import GgufFile
from slm_core.gguf.ggml_types import GgmlType
from slm_core.gguf.metadata import OWN, RANK_EOS_TWICE, RANK_POOLING, Metadata, MetadataValue
from slm_core.gguf.source import WeightSource
from slm_core.gguf.tensors import TensorInfo
from slm_core.gguf.writer import GgufWriter, NewTensor, PlainValue, TensorSink, header, stored_uint32

__all__ = [
    "OWN",
    "RANK_EOS_TWICE",
    "RANK_POOLING",
    "GgmlType",
    "GgufFile",
    "GgufWriter",
    "Metadata",
    "MetadataValue",
    "NewTensor",
    "PlainValue",
    "TensorInfo",
    "TensorSink",
    "WeightSource",
    "header",
    "stored_uint32",
]
