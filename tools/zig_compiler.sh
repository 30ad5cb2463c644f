# For check_windows.sh and check_macos.sh: zig_compiler FOLDER TARGET writes a compiler for a target into a folder, and sets
# zig_cxx. zig-ar and zig-ranlib are in the same folder.

zig_compiler() {
    for tool in cmake ninja python3; do
        command -v $tool > /dev/null || { echo "$0: $tool is missing" >&2; exit 2; }
    done
    python3 -c 'import ziglang' 2> /dev/null || { echo "$0: ziglang is missing (pip install ziglang)" >&2; exit 2; }
    local python tool
    python=$(command -v python3)
    mkdir -p "$1"
    zig_cxx="$(cd "$1" && pwd)/zig-c++"
    # zig has other names for Arm's instruction sets.
    cat > "$zig_cxx" << EOF
#!/usr/bin/env bash
exec "$python" -m ziglang c++ -target $2 "\${@/#-march=armv8.2-a/-mcpu=generic}"
EOF
    for tool in ar ranlib; do printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$python" $tool > "${zig_cxx%c++}$tool"; done
    chmod +x "$zig_cxx" "${zig_cxx%c++}"{ar,ranlib}
}
