"""Costs of architectures: a forward pass relative to llama's, recurrent models at depth, bytes of experts per token.

    python benchmarks/architectures.py
    python benchmarks/architectures.py --families gemma3n,qwen3moe --tier reference --rounds 3

The models are the random models of the tests in Q8_0, widened to the size of small published models (1056 to 1152
wide, feed-forward layers three times as wide, experts half as wide). The first table alternates each family with a
llama of the same width, heads and layers, whose feed-forward width makes a token read about the same bytes of weights.
Times are divided by these bytes, so the ratios are times per byte. For prompts all rows are requested: recurrent layers
compute every row anyway, while llama's last layer would compute only the requested ones.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import FAMILIES, RMS, Family
from slm_core.architectures import ModelSpec, read_spec
from slm_core.cpu import usable_cores
from slm_core.errors import SlmError
from slm_core.gguf import GgufFile
from slm_core.protocols import Context
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_native.kernels.reference import ReferenceKernels

LEAST_WIDTH = 1024
WIDTHS = (
    "embedding_length",
    "attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
    "attention.kv_lora_rank", "attention.q_lora_rank", "rope.dimension_count", "rope.dimension_sections",
    "ssm.inner_size", "ssm.time_step_rank",
)  # fmt: skip
FEED_FORWARD = {"feed_forward_length": 3.0, "expert_feed_forward_length": 0.5, "expert_shared_feed_forward_length": 0.5}
AROUND_BLOCKS = ("altup_proj", "altup_unembd_proj", "per_layer_model_proj")  # per token; llama does not have them
PROMPTS, DECODED = (128, 512), 8
DEPTHS = (0, 512, 2048)
LARGEST_RATIO = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names of slm_conformance.oracle.family_table")
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--models", type=Path, help="a folder that keeps the models (about 11 GB) for another run")
    arguments = parser.parse_args()
    names = arguments.families.split(",")
    print(f"{platform.processor() or platform.machine()}, {usable_cores()} cores, tier {arguments.tier}\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.models or Path(temporary)
        folder.mkdir(exist_ok=True)
        costs(folder, names, arguments.tier, arguments.rounds)
        depths(folder, names, arguments.tier)
        experts_table(folder, names)


def costs(folder: Path, names: list[str], tier: str, rounds: int) -> None:
    """A table of ratios to llama; ratios above the bound are marked."""
    prefills = " | ".join(f"prefill of {n}" for n in PROMPTS)
    print(f"| family | decode | {prefills} | (times for a byte, in relation to llama's; at most {LARGEST_RATIO})")
    print("|---|---|" + "---|" * len(PROMPTS))
    for name in names:
        try:
            path = wide_model(folder, name, FAMILIES[name])
            twin = twin_of(folder, FAMILIES[name].metadata, bytes_a_token(path))
            with pair(path, twin, tier) as contexts:
                ratios = measured(contexts, [bytes_a_token(path), bytes_a_token(twin)], rounds)
        except SlmError as error:
            print(f"| {name} | {error} |")
            continue
        print(f"| {name} | {' | '.join(f'{r:.2f}' + ' (!)' * (r > LARGEST_RATIO) for r in ratios)} |", flush=True)


def depths(folder: Path, names: list[str], tier: str) -> None:
    """A table of the time per token at several depths, for families without attention."""
    print(f"\n| family | {' | '.join(f'decode at {depth}' for depth in DEPTHS)} | (ms)")
    print("|---|" + "---|" * len(DEPTHS))
    for name in names:
        path = wide_model(folder, name, FAMILIES[name])
        spec = spec_of(path)
        if spec.attention_layers or not spec.recurrent_layers:
            continue
        with loaded(path, tier, max(DEPTHS) + DECODED) as context:
            times = [decode_time(context, depth) for depth in DEPTHS]
        print(f"| {name} | {' | '.join(f'{1e3 * seconds:.2f}' for seconds in times)} |", flush=True)


def experts_table(folder: Path, names: list[str]) -> None:
    """A table of the bytes of experts that one token reads, measured in the products of the reference kernels."""
    print(
        "\n| family | experts | used | bytes of experts | bytes read for a token | share |\n|---|---|---|---|---|---|"
    )
    for name in names:
        path = wide_model(folder, name, FAMILIES[name])
        experts = next((layer.experts for layer in spec_of(path).layers if layer.experts is not None), None)
        if experts is None:
            continue
        with GgufFile.open(path) as file:
            n_bytes = sum(info.n_bytes for tensor, info in file.tensors.items() if "_exps.weight" in tensor)
        with counted() as read, loaded(path, "reference", 64) as context:
            feed(context, 1)
        n_read = sum(n for tensor, n in read.items() if "_exps" in tensor)
        print(f"| {name} | {experts.n_experts} | {experts.n_used} | {n_bytes} | {n_read} | {n_read / n_bytes:.2f} |")


def wide_model(folder: Path, name: str, family: Family) -> Path:
    """The file of a family with wider matrices."""
    return model_file(folder, f"wide {name}", replace(family, metadata=widened(family.metadata)))


def twin_of(folder: Path, metadata: Mapping[str, Any], n_bytes: float) -> Path:
    """The file of the llama that a family is compared with; families with the same shapes share it."""
    llama_metadata = like_llama(widened(metadata), n_bytes)
    label = f"llama {zlib.crc32(repr(sorted(llama_metadata.items())).encode()):08x}"
    return model_file(folder, label, Family("llama", llama_metadata))


def model_file(folder: Path, label: str, family: Family) -> Path:
    """The file of a family, written once."""
    if paths := list(folder.glob(f"{label}-*")):
        return paths[0]
    FAMILIES[label] = family
    try:
        return family_model(folder, label, "q8_0")
    finally:
        del FAMILIES[label]


def widened(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with the widths of published models: integer multiples, so that the shapes still fit."""
    n_embd = metadata["embedding_length"]
    factor = 2 * -(-LEAST_WIDTH // (2 * n_embd))
    wide = {key: times(value, factor) if key in WIDTHS else value for key, value in metadata.items()}
    for key, share in FEED_FORWARD.items():
        n_ff = metadata.get(key) or 0
        share = FEED_FORWARD["feed_forward_length"] if n_ff == metadata.get("feed_forward_length") else share
        if narrowest := min(n_ff) if isinstance(n_ff, list) else n_ff:
            wide[key] = times(n_ff, 2 * math.ceil(share * factor * n_embd / (2 * narrowest)))
    return wide


def times(value: Any, factor: int) -> Any:
    return [factor * element for element in value] if isinstance(value, list) else factor * value


def like_llama(metadata: Mapping[str, Any], n_bytes: float) -> dict[str, Any]:
    """A llama with a family's widths, heads and layers, and a feed-forward width that reads ``n_bytes`` per token.

    Models without attention get heads of width 128.
    """
    n_embd, n_layers = metadata["embedding_length"], metadata["block_count"]
    width = metadata.get("attention.key_length_mla") or metadata.get("attention.key_length") or 128
    heads = metadata.get("attention.head_count") or n_embd // width
    n_kv = metadata.get("attention.head_count_kv") or heads
    n_kv = max(n_kv) if isinstance(n_kv, list) else n_kv
    weights = n_bytes * 32 / 34 / n_layers - 2 * n_embd * width * (heads + n_kv)
    common = {key: metadata[key] for key in ("block_count", "context_length", "embedding_length")}
    return common | {
        "feed_forward_length": max(32, round(weights / (3 * n_embd) / 32) * 32),
        "attention.head_count": heads,
        "attention.head_count_kv": n_kv,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": 1e4,
        RMS: 1e-5,
    }


def bytes_a_token(path: Path) -> float:
    """Bytes of the tensors that a token reads; experts count by the selected share."""
    total, spec = 0.0, spec_of(path)
    with GgufFile.open(path) as file:
        for name, info in file.tensors.items():
            if not name.startswith("blk."):
                total += info.n_bytes * name.startswith(AROUND_BLOCKS)
                continue
            layer = spec.layers[int(name.split(".")[1])]
            shared = layer.experts is not None and "_exps." in name
            total += info.n_bytes * (layer.experts.n_used / layer.experts.n_experts if shared and layer.experts else 1)
    return total


def measured(contexts: list[Context], n_bytes: list[float], rounds: int) -> list[float]:
    """Ratios of the time per byte, for decode and prefills: medians over rounds that alternate between both models."""
    ratios: list[list[float]] = []
    for _ in range(rounds):
        family_times, llama_times = (times_of(context, each) for context, each in zip(contexts, n_bytes, strict=True))
        ratios.append([a / b for a, b in zip(family_times, llama_times, strict=True)])
    return [statistics.median(column) for column in zip(*ratios, strict=True)]


def times_of(context: Context, n_bytes: float) -> list[float]:
    """Seconds per byte, for a token after the first prompt and for the prompts."""
    prefills, decodes = [], []
    for n in PROMPTS:
        context.clear()
        prefills.append(feed(context, n) / n_bytes)
        if n == PROMPTS[0]:
            decodes = [feed(context, 1) / n_bytes for _ in range(DECODED)]
    return [statistics.median(decodes), *prefills]


def decode_time(context: Context, depth: int) -> float:
    context.clear()
    for start in range(0, depth, PROMPTS[0]):
        feed(context, min(PROMPTS[0], depth - start))
    return statistics.median(feed(context, 1) for _ in range(DECODED))


def feed(context: Context, n: int) -> float:
    """Seconds for ``n`` more tokens, each through every layer."""
    batch, start = context.new_batch(), context.length(0)
    batch.extend(np.random.default_rng(start).integers(0, 300, n).astype(np.int32), Pos(0, start), logits="all")
    start_s = time.perf_counter()
    context.decode(batch)
    return time.perf_counter() - start_s


def spec_of(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        return read_spec(file)


@contextmanager
def loaded(path: Path, tier: str, n_ctx: int) -> Iterator[Context]:
    with NativeBackend().load(path, ModelOptions(backend_options={"tier": tier})) as model:
        context = model.new_context(ContextOptions(n_ctx=n_ctx, n_batch=max(PROMPTS)))
        with context:
            yield context


@contextmanager
def pair(path: Path, twin: Path, tier: str) -> Iterator[list[Context]]:
    n_ctx = max(PROMPTS) + DECODED
    with loaded(path, tier, n_ctx) as family_context, loaded(twin, tier, n_ctx) as llama_context:
        yield [family_context, llama_context]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes of each weight in the products of the reference kernels, by name."""
    read: dict[str, int] = {}
    matmul = ReferenceKernels.matmul

    def spy(self: ReferenceKernels, x: Any, weight: Any, bias: Any = None) -> Any:
        read[weight.tensor.name] = weight.tensor.data.nbytes
        return matmul(self, x, weight, bias)

    ReferenceKernels.matmul = spy  # type: ignore[method-assign]
    try:
        yield read
    finally:
        ReferenceKernels.matmul = matmul  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
