"""What happens to a tensor on its way from a directory's names to GGUF's: its order, its shape, what norms add."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[Any]


class Change(Protocol):
    """One change. ``computes`` says whether it is of numbers, which then are float32, rather than of their order."""

    computes: ClassVar[bool]

    def shape(self, shape: Shape) -> Shape:
        """The shape afterwards.

        Raises:
            ValueError: there is none, for a tensor of this shape.
        """
        ...

    def values(self, array: Array) -> Array:
        """The numbers afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows of queries or keys, half against half in each head, in the order of interleaved RoPE pairs."""

    n_heads: int
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The same."""
        _check(shape[0] % (2 * self.n_heads) == 0, f"rows that are not {self.n_heads} heads of pairs")
        return shape

    def values(self, array: Array) -> Array:
        """Pairs side by side."""
        halves = array.reshape(self.n_heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class OneAdded:
    """Norms whose weights stand for what they are more than 1."""

    computes: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """The same."""
        return shape

    def values(self, array: Array) -> Array:
        """One more."""
        return array + np.float32(1)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Matrices that the directory has as (in, out)."""

    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The last two sizes change places."""
        _check(len(shape) >= 2, "no matrix")
        return (*shape[:-2], shape[-1], shape[-2])

    def values(self, array: Array) -> Array:
        """Rows and columns change places."""
        return array.swapaxes(-1, -2)


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Matrices with rows of so many numbers, which some directories have as (out, in) and others as (in, out)."""

    n: int
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """That of (out, in)."""
        _check(len(shape) >= 2 and self.n in shape[-2:], f"neither rows nor columns of {self.n}")
        _check(shape[-2] != shape[-1], "square, so that (out, in) is not told from (in, out)")
        return shape if shape[-1] == self.n else Transposed().shape(shape)

    def values(self, array: Array) -> Array:
        """Likewise."""
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
    """Some heads of each group of such a matrix: its queries, its key, or its value."""

    n_queries: int
    n_groups: int
    heads: slice
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """That of those heads' rows."""
        n_rows = Grouped(self.n_queries, self.n_groups).shape(shape)[0] // (self.n_queries + 2)
        return n_rows * len(range(self.n_queries + 2)[self.heads]), *shape[1:]

    def values(self, array: Array) -> Array:
        """Those heads' rows, group by group."""
        groups = array.reshape(self.n_groups, self.n_queries + 2, -1, *array.shape[1:])
        return groups[:, self.heads].reshape(-1, *array.shape[1:])


@dataclass(frozen=True, slots=True)
class Row:
    """A matrix of one row that files hold as a vector."""

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
    """The weights of a convolution of each channel by itself, [C, 1, W], as [C, W]."""

    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """Without the one."""
        _check(len(shape) == 3 and shape[1] == 1, "no convolution of each channel by itself")
        return shape[0], shape[2]

    def values(self, array: Array) -> Array:
        """The same."""
        return array[:, 0]


@dataclass(frozen=True, slots=True)
class Shaped:
    """A vector as a matrix: of one column, or of one row for each of so many groups."""

    n_groups: int | None = None
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """That of the matrix."""
        n_rows = shape[0] if self.n_groups is None else self.n_groups
        _check(len(shape) == 1 and shape[0] % n_rows == 0, f"no vector of {n_rows} parts")
        return n_rows, shape[0] // n_rows

    def values(self, array: Array) -> Array:
        """The same."""
        return array.reshape(self.shape(array.shape))


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same numbers in another shape: the leading sizes, and what is left; a vector where there are none."""

    leading: Shape = ()
    computes: ClassVar[bool] = False

    def shape(self, shape: Shape) -> Shape:
        """The leading sizes and what is left."""
        n, n_rows = math.prod(shape), math.prod(self.leading)
        _check(n % n_rows == 0, f"no {n_rows} parts")
        return *self.leading, n // n_rows

    def values(self, array: Array) -> Array:
        """The same."""
        return array.reshape(*self.leading, -1)


@dataclass(frozen=True, slots=True)
class Decays:
    """The rates at which a state decays, of their logarithms; as a column, where heads have one each."""

    as_column: bool = False
    computes: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """The same, or a column."""
        return Shaped().shape(shape) if self.as_column else shape

    def values(self, array: Array) -> Array:
        """Below 0."""
        rates = -np.exp(array)
        return Shaped().values(rates) if self.as_column else rates


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A matrix times a number; before that, runs of rows times a number each."""

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
    """The rows of all experts one after another, as a matrix for each; transposed for those stored as (in, out)."""

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
    """One change after another."""

    first: Change
    second: Change
    computes: ClassVar[bool] = False  # neither of those that are combined computes

    def shape(self, shape: Shape) -> Shape:
        """The last one's."""
        return self.second.shape(self.first.shape(shape))

    def values(self, array: Array) -> Array:
        """The last one's."""
        return self.second.values(self.first.values(array))


@dataclass(frozen=True, slots=True)
class UpProjection:
    """The keys' or the values' part of latent attention's matrix, by head; keys' transposed, as queries absorb it."""

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


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
