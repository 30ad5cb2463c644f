"""Small models, and small models with the metadata of large ones, for quantization only, and importance matrices."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Toy:
    """A model with the names and metadata of a real model, and matrices with few rows."""

    architecture: str = "llama"
    n_layers: int = 3
    n_cols: int = 256
    n_down: int = 512
    n_heads: int = 8
    n_kv_heads: int = 2
    n_experts: int = 0
    tied: bool = False
    fused: bool = False
    dtype: type = np.float32
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shard_tensors: int = 0
    alignment: int = 32

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, rows first."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (9, self.n_cols),
            "output_norm.weight": (self.n_cols,),
        }
        if not self.tied:
            shapes["output.weight"] = (9, self.n_cols)
        experts = (self.n_experts,) if self.n_experts else ()
        suffix = "_exps" if self.n_experts else ""
        for i in reversed(range(self.n_layers)):  # files need not be in the order of layers
            attention = ["attn_qkv"] if self.fused else ["attn_q", "attn_k", "attn_v"]
            block = {f"{name}.weight": (3, self.n_cols) for name in [*attention, "attn_output"]}
            block |= {f"ffn_{name}{suffix}.weight": (*experts, 3, self.n_cols) for name in ("gate", "up")}
            block |= {f"ffn_down{suffix}.weight": (*experts, 3, self.n_down), "attn_norm.weight": (self.n_cols,)}
            if self.n_experts:
                block["ffn_gate_inp.weight"] = (self.n_experts, self.n_cols)
            shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        return shapes | dict(self.extra)

    def write(self, path: Path) -> Path:
        """Write one file, or several with ``shard_tensors`` tensors each; returns the first path."""
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=self.shard_tensors)
        if self.alignment != 32:
            writer.add_custom_alignment(self.alignment)
        self._add_metadata(writer)
        rng = np.random.default_rng(0)
        for name, shape in self.shapes().items():
            values = (0.05 * rng.standard_normal(shape)).astype(self.dtype if len(shape) > 1 else np.float32)
            writer.add_tensor(name, values)
        _finish(writer)
        return path if not self.shard_tensors else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))

    def _add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.name", "a toy: \u00e9\u4e2d")
        writer.add_uint32("general.file_type", 1)
        writer.add_block_count(self.n_layers)
        writer.add_context_length(512)
        writer.add_embedding_length(self.n_cols)
        writer.add_feed_forward_length(self.n_down)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        writer.add_rope_dimension_count(32)
        writer.add_vocab_size(9)
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(9)])
        writer.add_tokenizer_model("llama")
        writer.add_array("toy.array", [1.5, 2.5])
        if self.n_experts:
            writer.add_expert_count(self.n_experts)
            writer.add_expert_used_count(2)


def importance_for(path: Path) -> dict[str, NDArray[np.float32]]:
    """Random importance of the matrices in the layers of a model, [n_matrices, n_cols], one row per expert."""
    rng = np.random.default_rng(1)
    shapes = {
        tensor.name: tensor.shape[::-1]  # rows first
        for tensor in gguf.GGUFReader(path).tensors
        if len(tensor.shape) > 1 and tensor.name not in ("token_embd.weight", "output.weight")
    }
    drawn = {name: rng.gamma(0.5, 1, (*shape[:-2], shape[-1])) + 1e-3 for name, shape in shapes.items()}
    return {name: values.reshape(-1, values.shape[-1]).astype(np.float32) for name, values in drawn.items()}


def write_imatrix(path: Path, importance: Mapping[str, NDArray[np.float32]], n_inputs: int = 5) -> Path:
    """Write a GGUF importance matrix in llama.cpp's layout: sums over ``seen`` inputs, and their number."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a text"])
    writer.add_uint32("imatrix.chunk_count", n_inputs)
    for name, values in importance.items():
        writer.add_tensor(f"{name}.in_sum2", n_inputs * values)
        writer.add_tensor(f"{name}.counts", np.full((len(values), 1), n_inputs, np.float32))
    _finish(writer)
    return path


def write_legacy_imatrix(path: Path, importance: Mapping[str, NDArray[np.float32]], n_calls: int = 5) -> Path:
    """Write an importance matrix in the legacy format of llama.cpp."""
    data = struct.pack("<i", len(importance))
    for name, values in importance.items():
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", n_calls, values.size)
        data += (n_calls * values).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 7, 6) + b"a text")
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
