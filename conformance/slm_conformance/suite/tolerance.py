"""How far logits may be from the reference: derived from how a backend computes and what it stores, never picked.

An error is relative: the L2 norm of the difference of two logits rows over the norm of the expected one. The contract
(clause 9) sets 1e-4 for float32 and 1e-2 for 16 bit. Where activations or keys and values are quantized, the reference
runs once more with just that rounding, and its error on the same model is the measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.reference import Array, Reference
from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.weights import Weights
from slm_core.types import KvType

MEAN_MARGIN = 1.2
"""By clause 9: the mean error may be this many times that of quantized activations."""

ROW_MARGIN = 1.5
"""A single row may err this many times as much as the worst of ``N_ROW_SAMPLES * N_SAMPLE`` rows of the measure.

Errors of rows are spread widely: on a trained model the worst of so many is five times the root mean square. A wrong
position or neighbour is far beyond.
"""

N_SAMPLE = 160
"""Tokens of a sample. On other tokens, or fewer, the mean is another one: it is compared on the same."""

N_ROW_SAMPLES = 4

UNKNOWN_MODEL = 0.02
"""Where there is no reference: the error of quantized activations that clause 9 quotes."""

KV_LEVELS = {KvType.Q8_0: 127, KvType.Q5_0: 16, KvType.Q4_0: 8}
"""Steps from zero to the largest value of a block, of the types that store blocks."""


class Precision(StrEnum):
    """What numbers a backend multiplies weights with."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    QUANTIZED = "quantized"


_FIXED = {Precision.FLOAT32: 1e-4, Precision.FLOAT16: 1e-2, KvType.F32: 0.0, KvType.F16: 1e-2}


class Tolerance:
    """The bounds for a model, a way of computing and a storage type of keys and values.

    Args:
        weights: the model, or None where the reference cannot run it.
        precision: what weights are multiplied with.
        kv_type: how keys and values are stored.
    """

    def __init__(self, weights: Weights | None, precision: Precision, kv_type: KvType) -> None:
        self._weights = weights
        self._causes = (precision, kv_type)

    @cached_property
    def row(self) -> float:
        """What any one row of logits may err by."""
        return sum(self._bound(cause, ROW_MARGIN, lambda errors: errors.row.max()) for cause in self._causes)

    @cached_property
    def mean(self) -> float:
        """What the rows of sample 0 may err by in the mean."""
        return sum(
            self._bound(cause, MEAN_MARGIN, lambda errors: errors.row[:N_SAMPLE].mean()) for cause in self._causes
        )

    @cached_property
    def state(self) -> float:
        """What any one row of hidden states may err by."""
        return sum(self._bound(cause, ROW_MARGIN, lambda errors: errors.state.max()) for cause in self._causes)

    @cached_property
    def gap(self) -> float:
        """How much any token may gain or lose on the best one, as a share of the row's norm.

        Where a row's error is all that is known, it may lie in those two logits alone, in opposite directions: the
        square root of two times that error. Where it is measured, what tokens gain and lose on the best one is
        measured, too.

        Three bounds follow, each times the norm of the row:

        - The best token of an engine's row is behind the reference's best by one gap at most.
        - It is behind the best of another row of the engine, decoded from the same tokens in other batches, by three:
          by one in exact numbers, and either token may be off by one in the other row.
        - A log-probability is off by two: ``log_softmax(row)[t]`` moves by the error of logit t less a mean of all
          errors, and any two errors differ by two gaps at most.
        """
        two = float(np.sqrt(2))
        return sum(self._bound(cause, ROW_MARGIN, lambda errors: errors.gain.max(), two) for cause in self._causes)

    def _bound(
        self, cause: Precision | KvType, margin: float, measure: Callable[[_Errors], float], of_fixed: float = 1
    ) -> float:
        if cause in _FIXED:
            return of_fixed * _FIXED[cause]
        if self._weights is None:
            return of_fixed * margin * UNKNOWN_MODEL
        return margin * float(measure(_rounding_errors(self._weights, cause)))


def relative_errors(rows: NDArray[np.floating], expected: NDArray[np.floating]) -> Array:
    """The relative error of each row, [n_rows, V] each."""
    difference = np.linalg.norm(rows.astype(np.float64) - expected, axis=-1)
    return np.asarray(difference / np.linalg.norm(expected.astype(np.float64), axis=-1))


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


@dataclass(frozen=True, slots=True)
class _Errors:
    """Errors of the rows of all samples.

    Attributes:
        row: of each, over its norm.
        gain: the most that a token gains or loses on the best one, likewise.
        state: of the hidden state that a row is made of, over its norm.
    """

    row: Array
    gain: Array
    state: Array


@lru_cache(maxsize=64)
def _rounding_errors(weights: Weights, cause: Precision | KvType) -> _Errors:
    """The errors where nothing but ``cause`` rounds."""
    rows, gains, states = [], [], []
    for seed in range(N_ROW_SAMPLES):
        tokens = random_tokens(weights.n_vocab, N_SAMPLE, seed)
        ways = reference_of(weights), rounding_reference(weights, cause)
        exact_states, rounded_states = (way.embed(tokens) for way in ways)
        states.append(relative_errors(rounded_states, exact_states))
        exact, rounded = ways[0].logits(exact_states), ways[1].logits(rounded_states)
        rows.append(relative_errors(rounded, exact))
        error, best = rounded - exact, exact.argmax(axis=1)
        gain = np.abs(error - error[np.arange(N_SAMPLE), best][:, None]).max(axis=1)
        gains.append(gain / np.linalg.norm(exact, axis=1))
    return _Errors(np.concatenate(rows), np.concatenate(gains), np.concatenate(states))


def rounding_reference(weights: Weights, cause: Precision | KvType) -> Reference:
    """A reference in which nothing but ``cause`` rounds: quantized activations, or a type of keys and values."""
    to_bytes = partial(round_blocks, levels=127)
    if cause is Precision.QUANTIZED:
        return reference_of(weights, round_inputs=to_bytes)
    # An engine may bring queries and attention weights to a type that suits what is stored, as ggml does.
    if cause is KvType.BF16:
        return reference_of(weights, round_kept=_round_bf16, round_queries=_round_bf16, round_attention=_round_bf16)
    if cause is KvType.F8_E4M3:
        return reference_of(weights, round_kept=_round_e4m3)
    return reference_of(
        weights, round_kept=partial(round_blocks, levels=KV_LEVELS[KvType(cause)]), round_queries=to_bytes
    )


def _round_e4m3(x: Array) -> Array:
    """Keep the sign and four bits of significand, the last of them at least 2^-9, and no more than 448."""
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 4, -9))
    rounded: Array = np.clip(np.rint(x / step) * step, -448, 448)
    return rounded


def _round_bf16(x: Array) -> Array:
    """Keep the sign, eight bits of exponent and eight of significand, as a float32's upper half does."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
