"""Every Triton kernel compiles to machine code, on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton: pip install triton")

from slm_native.kernels.torch.triton.kernels import NARROW

CACHE = Path(__file__).resolve().parents[3] / "build" / "triton"
"""Triton keeps what it compiled here: compiling takes a minute, and most changes are not in the kernels."""
N_TYPES = 15
MLA_WIDTH = 576
SHARED_KIB = {75: 64, 89: 99, 90: 227}
"""Shared memory of a block, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


class Compiled(NamedTuple):
    kernel: str
    capability: int
    machine_code: int
    shared: int
    registers: int
    spilled: int


NARROW_AND_WIDE = ((75, 128), (75, NARROW), (75, MLA_WIDTH), (89, MLA_WIDTH))
"""Compute capabilities, and widths of heads: 8.0 and 9.0 have the instructions of 8.9, and more shared memory."""


@pytest.fixture(scope="module")
def kernels() -> list[Compiled]:
    """Every kernel for compute capability 9.0, then attention for ``NARROW_AND_WIDE``."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(CACHE), "TRITON_INTERPRET": "0"}
    command = [sys.executable, Path(__file__).parent / "compile_triton.py", "90"]
    command += [f"{capability}:{width}" for capability, width in NARROW_AND_WIDE]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    fields = [line.split() for line in process.stdout.splitlines()]
    return [Compiled(name, *map(int, numbers)) for name, *numbers in fields]


@pytest.mark.slow
def test_every_kernel_compiles_for_compute_capability_9(kernels: Sequence[Compiled]) -> None:
    kernels = [each for each in kernels if each.capability == 90]
    assert Counter(each.kernel for each in kernels) == {
        "_few_rows": N_TYPES + 1,
        "_few_rows[16]": 4,
        "_many_rows": 3,
        "_dequantized": N_TYPES,
        "_attend_pages": 8 + 1,
        "_join": 1,
        "_positioned": 5,
        "_gated": 1,
        "_normed": 1,
    }
    assert all(each.machine_code > 1000 for each in kernels)
    assert max(each.shared for each in kernels) <= SHARED_KIB[90] << 10
    assert all(each.spilled == 0 for each in kernels if each.kernel in ("_dequantized", "_positioned", "_join"))
    for each in kernels:
        if each.kernel == "_few_rows[16]":
            assert each.spilled == 0 and each.shared <= 16, "threads exchange more than sums at the end"


@pytest.mark.slow
def test_attention_fits_in_shared_memory(kernels: Sequence[Compiled]) -> None:
    """On compute capability 7.5 the widest heads are left to torch."""
    attention = [each for each in kernels if each.capability != 90]
    assert [each.capability for each in attention] == [capability for capability, _ in NARROW_AND_WIDE]
    for each, (capability, width) in zip(attention, NARROW_AND_WIDE, strict=True):
        assert each.kernel == "_attend_pages"
        fits = each.shared <= SHARED_KIB[capability] << 10
        assert fits == (capability >= 80 or width <= NARROW), f"heads of {width} need {each.shared} bytes"
