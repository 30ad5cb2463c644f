#!/bin/sh
# Builds llama-bench of ik_llama.cpp, for this machine's processor.
# usage: build_ik_llama.sh FOLDER [SOURCE]; the program is FOLDER/build/bin/llama-bench.
# SOURCE is a folder with the sources; without it they are fetched into FOLDER/source.
# GGML_IQK_FA_ALL_QUANTS=OFF leaves out attention over KV caches of 4-bit types, which the benchmark does not use.
set -eu
commit=8337e4cd3861406fc04e0854b1409cd1b027fbc9
repository=https://github.com/ikawrakow/ik_llama.cpp
folder=$1
mkdir -p "$folder"
if [ $# -gt 1 ]; then
    source=$2
else
    source=$folder/source
    git init -q "$source"
    git -C "$source" fetch --depth 1 "$repository" "$commit"
    git -C "$source" checkout -q FETCH_HEAD
fi
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=ON -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF
cmake --build "$folder/build" --parallel --target llama-bench
