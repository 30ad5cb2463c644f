"""C++ matrix products, on every instruction set of this machine, against float64 products of dequantized weights."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from random_matrices import (
    FLOATS,
    HALVES,
    ROUNDING,
    Matrix,
    as_matrix,
    bf16_of,
    float32_bound,
    int8_values,
    random_matrix,
    with_ordinary_scales,
)
from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, format_of
from slm_native import _extension
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.select import ISA_VARIABLE, select_kernels

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

native = _extension.load()
TYPES = [GgmlType(t) for t in sorted(native.Kernels("scalar", 1).types)]
QUANTIZED = [t for t in TYPES if t not in FLOATS]
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 70)
every_type = pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
every_quantized_type = pytest.mark.parametrize("ggml_type", QUANTIZED, ids=lambda t: t.name)


def f32(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def multiply(isa: str, x: NDArray[np.float32], matrix: Matrix, n_threads: int = 1) -> NDArray[np.float32]:
    kernels = native.Kernels(isa, n_threads)
    product: NDArray[np.float32] = kernels.matmul(x, kernels.matrix(matrix.data, matrix.ggml_type, *matrix.shape))
    assert product.dtype == np.float32
    return product


FEW = 6
"""Products of at most this many rows of activations round nothing to bf16."""


def rounds_weights(isa: str, x: NDArray[np.float32], matrix: Matrix) -> bool:
    """Whether AMX multiplies, which rounds dequantized weights to bf16."""
    return isa in ("amx", "amx_plain") and len(x) > FEW and matrix.ggml_type not in FLOATS


def weights_bound(isa: str, x: NDArray[np.float32], matrix: Matrix) -> NDArray[np.float64]:
    """The error of a product from rounding weights to bf16; subnormal weights become zero."""
    if not rounds_weights(isa, x, matrix):
        return np.zeros((len(x), len(matrix.exact)))
    weights = 2.0**-8 * np.abs(matrix.exact) + 2.0**-126
    bound: NDArray[np.float64] = np.abs(x).astype(np.float64) @ weights.T
    return bound


def rounding_bound(isa: str, x: NDArray[np.float32], matrix: Matrix) -> NDArray[np.float64]:
    """The error of a product from rounding activations, and weights if they are rounded, too.

    int8 errs by half a step of its block of 32, and by three float32 roundings of at most 127 steps. bf16 has 8 bits
    of precision: it errs by at most 1/256 of each number, and subnormal numbers become zero.
    """
    is_bf16 = isa in ("avx512_bf16", "amx", "amx_plain") and matrix.ggml_type is GgmlType.BF16 and len(x) > FEW
    if is_bf16 or rounds_weights(isa, x, matrix):
        rounded = 2.0**-8 * np.abs(x).astype(np.float64) + 2.0**-126
        return rounded @ np.abs(matrix.exact).T + (1 + 2.0**-8) * weights_bound(isa, x, matrix)
    if matrix.ggml_type in FLOATS:
        return np.zeros((len(x), len(matrix.exact)))
    n_in = matrix.shape[1]
    steps = np.abs(x.reshape(len(x), -1, 32)).max(axis=2).astype(np.float64) / 127
    weights = np.abs(matrix.exact).reshape(-1, n_in // 32, 32).sum(axis=2)
    bound: NDArray[np.float64] = (0.5 + 3 * 127 * ROUNDING) * (steps @ weights.T)
    return bound


def assert_within(
    y: NDArray[np.float32], x: NDArray[np.float32], matrix: Matrix, bound: NDArray[np.float64], case: str = ""
) -> None:
    expected = x.astype(np.float64) @ matrix.exact.T
    assert y.shape == expected.shape
    worst = np.max(np.abs(y - expected) / bound)
    assert worst <= 1, f"off by {worst:.2f} times the bound {case}"


@every_isa
@every_type
@pytest.mark.parametrize(("n_out", "n_blocks"), [(1, 1), (5, 3), (33, 11)])
def test_products_of_activations_exact_in_int8(isa: str, ggml_type: GgmlType, n_out: int, n_blocks: int) -> None:
    """Only float32 sums are rounded, and with AMX the weights.

    11 blocks are whole groups of 256 weights, or some groups and a remainder.
    """
    matrix = random_matrix(ggml_type, n_out, n_blocks * max(32, ggml_type.block_size))
    x = int8_values(max(TOKENS), matrix.shape[1], seed=n_out)
    expected = x.astype(np.float64) @ matrix.exact.T
    sums_bound, rounded_weights_bound = float32_bound(x, matrix), weights_bound(isa, x, matrix)
    for n_threads in (1, 2, 3):
        kernels = native.Kernels(isa, n_threads)
        weights = kernels.matrix(matrix.data, ggml_type, *matrix.shape)
        for n in TOKENS:
            y = kernels.matmul(x[:n], weights)
            assert (y.dtype, y.shape) == (np.float32, (n, n_out))
            bound = sums_bound[:n] + rounded_weights_bound[:n] * rounds_weights(isa, x[:n], matrix)
            worst = np.max(np.abs(y - expected[:n]) / bound)
            assert worst <= 1, f"off by {worst:.2f} times the bound with {n} tokens, {n_threads} threads"


@every_isa
@every_type
@pytest.mark.parametrize("n_in", [256, 7 * 256])
def test_products_of_any_activations(isa: str, ggml_type: GgmlType, n_in: int) -> None:
    matrix, x = random_matrix(ggml_type, 33, n_in), f32(max(TOKENS), n_in, seed=n_in)
    for n in TOKENS:
        bound = float32_bound(x[:n], matrix) + rounding_bound(isa, x[:n], matrix)
        assert_within(multiply(isa, x[:n], matrix), x[:n], matrix, bound, f"with {n} tokens")


@every_isa
@pytest.mark.parametrize("ggml_type", FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize("n_in", [1, 7, 31, 100, 513])
def test_rows_of_any_width(isa: str, ggml_type: GgmlType, n_in: int) -> None:
    matrix, x = random_matrix(ggml_type, 5, n_in), f32(max(TOKENS), n_in, seed=n_in)
    for n in TOKENS:
        bound = float32_bound(x[:n], matrix) + rounding_bound(isa, x[:n], matrix)
        assert_within(multiply(isa, x[:n], matrix), x[:n], matrix, bound, f"with {n} tokens")


@every_isa
@every_type
@pytest.mark.parametrize("n_blocks", [1, 11, 16])
def test_embedding_rows_equal_the_gguf_package(isa: str, ggml_type: GgmlType, n_blocks: int) -> None:
    """Bit for bit, in any order and repeated; 11 blocks may be whole groups of 256 weights and a remainder."""
    matrix = random_matrix(ggml_type, 33, n_blocks * max(32, ggml_type.block_size))
    kernels = native.Kernels(isa, 2)
    weights = kernels.matrix(matrix.data, matrix.ggml_type, *matrix.shape)
    for ids in (np.array([], np.int32), np.array([32], np.int32), np.arange(120, dtype=np.int32)[::-1].copy() * 7 % 33):
        rows = kernels.embed(weights, ids)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, matrix.exact[ids])


@every_isa
@pytest.mark.parametrize("ggml_type", [GgmlType.Q4_K, GgmlType.IQ2_XS], ids=lambda t: t.name)
def test_embed(isa: str, ggml_type: GgmlType) -> None:
    """IQ2_XS has no kernels: NumPy dequantizes its rows."""
    matrix, kernels = random_matrix(ggml_type, 11, 512), CpuKernels(isa, 1, 0)
    weight = kernels.prepare(QuantizedTensor("embd", matrix.shape, ggml_type, matrix.data))
    np.testing.assert_array_equal(kernels.embed(weight, np.array([10, 3, 3], np.int32)), matrix.exact[[10, 3, 3]])
    for bad in (11, -1):
        with pytest.raises(
            IndexError, match=f"row ids span {min(bad, 2)} to {max(bad, 2)}, the matrix has rows 0 to 10"
        ):
            kernels.embed(weight, np.array([2, bad], np.int32))


def test_row_ids_of_another_type_or_shape_are_refused() -> None:
    matrix, kernels = random_matrix(GgmlType.Q8_0, 4, 32), native.Kernels("scalar", 1)
    weights = kernels.matrix(matrix.data, matrix.ggml_type, *matrix.shape)
    with pytest.raises(TypeError, match="ids must be int32"):
        kernels.embed(weights, np.array([1]))
    with pytest.raises(ValueError, match="ids must be aligned and C-contiguous with 1 dimension"):
        kernels.embed(weights, np.array([[1]], np.int32))


@every_isa
@every_quantized_type
def test_rounding_of_activations_is_unbiased_noise(isa: str, ggml_type: GgmlType) -> None:
    """Uniform, independent errors of at most half a step have a root mean square of step / sqrt(12).

    If weights are rounded, too, they err as bf16 does. The mean over 33 x 70 products of the squared error, relative to
    its expected value, is about 1; it is not exactly 1 because products share weights and activations. A wrong scale or
    a biased rounding makes it many times larger.
    """
    matrix, x = random_matrix(ggml_type, 33, 1792), f32(70, 1792, seed=3)
    wide = x.astype(np.float64)
    steps = np.repeat(np.abs(wide.reshape(70, -1, 32)).max(axis=2) / 127, 32, axis=1)
    weight_variance = np.zeros((70, 33))
    if rounds_weights(isa, x, matrix):
        steps = np.exp2(np.floor(np.log2(np.abs(wide))) - 7)
        weight_variance = wide**2 @ ((bf16_of(matrix.exact) - matrix.exact) ** 2).T
    expected = steps**2 / 12 @ (matrix.exact**2).T + weight_variance
    error = multiply(isa, x, matrix) - x.astype(np.float64) @ matrix.exact.T
    assert 0.8 < np.mean(error**2 / expected) < 1.2


@every_isa
@every_quantized_type
def test_every_code_at_every_position(isa: str, ggml_type: GgmlType) -> None:
    """One activation is 127 and the others are 0: a product is 127 times one weight, rounded three times.

    All bytes of row r are r, for r from 0 to 255, so that every code is at every position. Scales are set to ordinary
    numbers.
    """
    n_in, rng = ggml_type.block_size, np.random.default_rng(ggml_type)
    data = np.repeat(np.arange(256, dtype=np.uint8), ggml_type.block_bytes)
    matrix = as_matrix(ggml_type, with_ordinary_scales(data, ggml_type, rng), n_in)
    x = 127 * np.eye(n_in, dtype=np.float32)
    few = np.concatenate([multiply(isa, x[i : i + 8], matrix) for i in range(0, n_in, 8)])
    for y in (few, multiply(isa, x, matrix)):
        bound = 3 * ROUNDING * 127 * matrix.magnitude.T + weights_bound(isa, x, matrix)
        different = np.abs(y - 127 * matrix.exact.T) > bound
        assert not different.any(), f"{different.sum()} differ, first at (position, row) {np.argwhere(different)[0]}"


@every_isa
@every_quantized_type
def test_the_largest_integer_sums_do_not_overflow(isa: str, ggml_type: GgmlType) -> None:
    """All bytes of a row are equal, all activations are 127 or -127: no integer sum of products may overflow.

    An int16 holds the sum of eight products of 4-bit codes with int8, of four with 5-bit codes, or of two with 6-bit.
    """
    n_in, rng = max(256, ggml_type.block_size), np.random.default_rng(ggml_type)
    data = np.repeat(np.arange(256, dtype=np.uint8), ggml_type.block_bytes * (n_in // ggml_type.block_size))
    matrix = as_matrix(ggml_type, with_ordinary_scales(data, ggml_type, rng), n_in)
    x = np.full((24, n_in), 127, np.float32)
    x[1::2] = -127
    for n in (1, 4, 24):
        bound = float32_bound(x[:n], matrix) + weights_bound(isa, x[:n], matrix) + 1e-30  # some rows are zero
        assert_within(multiply(isa, x[:n], matrix), x[:n], matrix, bound, f"with {n} tokens")


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize(
    "ggml_type", [t for t in QUANTIZED if "scale" in (format_of(t).block.names or ())], ids=lambda t: t.name
)
def test_every_finite_scale(isa: str, ggml_type: GgmlType, n_tokens: int) -> None:
    """Subnormal scales included. Formats with a minimum use all scales for it, too, in reverse order."""
    matrix = _every_scale(ggml_type)
    x = np.zeros((n_tokens, ggml_type.block_size), np.float32)
    x[:, 13] = 127
    bound = 3 * ROUNDING * 127 * matrix.magnitude[:, 13] + weights_bound(isa, x, matrix) + 1e-44
    assert_within(multiply(isa, x, matrix), x, matrix, bound)


@lru_cache(maxsize=2)
def _every_scale(ggml_type: GgmlType) -> Matrix:
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)][:: 7 if ggml_type.block_size > 32 else 1]
    rng, block = np.random.default_rng(ggml_type), format_of(ggml_type).block
    blocks = rng.integers(0, 256, len(scales) * block.itemsize, np.uint8).view(block)
    for name, values in zip([n for n in HALVES if n in (block.names or ())], (scales, scales[::-1]), strict=False):
        blocks[name] = values
    return as_matrix(ggml_type, blocks.view(np.uint8), ggml_type.block_size)


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_every_shared_exponent(isa: str, n_tokens: int) -> None:
    """Exponents of MXFP4 from 2 ** -127 to 2 ** 127: products beyond float32 are infinite, subnormal ones are exact."""
    blocks = np.zeros(256, format_of(GgmlType.MXFP4).block)
    blocks["exponent"], blocks["nibbles"][:, 13] = np.arange(256), 0x02  # code 2 is a weight of 1
    matrix = as_matrix(GgmlType.MXFP4, blocks.view(np.uint8), 32)
    x = np.zeros((n_tokens, 32), np.float32)
    x[:, 13] = 0.5 * 127
    with np.errstate(over="ignore"):
        expected = (x.astype(np.float64) @ matrix.exact.T).astype(np.float32)
    y = multiply(isa, x, matrix)
    atol = np.max(weights_bound(isa, x, matrix)[:, 0])  # of subnormal weights
    np.testing.assert_allclose(y[:, :248], expected[:, :248], rtol=3 * ROUNDING, atol=atol)
    assert ((y[:, 248:] == expected[:, 248:]) | np.isinf(y[:, 248:])).all()


@every_isa
@every_type
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_zeros_and_tiny_activations(isa: str, ggml_type: GgmlType, n_tokens: int) -> None:
    matrix = random_matrix(ggml_type, 3, 512)
    np.testing.assert_array_equal(multiply(isa, np.zeros((n_tokens, 512), np.float32), matrix), 0)
    x = f32(n_tokens, 512, seed=1)
    for power in (-90, -99):  # 2 ** -99 > 1e-30: quantized products round smaller activations to 0
        tiny = np.asarray(x * 2.0**power, np.float32)
        bound = float32_bound(tiny, matrix) + rounding_bound(isa, tiny, matrix) + 1e-42
        assert_within(multiply(isa, tiny, matrix), tiny, matrix, bound)
    vanishing = np.full((n_tokens, 512), 1e-31, np.float32)
    limit = (vanishing.astype(np.float64) @ matrix.magnitude.T) * (1 + 1e-3)
    assert (np.abs(multiply(isa, vanishing, matrix)) <= limit).all()


@every_isa
@every_type
@pytest.mark.parametrize("n_tokens", [1, 3, 9, 20])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
def test_nan_and_infinite_activations_propagate(isa: str, ggml_type: GgmlType, n_tokens: int, bad: float) -> None:
    """All products of their token are not finite; those of other tokens are."""
    matrix = random_matrix(ggml_type, 5, 768)
    for column in (0, 300, 767):
        x = f32(n_tokens, 768, seed=2)
        x[n_tokens // 2, column] = bad
        finite = np.isfinite(multiply(isa, x, matrix))
        assert finite.all(axis=1).tolist() == [t != n_tokens // 2 for t in range(n_tokens)]
        assert not finite[n_tokens // 2].any()


@every_isa
@every_type
@pytest.mark.parametrize("n_tokens", [1, 3, 9, 20])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
def test_nan_and_infinite_scales_propagate(isa: str, ggml_type: GgmlType, n_tokens: int, bad: float) -> None:
    names = {*HALVES, "weight", "upper_half"} & set(format_of(ggml_type).block.names or ())
    for name in names:  # empty for MXFP4 and NVFP4, whose scales are always finite
        data = random_matrix(ggml_type, 5, 768).data.copy()
        blocks = data.view(format_of(ggml_type).block).reshape(5, -1)
        blocks[name][3, -1] = np.float32(bad).view(np.uint32) >> 16 if name == "upper_half" else bad
        matrix = as_matrix(ggml_type, data, 768)
        finite = np.isfinite(multiply(isa, f32(n_tokens, 768, seed=3), matrix))
        assert finite.all(axis=0).tolist() == [True, True, True, False, True], name
        assert not finite[:, 3].any()


@every_isa
@every_type
@pytest.mark.parametrize("offset", [1, 2, 3, 31])
def test_blocks_at_any_address(isa: str, ggml_type: GgmlType, offset: int) -> None:
    matrix = random_matrix(ggml_type, 7, 768)
    moved = np.zeros(matrix.data.size + offset, np.uint8)[offset:]
    moved[:] = matrix.data
    for n in (5, 9):
        x = f32(n, 768, seed=2)
        actual = multiply(isa, x, Matrix(ggml_type, moved, matrix.exact, matrix.magnitude))
        np.testing.assert_array_equal(actual, multiply(isa, x, matrix))


@every_isa
@every_type
def test_blocks_at_the_end_of_a_mapped_file(isa: str, ggml_type: GgmlType, tmp_path: Path) -> None:
    """The weights end at the end of a memory page: a read past the end would crash the process."""
    matrix = random_matrix(ggml_type, 5, 768)
    page = 1 << 16
    path = tmp_path / "weights"
    path.write_bytes(bytes(-matrix.data.size % page) + matrix.data.tobytes())
    mapped = np.memmap(path, np.uint8, mode="r")[-matrix.data.size :]
    for n in (1, 9):
        x = int8_values(n, 768, seed=2)
        y = multiply(isa, x, Matrix(ggml_type, mapped, matrix.exact, matrix.magnitude))
        assert_within(y, x, matrix, float32_bound(x, matrix) + weights_bound(isa, x, matrix))


@every_isa
@every_type
def test_empty_products(isa: str, ggml_type: GgmlType) -> None:
    kernels, matrix = native.Kernels(isa, 2), random_matrix(ggml_type, 3, 256)
    assert multiply(isa, f32(0, 256, seed=2), matrix).shape == (0, 3)
    for n in (2, 9):
        empty = kernels.matrix(matrix.data[:0], ggml_type, 0, 256)
        assert kernels.matmul(f32(n, 256, seed=2), empty).shape == (n, 0)


@every_isa
def test_wrong_arguments_of_products_are_refused(isa: str) -> None:
    kernels, x = native.Kernels(isa, 1), f32(2, 64, seed=2)
    weights = kernels.matrix(random_matrix(GgmlType.Q8_0, 3, 64).data, 8, 3, 64)
    misaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    wrong: list[tuple[object, type[Exception], str]] = [
        (x.astype(np.float64), TypeError, "x must be float32"),
        (x.tolist(), TypeError, "incompatible function arguments"),
        (x[0], ValueError, r"x must be aligned and C-contiguous with 2 dimension\(s\); its shape is \[64\]"),
        (x[:, ::2], ValueError, r"x must be aligned and C-contiguous .* its shape is \[2, 32\]"),
        (misaligned, ValueError, "x must be aligned"),
        (np.asfortranarray(x), ValueError, "x must be aligned and C-contiguous"),
        (x[:, :32].copy(), ValueError, "x has rows of 32, the matrix takes 64"),
        (x[:, :0].copy(), ValueError, "x has rows of 0, the matrix takes 64"),
    ]
    for bad, error, message in wrong:
        with pytest.raises(error, match=message):
            kernels.matmul(bad, weights)
    for other in {*native.available_isas()} - {isa}:
        with pytest.raises(ValueError, match="the weights were prepared for another instruction set"):
            native.Kernels(other, 1).matmul(x, weights)


@every_isa
def test_wrong_arguments_of_matrices_are_refused(isa: str) -> None:
    kernels, data = native.Kernels(isa, 1), random_matrix(GgmlType.Q8_0, 3, 64).data
    wrong: list[tuple[tuple[object, ...], type[Exception], str]] = [
        ((data.view(np.int8), 8, 3, 64), TypeError, "data must be uint8"),
        ((data[::2], 8, 3, 64), ValueError, "data must be aligned and C-contiguous"),
        ((data.reshape(3, -1), 8, 3, 64), ValueError, r"data must be .* 1 dimension\(s\); its shape is \[3, 68\]"),
        ((data, 8, 3, 48), ValueError, "rows of 48 weights are not a multiple of the block size 32"),
        ((data, 8, 3, 0), ValueError, "rows have no weights"),
        ((data, 8, 4, 64), ValueError, "data has 204 bytes, a matrix of 4 x 64 takes 272"),
        ((data[:-1], 8, 3, 64), ValueError, "data has 203 bytes, a matrix of 3 x 64 takes 204"),
        ((data, 19, 3, 64), ValueError, "no kernel for ggml type 19"),
        ((data, 8, -1, 64), TypeError, "incompatible function arguments"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            kernels.matrix(*arguments)


@pytest.mark.parametrize("isa", ["avx9", "neon2", "", "AVX2"])
def test_a_missing_instruction_set_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = ", ".join(native.available_isas())
    with pytest.raises(InvalidOption, match=f"instruction set '{isa}' .this build on this machine has: {accepted}"):
        CpuKernels(isa, 1, 0)
    with pytest.raises(ValueError, match=f"instruction set '{isa}' is not available here"):
        native.Kernels(isa, 1)
    monkeypatch.setenv(ISA_VARIABLE, isa or "sse")
    with pytest.raises(InvalidOption, match="unknown or missing instruction set"):
        select_kernels()


@every_isa
def test_the_environment_forces_an_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    kernels, reason = select_kernels()
    assert isinstance(kernels, CpuKernels)
    assert kernels.describe().startswith(f"C++ kernels ({isa}, ")
    assert reason.endswith(f"instruction set {isa}, forced by SLM_NATIVE_ISA")


def test_auto_selects_the_best_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    for tier in ("auto", "cpu"):
        kernels, reason = select_kernels(tier)
        assert kernels.name == "cpu"
        assert reason.endswith(f"instruction set {native.available_isas()[-1]}, the best that this machine has")


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 8, 9])
def test_matmul_adds_biases_and_accepts_strided_rows(isa: str, n_tokens: int) -> None:
    matrix, bias = random_matrix(GgmlType.Q8_0, 33, 1024), f32(33, seed=3)
    x = np.repeat(int8_values(n_tokens, 1024, seed=2), 2, axis=1)[:, ::2]
    kernels = CpuKernels(isa, 1, 0)
    weight = kernels.prepare(QuantizedTensor("w", (33, 1024), GgmlType.Q8_0, matrix.data))
    actual = kernels.matmul(x, weight, bias).astype(np.float64) - bias
    bound = float32_bound(x, matrix) + weights_bound(isa, x, matrix)
    assert_within(actual, x, matrix, bound + 2 * ROUNDING * (np.abs(actual) + np.abs(bias)))


def test_types_without_kernels_are_dequantized() -> None:
    matrix, x = random_matrix(GgmlType.IQ2_S, 5, 512), f32(9, 512, seed=1)
    kernels = CpuKernels("scalar", 1, 1 << 20)
    weight = kernels.prepare(QuantizedTensor("w", (5, 512), GgmlType.IQ2_S, matrix.data))
    bound = (512 + 4) * ROUNDING * (np.abs(x.astype(np.float64)) @ matrix.magnitude.T)
    assert_within(kernels.matmul(x, weight), x, matrix, bound)
