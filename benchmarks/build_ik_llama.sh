#!/bin/sh
# Builds llama-bench of ik_llama.cpp, for this machine's processor.
# usage: build_ik_llama.sh FOLDER [SOURCE]; the program is FOLDER/build/bin/llama-bench. It takes half an hour on two cores.
# SOURCE is a folder with the sources; without it they are cloned into FOLDER/source.
# GGML_IQK_FA_ALL_QUANTS=OFF leaves out attention over KV caches of 4-bit types, which the benchmark does not use.
set -eu
folder=$1
source=${2:-$folder/source}
commit=8337e4c
mkdir -p "$folder"
if [ ! -e "$source" ]; then
    git clone --filter=blob:none --no-checkout https://github.com/ikawrakow/ik_llama.cpp "$source"
    git -C "$source" checkout "$commit"
fi
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=ON -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF
cmake --build "$folder/build" --parallel --target llama-bench
