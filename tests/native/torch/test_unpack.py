"""Expansion on torch, bit for bit what the definitions in NumPy give, which are tested against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import dequantize, supported_types

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch.unpack import unpack, unpacked_types  # noqa: E402


def test_exactly_the_types_that_have_a_definition_are_unpacked():
    assert unpacked_types() == supported_types()


@pytest.mark.parametrize("ggml_type", supported_types(), ids=lambda t: t.name)
def test_every_byte_pattern_gives_the_bits_of_the_definition(ggml_type):
    """Infinities, nans, subnormal scales and codes that no quantizer writes included: 2048 random blocks, 8 rows."""
    n_blocks = 2048
    data = np.random.default_rng(ggml_type).integers(0, 256, n_blocks * ggml_type.block_bytes, np.uint8)
    shape = (8, n_blocks // 8 * ggml_type.block_size)
    wanted = dequantize(data, ggml_type, shape)
    found = unpack(torch.from_numpy(data.reshape(8, -1)), ggml_type).numpy()
    assert (found.dtype, found.shape) == (np.float32, shape)
    different = (found.view(np.uint32) != wanted.view(np.uint32)) & ~(np.isnan(found) & np.isnan(wanted))
    where = np.argwhere(different)
    assert not different.any(), f"{len(where)} weights differ, first {found[tuple(where[0])]} at {where[0]}"
    assert np.count_nonzero(wanted) > wanted.size // 4, "the fixture is all but empty"


@pytest.mark.parametrize("ggml_type", supported_types(), ids=lambda t: t.name)
def test_rows_that_lie_apart_or_at_an_odd_address(ggml_type):
    """A panel of a matrix, and chosen rows of one, are views whose storage begins anywhere."""
    data = np.random.default_rng(ggml_type).integers(0, 256, (6, 3 * ggml_type.block_bytes), np.uint8)
    wanted = dequantize(data.reshape(-1), ggml_type, (6, 3 * ggml_type.block_size))
    shifted = torch.empty(data.size + 1, dtype=torch.uint8)[1:].view(data.shape)
    shifted.copy_(torch.from_numpy(data))
    np.testing.assert_array_equal(unpack(shifted[1:4], ggml_type).numpy(), wanted[1:4])
    np.testing.assert_array_equal(unpack(shifted[::2], ggml_type).numpy(), wanted[::2])


def test_other_types_are_refused():
    with pytest.raises(UnsupportedModel, match=r"torch tier has no tensor type Q8_K \(supported: F32, F16"):
        unpack(torch.zeros(1, 292, dtype=torch.uint8), GgmlType.Q8_K)
