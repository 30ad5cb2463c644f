"""Speed of the torch tier on a GPU, relative to its memory bandwidth and its matrix products.

    python benchmarks/gpu.py [--device cuda:0] [--shapes 0.6b,1.7b,8b] [--types BF16,Q8_0,Q4_K] [--out FOLDER]

Models have a published shape and random weights, generated in the packed types; nothing is downloaded. Decoding is
measured as a share of the rate at which the device copies memory, prefill as a share of its bfloat16 matrix product.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slm_core.gguf import GgmlType
from slm_core.quant import row_bytes
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

SHAPES = {"0.6b": (28, 1024, 3072, 16, 8), "1.7b": (28, 2048, 6144, 16, 8), "8b": (36, 4096, 12288, 32, 8)}
HEAD, N_VOCAB, CROWD, PROMPT = 128, 32_000, 64, 2048
"""Width of a head; vocabulary; sequences that decode together; tokens of a prefill."""


def measured(step: Callable[[], object], device: str, n: int) -> float:
    """Median seconds of one step: 5 times ``n`` steps after a warm-up."""
    import torch

    step()
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(n):
            step()
        torch.cuda.synchronize(device)
        rounds.append((time.perf_counter() - start) / n)
    return statistics.median(rounds)


def copy_rate(device: str) -> float:
    """Bytes per second that are read and written."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measured(lambda: target.copy_(source), device, 20)


def product_rate(device: str) -> float:
    """Floating point operations per second of a bfloat16 product."""
    import torch

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / measured(lambda: a @ b, device, 10)


def packed(rng: np.random.Generator, n_out: int, n_in: int, ggml_type: GgmlType) -> np.ndarray:
    """Random blocks with scales that keep activations around 1."""
    data = rng.integers(0, 256, (n_out, row_bytes(ggml_type, n_in)), np.uint8)
    blocks = data.reshape(-1, ggml_type.block_bytes)
    small = np.float16(0.02 / np.sqrt(n_in)).view(np.uint16)
    if ggml_type is GgmlType.BF16:
        weights = rng.standard_normal((n_out, n_in), np.float32) / np.float32(np.sqrt(n_in))
        return (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks[:, 0:2] = np.array([small]).view(np.uint8)
    if ggml_type is GgmlType.Q4_K:
        blocks[:, 2:4] = np.array([small]).view(np.uint8)
    return data


def write_model(path: Path, shape: str, ggml_type: GgmlType) -> None:
    """A llama of a published shape. All layers share the weights of one, as only sizes matter."""
    import gguf

    n_layers, n_embd, n_ff, n_heads, n_kv = SHAPES[shape]
    kind = gguf.GGMLQuantizationType(ggml_type)
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_token_list([f"<{i}>" for i in range(N_VOCAB)])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([1] * N_VOCAB)
    writer.add_block_count(n_layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    sizes = {
        "attn_q": (n_heads * HEAD, n_embd),
        "attn_k": (n_kv * HEAD, n_embd),
        "attn_v": (n_kv * HEAD, n_embd),
        "attn_output": (n_embd, n_heads * HEAD),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    matrices = {name: packed(rng, *size, ggml_type) for name, size in sizes.items()}
    ones = np.ones(n_embd, np.float32)
    writer.add_tensor("token_embd.weight", packed(rng, N_VOCAB, n_embd, ggml_type), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(n_layers):
        for name, matrix in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix, raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(path: Path, device: str, profile: Path | None = None) -> dict[str, float]:
    """Seconds of a step of one sequence, of a step of many, of a prefill; bytes of weights, and multiplications."""
    rng = np.random.default_rng(1)
    named = {} if profile is None else {"profile": str(profile)}
    with NativeBackend().load(path, ModelOptions(device=device, backend_options=named)) as model:
        sizes = ContextOptions(PROMPT + CROWD * 256, CROWD, PROMPT, KvType.F16, KvType.F16)
        context = model.new_context(sizes)

        def step(n_seqs: int) -> None:
            batch = context.new_batch()
            for seq_id in range(n_seqs):
                batch.add(int(rng.integers(N_VOCAB)), Pos(seq_id, context.length(seq_id)), logits=True)
            context.decode(batch)

        def prefill() -> None:
            context.clear()
            batch = context.new_batch()
            batch.extend(rng.integers(0, N_VOCAB, PROMPT).tolist(), Pos(0, 0), logits="last")
            context.decode(batch)

        times = {"prefill": measured(prefill, device, 1)}
        context.clear()
        times["one"] = measured(lambda: step(1), device, 16)
        context.clear()
        times["many"] = measured(lambda: step(CROWD), device, 8)
        return {**times, "bytes": float(model.info.n_bytes), "weights": float(model.info.n_params)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", default="0.6b,1.7b,8b")
    parser.add_argument("--types", default="BF16,Q8_0,Q4_K")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    import torch

    copied, multiplied = copy_rate(args.device), product_rate(args.device)
    today = datetime.date.today().isoformat()
    lines = [
        f"# The torch tier on {torch.cuda.get_device_name(args.device)}, {today}",
        "",
        f"torch {torch.__version__}; memory copies at {copied / 1e9:.0f} GB/s; bfloat16 products at"
        f" {multiplied / 1e12:.0f} Tflop/s. Random weights, KV cache f16. Each row twice: steps launched kernel by"
        " kernel, and captured in CUDA graphs, which is the default.",
        "",
        f"| shape | type | steps | decode, tok/s | of copies | {CROWD} together, times one | prefill {PROMPT}, tok/s"
        " | of products |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in args.shapes.split(","):
        for name in args.types.split(","):
            with tempfile.TemporaryDirectory() as folder:
                path, profile = Path(folder) / "model.gguf", Path(folder) / "launched.toml"
                profile.write_text("[decode]\ncapture = false\n")
                write_model(path, shape, GgmlType[name])
                for steps, result in {
                    "launched": measure(path, args.device, profile),
                    "captured": measure(path, args.device),
                }.items():
                    share = result["bytes"] / result["one"] / copied
                    flops = 2 * result["weights"] * PROMPT / result["prefill"] / multiplied
                    lines.append(
                        f"| {shape} | {name} | {steps} | {1 / result['one']:.1f} | {share:.0%}"
                        f" | {CROWD * result['one'] / result['many']:.1f} | {PROMPT / result['prefill']:.0f}"
                        f" | {flops:.0%} |"
                    )
                    print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{today}-gpu.md").write_text(text)


if __name__ == "__main__":
    main()
