"""A directory of a Hugging Face model, presented as a GGUF file."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.changes import Change, keeps_rows
from slm_core.checkpoints.reading import CONFIG, answer_ends, read_recipe, renamed, vocabulary_of
from slm_core.checkpoints.recipe import Part, Parts, Recipe
from slm_core.checkpoints.store import TensorStore
from slm_core.closing import Closing
from slm_core.errors import InvalidModelFile, ModelClosed, UnsupportedModel
from slm_core.gguf import OWN, GgmlType, GgufFile, Metadata, TensorInfo, header
from slm_core.gguf.cursor import shown
from slm_core.jsonfile import read_json
from slm_core.quant import dequantize

T = TypeVar("T")
D = TypeVar("D")

_log = logging.getLogger(__name__)


class Checkpoint(Closing):
    """Metadata and tensors by GGUF's names, from ``config.json`` and safetensors files, which stay mapped.

    A tensor that GGUF stores in the same form is a view of the file. Other tensors (query and key rows in another
    order, norms stored as the difference to 1, experts in separate tensors, FP8) are converted at each read. Several
    threads may use a checkpoint.

    Args:
        folder: the directory.
        with_unread: whether to include tensors that nothing reads here, but that other readers of GGUF files need.

    Attributes:
        path: the directory.
        metadata: the metadata of the equivalent GGUF file.
        tensors: shapes and types, by GGUF's names.
        config: the content of ``config.json``.
        ends: tokens that end an answer, from the configuration.
        is_mapped: see ``gguf.WeightSource``.

    Raises:
        InvalidModelFile: a file is missing or damaged, or a tensor is missing.
        UnsupportedModel: the directory's kind, or one of its settings, is not implemented.
    """

    is_mapped = True

    def __init__(self, folder: Path, *, with_unread: bool = False) -> None:
        self.path = folder
        recipe = read_recipe(folder)
        self.config: Mapping[str, Any] = MappingProxyType(read_json(folder / CONFIG))
        self.ends = answer_ends(folder)
        self._tables = recipe.tables
        self._store: TensorStore | None = TensorStore(folder, recipe.subfolders, recipe.packing)
        try:
            stored = {renamed(name, recipe.renamed): name for name in self._store.shapes}
            recipe = recipe.as_stored(stored)
            self._parts = recipe.parts(stored)
            if with_unread:
                unread = recipe.unread.items()
                self._parts |= {name: part for name, part in unread if stored.keys() >= set(part.names())}
            self._stored_names = _names(folder, recipe, self._parts, stored)
            numbers = {key: [*map(self._number, names)] for key, names in recipe.number_names().items()}
            self._header = GgufFile.open(_header(folder, recipe, numbers))
            self.metadata: Metadata = self._header.metadata
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._infos())
        except BaseException:
            self.close()
            raise
        self._fingerprint: str | None = None

    def require(self, key: str, type_: type[T]) -> T:
        """The metadata value of ``key``, strictly typed; see ``Metadata.require``."""
        return self.metadata.require(key, type_)

    def get(self, key: str, type_: type[T], default: D) -> T | D:
        """The metadata value of ``key``, strictly typed, or ``default`` if there is none; see ``Metadata.typed``."""
        return self.metadata.typed(key, type_, default)

    def tensor_data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's numbers as a GGUF file would store them, uint8 [n_bytes], read-only.

        Raises:
            UnsupportedModel: there is no such tensor.
            ModelClosed: after ``close()``.
        """
        if name not in self.tensors:
            raise UnsupportedModel(f"{self.path}: tensor {shown(name)} is missing")
        array = self._tables[name] if name in self._tables else self._array(self._parts[name])
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data.flags.writeable = False
        return data

    def fingerprint(self) -> str:
        """A digest of the content, independent of path and date: 64 hexadecimal digits.

        It covers the metadata, the vocabulary, and names, shapes, types and samples of all tensors.

        Raises:
            ModelClosed: after ``close()``, unless the fingerprint is cached.
        """
        if self._fingerprint is None:
            digest = blake2b(digest_size=32)
            named = {key: repr(self.metadata[key]) for key in self.metadata if key != "general.name"}
            digest.update(json.dumps([named, sorted(self.ends)]).encode())
            if (vocabulary := vocabulary_of(self.path)).is_file():
                digest.update(vocabulary.read_bytes())
            digest.update(self._open_store().digest())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Release the files. A second call does nothing; reading tensors afterwards raises ``ModelClosed``."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open_store(self) -> TensorStore:
        if self._store is None:
            raise ModelClosed(f"{self.path}: the directory is closed")
        return self._store

    def _array(self, part: Part) -> NDArray[Any]:
        store = self._open_store()
        arrays = [store.array(self._stored_names[name]) for name in part.names()]
        array = np.stack(arrays) if part.n_stacked else arrays[0]
        if part.change is None:
            return array
        kind, shape = store.ggml_type(self._stored_names[part.names()[0]]), self._shape(part)
        if part.change.computes or _parts_blocks(kind, part.change, shape):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            array = part.change.values(dequantize(data, kind, shape))
            return array if part.change.computes else array.astype(np.float16)
        return part.change.values(array)

    def _shape(self, part: Part) -> tuple[int, ...]:
        """The shape of a part before its change."""
        shape = self._open_store().shapes[self._stored_names[part.names()[0]]]
        return (part.n_stacked, *shape) if part.n_stacked else shape

    def _number(self, name: str) -> float:
        """The single number of a tensor that is metadata in GGUF files."""
        store, stored = self._open_store(), self._stored_names[name]
        if math.prod(store.shapes[stored]) != 1:
            raise InvalidModelFile(f"{self.path}: tensor {shown(stored)} is not one number")
        data = np.ascontiguousarray(store.array(stored)).reshape(-1).view(np.uint8)
        return float(dequantize(data, store.ggml_type(stored), (1,))[0])

    def _infos(self) -> dict[str, TensorInfo]:
        infos = {
            name: TensorInfo(name, table.shape, GgmlType.F32, table.nbytes, 0, 0)
            for name, table in self._tables.items()
        }
        for name, part in self._parts.items():
            infos[name] = self._info(name, part)
        return infos

    def _info(self, name: str, part: Part) -> TensorInfo:
        store = self._open_store()
        names = [self._stored_names[each] for each in part.names()]
        shapes, kinds = {store.shapes[each] for each in names}, {store.ggml_type(each) for each in names}
        if len(shapes) != 1 or len(kinds) != 1:
            raise UnsupportedModel(f"{self.path}: tensors such as {shown(names[0])} differ in shape or type")
        shape, kind = (part.n_stacked,) * bool(part.n_stacked) + shapes.pop(), kinds.pop()
        if part.change is not None:
            before, shape = shape, self._changed_shape(names[0], part.change, shape)
            if part.change.computes or _parts_blocks(kind, part.change, before):
                kind = GgmlType.F32 if part.change.computes else GgmlType.F16
        return TensorInfo(name, shape, kind, math.prod(shape) // kind.block_size * kind.block_bytes, 0, 0)

    def _changed_shape(self, name: str, change: Change, shape: tuple[int, ...]) -> tuple[int, ...]:
        try:
            if not shape:
                raise ValueError("a number alone")
            return change.shape(shape)
        except ValueError as error:
            raise InvalidModelFile(f"{self.path}: tensor {shown(name)} has the shape {shape}: {error}") from None


def _parts_blocks(kind: GgmlType, change: Change, shape: tuple[int, ...]) -> bool:
    """Whether a change of a tensor of this shape would move single columns of blocks."""
    return kind.block_size > 1 and not keeps_rows(change, shape)


def _header(folder: Path, recipe: Recipe, numbers: Mapping[str, list[float]]) -> bytes:
    """The metadata in the format of a GGUF file, so that the same strict reader applies."""
    architecture = recipe.architecture
    named = {key if key.startswith(OWN) else f"{architecture}.{key}": value for key, value in recipe.metadata.items()}
    general = {"general.architecture": architecture, "general.name": folder.resolve().name}
    return header({**general, **named, **recipe.plain, **numbers})


def _names(folder: Path, recipe: Recipe, parts: Parts, stored: Mapping[str, str]) -> dict[str, str]:
    """The stored name of every tensor of the recipe.

    Raises:
        InvalidModelFile: a tensor of the recipe is missing.
        UnsupportedModel: the directory has an unknown tensor.
    """
    required = {name for part in parts.values() for name in part.names()}
    required.update(*recipe.number_names().values())
    for name in sorted(required - stored.keys()):
        raise InvalidModelFile(f"{folder}: tensor {shown(name)} is missing")
    unused = [name for name in stored if name not in required]
    for name in unused:
        if not re.search(recipe.unused, name):
            raise UnsupportedModel(
                f"{folder}: tensor {shown(stored[name])} is unknown for {recipe.architecture} models, so results"
                f" could be wrong ({CONFIG} may say something else)"
            )
    if unused:
        _log.info("%s: %d tensors change nothing here, such as %r", folder, len(unused), stored[unused[0]])
    return {name: stored[name] for name in required}
