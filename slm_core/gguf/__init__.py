"""Reading GGUF, the model file format of ggml: metadata, tensor directory and raw tensor data, without copying."""

from slm_core.gguf.file import GgufFile
from slm_core.gguf.ggml_types import GgmlType
from slm_core.gguf.metadata import Metadata, MetadataValue
from slm_core.gguf.tensors import TensorInfo

__all__ = ["GgmlType", "GgufFile", "Metadata", "MetadataValue", "TensorInfo"]
