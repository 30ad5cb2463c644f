"""The plan of a quantization: each tensor's type, decided and checked before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slm_core.errors import InvalidOption, UnsupportedModel
from slm_core.exporting import ExportedDirectory
from slm_core.gguf import GgmlType, GgufFile, GgufWriter, NewTensor, TensorInfo, stored_uint32
from slm_core.gguf.cursor import shown
from slm_core.gguf.file_types import FILE_TYPE
from slm_core.gguf.matrices import may_be_quantized
from slm_core.quant import format_of, quantizable_types, row_bytes
from slm_core.quantizing.importance import Importance, read_importance
from slm_core.quantizing.recipes import (
    Chooser,
    QuantizationRecipe,
    fallback_type,
    in_order,
    recipe_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensor:
    """One tensor.

    Attributes:
        source: its location and type in the source file.
        requested_type: the type of the recipe or an override.
        ggml_type: the type in the new file. It differs if a row is not a multiple of the requested type's blocks.
        importance: float32 [n_matrices * n_cols], the weight of each column's error; None for equal weights.
    """

    source: TensorInfo
    requested_type: GgmlType
    ggml_type: GgmlType
    importance: NDArray[np.float32] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the tensor is copied unchanged."""
        return self.ggml_type is self.source.ggml_type

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the new file."""
        if self.is_kept:
            return self.source.n_bytes
        n_cols = self.source.shape[-1]
        return self.source.n_elements // n_cols * row_bytes(self.ggml_type, n_cols)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for a model file.

    Attributes:
        file: the model, open: a GGUF file, or the one that a directory becomes.
        recipe: the recipe.
        tensors: every tensor, in file order.
        notes: notes of one line on losses of precision and missing importance.
    """

    file: GgufFile | ExportedDirectory
    recipe: QuantizationRecipe
    tensors: tuple[PlannedTensor, ...]
    notes: tuple[str, ...]

    @property
    def fallbacks(self) -> list[PlannedTensor]:
        """The tensors that do not get the requested type."""
        return [tensor for tensor in self.tensors if tensor.ggml_type is not tensor.requested_type]

    def writer(self) -> GgufWriter:
        """The writer of the new file. Metadata is copied, except the file type; shards become one file."""
        source = self.file.metadata
        metadata = {key: source.stored(key) for key in source if not key.startswith("split.")}
        metadata[FILE_TYPE] = stored_uint32(self.recipe.file_type)
        metadata["general.quantization_version"] = stored_uint32(_QUANTIZATION_VERSION)
        tensors = [NewTensor(t.source.name, t.source.shape, t.ggml_type, t.n_bytes) for t in self.tensors]
        return GgufWriter(metadata, tensors, self.file.alignment)


def plan_quantization(
    file: GgufFile | ExportedDirectory,
    type_name: str,
    *,
    overrides: Mapping[str, str] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    pure: bool = False,
) -> Plan:
    """Decide the type of every tensor, and check that each conversion is possible.

    Args:
        file: the model, open; of any types, also quantized ones.
        type_name: a recipe, such as ``Q4_K_M``; see ``RECIPES``.
        overrides: types by regular expressions, searched for in names of matrices; the first match counts.
        imatrix: an importance matrix.
        pure: give every matrix the recipe's main type.

    Raises:
        InvalidOption: an unknown type, a regular expression that is invalid or matches no matrix, or an importance
            matrix of another model.
        InvalidModelFile: the importance matrix is damaged.
        UnsupportedModel: the file has no matrix to quantize, or a tensor has a type that cannot be read.
    """
    recipe = recipe_of(type_name)
    matrices = [name for name, tensor in file.tensors.items() if may_be_quantized(name, tensor.shape)]
    if not matrices:
        raise UnsupportedModel(f"{file.path}: no matrix in it that could be quantized")
    forced = _forced_types(overrides or {}, matrices)
    importance = {} if imatrix is None else read_importance(imatrix)
    chooser = Chooser(file, recipe, has_importance=imatrix is not None)
    is_uniform = pure or recipe.main_type in _FLOATS
    requested = dict(forced)
    for name in in_order(matrices):
        if name not in forced:
            n_cols = file.tensors[name].shape[-1]
            requested[name] = recipe.main_type if is_uniform else chooser.choose(name, n_cols)
    tensors = tuple(_planned(file, tensor, requested.get(tensor.name), importance) for tensor in file.tensors.values())
    if imatrix is not None and all(tensor.importance is None for tensor in tensors):
        raise InvalidOption(f"{os.fspath(imatrix)}: no importance of any tensor of {file.path} in it")
    return Plan(file, recipe, tensors, tuple(_notes(tensors, has_importance=imatrix is not None)))


def _forced_types(overrides: Mapping[str, str], matrices: list[str]) -> dict[str, GgmlType]:
    forced: dict[str, GgmlType] = {}
    accepted = {ggml_type.name: ggml_type for ggml_type in quantizable_types()}
    for expression, type_name in overrides.items():
        if type_name.upper() not in accepted:
            raise InvalidOption(f"unknown type {type_name!r} for {expression!r} (accepted: {', '.join(accepted)})")
        try:
            pattern = re.compile(expression)
        except re.error as error:
            raise InvalidOption(f"{expression!r} is not a regular expression: {error}") from None
        matching = [name for name in matrices if pattern.search(name)]
        if not matching:
            raise InvalidOption(f"{expression!r} matches no name of a matrix that may be quantized")
        for name in matching:
            forced.setdefault(name, accepted[type_name.upper()])
    return forced


def _planned(
    file: GgufFile | ExportedDirectory, tensor: TensorInfo, requested_type: GgmlType | None, importance: Importance
) -> PlannedTensor:
    if requested_type is None:
        return PlannedTensor(tensor, tensor.ggml_type, tensor.ggml_type)
    planned = PlannedTensor(
        tensor, requested_type, fallback_type(requested_type, tensor.shape[-1]), importance.get(tensor.name)
    )
    if not planned.is_kept:
        _check_readable(file, tensor)
    if planned.importance is None:
        return planned
    n_matrices = tensor.n_elements // (tensor.shape[-1] * tensor.shape[-2])
    if planned.importance.size == n_matrices * tensor.shape[-1]:
        return planned
    if tensor.name == "token_embd.weight":  # its inputs are tokens, but some programs write an entry
        return PlannedTensor(tensor, requested_type, planned.ggml_type)
    raise InvalidOption(
        f"the importance of {shown(tensor.name)} has {planned.importance.size} values, but the tensor"
        f" {n_matrices * tensor.shape[-1]} columns: it was made with another model"
    )


def _check_readable(file: GgufFile | ExportedDirectory, tensor: TensorInfo) -> None:
    try:
        format_of(tensor.ggml_type)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file.path}: tensor {shown(tensor.name)}: {error}") from None


def _notes(tensors: tuple[PlannedTensor, ...], *, has_importance: bool) -> list[str]:
    changed = [tensor for tensor in tensors if not tensor.is_kept]
    again = [tensor for tensor in changed if tensor.source.ggml_type not in _FLOATS]
    notes = []
    if not changed:
        notes.append("every tensor has its type already: the new file is a copy")
    if again:
        notes.append(
            f"{len(again)} tensors are quantized already ({_some(again)}): their errors add up; start from the floats"
            " if you have them"
        )
    unweighted = [tensor for tensor in changed if tensor.importance is None]
    if has_importance and unweighted:
        notes.append(f"no importance of {len(unweighted)} tensors ({_some(unweighted)}): their errors count alike")
    return notes


def _some(tensors: list[PlannedTensor]) -> str:
    names = ", ".join(shown(tensor.source.name) for tensor in tensors[:_NAMES_SHOWN])
    return f"{names}, ..." if len(tensors) > _NAMES_SHOWN else names
