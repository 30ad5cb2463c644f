"""Reading an architecture's metadata strictly: every key is read, known to be neutral, or refused."""

from __future__ import annotations

import numpy as np

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import OWN, WeightSource
from slm_core.gguf.cursor import shown

_MAX_SIZE = 2**31 - 1
_SMALLEST, _LARGEST = 1e-30, 1e30  # beyond any real value, and arithmetic with them does not overflow


class Keys:
    """The keys below the architecture's name ("qwen3.block_count"), read without this prefix; and our additional keys.

    Args:
        gguf: the open file.
    """

    def __init__(self, gguf: WeightSource) -> None:
        self.gguf = gguf
        self.architecture = gguf.require("general.architecture", str)
        self._known: set[str] = set()

    def size(self, name: str, default: int | None = None, largest: int = _MAX_SIZE) -> int:
        """A positive integer, at most ``largest``; an array of equal integers (one per layer) is accepted, too.

        Raises:
            UnsupportedModel: the key is missing and has no default, or layers differ.
            InvalidModelFile: the value is invalid.
        """
        key = self._key(name)
        if default is not None and key not in self.gguf.metadata:
            return default
        size = self._uniform(key) if self._is_array(key) else self.gguf.require(key, int)
        if not 1 <= size <= largest:
            raise InvalidModelFile(f"{self.gguf.path}: metadata {key!r} is {size} (accepted: 1 to {largest})")
        return size

    def count(self, name: str, default: int) -> int:
        """An integer, 0 or more.

        Raises:
            InvalidModelFile: it is something else.
        """
        key = self._key(name)
        count = self.gguf.get(key, int, default)
        if not 0 <= count <= _MAX_SIZE:
            raise InvalidModelFile(f"{self.gguf.path}: metadata {key!r} is {count} (accepted: 0 to {_MAX_SIZE})")
        return count

    def counts(self, name: str, n: int) -> list[int]:
        """An integer for each of ``n`` layers, 0 or more; a single integer is for every layer.

        Raises:
            UnsupportedModel: it is missing.
            InvalidModelFile: it is something else, or of another length.
        """
        key = self._key(name)
        if not self._is_array(key):
            self.gguf.require(key, int)
            return [self.count(name, 0)] * n
        values = self.gguf.require(key, np.ndarray)
        if values.dtype.kind not in "iu" or values.shape != (n,) or (values < 0).any() or (values > _MAX_SIZE).any():
            raise InvalidModelFile(
                f"{self.gguf.path}: metadata {key!r} must hold {n} integers from 0 to {_MAX_SIZE}, one for each layer"
            )
        return [int(value) for value in values]

    def number(self, name: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive number, or 0 if ``zero`` allows it.

        Raises:
            UnsupportedModel: the key is missing and has no default.
            InvalidModelFile: the value is invalid.
        """
        key = self._key(name)
        if default is not None and key not in self.gguf.metadata:
            return default
        number = self.gguf.require(key, float)
        if not (_SMALLEST <= number <= _LARGEST or (number == 0 and zero)):
            raise InvalidModelFile(
                f"{self.gguf.path}: metadata {key!r} is {number} (accepted: {_SMALLEST} to {_LARGEST}{', 0' * zero})"
            )
        return number

    def choice(self, name: str, accepted: tuple[str, ...], default: str) -> str:
        """One of several texts.

        Raises:
            UnsupportedModel: the value is another text.
        """
        key = self._key(name)
        value = self.gguf.get(key, str, default)
        if value not in accepted:
            raise self._unsupported(key, f"accepted: {', '.join(accepted)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A truth value.

        Raises:
            InvalidModelFile: it is something else.
        """
        return self.gguf.get(self._key(name), bool, default)

    def numbers(self, key: str, n: int) -> list[float]:
        """A number for each of ``n`` layers, from a key that does not begin with the architecture's name.

        Raises:
            UnsupportedModel: it is missing.
            InvalidModelFile: another type or length, or NaN.
        """
        values = self.gguf.require(key, np.ndarray)
        if values.dtype.kind != "f" or values.shape != (n,) or not np.isfinite(values).all():
            raise InvalidModelFile(f"{self.gguf.path}: metadata {key!r} must hold {n} numbers, one for each layer")
        return [float(value) for value in values]

    def thresholds(self, name: str, n: int) -> list[float | None]:
        """A number for each of ``n`` layers; None for minus infinity.

        Raises:
            UnsupportedModel: it is missing.
            InvalidModelFile: it is something else, or of another length.
        """
        values = self.gguf.require(self._key(name), np.ndarray)
        if values.dtype.kind != "f" or values.shape != (n,) or not (values < _LARGEST).all():
            key = f"{self.architecture}.{name}"
            raise InvalidModelFile(f"{self.gguf.path}: metadata {key!r} must hold {n} numbers, one for each layer")
        return [None if np.isneginf(value) else float(value) for value in values]

    def flags(self, name: str, n: int) -> list[bool] | int | None:
        """A boolean for each of ``n`` layers, the period of a pattern, or None if it is missing.

        Raises:
            InvalidModelFile: it is something else, or of another length.
        """
        key = self._key(name)
        if key not in self.gguf.metadata:
            return None
        if not self._is_array(key):
            return self.count(name, 0)
        values = self.gguf.require(key, np.ndarray)
        if values.dtype.kind != "b" or values.shape != (n,):
            raise InvalidModelFile(f"{self.gguf.path}: metadata {key!r} must hold {n} truth values, one for each layer")
        return [bool(value) for value in values]

    def only(self, name: str, *accepted: bool | float | str) -> None:
        """A key that may be missing, or have one of the neutral values; a key that was read is always accepted.

        Raises:
            UnsupportedModel: it has another value.
        """
        if self._full(name) in self._known:
            return
        key = self._key(name)
        if key in self.gguf.metadata and (self._is_array(key) or self.gguf.metadata[key] not in accepted):
            raise self._unsupported(key, f"accepted: {', '.join(map(str, accepted))}, or no such key")

    def neutral(self, *names: str) -> None:
        """Keys whose value has no effect here."""
        self._known.update(map(self._key, names))

    def refuse_others(self) -> None:
        """Refuse every key that was neither read nor declared neutral: it could change results.

        Raises:
            UnsupportedModel: there is such a key.
        """
        for key in self.gguf.metadata:
            if key.startswith((f"{self.architecture}.", OWN)) and key not in self._known:
                raise self._unsupported(key, "unknown here, so results could be wrong")

    def _key(self, name: str) -> str:
        key = self._full(name)
        self._known.add(key)
        return key

    def _full(self, name: str) -> str:
        return name if name.startswith(OWN) else f"{self.architecture}.{name}"

    def _is_array(self, key: str) -> bool:
        return key in self.gguf.metadata and self.gguf.metadata.type_name(key).startswith("array")

    def _uniform(self, key: str) -> int:
        values = self.gguf.require(key, np.ndarray)
        if len(values) == 0 or values.dtype.kind not in "iu" or (values != values[0]).any():
            raise self._unsupported(key, "accepted: one size for all layers")
        return int(values[0])

    def _unsupported(self, key: str, why: str) -> UnsupportedModel:
        value = " ".join(repr(self.gguf.metadata[key]).split())  # NumPy breaks lines
        value = value if len(value) <= 80 else f"{value[:80]}..."
        return UnsupportedModel(f"{self.gguf.path}: metadata {shown(key)} is {value}, which is not implemented ({why})")
