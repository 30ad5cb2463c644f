"""Reads an adapter from a GGUF file or a PEFT directory, and checks that it fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slm_core.adapters.adapter import Adapter, LowRank, checked_changes, fingerprint_of, n_params
from slm_core.adapters.base_model import BaseModel
from slm_core.adapters.gguf_adapters import read_gguf
from slm_core.adapters.peft import read_peft
from slm_core.errors import InvalidModelFile, ModelFileNotFound
from slm_core.types import AdapterInfo


def read_adapter(path: Path, base: BaseModel, name: str | None = None) -> Adapter:
    """Read an adapter.

    Args:
        path: a GGUF file, or a directory that PEFT's ``save_pretrained`` wrote.
        base: the model that it changes.
        name: its name; None for the name of the file or directory.

    Raises:
        InvalidModelFile: it is missing or damaged, or does not fit the model.
        UnsupportedModel: an adapter of another kind.
    """
    if not path.exists():
        raise ModelFileNotFound(f"{path}: no such file or directory")
    changes = checked_changes(path, read_peft(path, base) if path.is_dir() else read_gguf(path, base))
    _check_shapes(path, changes, base)
    info = AdapterInfo(
        name=path.resolve().name.removesuffix(".gguf") if name is None else name,
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
