"""An adapter: low-rank changes of a model's matrices, by GGUF's names of the tensors, or a control vector.

Shapes: r rank, out and in as in the changed matrix (out, in), X experts, E embedding width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile
from slm_core.types import AdapterInfo

EMBEDDING = "token_embd.weight"
Direction: TypeAlias = NDArray[np.float32]
"""A direction of a control vector, float32 [E]."""


class LowRank(NamedTuple):
    """The change ``scale * b @ a`` of a matrix (out, in), or of each matrix of a tensor (X, out, in).

    Attributes:
        a: float32 [r, in], or [X, r, in].
        b: float32 [out, r], or [X, out, r].
        scale: alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski, arXiv:2312.03732).
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float

    @property
    def rank(self) -> int:
        """The rank."""
        rank: int = self.a.shape[-2]
        return rank

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the changed tensor."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def dense(self, scale: float = 1.0) -> NDArray[np.float32]:
        """The change as a full tensor, float32."""
        product: NDArray[np.float32] = self.b @ self.a
        return product * np.float32(scale * self.scale)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter in memory. Immutable; threads may share it. Engines cache values made from it by weak reference.

    Attributes:
        info: its name, size and fingerprint.
        changes: the change of each tensor, by the tensor's name; none for a control vector.
        directions: the direction that a control vector adds to the residual stream after each layer, by the number of
            the layer; none for LoRA.
    """

    info: AdapterInfo
    changes: Mapping[str, LowRank]
    directions: Mapping[int, Direction] = field(default_factory=lambda: MappingProxyType({}))


class AdapterUse(NamedTuple):
    """An adapter of a sequence.

    Attributes:
        adapter: the adapter.
        scale: an additional factor on its changes, or on its directions.
    """

    adapter: Adapter
    scale: float

    @property
    def key(self) -> tuple[str, float]:
        """The fingerprint of the adapter's content, and the scale: equal keys give equal results."""
        return self.adapter.info.fingerprint, self.scale


AdapterSet: TypeAlias = tuple[AdapterUse, ...]
"""The adapters of a sequence, by name; their changes and directions are added."""


def stacked(uses: AdapterSet) -> dict[str, LowRank]:
    """The sum of all changes as one change of each tensor: ranks are concatenated, and factors are in ``b``."""
    by_tensor: dict[str, list[tuple[LowRank, float]]] = {}
    for adapter, scale in uses:
        for name, change in adapter.changes.items():
            by_tensor.setdefault(name, []).append((change, scale * change.scale))
    return {
        name: LowRank(
            np.concatenate([change.a for change, _ in parts], axis=-2),
            np.concatenate([change.b * np.float32(factor) for change, factor in parts], axis=-1),
            1.0,
        )
        for name, parts in by_tensor.items()
    }


def summed_directions(uses: AdapterSet) -> dict[int, Direction]:
    """The sum of the directions of all control vectors, each multiplied by its scale, by layer."""
    total: dict[int, Direction] = {}
    for adapter, scale in uses:
        for layer, direction in adapter.directions.items():
            scaled = direction * np.float32(scale)
            total[layer] = total[layer] + scaled if layer in total else scaled
    return total


def fingerprint_of(changes: Mapping[str, LowRank]) -> str:
    """A digest of the numbers, which does not depend on the file's format: 64 hexadecimal digits."""
    digest = blake2b(digest_size=32)
    for name in sorted(changes):
        change = changes[name]
        digest.update(f"{name} {change.a.shape} {change.b.shape}\n".encode())
        digest.update(change.a.tobytes())
        digest.update((change.b * np.float32(change.scale)).tobytes())  # files may have the scale in b
    return digest.hexdigest()


def check_changes(source: object, changes: Mapping[str, LowRank]) -> None:
    """Check that the matrices of changes fit each other and are finite.

    Raises:
        InvalidModelFile: they do not, or there are none.
    """
    if not changes:
        raise InvalidModelFile(f"{source}: the adapter changes no tensor")
    for name, (a, b, scale) in changes.items():
        if a.ndim not in (2, 3) or a.ndim != b.ndim or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
            raise InvalidModelFile(f"{source}: {name}: A {a.shape} and B {b.shape} are not [r, in] and [out, r]")
        if 0 in a.shape or 0 in b.shape:
            raise InvalidModelFile(f"{source}: {name}: A {a.shape} or B {b.shape} is empty")
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = _is_finite(a) and _is_finite(b * np.float32(scale))
        if not is_finite:
            raise InvalidModelFile(f"{source}: {name}: a number is not finite")


def n_params(changes: Iterable[LowRank]) -> int:
    """The number of parameters."""
    return sum(change.a.size + change.b.size for change in changes)


def _is_finite(values: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(values).all())
