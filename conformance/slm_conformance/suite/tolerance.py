"""The tolerances of logits, derived from the precision of the backend and of its KV cache.

An error is relative: the L2 norm of the difference of two rows of logits over the norm of the expected row. The
contract (clause 9) sets 1e-4 for float32 and 1e-2 for 16 bit. For quantized activations, keys or values, the bound is
the error of the reference itself with only that rounding, on the same model.
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
"""Clause 9: factor of the mean error over that of quantized activations."""

ROW_MARGIN = 1.5
"""Factor of a single row's error over the largest of ``N_ROW_SAMPLES * N_SAMPLE`` measured rows.

Errors of rows vary widely: for a trained model, the largest is five times the root mean square. A wrong position or
neighbour causes far larger errors.
"""

N_SAMPLE = 160
"""Tokens of a sample. A mean error depends on the tokens, so all mean errors are those of one sample."""

N_ROW_SAMPLES = 4

UNKNOWN_MODEL = 0.02
"""The error of quantized activations from clause 9, for models without a reference."""

KV_LEVELS = {KvType.Q8_0: 127, KvType.Q6_0: 32, KvType.Q5_0: 16, KvType.Q4_0: 8}
"""For types with blocks: steps from zero to the largest value of a block."""


class Precision(StrEnum):
    """The numbers with which a backend multiplies weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    QUANTIZED = "quantized"


_FIXED = {Precision.FLOAT32: 1e-4, Precision.FLOAT16: 1e-2, KvType.F32: 0.0, KvType.F16: 1e-2}


class Tolerance:
    """The tolerances for a model, a precision and a KV type.

    Args:
        weights: the model; None if the reference cannot run it.
        precision: precision of products.
        kv_type: KV type.
    """

    def __init__(self, weights: Weights | None, precision: Precision, kv_type: KvType) -> None:
        self._weights = weights
        self._causes = (precision, kv_type)

    @cached_property
    def row(self) -> float:
        """Tolerance of a single row of logits."""
        return sum(self._bound(cause, ROW_MARGIN, lambda errors: errors.row.max()) for cause in self._causes)

    @cached_property
    def mean(self) -> float:
        """Tolerance of the mean error of sample 0."""
        return sum(
            self._bound(cause, MEAN_MARGIN, lambda errors: errors.row[:N_SAMPLE].mean()) for cause in self._causes
        )

    @cached_property
    def state(self) -> float:
        """Tolerance of a single row of hidden states."""
        return sum(self._bound(cause, ROW_MARGIN, lambda errors: errors.state.max()) for cause in self._causes)

    @cached_property
    def gap(self) -> float:
        """The most that a token may gain or lose relative to the best token, as a share of the row's norm.

        If only a row's error is known, all of it may be in these two logits, in opposite directions: the gap is then
        the square root of two times the error. Otherwise the gap is measured.

        Three bounds follow, each times the norm of the row:

        - The best token of an engine's row is behind the reference's best by at most one gap.
        - It is behind the best token of another row of the engine, decoded from the same tokens in other batches, by at
          most three gaps: one in exact numbers, and one for each token in the other row.
        - A log probability is off by at most two gaps: ``log_softmax(row)[t]`` changes by the error of logit t minus a
          mean of all errors, and two errors differ by at most two gaps.
        """
        sqrt_2 = float(np.sqrt(2))
        return sum(self._bound(cause, ROW_MARGIN, lambda errors: errors.gain.max(), sqrt_2) for cause in self._causes)

    def _bound(
        self, cause: Precision | KvType, margin: float, measure: Callable[[_Errors], float], fixed_factor: float = 1
    ) -> float:
        if cause in _FIXED:
            return fixed_factor * _FIXED[cause]
        if self._weights is None:
            return fixed_factor * margin * UNKNOWN_MODEL
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
    """Round as Q8_0, Q6_0, Q5_0 and Q4_0 do: blocks of 32 share a scale, with ``levels`` steps to the largest."""
    blocks = x.reshape(-1, min(32, x.shape[-1]))
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / levels
    scale[scale == 0] = 1
    rounded: Array = np.rint(blocks / scale) * scale
    return rounded.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _Errors:
    """Errors of the rows of all samples.

    row: error of each row, relative to its norm.
    gain: the most that a token gains or loses relative to the best one, relative to the norm.
    state: error of the hidden state of a row, relative to its norm.
    """

    row: Array
    gain: Array
    state: Array


@lru_cache(maxsize=64)
def exact_sample(weights: Weights, seed: int) -> tuple[Array, Array]:
    """The hidden states and the logits of the reference after each token of a sample, [N_SAMPLE, E] and [.., V]."""
    reference = reference_of(weights)
    states = reference.embed(random_tokens(weights.n_vocab, N_SAMPLE, seed))
    return states, reference.logits(states)


@lru_cache(maxsize=64)
def _rounding_errors(weights: Weights, cause: Precision | KvType) -> _Errors:
    """The errors if only ``cause`` rounds."""
    rows, gains, states = [], [], []
    for seed in range(N_ROW_SAMPLES):
        tokens = random_tokens(weights.n_vocab, N_SAMPLE, seed)
        exact_states, exact = exact_sample(weights, seed)
        rounding = rounding_reference(weights, cause)
        rounded_states = rounding.embed(tokens)
        states.append(relative_errors(rounded_states, exact_states))
        rounded = rounding.logits(rounded_states)
        rows.append(relative_errors(rounded, exact))
        error, best = rounded - exact, exact.argmax(axis=1)
        gain = np.abs(error - error[np.arange(N_SAMPLE), best][:, None]).max(axis=1)
        gains.append(gain / np.linalg.norm(exact, axis=1))
    return _Errors(np.concatenate(rows), np.concatenate(gains), np.concatenate(states))


def rounding_reference(weights: Weights, cause: Precision | KvType) -> Reference:
    """A reference in which only ``cause`` rounds: quantized activations, or a KV type."""
    to_bytes = partial(round_blocks, levels=127)
    if cause is Precision.QUANTIZED:
        return reference_of(weights, round_inputs=to_bytes)
    # An engine may convert queries and attention weights to a type that matches the KV cache, as ggml does.
    if cause is KvType.BF16:
        return reference_of(weights, round_kv=_round_bf16, round_queries=_round_bf16, round_attention=_round_bf16)
    if cause is KvType.F8_E4M3:
        return reference_of(weights, round_kv=_round_e4m3)
    return reference_of(
        weights, round_kv=partial(round_blocks, levels=KV_LEVELS[KvType(cause)]), round_queries=to_bytes
    )


def _round_e4m3(x: Array) -> Array:
    """Keep the sign and four bits of the significand, the last of them at least 2^-9; clamp to 448."""
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 4, -9))
    rounded: Array = np.clip(np.rint(x / step) * step, -448, 448)
    return rounded


def _round_bf16(x: Array) -> Array:
    """Keep the sign, eight bits of exponent and eight of the significand, like the upper half of a float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
