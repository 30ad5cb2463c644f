"""The C++ kernels, every instruction set of this machine, against float64 products of what gguf dequantizes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType
from slm_native import _extension
from slm_native.kernels import Weight, select_kernels
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kernels.select import ISA_VARIABLE
from slm_native.tensor import QuantizedTensor

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

native = _extension.load()
ROUNDING = 2.0**-24
every_isa = pytest.mark.parametrize("isa", native.available_isas())


def f32(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def q8_0(n_out: int, n_in: int, seed: int) -> NDArray[np.uint8]:
    data = gguf.quants.quantize(f32(n_out, n_in, seed=seed), gguf.GGMLQuantizationType.Q8_0)
    return np.ascontiguousarray(data).reshape(-1)


def exact(data: NDArray[np.uint8], n_in: int) -> NDArray[np.float64]:
    rows = data.reshape(-1, n_in // 32 * 34)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0).astype(np.float64)


def assert_is_product(y: NDArray[np.float32], x: NDArray[np.float32], data: NDArray[np.uint8]) -> None:
    """Within the n_blocks + 9 roundings that the kernels promise, of the sum of magnitudes."""
    n_in = x.shape[1]
    w, wide = exact(data, n_in), x.astype(np.float64)
    bound = (n_in // 32 + 10) * ROUNDING * (np.abs(wide) @ np.abs(w.T))
    assert y.dtype == np.float32
    assert y.shape == (len(x), len(w))
    worst = np.max(np.abs(y - wide @ w.T) / bound)
    assert worst <= 1, f"off by {worst:.2f} times the bound"


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 32), (5, 96), (3, 320), (33, 1024), (2, 8192)])
def test_q8_0_matmul(isa: str, n_out: int, n_in: int, n_tokens: int) -> None:
    data, x = q8_0(n_out, n_in, seed=n_in), f32(n_tokens, n_in, seed=n_tokens)
    assert_is_product(native.Kernels(isa).q8_0_matmul(x, data), x, data)


@every_isa
def test_nothing_to_multiply(isa: str) -> None:
    data = q8_0(3, 64, seed=1)
    assert native.Kernels(isa).q8_0_matmul(f32(0, 64, seed=2), data).shape == (0, 3)
    assert native.Kernels(isa).q8_0_matmul(f32(2, 64, seed=2), data[:0]).shape == (2, 0)


@every_isa
@pytest.mark.parametrize("offset", [1, 2, 3, 31])
def test_blocks_at_any_address(isa: str, offset: int) -> None:
    kernels, data, x = native.Kernels(isa), q8_0(7, 96, seed=1), f32(5, 96, seed=2)
    moved = np.zeros(data.size + offset, np.uint8)[offset:]
    moved[:] = data
    np.testing.assert_array_equal(kernels.q8_0_matmul(x, moved), kernels.q8_0_matmul(x, data))


@every_isa
def test_blocks_in_a_mapped_file(isa: str, tmp_path: Path) -> None:
    data, x = q8_0(7, 96, seed=1), f32(1, 96, seed=2)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    mapped = np.memmap(path, np.uint8, mode="r")
    assert_is_product(native.Kernels(isa).q8_0_matmul(x, mapped), x, data)


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_every_finite_scale_is_exact(isa: str, n_tokens: int) -> None:
    """One weight of 1 in each block and one activation of 1: the result is the scale, subnormal ones included."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)]
    blocks = np.zeros(len(scales), np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
    blocks["scale"], blocks["quants"][:, 13] = scales, 1
    x = np.zeros((n_tokens, 32), np.float32)
    x[:, 13] = 1
    y = native.Kernels(isa).q8_0_matmul(x, blocks.view(np.uint8))
    np.testing.assert_array_equal(y, np.tile(scales.astype(np.float32), (n_tokens, 1)))


@every_isa
def test_every_quant_is_exact_in_every_place(isa: str) -> None:
    """Row r of block p holds the byte r at place p alone: products with ones are the bytes."""
    for place in range(32):
        blocks = np.zeros(256, np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
        blocks["scale"], blocks["quants"][:, place] = 1, np.arange(256).astype(np.uint8).view(np.int8)
        x = np.zeros((1, 32), np.float32)
        x[0, place] = 1
        y = native.Kernels(isa).q8_0_matmul(x, blocks.view(np.uint8))
        np.testing.assert_array_equal(y[0], blocks["quants"][:, place], f"place {place}")


@every_isa
def test_zeros_subnormals_infinities_and_nans(isa: str) -> None:
    kernels, data = native.Kernels(isa), q8_0(3, 64, seed=1)
    np.testing.assert_array_equal(kernels.q8_0_matmul(np.zeros((1, 64), np.float32), data), 0)
    tiny = f32(1, 64, seed=2) * np.float32(2.0**-120)
    scaled = kernels.q8_0_matmul(tiny * np.float32(2.0**100), data) * np.float32(2.0**-100)
    # A product below the smallest normal number loses up to half the smallest subnormal one, 2**-150.
    np.testing.assert_allclose(kernels.q8_0_matmul(tiny, data), scaled, rtol=0, atol=80 * 2.0**-150)
    for bad in (np.inf, -np.inf, np.nan):
        x = f32(1, 64, seed=3)
        x[0, 40] = bad
        assert not np.isfinite(kernels.q8_0_matmul(x, data)).any()
        blocks = data.copy().view(np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
        blocks["scale"][3] = bad  # second block of the second row
        finite = np.isfinite(kernels.q8_0_matmul(f32(1, 64, seed=3), blocks.view(np.uint8)))
        assert finite.tolist() == [[True, False, True]]


@every_isa
def test_arguments_are_checked(isa: str) -> None:
    matmul, data, x = native.Kernels(isa).q8_0_matmul, q8_0(3, 64, seed=1), f32(2, 64, seed=2)
    misaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    wrong: list[tuple[object, object, type[Exception], str]] = [
        (x.astype(np.float64), data, TypeError, "x must be float32"),
        (x, data.view(np.int8), TypeError, "weights must be uint8"),
        (x.tolist(), data, TypeError, "incompatible function arguments"),
        (x[0], data, ValueError, r"x must be aligned and C-contiguous with 2 dimension\(s\); its shape is \[64\]"),
        (x[:, ::2], data, ValueError, r"x must be aligned and C-contiguous .* its shape is \[2, 32\]"),
        (misaligned, data, ValueError, "x must be aligned"),
        (np.asfortranarray(x), data, ValueError, "x must be aligned and C-contiguous"),
        (x, data[::2], ValueError, "weights must be aligned and C-contiguous"),
        (x, data.reshape(3, -1), ValueError, r"weights must be .* 1 dimension\(s\); its shape is \[3, 68\]"),
        (x[:, :31].copy(), data, ValueError, "x has rows of 31, not a multiple of 32"),
        (x[:, :0].copy(), data, ValueError, "x has rows of 0"),
        (x, data[:-1], ValueError, "weights has 203 bytes, not a whole number of rows of 68"),
    ]
    for bad_x, bad_weights, error, message in wrong:
        with pytest.raises(error, match=message):
            matmul(bad_x, bad_weights)


def test_the_gil_is_released() -> None:
    """With thread switches all but off, this thread runs during the product only if the product lets it."""
    data, x = np.tile(q8_0(64, 4096, seed=1), 200), f32(8, 4096, seed=2)
    started, finished = threading.Event(), threading.Event()

    def multiply() -> None:
        started.set()
        native.Kernels("scalar").q8_0_matmul(x, data)
        finished.set()

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=multiply)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        started.wait()
        ran_meanwhile = not finished.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert ran_meanwhile


@pytest.mark.parametrize("isa", ["avx512", "neon", "", "AVX2"])
def test_an_instruction_set_that_is_not_there_is_an_error(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = ", ".join(native.available_isas())
    with pytest.raises(InvalidOption, match=f"instruction set '{isa}' .this build on this machine has: {accepted}"):
        CpuKernels(isa, 0)
    with pytest.raises(ValueError, match=f"instruction set '{isa}' is not available here"):
        native.Kernels(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa or "sse")
    with pytest.raises(InvalidOption, match="unknown or missing instruction set"):
        select_kernels()


@every_isa
def test_the_environment_forces_an_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    kernels, reason = select_kernels()
    assert isinstance(kernels, CpuKernels)
    assert kernels.describe().startswith(f"C++ kernels ({isa})")
    assert reason.endswith(f"instruction set {isa}, forced by SLM_NATIVE_ISA")


def test_auto_takes_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    for tier in ("auto", "cpu"):
        kernels, reason = select_kernels(tier)
        assert kernels.name == "cpu"
        assert reason.endswith(f"instruction set {native.available_isas()[-1]}, the best that this machine has")


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 8, 9])
def test_cpu_tier_agrees_with_the_reference(isa: str, n_tokens: int) -> None:
    """The contract's bound for a tier in float32, as a relative L2 distance, and the tighter one of the kernel."""
    data, x, bias = q8_0(33, 1024, seed=1), f32(n_tokens, 2048, seed=2)[:, ::2], f32(33, seed=3)
    tensor = QuantizedTensor("w", (33, 1024), GgmlType.Q8_0, data)
    cpu, reference = CpuKernels(isa, 1 << 20), ReferenceKernels()
    weight: Weight = cpu.prepare(tensor)
    y, expected = cpu.matmul(x, weight, bias), reference.matmul(x, reference.prepare(tensor), bias)
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)
    assert_is_product(cpu.matmul(x, weight), np.ascontiguousarray(x), data)


def test_few_rows_expand_no_weights_and_many_do() -> None:
    kernels = CpuKernels("scalar", 1 << 20)
    weight = kernels.prepare(QuantizedTensor("w", (3, 64), GgmlType.Q8_0, q8_0(3, 64, seed=1)))
    kernels.matmul(f32(8, 64, seed=2), weight)
    assert weight.expanded is None
    kernels.matmul(f32(9, 64, seed=2), weight)
    assert weight.expanded is not None
