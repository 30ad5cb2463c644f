#!/usr/bin/env bash
# Cross-compiles the C++ kernels for Windows on x86-64, and checks their products and layers under wine.
# Needs cmake, ninja, wine (Debian: wine64), and a Python that has the tests' packages and ziglang, whose clang compiles
# (PATH=.venv/bin:$PATH; pip install ziglang). Without wine it compiles and says so.
#
# usage: tools/check_windows.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/windows}
source tools/zig_compiler.sh
zig_compiler "$build" x86_64-windows-gnu
cmake -G Ninja -S backends/slm_native/csrc -B "$build" -DSLM_CHECK=ON \
    -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64 -DCMAKE_CXX_COMPILER="$zig_cxx" \
    -DCMAKE_AR="${zig_cxx%c++}ar" -DCMAKE_RANLIB="${zig_cxx%c++}ranlib"
cmake --build "$build"
command -v wine > /dev/null || { echo "check_windows: compiled, but not run: wine is missing" >&2; exit 0; }
PYTHONPATH=.:tests python3 tests/kernel_cases.py "$build/cases"
export WINEPREFIX="$PWD/$build/wine" WINEDEBUG=-all
(cd "$build" && wine check_products.exe cases) | tee "$build/windows.log"
grep -q '^scalar: ' "$build/windows.log" && { ! grep -q avx2 /proc/cpuinfo || grep -q '^avx2: ' "$build/windows.log"; }
