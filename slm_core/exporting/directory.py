"""A directory of a Hugging Face model, presented as the whole GGUF file that is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints import INDEX, SINGLE, Checkpoint
from slm_core.closing import Closing
from slm_core.errors import UnsupportedModel
from slm_core.exporting.vocabulary import vocabulary_metadata
from slm_core.formatting import directory_templates
from slm_core.gguf import GgmlType, GgufFile, GgufWriter, NewTensor, TensorInfo
from slm_core.gguf.file_types import FILE_TYPE, file_type, main_type
from slm_core.gguf.matrices import may_be_quantized
from slm_core.gguf.writer import stored
from slm_core.paths import local
from slm_core.quant import dequantize

T = TypeVar("T")
D = TypeVar("D")

_EMBEDDING = "token_embd.weight"
_QUANTIZATION_VERSION = 2
_FLOATS = (GgmlType.F16, GgmlType.BF16)


class ExportedDirectory(Closing):
    """Metadata and tensors of the GGUF file that a directory becomes; see ``gguf.WeightSource``.

    Norms, biases and other small tensors become F32, as engines expect; matrices keep their type.

    Args:
        folder: the directory.

    Attributes:
        path: the directory.
        alignment: the alignment of the file's tensors, in bytes.
        shard_paths: the files that are read.
        metadata: the metadata, with the vocabulary and the chat templates.
        tensors: shapes and types, by GGUF's names.
        size_bytes: the size of the directory's weights.
        is_mapped: see ``gguf.WeightSource``.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``Checkpoint`` and ``vocabulary_metadata``.
        TemplateError: a chat template is damaged.
    """

    alignment = 32
    is_mapped = True

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._checkpoint = Checkpoint(folder, with_unread=True)
        try:
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
                {name: _exported(info) for name, info in self._checkpoint.tensors.items()}
            )
            self.size_bytes = sum(info.n_bytes for info in self._checkpoint.tensors.values())
            self._header = GgufFile.open(GgufWriter(self._metadata(), [], self.alignment).header)
        except BaseException:
            self._checkpoint.close()
            raise
        self.metadata = self._header.metadata

    @property
    def shard_paths(self) -> Sequence[Path]:
        """The files of weights."""
        names = (SINGLE, INDEX, "*.safetensors")
        return [path for name in names for path in self.path.glob(name)]

    def require(self, key: str, type_: type[T]) -> T:
        """The metadata value of ``key``; see ``Metadata.require``."""
        return self.metadata.require(key, type_)

    def get(self, key: str, type_: type[T], default: D) -> T | D:
        """The metadata value of ``key``, or ``default``; see ``Metadata.typed``."""
        return self.metadata.typed(key, type_, default)

    def tensor_data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's numbers as the file stores them, uint8 [n_bytes]; errors as for ``Checkpoint.tensor_data``."""
        data = self._checkpoint.tensor_data(name)
        info = self._checkpoint.tensors[name]
        if self.tensors[name].ggml_type is info.ggml_type:
            return data
        return dequantize(data, info.ggml_type, info.shape).reshape(-1).view(np.uint8)

    def fingerprint(self) -> str:
        """A digest of the directory's content; see ``Checkpoint.fingerprint``."""
        return self._checkpoint.fingerprint()

    def close(self) -> None:
        """Release the files. A second call does nothing."""
        self._checkpoint.close()

    def writer(self) -> GgufWriter:
        """The writer of the file."""
        metadata = {key: self.metadata.stored(key) for key in self.metadata}
        tensors = [NewTensor(info.name, info.shape, info.ggml_type, info.n_bytes) for info in self.tensors.values()]
        return GgufWriter(metadata, tensors, self.alignment)

    def _metadata(self) -> dict[str, bytes]:
        metadata = self._checkpoint.metadata
        if _EMBEDDING not in self.tensors:
            raise UnsupportedModel(f"{self.path}: tensor {_EMBEDDING!r} is missing")
        n_vocab = self.tensors[_EMBEDDING].shape[0]
        kind = main_type((info.ggml_type, info.n_elements) for info in self.tensors.values())
        added = {
            FILE_TYPE: file_type(kind),
            "general.quantization_version": _QUANTIZATION_VERSION,
            **vocabulary_metadata(self.path, n_vocab, self._checkpoint.ends),
            **_templates(self.path),
        }
        return {key: metadata.stored(key) for key in metadata} | {key: stored(value) for key, value in added.items()}


def open_gguf(source: str | os.PathLike[str]) -> GgufFile | ExportedDirectory:
    """Open a GGUF file, or a directory as the GGUF file that is made of it.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``GgufFile.open`` and ``ExportedDirectory``.
    """
    path = local(source)
    return ExportedDirectory(path) if path.is_dir() else GgufFile.open(path)


def _exported(info: TensorInfo) -> TensorInfo:
    if info.ggml_type not in _FLOATS or may_be_quantized(info.name, info.shape):
        return info
    return TensorInfo(info.name, info.shape, GgmlType.F32, 4 * info.n_elements, 0, 0)


def _templates(folder: Path) -> dict[str, str | list[str]]:
    templates, _ = directory_templates(folder)
    values: dict[str, str | list[str]] = {}
    if "default" in templates:
        values["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        values["tokenizer.chat_templates"] = list(templates)
    return values | {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}
