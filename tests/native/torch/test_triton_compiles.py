"""Every Triton kernel compiles to machine code, on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton: pip install triton")

N_TYPES = 15


@pytest.mark.slow
def test_every_kernel_compiles_for_compute_capability_9(tmp_path):
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_INTERPRET"] = "0"
    script = Path(__file__).parent / "compile_triton.py"
    process = subprocess.run([sys.executable, script, "90"], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    compiled = Counter(line.split()[0] for line in process.stdout.splitlines())
    assert all(int(line.split()[1]) > 1000 for line in process.stdout.splitlines())
    assert compiled == {
        "_few_rows": N_TYPES,
        "_many_rows": 3,
        "_attend_pages": 7,
        "_join": 7,
        "_positioned": 5,
        "_gated": 1,
        "_normed": 1,
    }
