"""Dequantization equals the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import dequantize, dequantize_rows, format_of, row_bytes, supported_types

N_OUT = 5  # rows, and 3 blocks in each: neither square nor a power of two
BLOCKS_IN_ROW = 3

SCALE_FIELDS = ("scale", "min_scale", "minimum", "weight")


def can_dequantize(ggml_type: GgmlType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros(ggml_type.block_bytes, np.uint8), gguf.GGMLQuantizationType(ggml_type))
    except NotImplementedError:
        return False
    return True


ALL_TYPES = [GgmlType(t) for t in gguf.GGMLQuantizationType if can_dequantize(GgmlType(t))]
all_types = pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)


def oracle(data: NDArray[np.uint8], ggml_type: GgmlType, shape: tuple[int, ...]) -> NDArray[np.float32]:
    rows = data.reshape(shape[0], -1)
    with np.errstate(all="ignore"):
        expanded = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(ggml_type))
    return expanded.astype(np.float32, copy=False).reshape(shape)


def assert_same_bits(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    different = (actual.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(actual) & np.isnan(expected))
    where = np.argwhere(different)
    assert not different.any(), (
        f"{len(where)} of {actual.size} weights differ, first at {where[0]}:"
        f" {actual[tuple(where[0])]!r}, expected {expected[tuple(where[0])]!r}"
    )


def random_bytes(ggml_type: GgmlType, rng: np.random.Generator) -> NDArray[np.uint8]:
    return rng.integers(0, 256, N_OUT * BLOCKS_IN_ROW * ggml_type.block_bytes, np.uint8)


def with_sane_scales(data: NDArray[np.uint8], ggml_type: GgmlType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The same blocks with random f16 and f32 scales from -2 to 2."""
    block = format_of(ggml_type).block
    blocks = data.view(block)
    for name in set(SCALE_FIELDS) & set(block.names or ()):
        blocks[name] = rng.uniform(-2, 2, blocks.shape)
    return data


def test_the_types_of_gguf_and_one_more_are_supported() -> None:
    assert supported_types() == sorted([*ALL_TYPES, GgmlType.Q1_0])


def test_q1_0_without_gguf() -> None:
    rng = np.random.default_rng(7)
    scales = rng.uniform(-2, 2, (6, 1)).astype(np.float16)
    positive = rng.random((6, 128)) < 0.5
    signs = np.packbits(positive, axis=1, bitorder="little")  # the first weight in the lowest bit of the first byte
    data = np.concatenate([scales.view(np.uint8), signs], axis=1).reshape(-1)
    weights = dequantize(data, GgmlType.Q1_0, (2, 384)).reshape(6, 128)
    assert_same_bits(weights, np.where(positive, scales, -scales).astype(np.float32))


@all_types
def test_the_block_layout_has_the_size_of_the_type(ggml_type: GgmlType) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
    assert format_of(ggml_type).block.itemsize == block_bytes
    assert (ggml_type.block_size, ggml_type.block_bytes) == (block_size, block_bytes)


@all_types
def test_random_blocks_with_sane_scales(ggml_type: GgmlType) -> None:
    rng = np.random.default_rng(ggml_type)
    data = with_sane_scales(random_bytes(ggml_type, rng), ggml_type, rng)
    shape = (N_OUT, BLOCKS_IN_ROW * ggml_type.block_size)
    weights = dequantize(data, ggml_type, shape)
    assert np.count_nonzero(weights) > weights.size // 4, "the fixture is all but empty"
    assert_same_bits(weights, oracle(data, ggml_type, shape))


@all_types
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaNs, in the oracle
def test_every_byte_pattern_with_infinities_and_nans(ggml_type: GgmlType) -> None:
    rng = np.random.default_rng(100 + ggml_type)
    n_blocks = 4096
    data = rng.integers(0, 256, n_blocks * ggml_type.block_bytes, np.uint8)
    shape = (8, n_blocks // 8 * ggml_type.block_size)
    assert_same_bits(dequantize(data, ggml_type, shape), oracle(data, ggml_type, shape))


@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize(
    "ggml_type", [t for t in ALL_TYPES if "scale" in (format_of(t).block.names or ())], ids=lambda t: t.name
)
def test_extreme_scales(ggml_type: GgmlType, scale: float) -> None:
    rng = np.random.default_rng(200 + ggml_type)
    data = random_bytes(ggml_type, rng)
    data.view(format_of(ggml_type).block)["scale"] = scale
    shape = (N_OUT, BLOCKS_IN_ROW * ggml_type.block_size)
    assert_same_bits(dequantize(data, ggml_type, shape), oracle(data, ggml_type, shape))


QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights(name: str) -> None:
    """Weights quantized by gguf are dequantized bit for bit, and are close to the original weights."""
    ggml_type = GgmlType[name]
    weights = np.random.default_rng(ggml_type).standard_normal((7, 768), np.float32)
    data = np.ascontiguousarray(gguf.quants.quantize(weights, gguf.GGMLQuantizationType(ggml_type))).view(np.uint8)
    restored = dequantize(data.reshape(-1), ggml_type, weights.shape)
    assert_same_bits(restored, oracle(data.reshape(-1), ggml_type, weights.shape))
    correlation = np.corrcoef(restored.ravel(), weights.ravel())[0, 1]
    # The correlation is 0 ± 1/sqrt(7 * 768) = 0.014 for weights in a wrong order, and 0.6 for ternary weights in order.
    assert correlation > 0.3, f"the correlation with the original is only {correlation:.3f}: wrong order?"


@all_types
def test_tensors_larger_than_one_chunk(ggml_type: GgmlType) -> None:
    rng = np.random.default_rng(300 + ggml_type)
    shape = (3, 40 * 1024)
    data = rng.integers(0, 256, shape[0] * row_bytes(ggml_type, shape[1]), np.uint8)
    data = with_sane_scales(data, ggml_type, rng)
    assert_same_bits(dequantize(data, ggml_type, shape), oracle(data, ggml_type, shape))


@all_types
def test_single_rows_equal_the_rows_of_the_whole(ggml_type: GgmlType) -> None:
    rng = np.random.default_rng(400 + ggml_type)
    data = with_sane_scales(random_bytes(ggml_type, rng), ggml_type, rng)
    n_cols = BLOCKS_IN_ROW * ggml_type.block_size
    row_ids = np.array([4, 0, 0, 2], np.int32)
    expected = oracle(data, ggml_type, (N_OUT, n_cols))[row_ids]
    assert_same_bits(dequantize_rows(data, ggml_type, n_cols, row_ids), expected)


def test_no_rows() -> None:
    data = np.zeros(34 * 3, np.uint8)
    assert dequantize_rows(data, GgmlType.Q8_0, 32, np.array([], np.int32)).shape == (0, 32)


def test_tensors_of_three_dimensions() -> None:
    rng = np.random.default_rng(5)
    data = with_sane_scales(rng.integers(0, 256, 2 * 3 * 2 * 34, np.uint8), GgmlType.Q8_0, rng)
    expected = oracle(data, GgmlType.Q8_0, (6, 64)).reshape(2, 3, 64)
    assert_same_bits(dequantize(data, GgmlType.Q8_0, (2, 3, 64)), expected)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_data_at_any_address(offset: int) -> None:
    rng = np.random.default_rng(6)
    for ggml_type in (GgmlType.F32, GgmlType.Q8_0, GgmlType.IQ2_XXS):
        data = with_sane_scales(random_bytes(ggml_type, rng), ggml_type, rng)
        shape = (N_OUT, BLOCKS_IN_ROW * ggml_type.block_size)
        moved = np.zeros(data.size + offset, np.uint8)[offset:]
        moved[:] = data
        assert_same_bits(dequantize(moved, ggml_type, shape), oracle(data, ggml_type, shape))


def test_read_only_data_gives_a_writable_copy() -> None:
    data = np.arange(32, dtype=np.float32).view(np.uint8)
    data.flags.writeable = False
    weights = dequantize(data, GgmlType.F32, (4, 8))
    weights[:] = -1
    assert data.view(np.float32)[31] == 31


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I8", "I32", "F64", "Q2_0"])
def test_types_that_are_not_weights_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"tensor type {name} \(supported: F32, F16, Q4_0,"):
        dequantize(np.zeros(0, np.uint8), GgmlType[name], (1, 256))


@pytest.mark.parametrize(
    ("shape", "n_bytes", "message"),
    [
        ((2, 33), 68, "a row of 33 weights is not a whole number of Q8_0 blocks of 32"),
        ((2, 0), 0, "a row of 0 weights"),
        ((2, 32), 67, "Q8_0 weights of shape (2, 32) take 68 bytes, got 67"),
        ((2, 32), 102, "Q8_0 weights of shape (2, 32) take 68 bytes, got 102"),
    ],
)
def test_wrong_sizes_are_refused(shape: tuple[int, ...], n_bytes: int, message: str) -> None:
    with pytest.raises(InvalidModelFile) as error:
        dequantize(np.zeros(n_bytes, np.uint8), GgmlType.Q8_0, shape)
    assert message in str(error.value)


def test_missing_rows_are_refused() -> None:
    data = np.zeros(34 * 3, np.uint8)
    for bad in (-1, 3):
        with pytest.raises(IndexError, match="the matrix has rows 0 to 2"):
            dequantize_rows(data, GgmlType.Q8_0, 32, np.array([0, bad], np.int32))
    with pytest.raises(InvalidModelFile, match="101 bytes are not a whole number of Q8_0 rows of 34 bytes"):
        dequantize_rows(data[:101], GgmlType.Q8_0, 32, np.array([0], np.int32))
