"""The settings of the torch tier on one machine: a TOML file next to the model, or a named one."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_core.errors import InvalidOption, UnknownOption
from slm_core.user_paths import option_path

PROFILE_VARIABLE = "SLM_PROFILE"
_SUFFIX = ".profile.toml"
_MOST_ROWS = 1024
_LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Profile:
    """The keys of a profile; any other key is an error.

    Attributes:
        dtype: number format of products, like the option.
        compile: whether weights are dequantized by code of torch.compile.
        tune: whether launch parameters of Triton kernels are tuned on the device, and cached on disk.
        buckets: ascending sizes to which batches with one token per sequence are padded; empty for no padding.
        capture: whether a step of each shape is captured in a CUDA graph and then replayed.
        graphs: the number of graphs that a context keeps; the least recently used one is dropped.
        warm: length of a sequence in tokens; a new context captures every bucket and whole chunk for it. 0 for none.
        chunk: number of prompt tokens that are computed at a time; 0 for the whole batch.
        capture_prefill: whether whole chunks without logits are captured, like steps.
    """

    dtype: str = "auto"
    compile: bool = False
    tune: bool = False
    buckets: tuple[int, ...] = ()
    capture: bool = False
    graphs: int = 16
    warm: int = 0
    chunk: int = 0
    capture_prefill: bool = False

    def bucket(self, n_rows: int) -> int | None:
        """The smallest bucket for this number of rows; None if there is none."""
        return next((bucket for bucket in self.buckets if bucket >= n_rows), None)


CAPTURED = Profile(buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256), capture=True)
"""The default on devices with CUDA graphs."""


def find_profile(model: Path | None, named: str | None) -> Profile | None:
    """The profile of a model: the named one, or ``SLM_PROFILE``, or ``MODEL.profile.toml`` next to the model.

    Raises:
        InvalidOption: a named file is missing, a file is not TOML, or a value does not fit.
        UnknownOption: an unknown key.
    """
    name = named or os.environ.get(PROFILE_VARIABLE)
    if name:
        return read_profile(option_path("profile", name))
    path = model.with_name(model.stem + _SUFFIX) if model is not None else None
    return read_profile(path) if path is not None and path.is_file() else None


def read_profile(path: Path) -> Profile:
    """Read a profile; see ``find_profile`` for errors."""
    try:
        text = path.read_text(encoding="utf-8")
        settings = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidOption(f"profile {path}: {error}") from error
    try:
        tables = {name: _table(settings, name, known) for name, known in (("decode", _DECODE), ("prefill", _PREFILL))}
        _check(settings, _TOP, "")
        return _profile_from(settings, **tables)
    except (InvalidOption, UnknownOption) as error:
        raise type(error)(f"profile {path}: {error}") from None


def _table(settings: dict[str, Any], name: str, known: Mapping[str, str]) -> dict[str, Any]:
    table = settings.pop(name, {})
    if not isinstance(table, dict):
        raise InvalidOption(f"{name}={table!r} (accepted: a table)")
    _check(table, known, f"{name}.")
    return table


def _profile_from(settings: Mapping[str, Any], decode: dict[str, Any], prefill: dict[str, Any]) -> Profile:
    decode["buckets"] = tuple(sorted(set(decode.get("buckets", ()))))
    capture_prefill = prefill.pop("capture", False)
    profile = Profile(**settings, **decode, **prefill, capture_prefill=capture_prefill)
    if profile.capture and not profile.buckets:
        raise InvalidOption("decode.capture needs decode.buckets, as a graph has one shape")
    if profile.capture_prefill and not profile.chunk:
        raise InvalidOption("prefill.capture needs prefill.chunk, as a graph has one shape")
    return profile


def _check(settings: Mapping[str, Any], known: Mapping[str, str], prefix: str) -> None:
    for name, value in settings.items():
        if name not in known:
            accepted = ", ".join(prefix + key for key in known)
            raise UnknownOption(f"unknown key {prefix + name!r} (accepted: {accepted})")
        if not _fits(name, value):
            raise InvalidOption(f"{prefix}{name}={value!r} (accepted: {known[name]})")


def _fits(name: str, value: object) -> bool:
    if name == "buckets":
        return isinstance(value, list) and bool(value) and all(_is_count(size, 1, _MOST_ROWS) for size in value)
    if name == "graphs":
        return _is_count(value, 1, _MOST_ROWS)
    if name == "chunk":
        return _is_count(value, _LEAST_CHUNK, 1 << 20)
    if name == "warm":
        return _is_count(value, 0, 1 << 31)
    return isinstance(value, str if name == "dtype" else bool)


def _is_count(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


_TOP = {
    "dtype": "auto, float32, bfloat16 or float16",
    "compile": "true or false",
    "tune": "true or false",
    "decode": "a table",
    "prefill": "a table",
}
_DECODE = {
    "buckets": f"sizes of batches from 1 to {_MOST_ROWS}, as [1, 2, 4, 8]",
    "capture": "true or false",
    "graphs": f"1 to {_MOST_ROWS}",
    "warm": "tokens, 0 for none",
}
_PREFILL = {"chunk": f"tokens, {_LEAST_CHUNK} or more", "capture": "true or false"}
