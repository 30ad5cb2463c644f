#!/bin/sh
# All that a GPU is needed for, in one command: tests, the conformance suite, speed. A failure does not stop the rest.
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
status=0
"$python" -m pytest -q tests/gpu || status=1
"$python" -m pytest -q tests/native/torch/test_triton_compiles.py || status=1
"$python" -c 'from slm_core.cli import main; main()' conformance --backend native --device "$device" || status=1
"$python" benchmarks/gpu.py --device "$device" --out benchmarks/results || status=1
exit $status
