"""Reads an adapter from a GGUF file or a PEFT directory, and checks that it fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slm_core.adapters.adapter import Adapter, LowRank, check_changes, fingerprint_of, n_params
from slm_core.adapters.base_model import BaseModel
from slm_core.adapters.control_vectors import (
    check_layer_range,
    directions_fingerprint,
    is_control_vector,
    read_directions,
)
from slm_core.adapters.gguf_adapters import read_gguf
from slm_core.adapters.peft import read_peft
from slm_core.errors import InvalidModelFile, InvalidOption, ModelFileNotFound
from slm_core.gguf import GgufFile
from slm_core.types import AdapterInfo


def read_adapter(
    path: Path, base: BaseModel, name: str | None = None, layers: tuple[int, int] | None = None
) -> Adapter:
    """Read an adapter.

    Args:
        path: a GGUF file, or a directory that PEFT's ``save_pretrained`` wrote.
        base: the model that it changes.
        name: its name; None for the name of the file or directory.
        layers: the first and the last layer after which a control vector adds its directions; None for all layers.

    Raises:
        InvalidModelFile: it is missing or damaged, or does not fit the model.
        UnsupportedModel: an adapter of another kind.
        InvalidOption: ``layers`` for an adapter that is not a control vector, or has no direction for them.
    """
    layers = check_layer_range(layers)
    if not path.exists():
        raise ModelFileNotFound(f"{path}: no such file or directory")
    name = path.resolve().name.removesuffix(".gguf") if name is None else name
    if path.is_dir():
        return _low_rank(path, name, read_peft(path, base), base, layers)
    with GgufFile.open(path) as file:
        if not is_control_vector(file):
            return _low_rank(path, name, read_gguf(file, base), base, layers)
        directions = read_directions(file, base, layers)
    info = AdapterInfo(
        name=name,
        path=path,
        fingerprint=directions_fingerprint(directions),
        rank=0,
        n_params=sum(direction.size for direction in directions.values()),
        tensors=(),
        layers=tuple(directions),
    )
    return Adapter(info, {}, directions)


def _low_rank(
    path: Path, name: str, changes: Mapping[str, LowRank], base: BaseModel, layers: tuple[int, int] | None
) -> Adapter:
    if layers is not None:
        raise InvalidOption(
            f"layers={layers}: {path} is not a control vector, so it has no layers to choose (accepted: None)"
        )
    check_changes(path, changes)
    _check_shapes(path, changes, base)
    info = AdapterInfo(
        name=name,
        path=path,
        fingerprint=fingerprint_of(changes),
        rank=max(change.rank for change in changes.values()),
        n_params=n_params(changes.values()),
        tensors=tuple(sorted(changes)),
    )
    return Adapter(info, changes)


def _check_shapes(path: Path, changes: Mapping[str, LowRank], base: BaseModel) -> None:
    for name, change in changes.items():
        if name not in base.shapes:
            raise InvalidModelFile(f"{path}: the adapter changes {name}, which this model does not have")
        if change.shape != base.shapes[name]:
            raise InvalidModelFile(
                f"{path}: the adapter changes {name} of the shape {change.shape}, and this model has"
                f" {base.shapes[name]}: it is an adapter of another model"
            )
