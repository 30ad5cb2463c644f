"""Tiny models with random weights: real GGUF files of four architectures, under 2 MB.

No tensor is symmetric, zero or square. There are fewer key heads than query heads. Each feature that an engine could
forget changes the logits: rope frequency factors and an untied output (llama), biases (qwen2), query and key norms and
tied embeddings (qwen3), M-RoPE positions (qwen2vl).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.gguf_writer import StoredTensor, Value, write_gguf

Architecture: TypeAlias = Literal["llama", "qwen2", "qwen3", "qwen2vl"]
Shape: TypeAlias = Literal[Architecture, "small_llama", "narrow_llama", "shallow_llama", "mtp_llama"]
WeightType: TypeAlias = Literal["f32", "f16", "q8_0"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALM = 8
"""A factor for the embeddings. Attention of the tiny models is peaked, so coarse keys make large errors. With larger
embeddings, these errors are smaller than the differences between logits."""

MTP_NORMS = ("enorm", "hnorm", "shared_head_norm")
"""The norms of an MTP layer: of the embedding, of the hidden state before, and of its output."""

_CONTROL, _USER_DEFINED, _NORMAL = 3, 4, 1
_SPECIAL_TOKENS = {
    "<|endoftext|>": _CONTROL,
    "<|im_start|>": _CONTROL,
    "<|im_end|>": _CONTROL,
    "<think>": _USER_DEFINED,
    "</think>": _USER_DEFINED,
}
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
        "zephyr": ("<|user|>", "<|assistant|>"),
    }
)
"""Chat formats to test besides the model's own, and the control tokens that they need."""
_MERGES = (
    "Ġ t,h e,i n,Ġ a,r e,o n,Ġt he,e r,Ġ s,a t,Ġ w,o u,i s,Ġ c,e n,a n,Ġ b,i t,l l,e d,Ġ f,Ġ p,Ġ m,in g,o r,Ġ d,a l,"
    "Ġ is,Ġ o,Ġ y,Ġy ou,o g,Ġd og,ll o,he llo,s s,a ss,ass is,t an,assis tan,s y,e m,u s,us er"
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model.

    Attributes:
        architecture: its name in the file.
        n_layers: transformer blocks L.
        n_embd: embedding width E.
        n_ff: feed-forward width F.
        n_heads: query heads H.
        n_kv_heads: key and value heads K.
        head_dim: width of a head D.
        rope_freq_base: the base frequency of RoPE.
        norm_eps: epsilon of the RMS norms.
        tied: whether the output matrix is the token embeddings.
        sections: the number of a head's pairs that rotate by time, height and width; () if all rotate by one position.
        n_mtp: layers for multi-token prediction after the blocks, 0 or 1. No engine but the toy has them for llama.
    """

    architecture: Architecture
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_freq_base: float
    norm_eps: float
    tied: bool
    sections: tuple[int, ...] = ()
    n_mtp: int = 0


SHAPES: dict[Architecture, ModelShape] = {
    "llama": ModelShape("llama", 3, 96, 160, 6, 2, 32, 1e4, 1e-5, tied=False),
    "qwen2": ModelShape("qwen2", 3, 96, 224, 6, 2, 16, 1e5, 1e-6, tied=False),
    "qwen3": ModelShape("qwen3", 3, 64, 160, 6, 3, 32, 1e6, 1e-6, tied=True),
    "qwen2vl": ModelShape("qwen2vl", 2, 96, 128, 6, 2, 16, 1e4, 1e-6, tied=False, sections=(3, 3, 2)),
}


SMALL_SHAPES: dict[Shape, ModelShape] = {
    "small_llama": ModelShape("llama", 2, 40, 48, 4, 2, 8, 1e4, 1e-5, tied=False),
    "narrow_llama": ModelShape("llama", 2, 32, 64, 4, 2, 32, 1e4, 1e-5, tied=True),
    "shallow_llama": ModelShape("llama", 1, 40, 48, 4, 2, 32, 1e4, 1e-5, tied=False),
    "mtp_llama": ModelShape("llama", 2, 40, 48, 4, 2, 8, 1e4, 1e-5, tied=False, n_mtp=1),
}
"""Smaller models, for devices where a decode takes long. small_llama and shallow_llama are F32 or F16: 32 does not
divide their widths. mtp_llama has a layer for multi-token prediction."""


def shape_name(shape: ModelShape) -> Shape:
    """The name of the tiny model with a shape; if there is none, of the tiny model of the architecture."""
    return next((name for name, small in SMALL_SHAPES.items() if small == shape), shape.architecture)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model in memory, for ``write`` and for a reference.

    Attributes:
        shape: its dimensions.
        tensors: every tensor of the file, by name, in file order.
        metadata: every key of the file.
    """

    shape: ModelShape
    tensors: dict[str, StoredTensor]
    metadata: dict[str, Value]

    def write(self, path: Path) -> Path:
        """Write the GGUF file; returns ``path``."""
        return write_gguf(path, self.metadata, self.tensors)


def tiny_model(directory: Path, architecture: Shape = "llama", weight_type: WeightType = "f32", seed: int = 0) -> Path:
    """Write a tiny model into ``directory``; returns its file.

    Args:
        directory: an existing directory.
        architecture: "llama", "qwen2", "qwen3" or "qwen2vl"; or "small_llama", "narrow_llama" or "shallow_llama".
        weight_type: the number format of the matrices; norms and biases are float32, as in every published file.
        seed: the seed of the weights; equal arguments give equal bytes.
    """
    path = directory / f"tiny-{architecture}-{weight_type}-{seed}.gguf"
    return make_tiny_model(architecture, weight_type, seed).write(path)


def make_tiny_model(
    architecture: Shape = "llama",
    weight_type: WeightType = "f32",
    seed: int = 0,
    *,
    calm: bool = False,
    controls: tuple[str, ...] = (),
) -> TinyModel:
    """Make a tiny model in memory; see ``tiny_model``.

    Args:
        architecture: "llama", "qwen2", "qwen3" or "qwen2vl"; or "small_llama", "narrow_llama" or "shallow_llama".
        weight_type: the number format of the matrices.
        seed: the seed of the weights.
        calm: multiply the embeddings by ``CALM``, so that the outputs of the blocks count less.
        controls: additional control tokens.
    """
    shape = (SHAPES | SMALL_SHAPES)[architecture]
    rng = np.random.default_rng([seed, zlib.crc32(architecture.encode())])
    values = _random_weights(shape, n_vocab(controls), rng)
    if calm:
        values["token_embd.weight"] *= np.float32(CALM)
    tensors = {
        name: StoredTensor.pack(array, weight_type if array.ndim == 2 else "f32") for name, array in values.items()
    }
    metadata = {
        **_hyperparameters(shape, weight_type, seed),
        **tokenizer_metadata(shape.architecture, controls),
    }
    return TinyModel(shape, tensors, metadata)


def _hyperparameters(shape: ModelShape, weight_type: WeightType, seed: int) -> dict[str, Value]:
    arch = shape.architecture
    return {
        "general.architecture": arch,
        "general.name": f"tiny random {arch}, seed {seed}",
        "general.file_type": {"f32": 0, "f16": 1, "q8_0": 7}[weight_type],
        f"{arch}.block_count": shape.n_layers + shape.n_mtp,
        f"{arch}.context_length": 2048,
        f"{arch}.embedding_length": shape.n_embd,
        f"{arch}.feed_forward_length": shape.n_ff,
        f"{arch}.attention.head_count": shape.n_heads,
        f"{arch}.attention.head_count_kv": shape.n_kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": shape.norm_eps,
        f"{arch}.rope.dimension_count": shape.head_dim,
        f"{arch}.rope.freq_base": shape.rope_freq_base,
        **({f"{arch}.rope.dimension_sections": [*shape.sections, 0]} if shape.sections else {}),
        **({f"{arch}.nextn_predict_layers": shape.n_mtp} if shape.n_mtp else {}),
    }


def n_vocab(controls: tuple[str, ...] = ()) -> int:
    """Vocabulary size V of the tiny models, with additional control tokens."""
    return len(_vocabulary(controls)[0])


def tokenizer_metadata(architecture: str, controls: tuple[str, ...] = ()) -> dict[str, Value]:
    """Metadata of the vocabulary and the chat template, for a file of an architecture."""
    tokens, token_types, merges = _vocabulary(controls)
    infill = {f"tokenizer.ggml.fim_{role}_token_id": 1 + i for i, role in enumerate(("pre", "suf", "mid"))}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe" if architecture == "llama" else "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": architecture == "llama",
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **(
            infill if architecture == "llama" else {}
        ),  # the other models also become directories, which cannot name these tokens
    }


def _vocabulary(controls: tuple[str, ...]) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of byte-level BPE: all bytes, the results of all merges, special tokens."""
    merges = _MERGES.split(",")
    learned = [merge.replace(" ", "") for merge in merges]
    tokens = [*_byte_alphabet(), *learned, *_SPECIAL_TOKENS, *controls]
    types = [_NORMAL] * (256 + len(learned)) + list(_SPECIAL_TOKENS.values()) + [_CONTROL] * len(controls)
    return tokens, types, merges


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _random_weights(shape: ModelShape, n_vocab: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """All tensors, float32, by name in the file."""
    # Rows of norm 2.5 against a normalised hidden state give logits with a spread near 2.5.
    tensors = {"token_embd.weight": 2.5 * _matrix(rng, n_vocab, shape.n_embd)}
    if shape.architecture == "llama":
        tensors["rope_freqs.weight"] = rng.uniform(1, 4, shape.head_dim // 2).astype(np.float32)
    tensors["output_norm.weight"] = _norm(rng, shape.n_embd)
    if not shape.tied:
        tensors["output.weight"] = 2.5 * _matrix(rng, n_vocab, shape.n_embd)
    for layer in range(shape.n_layers + shape.n_mtp):
        block = _random_block(shape, rng)
        if layer >= shape.n_layers:
            block["nextn.eh_proj.weight"] = _matrix(rng, shape.n_embd, 2 * shape.n_embd)
            block |= {f"nextn.{name}.weight": _norm(rng, shape.n_embd) for name in MTP_NORMS}
        tensors |= {f"blk.{layer}.{name}": array for name, array in block.items()}
    return tensors


def _random_block(shape: ModelShape, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    n_q, n_kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    block = {
        "attn_norm.weight": _norm(rng, shape.n_embd),
        # Larger than variance 1/E: attention is peaked, so that a wrong position changes the logits.
        "attn_q.weight": 1.6 * _matrix(rng, n_q, shape.n_embd),
        "attn_k.weight": 1.6 * _matrix(rng, n_kv, shape.n_embd),
        "attn_v.weight": _matrix(rng, n_kv, shape.n_embd),
        "attn_output.weight": _matrix(rng, shape.n_embd, n_q),
        "ffn_norm.weight": _norm(rng, shape.n_embd),
        "ffn_gate.weight": _matrix(rng, shape.n_ff, shape.n_embd),
        "ffn_up.weight": _matrix(rng, shape.n_ff, shape.n_embd),
        "ffn_down.weight": _matrix(rng, shape.n_embd, shape.n_ff),
    }
    if shape.architecture in ("qwen2", "qwen2vl"):
        for name, width in (("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)):
            block[f"{name}.bias"] = (0.5 * rng.standard_normal(width)).astype(np.float32)
    if shape.architecture == "qwen3":
        block["attn_q_norm.weight"] = 1.6 * _norm(rng, shape.head_dim)
        block["attn_k_norm.weight"] = 1.6 * _norm(rng, shape.head_dim)
    return block


def _matrix(rng: np.random.Generator, n_out: int, n_in: int) -> NDArray[np.float32]:
    return rng.standard_normal((n_out, n_in), np.float32) / np.float32(np.sqrt(n_in))


def _norm(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    return (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)
