"""Every Triton kernel compiles to machine code, on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton: pip install triton")

from slm_native.kernels.torch.triton.kernels import NARROW

N_TYPES = 15
WIDTHS = (64, 128, 256, 512, 576)
"""Those of compile_triton.py."""
SHARED_KIB = {75: 64, 89: 99, 90: 227}
"""Shared memory of a block, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


class Compiled(NamedTuple):
    kernel: str
    capability: int
    machine_code: int
    shared: int
    registers: int
    spilled: int


def compiled(tmp_path, *arguments: str) -> list[Compiled]:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_INTERPRET"] = "0"
    script = Path(__file__).parent / "compile_triton.py"
    process = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    fields = [line.split() for line in process.stdout.splitlines()]
    return [Compiled(name, *map(int, numbers)) for name, *numbers in fields]


@pytest.mark.slow
def test_every_kernel_compiles_for_compute_capability_9(tmp_path):
    kernels = compiled(tmp_path, "90")
    assert Counter(each.kernel for each in kernels) == {
        "_few_rows": N_TYPES + 1,
        "_few_rows[16]": 4,
        "_many_rows": 3,
        "_dequantized": N_TYPES,
        "_attend_pages": 7 + 3 + 1,
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
def test_attention_fits_in_shared_memory(tmp_path):
    """Heads of 64 to 576 values. On compute capability 7.5 the widest are left to torch."""
    capabilities = (75, 89, 90)  # 8.0 has the instructions of 8.9, and more shared memory
    kernels = compiled(tmp_path, "--widths", ",".join(map(str, capabilities)))
    attention = [each for each in kernels if each.kernel == "_attend_pages"]
    kinds = ("in the cache", "new")
    assert Counter(each.capability for each in attention) == dict.fromkeys(capabilities, len(kinds) * len(WIDTHS))
    for each, width in zip(attention, np.repeat(WIDTHS, len(kinds) * len(capabilities)), strict=True):
        if width > NARROW and each.capability < 80:
            assert each.shared > SHARED_KIB[each.capability] << 10, "it fits, so torch need not compute it"
        else:
            assert each.shared <= SHARED_KIB[each.capability] << 10
