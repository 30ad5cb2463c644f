"""Triton matrix products in the interpreter, against float64 products of weights dequantized by NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.gguf import GgmlType
from slm_core.quant import dequantize, format_of

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are tested in Triton's interpreter: pip install triton")

from slm_native.kernels.torch.triton import products  # noqa: E402
from slm_native.kernels.torch.triton.formats import packed_format, packed_types  # noqa: E402

REQUIRED_TYPES = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_XS",
    "MXFP4",
    "TQ2_0",
    "Q1_0",
    "F16",
    "BF16",
]
SCALES = ("scale", "min_scale", "minimum", "weight")


def random_rows(ggml_type: GgmlType, n_out: int, n_in: int) -> np.ndarray:
    """Random blocks with scales of magnitude 1; exponents of MXFP4 are near that of 1."""
    n_bytes = n_in // ggml_type.block_size * ggml_type.block_bytes
    rng = np.random.default_rng(ggml_type)
    data = rng.integers(0, 256, (n_out, n_bytes), np.uint8)
    if ggml_type.name in ("F32", "F16", "BF16"):
        weights = torch.from_numpy(rng.standard_normal((n_out, n_in), np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[ggml_type.name]
        return weights.to(dtype).view(torch.uint8).numpy()
    blocks = data.reshape(-1).view(format_of(ggml_type).block)
    for name in set(SCALES) & set(blocks.dtype.names or ()):
        blocks[name] = rng.uniform(-2, 2, blocks.shape)
    if "exponent" in (blocks.dtype.names or ()):
        blocks["exponent"] = rng.integers(120, 132, blocks.shape)
    return data


def assert_product(y, x, data, ggml_type, rounding: float = 0.0) -> None:
    """The error is within float32 sums of n products in any order, plus the relative ``rounding`` of factors."""
    n_out, n_in = len(data), x.shape[1]
    w = dequantize(data.reshape(-1), ggml_type, (n_out, n_in)).astype(np.float64)
    expected, magnitude = x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w.T)
    worst = np.max(np.abs(y - expected) / (((n_in + 8) * 2.0**-24 + rounding) * magnitude))
    assert y.shape == expected.shape
    assert worst <= 1, f"off by {worst:.2f} times the bound"


def test_common_types_have_kernels():
    assert {GgmlType[name] for name in REQUIRED_TYPES} <= set(packed_types())


@pytest.mark.parametrize("ggml_type", packed_types(), ids=lambda t: t.name)
@pytest.mark.parametrize(("n_rows", "n_out", "n_blocks"), [(1, 5, 3), (3, 70, 1), (8, 3, 5)])
def test_few_rows(ggml_type, n_rows, n_out, n_blocks):
    n_in = n_blocks * max(32, ggml_type.block_size)
    data = random_rows(ggml_type, n_out, n_in)
    x = np.random.default_rng(1).standard_normal((n_rows, n_in), np.float32)
    form = packed_format(ggml_type, n_in)
    assert_product(products.few_rows(torch.from_numpy(x), torch.from_numpy(data), form).numpy(), x, data, ggml_type)


WAYS = [products.FewRows(rows=rows, num_warps=warps, programs=1) for rows, warps in ((4, 1), (8, 4), (2, 1))]


@pytest.mark.parametrize(
    ("name", "way"),
    [("Q4_K", WAYS[0]), ("Q4_K", WAYS[1]), ("Q4_K", WAYS[2]), ("Q5_K", WAYS[1]), ("Q8_0", WAYS[2]), ("Q6_K", WAYS[0])],
    ids=str,
)
def test_few_rows_of_matrices_that_fill_a_gpu(name, way):
    """A thread has several rows, a program several warps; rows end inside a tile and a program, or at its end."""
    ggml_type = GgmlType[name]
    for n_rows, n_out, n_blocks in ((1, 32, 4), (1, 21, 3), (3, 11, 5)):
        n_in = n_blocks * ggml_type.block_size
        data = random_rows(ggml_type, n_out, n_in)
        x = np.random.default_rng(1).standard_normal((n_rows, n_in), np.float32)
        form = packed_format(ggml_type, n_in)
        y = products.few_rows(torch.from_numpy(x), torch.from_numpy(data), form, way=way)
        assert_product(y.numpy(), x, data, ggml_type)


@pytest.mark.parametrize("programs", [1, 1000])
def test_a_residual_and_an_activation_are_computed_in_the_kernel(programs):
    """Against the product alone, with the same sums; the matrix is gate above up."""
    way = products.FewRows(programs=programs)
    data = torch.from_numpy(random_rows(GgmlType.Q4_K, 42, 512))
    x, residual = (torch.randn(2, n, generator=torch.Generator().manual_seed(n)) for n in (512, 42))
    x /= 5000  # products of about 1
    form = packed_format(GgmlType.Q4_K, 512)
    y = products.few_rows(x, data, form, way=way)
    added = products.few_rows(x, data, form, residual, way)
    torch.testing.assert_close(added, y + residual, rtol=1e-6, atol=1e-5)
    gated = products.few_rows(x, data, form, way=way, gated=True)
    torch.testing.assert_close(gated, torch.nn.functional.silu(y[:, :21]) * y[:, 21:], rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="accepted: an even number, without a residual"):
        products.few_rows(x, data, form, residual, gated=True)
    with pytest.raises(ValueError, match="accepted: an even number, without a residual"):
        products.few_rows(x, data[:41].contiguous(), form, gated=True)


@pytest.mark.parametrize("ggml_type", packed_types(), ids=lambda t: t.name)
def test_many_rows(ggml_type):
    n_in = 2 * max(32, ggml_type.block_size)
    data = random_rows(ggml_type, 67, n_in)
    x = np.random.default_rng(1).standard_normal((19, n_in), np.float32)
    form = packed_format(ggml_type, n_in)
    y = products.many_rows(torch.from_numpy(x), torch.from_numpy(data), form)
    assert_product(y.numpy(), x, data, ggml_type)


def test_many_rows_in_half_precision():
    """float16 only: Triton's interpreter multiplies bfloat16 as integers."""
    data, form = random_rows(GgmlType.Q8_0, 5, 96), packed_format(GgmlType.Q8_0, 96)
    x = torch.randn(17, 96, generator=torch.Generator().manual_seed(1)).half()
    y = products.many_rows(x, torch.from_numpy(data), form)
    assert_product(y.numpy(), x.float().numpy(), data, GgmlType.Q8_0, rounding=2.0**-11)


def test_every_exponent_of_mxfp4():
    """Scales from the smallest subnormal to the largest with finite weights; a one-hot x reads single weights."""
    data = np.random.default_rng(1).integers(0, 256, (252, 17), np.uint8)
    data[:, 0] = np.arange(252)
    expected = dequantize(data.reshape(-1), GgmlType.MXFP4, (252, 32))
    assert np.isfinite(expected).all()
    form = packed_format(GgmlType.MXFP4, 32)
    for column in (0, 7, 16, 31):
        x = torch.zeros(1, 32)
        x[0, column] = 1
        actual = products.few_rows(x, torch.from_numpy(data), form).numpy()[0]
        np.testing.assert_array_equal(actual, expected[:, column])


def test_wrong_arguments_are_refused():
    form = packed_format(GgmlType.Q8_0, 64)
    x, packed = torch.zeros(2, 64), torch.zeros(3, 68, dtype=torch.uint8)
    for bad_x, bad_packed in (
        (x[:, :63].contiguous(), packed),
        (torch.zeros(64, 2).T, packed),
        (x, packed[:, :34].contiguous()),
        (x, torch.zeros(6, 68, dtype=torch.uint8)[::2]),
        (torch.zeros(9, 64), packed),
        (x, packed.to(torch.int8)),
    ):
        with pytest.raises(ValueError, match="accepted: "):
            products.few_rows(bad_x, bad_packed, form)
    assert packed_format(GgmlType.Q4_K, 128) is None
    assert packed_format(GgmlType.IQ2_XXS, 256) is None


@pytest.mark.parametrize("ggml_type", packed_types(), ids=lambda t: t.name)
def test_dequantized_rows(ggml_type):
    """Within float32 rounding of NumPy's, then rounded once; a row of 5 blocks, which is no power of two.

    Triton's interpreter truncates to bfloat16, which has 7 bits of fraction.
    """
    n_in = 5 * max(32, ggml_type.block_size)
    data, form = random_rows(ggml_type, 7, n_in), packed_format(ggml_type, n_in)
    expected = dequantize(data.reshape(-1), ggml_type, (7, n_in)).astype(np.float64)
    for dtype, rounding in ((torch.float32, 2.0**-22), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        actual = products.dequantized(torch.from_numpy(data), form, dtype)
        assert actual.dtype == dtype
        # Some formats subtract a minimum from a product: the error is relative to the larger terms of a block.
        bound = rounding * np.abs(expected).reshape(7, 5, -1).max(axis=2).repeat(n_in // 5, axis=1) + 2.0**-24
        assert (np.abs(actual.double().numpy() - expected) <= bound).all()
