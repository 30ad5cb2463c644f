#!/usr/bin/env bash
# Cross-compiles the extension of slm_native for Linux on 64-bit Arm and runs it under qemu, in Debian's Python for Arm:
# greedy tokens of the demo model have to equal those of this machine, then the conformance suite runs.
#
# Needs PyPI, Debian 12 or later with its package sources, g++-aarch64-linux-gnu, qemu-user-static with binfmt-support,
# cmake, ninja, and an installed slm-core with nanobind (PATH=.venv/bin:$PATH). ONNX Runtime crashes at its import under
# qemu 7.2, and runs under qemu 10. Nothing is installed on this machine: the packages for Arm are unpacked into the
# build folder.
#
# usage: tools/check_aarch64_python.sh [BUILD_FOLDER [ARGUMENT_OF_SLM_CONFORMANCE ...]]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/aarch64-python}
suite=("${@:2}")
[ $# -gt 1 ] || suite=(--quick)
for tool in apt-get dpkg-deb unzip aarch64-linux-gnu-g++ cmake ninja; do
    command -v $tool > /dev/null || { echo "check_aarch64_python: nothing was compiled or run: $tool is missing" >&2; exit 0; }
done
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || {
    echo "check_aarch64_python: nothing was compiled or run: Linux does not start programs for Arm (qemu-user-static, binfmt-support)" >&2
    exit 0
}
python3 -c 'import nanobind, slm_native._native' || { echo "$0: nanobind or an installed slm-core is missing" >&2; exit 2; }
mkdir -p "$build"
build=$(cd "$build" && pwd)
root=$build/root site=$build/site
mkdir -p "$build"/apt/{state/lists,cache/archives}/partial "$build/wheels" "$root" "$site"
export QEMU_LD_PREFIX=$root PIP_DISABLE_PIP_VERSION_CHECK=1

debian_python() { # Debian's python3 for Arm, its headers, and all that they depend on
    [ -e "$build/apt/unpacked" ] && return
    : > "$build/apt/status" # nothing is installed: all dependencies are downloaded
    cat > "$build/apt/conf" << EOF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$build/apt/state";
Dir::State::status "$build/apt/status";
Dir::Cache "$build/apt/cache";
EOF
    APT_CONFIG=$build/apt/conf apt-get update -qq
    APT_CONFIG=$build/apt/conf apt-get install -qq -y --download-only --no-install-recommends python3 libpython3-dev libstdc++6 > /dev/null
    for package in "$build"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    touch "$build/apt/unpacked"
}

arm_python() { # limit in seconds, arguments
    PYTHONPATH=$site timeout --kill-after=10 "$1" "$root/usr/bin/python3" "${@:2}"
}

extension() { # slm_native/_native.so
    local headers soabi
    headers=$(echo "$root"/usr/include/python3.*)
    soabi=$(arm_python 60 -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
    cmake -G Ninja -S backends/slm_native/csrc -B "$build/extension" -DSLM_REQUIRE_EXTENSION=ON \
        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_CXX_FLAGS="-I$root/usr/include" -DPython_EXECUTABLE="$root/usr/bin/python3" -DPython_INCLUDE_DIR="$headers" \
        -DSKBUILD_SOABI="$soabi" -Dnanobind_DIR="$(python3 -m nanobind --cmake_dir)"
    cmake --build "$build/extension" --target _native
}

packages() { # slm-core without an extension, ours beside it, and the wheels it depends on
    local glibc version
    python3 -m pip install -q --no-deps --upgrade --target "$site" -C build-dir="$build/pure" -C cmake.define.SLM_EXTENSION=OFF .
    rm -f "$site/slm_native/_native_missing.py"
    cp "$build"/extension/_native.*.so "$site/slm_native/"
    glibc=$(arm_python 60 -c 'import os; print(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1])')
    version=$(arm_python 60 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    python3 -m pip download -q --platform manylinux2014_aarch64 $(seq -f '--platform manylinux_2_%g_aarch64' 17 "$glibc") \
        --python-version "$version" --only-binary :all: -d "$build/wheels" \
        $(python3 -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extra = p["optional-dependencies"]
print(*p["dependencies"], *extra["conformance"], *extra["onnx"])')
    for wheel in "$build"/wheels/*.whl; do unzip -qo "$wheel" -d "$site"; done
}

debian_python
extension
packages
python3 tools/greedy_tokens.py > "$build/tokens.here"
arm_python 1200 tools/greedy_tokens.py > "$build/tokens.arm"
diff "$build/tokens.here" "$build/tokens.arm"
echo "check_aarch64_python: greedy tokens are equal"
arm_python 600 -m slm_core backends
arm_python 3600 -m slm_core demo
for backend in native onnx; do arm_python 7200 -m slm_core conformance --backend $backend "${suite[@]}"; done
