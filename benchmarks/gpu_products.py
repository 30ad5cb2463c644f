"""Products of one row with packed matrices on a GPU, for several launch parameters.

    python benchmarks/gpu_products.py [--type Q4_K] [--shapes 4096x1024,24576x4096g]

A shape is rows x columns; "g" computes gate, up and the activation. Each product is replayed in a CUDA graph with
matrices that the L2 cache does not hold. Prints microseconds, and GB/s of packed weights.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import numpy as np
import torch

from slm_core.gguf import GgmlType
from slm_core.quant import dequantize
from slm_native.kernels.torch.triton import products
from slm_native.kernels.torch.triton.formats import packed_format

SHAPES = (
    "4096x1024,1024x2048,6144x1024g,1024x3072,32000x1024,"  # the layers of the 0.6b shape of gpu.py, and its output
    "6144x4096,4096x4096,24576x4096g,4096x12288,32000x4096"  # of the 8b shape
)
WAYS = [products.FewRows(rows, num_warps, programs=1) for rows, num_warps in itertools.product((1, 2, 4, 8), (1, 4))]
OUT_OF_CACHE = 300 << 20
"""Bytes of all copies of a matrix: several times the L2 cache of an H200."""


def random_matrices(ggml_type: GgmlType, n_out: int, n_in: int) -> list[torch.Tensor]:
    """Copies with random blocks; the first four bytes, the scales of K-quants, are small numbers."""
    n_bytes = n_in // ggml_type.block_size * ggml_type.block_bytes
    matrices = []
    for _ in range(max(2, min(64, OUT_OF_CACHE // (n_out * n_bytes)))):
        matrix = torch.randint(0, 256, (n_out, n_bytes), dtype=torch.uint8, device="cuda")
        scales = torch.from_numpy(np.full(2, 0.0005, np.float16).view(np.uint8)).cuda()
        matrix.view(-1, ggml_type.block_bytes)[:, :4] = scales
        matrices.append(matrix)
    return matrices


def microseconds(run: torch.cuda.CUDAGraph, n: int) -> float:
    """Median time of one of the ``n`` products of a graph."""
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            run.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / 4 / n)
    return statistics.median(times[1:])


def captured(
    way: products.FewRows, x: torch.Tensor, matrices: list[torch.Tensor], form: object, *, gated: bool
) -> object:
    """A graph with one product of each matrix."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for matrix in matrices:
            products.few_rows(x, matrix, form, way=way, gated=gated)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--shapes", default=SHAPES)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here")
    ggml_type = GgmlType[args.type]
    print(f"{torch.cuda.get_device_name()}, {args.type}\n")
    print("| matrix | " + " | ".join(f"{way.rows} rows, {way.num_warps} warps" for way in WAYS) + " |")
    print("|---" * (1 + len(WAYS)) + "|")
    for shape in args.shapes.split(","):
        gated = shape.endswith("g")
        n_out, n_in = map(int, shape.removesuffix("g").split("x"))
        form = packed_format(ggml_type, n_in)
        if form is None:
            raise SystemExit(f"{args.type} has no kernel for rows of {n_in} weights")
        matrices, x = random_matrices(ggml_type, n_out, n_in), torch.randn(1, n_in, device="cuda")
        weights = dequantize(matrices[0].cpu().numpy().reshape(-1), ggml_type, (n_out, n_in))
        expected = x.double() @ torch.from_numpy(weights).cuda().double().T
        if gated:
            expected = torch.nn.functional.silu(expected[:, : n_out // 2]) * expected[:, n_out // 2 :]
        cells = []
        for way in WAYS:
            y = products.few_rows(x, matrices[0], form, way=way, gated=gated)
            assert (y - expected).norm() / expected.norm() < 1e-4, f"{shape} with {way} is wrong"
            time = microseconds(captured(way, x, matrices, form, gated=gated), len(matrices))
            cells.append(f"{time:.1f} ({matrices[0].nbytes / time / 1000:,.0f})")
        print(f"| {shape} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
