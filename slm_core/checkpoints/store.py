"""The weights of a directory: all safetensors files together, FP8 dequantized, blocks in GGUF's layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints import fp8, mxfp4, packed
from slm_core.checkpoints.safetensors import SafetensorsFile, StoredTensor
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.gguf.cursor import shown
from slm_core.jsonfile import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES: Mapping[str, GgmlType] = {
    "F32": GgmlType.F32,
    "F16": GgmlType.F16,
    "BF16": GgmlType.BF16,
    fp8.DTYPE: GgmlType.BF16,
}
_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "U8": np.dtype("u1"),
}  # fmt: skip
_SAMPLES, _SAMPLE_BYTES = 8, 4096
_log = logging.getLogger(__name__)


class TensorStore:
    """All tensors of a directory, by their names in its files.

    Args:
        folder: contains ``model.safetensors``, or several files and their index.
        subfolders: folders in it with additional tensors; their names get the prefix "<subfolder>/".
        packing: how matrices of integers are packed; None for no such matrices.

    Attributes:
        shapes: the shapes of all tensors by name, without scales of other tensors.
        size_bytes: the stored size of all tensors, in bytes.

    Raises:
        InvalidModelFile: a file is missing or damaged.
        UnsupportedModel: the directory has no weights of this format.
    """

    def __init__(self, folder: Path, subfolders: Sequence[str] = (), packing: packed.Packing | None = None) -> None:
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._locations: dict[str, tuple[SafetensorsFile, str]] = {}  # the file of each tensor, and its name there
        try:
            for path in _paths(folder):
                self._add(SafetensorsFile(path))
            for name in subfolders:
                self._add(SafetensorsFile(folder / name / SINGLE), f"{name}/")
            self._check_index()
            self._scales = fp8.find_scales(folder, self._all())
            self._packed = mxfp4.find_packed(folder, self._all())
            self._matrices = packed.find_matrices(folder, self._all(), packing, self._data)
        except BaseException:
            self.close()
            raise
        scales = fp8.scaling_tensors(self._all(), self._scales)
        if unused := sorted(scales - set(self._scales.values())):
            _log.info("%s: %d tensors scale activations or caches, which changes nothing here", folder, len(unused))
        scales.update(map(mxfp4.scales_of, self._packed))
        scales |= packed.parts_of(self._matrices)
        shapes = {name: tensor.shape for name, tensor in self._all().items() if name not in scales}
        self.shapes = shapes | self._packed | {name: matrix.shape for name, matrix in self._matrices.items()}
        self.size_bytes = sum(tensor.n_bytes for tensor in self._all().values())

    def ggml_type(self, name: str) -> GgmlType:
        """The format of a tensor's values in ``array``.

        Raises:
            UnsupportedModel: the stored type is not supported.
        """
        if name in self._packed:
            return GgmlType.MXFP4
        if name in self._matrices:
            return self._matrices[name].ggml_type
        dtype = self._stored(name).dtype
        if dtype not in _TYPES:
            raise UnsupportedModel(
                f"{self.folder}: tensor {shown(name)} is of type {dtype} (accepted: {', '.join(_TYPES)})"
            )
        return _TYPES[dtype]

    def array(self, name: str) -> NDArray[np.generic]:
        """A tensor's values: BF16 as uint16 bits, rows of blocks as bytes; if possible, a view of the file."""
        if name in self._packed:
            return mxfp4.interleave(self._raw(name), self._raw(mxfp4.scales_of(name)))
        if name in self._matrices:
            return self._matrices[name].rows(self._data)
        tensor = self._stored(name)
        if tensor.dtype == fp8.DTYPE:
            scale = self._scales[name]
            return fp8.expand(self._raw(name), self._data(scale), self._stored(scale))
        array = self._data(name).view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        return array if array.flags.aligned else array.copy()

    def digest(self) -> bytes:
        """A digest of all weights, from names, shapes, types and samples, independent of their division into files."""
        digest = blake2b(digest_size=32)
        for name, tensor in sorted(self._all().items()):
            digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
            data = self._data(name)
            last = max(0, tensor.n_bytes - _SAMPLE_BYTES)
            for start in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                digest.update(data[start : start + _SAMPLE_BYTES].data)
        return digest.digest()

    def close(self) -> None:
        """Release the files. A second call does nothing."""
        for file in self._files:
            file.close()

    def _all(self) -> dict[str, StoredTensor]:
        return {name: self._stored(name) for name in self._locations}

    def _stored(self, name: str) -> StoredTensor:
        file, stored_name = self._locations[name]
        return file.tensors[stored_name]

    def _data(self, name: str) -> NDArray[np.uint8]:
        file, stored_name = self._locations[name]
        return file.data(stored_name)

    def _raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor of one-byte items, in its shape."""
        return self._data(name).reshape(self._stored(name).shape)

    def _add(self, file: SafetensorsFile, prefix: str = "") -> None:
        self._files.append(file)
        for stored_name in file.tensors:
            name = prefix + stored_name
            if name in self._locations:
                raise InvalidModelFile(
                    f"{file.path}: tensor {shown(stored_name)} is in {self._locations[name][0].path.name}, too"
                )
            self._locations[name] = file, stored_name

    def _check_index(self) -> None:
        for name, file in _index(self.folder).items():
            if name not in self._locations or self._locations[name][0].path.name != file:
                raise InvalidModelFile(f"{self.folder / INDEX}: tensor {shown(name)} is not in {shown(file)}")


def _paths(folder: Path) -> list[Path]:
    index = _index(folder)
    if index:
        return [folder / name for name in sorted(set(index.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise UnsupportedModel(f"{folder}: there is no {SINGLE}")


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor; {} without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise InvalidModelFile(f"{path}: there is no 'weight_map'")
    for name in files.values():
        if not isinstance(name, str) or "\0" in name or Path(name).name != name:
            raise InvalidModelFile(f"{path}: {shown(str(name))} is not the name of a file in the same folder")
    return files
