#!/usr/bin/env bash
# Cross-compiles the C++ kernels for macOS on 64-bit Arm. They are not run: tools/check_aarch64.sh runs them, on Linux.
# Needs cmake, ninja, and a Python that has ziglang, whose clang compiles (PATH=.venv/bin:$PATH; pip install ziglang).
#
# usage: tools/check_macos.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/macos}
source tools/zig_compiler.sh
zig_compiler "$build" aarch64-macos
cmake -G Ninja -S backends/slm_native/csrc -B "$build" -DSLM_CHECK=ON \
    -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 -DCMAKE_CXX_COMPILER="$zig_cxx" \
    -DCMAKE_AR="${zig_cxx%c++}ar" -DCMAKE_RANLIB="${zig_cxx%c++}ranlib" \
    -DCMAKE_OSX_SYSROOT=/ -DCMAKE_INSTALL_NAME_TOOL="$(command -v true)"
cmake --build "$build"
