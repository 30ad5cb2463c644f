"""An object with the tensors of a file, for tests of ``slm.TensorSource``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slm_core.closing import Closing
from slm_core.gguf import GgmlType, GgufFile, Metadata
from slm_core.tensor_source import TensorBytes


class FileTensors(Closing):
    """A ``TensorSource`` with the content of a GGUF file, which stays open until ``close()``.

    Args:
        path: the file.
        change: gets the name and bytes of a tensor, and returns the bytes that ``tensor_data`` returns.

    Attributes:
        metadata: the metadata of the file.
        tensors: shape and type of each tensor.
        reads: the number of reads of each tensor.
    """

    def __init__(self, path: Path, change: Callable[[str, bytes], Any] = lambda name, data: data) -> None:
        self._file = GgufFile.open(path)
        self._change = change
        self.metadata: Metadata = self._file.metadata
        self.tensors: Mapping[str, tuple[tuple[int, ...], GgmlType]] = {
            name: (tensor.shape, tensor.ggml_type) for name, tensor in self._file.tensors.items()
        }
        self.reads: Counter[str] = Counter()

    def tensor_data(self, name: str) -> TensorBytes:
        """The blocks of a tensor, in new memory."""
        self.reads[name] += 1
        data: TensorBytes = self._change(name, self._file.tensor_data(name).tobytes())
        return data

    def fingerprint(self) -> str:
        """The fingerprint of the file."""
        return self._file.fingerprint()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
