#!/bin/sh
# All that a GPU is needed for, in one command of a few minutes: tests, the conformance suite, speed.
#   benchmarks/gpu_check.sh [DEVICE]     cuda:0 unless named; writes benchmarks/results/DATE-gpu.md
set -eu
cd "$(dirname "$0")/.."
device=${1:-cuda:0}
export TRITON_INTERPRET=0
python=${PYTHON:-python3}
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "SKIPPED: nothing was checked, as torch finds no CUDA device here." >&2
    exit 3
fi
"$python" -m pytest -q tests/gpu
"$python" -m pytest -q tests/native/torch/test_triton_compiles.py
timeout 240 "$python" -c 'from slm_core.cli import main; main()' conformance --backend native --device "$device"
"$python" benchmarks/gpu.py --device "$device" --out benchmarks/results
