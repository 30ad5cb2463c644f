"""Conversions of tensors from a directory's layout to GGUF's: order, shape, and values of norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[Any]


class Change(Protocol):
    """One conversion. ``computes`` says whether it changes values (the result is float32) or only their order."""

    computes: ClassVar[bool]

    def shape(self, shape: Shape) -> Shape:
        """The shape afterwards.

        Raises:
            ValueError: a tensor of this shape cannot be converted.
        """
        ...

    def values(self, array: Array) -> Array:
        """The numbers afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Query or key rows, from half-split to interleaved RoPE pairs."""

    n_heads: int
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The same."""
        _check(shape[0] % (2 * self.n_heads) == 0, f"rows that are not {self.n_heads} heads of pairs")
        return shape

    def values(self, array: Array) -> Array:
        """The rows in interleaved order."""
        halves = array.reshape(self.n_heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class OneAdded:
    """Norm weights stored as the difference to 1."""

    computes: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """The same."""
        return shape

    def values(self, array: Array) -> Array:
        """The values plus 1."""
        return array + np.float32(1)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Matrices that the directory has as (in, out)."""

    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The shape with the last two sizes swapped."""
        _check(len(shape) >= 2, "no matrix")
        return (*shape[:-2], shape[-1], shape[-2])

    def values(self, array: Array) -> Array:
        """The transposed matrices."""
        return array.swapaxes(-1, -2)


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Matrices with ``n`` columns, which some directories store as (out, in) and others as (in, out)."""

    n: int
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The (out, in) shape."""
        _check(len(shape) >= 2 and self.n in shape[-2:], f"neither rows nor columns of {self.n}")
        _check(shape[-2] != shape[-1], "square, so that (out, in) and (in, out) look the same")
        return shape if shape[-1] == self.n else Transposed().shape(shape)

    def values(self, array: Array) -> Array:
        """The (out, in) matrix."""
        return array if array.shape[-1] == self.n else Transposed().values(array)


@dataclass(frozen=True, slots=True)
class Slice:
    """One of ``n_parts`` along an axis: the ``index``-th piece, or every ``n_parts``-th from there."""

    axis: int
    n_parts: int
    index: int
    alternating: bool = False
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """Shorter along the axis."""
        _check(len(shape) > self.axis and shape[self.axis] % self.n_parts == 0, f"not {self.n_parts} parts")
        return (*shape[: self.axis], shape[self.axis] // self.n_parts, *shape[self.axis + 1 :])

    def values(self, array: Array) -> Array:
        """The piece."""
        if self.alternating:
            return array[(slice(None),) * self.axis + (slice(self.index, None, self.n_parts),)]
        return np.split(array, self.n_parts, axis=self.axis)[self.index]


@dataclass(frozen=True, slots=True)
class WithoutFirst:
    """A matrix without its first ``n`` rows."""

    n: int
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """Fewer rows."""
        _check(len(shape) == 2 and shape[0] > self.n, f"no matrix of more than {self.n} rows")
        return shape[0] - self.n, shape[1]

    def values(self, array: Array) -> Array:
        """The rows from ``n`` on."""
        return array[self.n :]


@dataclass(frozen=True, slots=True)
class Grouped:
    """A fused matrix in which the query heads of each group come before its key and its value head."""

    n_queries: int
    n_groups: int
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The same."""
        n_heads = self.n_groups * (self.n_queries + 2)
        _check(shape[0] % n_heads == 0, f"rows that are not {n_heads} heads")
        return shape

    def values(self, array: Array) -> Array:
        """All queries, all keys, all values."""
        heads = array.reshape(self.n_groups, self.n_queries + 2, -1, *array.shape[1:])
        parts = (heads[:, : self.n_queries], heads[:, self.n_queries], heads[:, self.n_queries + 1])
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Some heads of each group of a grouped fused matrix: the queries, the key, or the value."""

    n_queries: int
    n_groups: int
    heads: slice
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The shape of the chosen heads' rows."""
        n_rows = Grouped(self.n_queries, self.n_groups).shape(shape)[0] // (self.n_queries + 2)
        return n_rows * len(range(self.n_queries + 2)[self.heads]), *shape[1:]

    def values(self, array: Array) -> Array:
        """The chosen heads' rows, group by group."""
        groups = array.reshape(self.n_groups, self.n_queries + 2, -1, *array.shape[1:])
        return groups[:, self.heads].reshape(-1, *array.shape[1:])


@dataclass(frozen=True, slots=True)
class Row:
    """A matrix of one row, which files store as a vector."""

    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """Without the row."""
        _check(len(shape) == 2 and shape[0] == 1, "not one row")
        return shape[1:]

    def values(self, array: Array) -> Array:
        """The row."""
        return array.reshape(-1)


@dataclass(frozen=True, slots=True)
class Squeezed:
    """The weights of a depthwise convolution, [C, 1, W], as [C, W]."""

    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """Without the axis of length 1."""
        _check(len(shape) == 3 and shape[1] == 1, "no convolution of each channel by itself")
        return shape[0], shape[2]

    def values(self, array: Array) -> Array:
        """The same."""
        return array[:, 0]


@dataclass(frozen=True, slots=True)
class Shaped:
    """A vector as a matrix: one column, or one row for each of ``n_groups`` groups."""

    n_groups: int | None = None
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The shape of the matrix."""
        n_rows = shape[0] if self.n_groups is None else self.n_groups
        _check(len(shape) == 1 and shape[0] % n_rows == 0, f"no vector of {n_rows} parts")
        return n_rows, shape[0] // n_rows

    def values(self, array: Array) -> Array:
        """The same."""
        return array.reshape(self.shape(array.shape))


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A reshape to the leading sizes and the rest; without leading sizes, to a vector."""

    leading: Shape = ()
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The leading sizes and the rest."""
        n, n_rows = math.prod(shape), math.prod(self.leading)
        _check(n % n_rows == 0, f"no {n_rows} parts")
        return *self.leading, n // n_rows

    def values(self, array: Array) -> Array:
        """The same."""
        return array.reshape(*self.leading, -1)


@dataclass(frozen=True, slots=True)
class Decays:
    """Decay rates of a state from their logarithms; as a column if each head has one rate."""

    as_column: bool = False
    computes: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """The same, or a column."""
        return Shaped().shape(shape) if self.as_column else shape

    def values(self, array: Array) -> Array:
        """The decay rates, below 0."""
        rates = -np.exp(array)
        return Shaped().values(rates) if self.as_column else rates


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A matrix multiplied by a number, and ranges of its rows by additional numbers."""

    factor: float
    rows: tuple[tuple[int, float], ...] = ()
    computes: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """The same."""
        n_rows = sum(n for n, _ in self.rows)
        _check(not self.rows or shape[0] == n_rows, f"not {n_rows} rows")
        return shape

    def values(self, array: Array) -> Array:
        """The products."""
        if self.rows:
            counts, factors = zip(*self.rows, strict=True)
            array = array * np.repeat(np.array(factors, np.float32), counts)[:, None]
        return array * np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class OfExperts:
    """All experts' rows in one matrix, as one matrix per expert; transposed if stored as (in, out)."""

    n_experts: int
    transposed: bool = False
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """(X, F, E), or (X, E, F)."""
        _check(len(shape) == 2 and shape[0] % self.n_experts == 0, f"not the rows of {self.n_experts} experts")
        n_rows = shape[0] // self.n_experts
        return (self.n_experts, shape[1], n_rows) if self.transposed else (self.n_experts, n_rows, shape[1])

    def values(self, array: Array) -> Array:
        """The matrices."""
        each = array.reshape(self.n_experts, -1, array.shape[1])
        return each.swapaxes(1, 2) if self.transposed else each


@dataclass(frozen=True, slots=True)
class Both:
    """Two conversions, one after the other."""

    first: Change
    second: Change
    computes: ClassVar[bool] = False  # only conversions that do not compute are combined

    def shape(self, shape: Shape) -> Shape:
        """The shape after the last conversion."""
        return self.second.shape(self.first.shape(shape))

    def values(self, array: Array) -> Array:
        """The values after the last conversion."""
        return self.second.values(self.first.values(array))


@dataclass(frozen=True, slots=True)
class UpProjection:
    """The per-head key or value part of latent attention's matrix; the key part is transposed for absorption."""

    n_heads: int
    n_nope: int
    n_value: int
    of_keys: bool
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """(H, C, N) for keys, (H, U, C) for values."""
        _check(len(shape) == 2 and shape[0] == self.n_heads * (self.n_nope + self.n_value), "not those heads' rows")
        return (self.n_heads, shape[1], self.n_nope) if self.of_keys else (self.n_heads, self.n_value, shape[1])

    def values(self, array: Array) -> Array:
        """The part."""
        heads = array.reshape(self.n_heads, -1, array.shape[1])
        return heads[:, : self.n_nope].swapaxes(1, 2) if self.of_keys else heads[:, self.n_nope :]


def keeps_rows(change: Change, shape: Shape) -> bool:
    """Whether a conversion of a tensor of this shape moves or drops only whole rows, which then may be blocks."""
    match change:
        case Interleaved() | Grouped() | GroupPart():
            return True
        case Slice():
            return change.axis < len(shape) - 1
        case OfExperts():
            return not change.transposed
        case UpProjection():
            return not change.of_keys
        case Both():
            return keeps_rows(change.first, shape) and keeps_rows(change.second, change.first.shape(shape))
    return False


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
