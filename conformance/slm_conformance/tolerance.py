"""How far logits may be from the reference: derived from how a backend computes and what it stores, never picked.

An error is relative: the L2 norm of the difference of two logits rows over the norm of the expected one. The contract
(clause 9) sets 1e-4 for float32 and 1e-2 for 16 bit. Where activations or keys and values are quantized, the reference
runs once more with just that rounding, and its error on the same model is the measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from slm_conformance.reference import Array, Reference
from slm_conformance.weights import Weights
from slm_core.types import KvType

MEAN_MARGIN = 1.2
"""By clause 9: the mean error may be this many times that of quantized activations."""

ROW_MARGIN = 4.0
"""A row's error is the sum of thousands of roundings, amplified by its context: over a thousand rows of the tiny models
the largest was 2.9 times the root mean square. A wrong position or neighbour is far beyond four times."""

N_SAMPLE = 160
"""Rows differ in their error by about half its mean, so the mean over so many is known within a few percent; on other
tokens, or fewer, it is another one."""

UNKNOWN_MODEL = 0.02
"""Where there is no reference: the error of quantized activations that clause 9 quotes."""


class Precision(StrEnum):
    """What numbers a backend multiplies weights with."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    QUANTIZED = "quantized"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is allowed.

    Attributes:
        row: relative error of any one row of logits.
        mean: of the mean over many rows, against the reference.
    """

    row: float
    mean: float


_FIXED = {Precision.FLOAT32: 1e-4, Precision.FLOAT16: 1e-2}
KV_LEVELS = {KvType.Q8_0: 127, KvType.Q5_0: 16, KvType.Q4_0: 8}
"""Steps from zero to the largest value of a block, of the types that store blocks."""


def tolerance(weights: Weights | None, precision: Precision, kv_type: KvType) -> Tolerance:
    """The bound for a model, a way of computing and a storage type of keys and values."""
    if weights is None:
        base = _FIXED.get(precision, UNKNOWN_MODEL)
        return Tolerance(ROW_MARGIN * base, MEAN_MARGIN * base)
    compute = _compute_tolerance(weights, precision)
    stored = _kv_tolerance(weights, kv_type)
    return Tolerance(compute.row + stored.row, compute.mean + stored.mean)


def relative_errors(rows: NDArray[np.floating], expected: NDArray[np.floating]) -> Array:
    """The relative error of each row, [n_rows, V] each."""
    difference = np.linalg.norm(rows.astype(np.float64) - expected, axis=-1)
    return np.asarray(difference / np.linalg.norm(expected.astype(np.float64), axis=-1))


def _compute_tolerance(weights: Weights, precision: Precision) -> Tolerance:
    if precision in _FIXED:
        return Tolerance(_FIXED[precision], _FIXED[precision])
    return _measured(Reference(weights, round_inputs=partial(round_blocks, levels=127)), weights)


def _kv_tolerance(weights: Weights, kv_type: KvType) -> Tolerance:
    if kv_type is KvType.F32:
        return Tolerance(0.0, 0.0)
    if kv_type is KvType.F16:
        return Tolerance(_FIXED[Precision.FLOAT16], _FIXED[Precision.FLOAT16])
    # An engine may bring queries and attention weights to a type that suits what is stored, as ggml does.
    if kv_type is KvType.BF16:
        rounded = Reference(weights, round_kept=_round_bf16, round_queries=_round_bf16, round_attention=_round_bf16)
    else:
        kept, queries = (partial(round_blocks, levels=levels) for levels in (KV_LEVELS[kv_type], 127))
        rounded = Reference(weights, round_kept=kept, round_queries=queries)
    return _measured(rounded, weights)


def _measured(rounded: Reference, weights: Weights) -> Tolerance:
    """The margins over the error of a reference that rounds."""
    tokens = random_tokens(weights.n_vocab, N_SAMPLE)
    errors = relative_errors(rounded.decode(tokens), Reference(weights).decode(tokens))
    return Tolerance(ROW_MARGIN * float(np.sqrt(np.mean(errors**2))), MEAN_MARGIN * float(errors.mean()))


def random_tokens(n_vocab: int, n: int, seed: int = 0) -> Sequence[int]:
    """Tokens of a fixed stream."""
    tokens: list[int] = np.random.default_rng([n_vocab, seed]).integers(0, n_vocab, n).tolist()
    return tokens


def round_blocks(x: Array, levels: int) -> Array:
    """Round as ggml's Q8_0, Q5_0 and Q4_0 do: blocks of 32 share a scale, with ``levels`` steps to the largest."""
    blocks = x.reshape(-1, min(32, x.shape[-1]))
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / levels
    scale[scale == 0] = 1
    rounded: Array = np.rint(blocks / scale) * scale
    return rounded.reshape(x.shape)


def _round_bf16(x: Array) -> Array:
    """Keep the sign, eight bits of exponent and eight of significand, as a float32's upper half does."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
