"""Quantization: fixed types equal gguf and ggml, searched types have at most ggml's error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ggml_library import ggml_quantize
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import dequantize, quantizable_types, quantize

T = GgmlType
FIXED = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.TQ2_0]
SEARCHED = [T.Q4_K, T.Q5_K, T.Q6_K]
PACKED = [*FIXED[3:], T.Q1_0, *SEARCHED]
SHAPE = (48, 768)  # three blocks of the widest types in a row

MORE_THAN_GGML = 1.02
"""The largest allowed ratio of our root mean square error to that of ggml's quantizer."""

by_name = {"ids": lambda t: t.name if isinstance(t, GgmlType) else str(t)}


def samples(kind: str, shape: tuple[int, int] = SHAPE) -> NDArray[np.float32]:
    """Weights from typical and from rare distributions."""
    rng = np.random.default_rng(11)
    drawn = {
        "normal": lambda: rng.standard_normal(shape),
        "heavy tails": lambda: rng.standard_t(3, shape),
        "outliers": lambda: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.005, 12, 1),
        "far from zero": lambda: rng.standard_normal(shape) + 0.7,
        "one sign": lambda: rng.gamma(2, 1, shape),
        "mostly zeros": lambda: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
    }[kind]()
    return (0.02 * drawn + 0.0).astype(
        np.float32
    )  # adding 0.0 removes -0.0: zero blocks of ggml and gguf would differ by a sign


KINDS = ["normal", "heavy tails", "outliers", "far from zero", "one sign", "mostly zeros"]


def importance_of(n_cols: int) -> NDArray[np.float32]:
    """An importance like that of activations: a few columns have a hundred times the weight of most."""
    return (np.random.default_rng(12).gamma(0.5, 1, n_cols) + 1e-4).astype(np.float32)


def rms_error(
    packed: NDArray[np.uint8],
    ggml_type: GgmlType,
    weights: NDArray[np.float32],
    counts: NDArray[np.float32] | float = 1,
) -> float:
    difference = dequantize(packed, ggml_type, weights.shape).astype(np.float64) - weights
    return float(np.sqrt((counts * difference**2).mean()))


def assert_same_bytes(actual: NDArray[np.uint8], expected: NDArray[np.uint8], ggml_type: GgmlType) -> None:
    different = np.flatnonzero(actual != expected)
    assert not different.size, (
        f"{different.size} of {actual.size} bytes differ, first byte {different[0] % ggml_type.block_bytes} of block"
        f" {different[0] // ggml_type.block_bytes}: {actual[different[0]]}, expected {expected[different[0]]}"
    )


def test_quantizable_types() -> None:
    assert quantizable_types() == sorted([*FIXED, *SEARCHED, T.Q1_0])


@pytest.mark.parametrize("kind", [*KINDS, "ties"])
@pytest.mark.parametrize("ggml_type", FIXED, **by_name)
def test_fixed_types_equal_the_gguf_package_bit_for_bit(ggml_type: GgmlType, kind: str) -> None:
    if kind == "ties":  # few levels, so that the largest magnitude occurs with both signs, and codes fall on halves
        weights = np.random.default_rng(3).integers(-8, 9, SHAPE).astype(np.float32) / 16
    else:
        weights = samples(kind)
    expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(ggml_type)).view(np.uint8).reshape(-1)
    assert_same_bytes(quantize(weights, ggml_type), expected, ggml_type)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ggml_type", [*FIXED[1:], T.Q1_0], **by_name)
def test_fixed_types_equal_ggml_bit_for_bit(ggml_type: GgmlType, kind: str) -> None:
    weights = samples(kind)
    assert_same_bytes(quantize(weights, ggml_type), ggml_quantize(weights, ggml_type), ggml_type)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ggml_type", PACKED, **by_name)
def test_error_is_no_larger_than_that_of_ggml(ggml_type: GgmlType, kind: str) -> None:
    weights = samples(kind)
    error = rms_error(quantize(weights, ggml_type), ggml_type, weights)
    ggml_error = rms_error(ggml_quantize(weights, ggml_type), ggml_type, weights)
    assert error <= MORE_THAN_GGML * ggml_error, f"{error / ggml_error:.4f} times the error of ggml"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ggml_type", PACKED, **by_name)
def test_weighted_error_is_no_larger_than_that_of_ggml(ggml_type: GgmlType, kind: str) -> None:
    weights, importance = samples(kind), importance_of(SHAPE[1])
    error = rms_error(quantize(weights, ggml_type, importance), ggml_type, weights, importance)
    ggml_error = rms_error(ggml_quantize(weights, ggml_type, importance), ggml_type, weights, importance)
    assert error <= MORE_THAN_GGML * ggml_error, f"{error / ggml_error:.4f} times the weighted error of ggml"


@pytest.mark.parametrize("ggml_type", [t for t in PACKED if t not in (T.Q8_0, T.TQ2_0)], **by_name)
def test_importance_lowers_the_weighted_error(ggml_type: GgmlType) -> None:
    weights, importance = samples("normal"), importance_of(SHAPE[1])
    plain, weighted = quantize(weights, ggml_type), quantize(weights, ggml_type, importance)
    gain = rms_error(plain, ggml_type, weights, importance) / rms_error(weighted, ggml_type, weights, importance)
    assert gain > 1.005, f"the weighted error without importance is {gain:.4f} of that with it"


@pytest.mark.parametrize("ggml_type", PACKED, **by_name)
def test_zeros_stay_zeros_even_without_importance(ggml_type: GgmlType) -> None:
    zeros = np.zeros((2, 256), np.float32)
    for importance in (None, np.ones(256, np.float32), np.zeros(256, np.float32)):
        assert not dequantize(quantize(zeros, ggml_type, importance), ggml_type, zeros.shape).any()


@pytest.mark.parametrize("value", [0.37, -0.37])
@pytest.mark.parametrize("importance", [None, np.zeros(256, np.float32), np.ones(256, np.float32)])
@pytest.mark.parametrize("ggml_type", PACKED, **by_name)
def test_blocks_of_one_value(ggml_type: GgmlType, importance: NDArray[np.float32] | None, value: float) -> None:
    weights = np.full((2, 256), value, np.float32)
    restored = dequantize(quantize(weights, ggml_type, importance), ggml_type, weights.shape)
    # Two roundings to float16, of scale and unit; 1/8 for 4 bits if the positive side has one code less.
    bound = {T.Q4_0: 1 / 8, T.Q5_0: 1 / 16, T.Q6_K: 1 / 32, T.Q8_0: 1 / 254}.get(ggml_type, 0) + 2**-9
    assert np.abs(restored / value - 1).max() <= bound


@pytest.mark.parametrize("ggml_type", PACKED, **by_name)
def test_denormal_weights(ggml_type: GgmlType) -> None:
    """Denormals, whose scales underflow in float16."""
    weights = np.float32(1e-41) * np.random.default_rng(5).integers(-9, 9, (2, 256)).astype(np.float32)
    for importance in (None, np.ones(256, np.float32)):
        restored = dequantize(quantize(weights, ggml_type, importance), ggml_type, weights.shape)
        assert np.abs(restored).max() < 1e-6


@pytest.mark.parametrize("ggml_type", quantizable_types(), **by_name)
def test_chunks_do_not_matter(ggml_type: GgmlType) -> None:
    weights = samples("normal", (100, 1024))  # more than one chunk
    whole = quantize(weights, ggml_type)
    assert_same_bytes(np.concatenate([quantize(row[None], ggml_type) for row in weights]), whole, ggml_type)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weights = samples("normal").copy()
    weights[5, 7] = bad
    for ggml_type in quantizable_types():
        with pytest.raises(InvalidModelFile, match="1 weights are infinite or not a number"):
            quantize(weights, ggml_type)


@pytest.mark.parametrize("ggml_type", [t for t in quantizable_types() if t is not T.F32], **by_name)
def test_weights_too_large_for_a_type_are_refused(ggml_type: GgmlType) -> None:
    weights = np.full((1, 256), 3.4e38, np.float32)
    for importance in (None, np.ones(256, np.float32)):
        with pytest.raises(UnsupportedModel, match=rf"weights up to 3.4e\+38 are too large for {ggml_type.name}"):
            quantize(weights, ggml_type, importance)


def test_types_without_a_quantizer_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="cannot quantize to IQ4_XS"):
        quantize(samples("normal"), T.IQ4_XS)
    with pytest.raises(InvalidModelFile, match="a row of 33 weights is not a whole number of Q8_0 blocks of 32"):
        quantize(np.zeros((2, 33), np.float32), T.Q8_0)
