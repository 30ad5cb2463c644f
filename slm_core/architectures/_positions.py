"""Positions beyond plain RoPE: LongRoPE's tables, temperatures of queries, slopes of ALiBi."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures._rope import FloatArray, Rope
from slm_core.architectures._spec import ModelSpec, RopeSpec, TemperatureSpec

ReadFactors = Callable[[str], FloatArray | None]
"""Reads a table of divisors from the file; None if it has none."""


def ropes_of(spec: ModelSpec, n_ctx: int, read_factors: ReadFactors) -> dict[RopeSpec, Rope]:
    """The distinct RoPEs of a model's layers, in the order of their first layers.

    Args:
        spec: the model.
        n_ctx: positions of the context. LongRoPE's table depends on it.
        read_factors: reads a table of factors.

    Raises:
        InvalidModelFile: the file's factors are not positive numbers.
    """
    ropes = dict.fromkeys(layer.rope for layer in spec.layers)
    return {rope: Rope(rope, _factors(rope, n_ctx, read_factors)) for rope in ropes if rope is not None}


def rope_kind(spec: ModelSpec, n_ctx: int) -> str:
    """Names the LongRoPE table in use. Contexts can exchange keys if their names are equal."""
    return "".join({_table(layer.rope, n_ctx) for layer in spec.layers if layer.rope is not None})


def temperatures(temperature: TemperatureSpec, positions: NDArray[np.integer]) -> FloatArray:
    """The factors on queries at ``positions`` [T], float32 [T]."""
    steps = np.log1p(np.floor((positions + temperature.offset) / temperature.length))
    factors: FloatArray = (1 + temperature.scale * steps).astype(np.float32)
    return factors


def alibi_slopes(n_heads: int, max_bias: float) -> FloatArray:
    """Slopes of ALiBi (Press et al. 2021, https://arxiv.org/abs/2108.12409), as float32 [H].

    For a power of two of heads, the slopes are a geometric series down to 2 ** -max_bias. Additional heads get every
    second slope of the series for twice as many heads, as in the authors' code.
    """
    n = 1 << (n_heads.bit_length() - 1)
    exponents = [max_bias * (i + 1) / n for i in range(n)]
    exponents += [max_bias * (2 * i + 1) / (2 * n) for i in range(n_heads - n)]
    return np.array([2.0**-exponent for exponent in exponents], np.float32)


def _factors(rope: RopeSpec, n_ctx: int, read: ReadFactors) -> FloatArray | None:
    if rope.long is not None:
        return read(rope.long.long if _table(rope, n_ctx) == "long" else rope.long.short)
    return None if rope.factors is None else read(rope.factors)


def _table(rope: RopeSpec, n_ctx: int) -> str:
    if rope.long is None:
        return ""
    return "long" if n_ctx > rope.long.n_ctx_original else "short"
