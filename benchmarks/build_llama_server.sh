#!/bin/sh
# Builds llama-server from the source inside llama-cpp-python's sdist, for this machine's processor.
# usage: build_llama_server.sh FOLDER [VERSION]; the program is FOLDER/build/bin/llama-server. It takes ten minutes.
set -eu
folder=$1
version=${2:-0.3.36}
mkdir -p "$folder"
cd "$folder"
python -m pip download --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version"
tar xzf "llama_cpp_python-$version.tar.gz"
cmake -S "llama_cpp_python-$version/vendor/llama.cpp" -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF
cmake --build build --parallel --target llama-server
