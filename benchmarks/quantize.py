"""Duration of quantizing, compared with llama.cpp's quantizer.

    python benchmarks/quantize.py model-F16.gguf
    python benchmarks/quantize.py model-F16.gguf --types Q4_K_M Q8_0 --threads 2 --rounds 3

Both alternate and convert the same files, so that other load of the machine affects both. Times are the minimum over
the rounds, in seconds; the ratio is llama.cpp's time over ours.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slm_core.cpu import usable_cores
from slm_core.gguf import GgufFile
from slm_core.quantizing import quantize_model, recipe_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file of floats")
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q6_K", "Q4_0", "Q8_0"])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with GgufFile.open(arguments.model) as file:
        n_weights = sum(tensor.n_elements for tensor in file.tensors.values())
    print(f"{platform.machine()}, {arguments.threads} threads, {n_weights / 1e6:,.0f} million weights\n")
    print("| type | here, s | million weights a second | llama.cpp, s | ratio |\n|---|---|---|---|---|")
    for name in arguments.types:
        ours, theirs = measure(arguments.model, name, arguments.threads, arguments.rounds)
        print(
            f"| {name} | {ours:.1f} | {n_weights / ours / 1e6:.0f} | {theirs:.1f} | {theirs / ours:.2f} |", flush=True
        )


def measure(source: Path, name: str, n_threads: int, rounds: int) -> tuple[float, float]:
    """The minimum of our seconds, and of llama.cpp's."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        target = Path(folder) / "new.gguf"
        for _ in range(rounds):
            ours.append(seconds(lambda: quantize_model(source, target, name, force=True, n_threads=n_threads)))
            theirs.append(seconds(lambda: llama_quantize(source, target, recipe_of(name).file_type, n_threads)))
    return min(ours), min(theirs)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def llama_quantize(source: Path, target: Path, file_type: int, n_threads: int) -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, n_threads
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot quantize {source}")


if __name__ == "__main__":
    main()
