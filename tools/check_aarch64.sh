#!/usr/bin/env bash
# Builds the C++ kernels for 64-bit Arm and checks their products and layers under qemu, without an Arm machine.
# Needs g++-aarch64-linux-gnu, qemu-user-static (or qemu-user), cmake, ninja, and a Python that has the tests'
# packages (PATH=.venv/bin:$PATH).
#
# usage: tools/check_aarch64.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in aarch64-linux-gnu-g++ cmake ninja python3; do
    command -v $tool > /dev/null || { echo "check_aarch64: $tool is missing" >&2; exit 2; }
done
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || { echo "check_aarch64: qemu-aarch64 is missing" >&2; exit 2; }
build=${1:-build/aarch64}
cmake -G Ninja -S backends/slm_native/csrc -B "$build" -DSLM_CHECK=ON \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_EXE_LINKER_FLAGS=-static
cmake --build "$build"
PYTHONPATH=.:tests python3 tests/kernel_cases.py "$build/cases"
for cpu in max cortex-a76 cortex-a53; do # with products of matrices, with dot products, and without: plain kernels alone
    echo "-- $cpu"
    "$qemu" -cpu $cpu "$build/check_products" "$build/cases" | tee "$build/$cpu.log"
done
grep -q '^neon_i8mm: ' "$build/max.log" && grep -q '^neon: ' "$build/cortex-a76.log" &&
    ! grep -q '^neon_i8mm' "$build/cortex-a76.log" && ! grep -q '^neon' "$build/cortex-a53.log"
