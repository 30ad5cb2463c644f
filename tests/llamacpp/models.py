"""Tiny random models of kinds that the conformance suite lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.factories import TinyModel, make_tiny_model
from slm_conformance.oracle.gguf_writer import StoredTensor, Value, write_gguf

_KINDS = {"normal": 1, "unknown": 2, "control": 3, "byte": 6}


def windowed_model(path: Path, window: int) -> Path:
    """Gemma 2: every other layer attends to the last ``window`` positions only."""
    rng = np.random.default_rng(1)
    n_embd, n_ff, n_heads, n_kv_heads, head_dim, n_layers = 48, 80, 4, 2, 16, 4
    metadata = _metadata("gemma2", n_embd, n_layers) | {
        "gemma2.feed_forward_length": n_ff,
        "gemma2.attention.head_count": n_heads,
        "gemma2.attention.head_count_kv": n_kv_heads,
        "gemma2.attention.key_length": head_dim,
        "gemma2.attention.value_length": head_dim,
        "gemma2.attention.sliding_window": window,
    }
    tensors = {"token_embd.weight": _matrix(rng, _n_vocab(), n_embd), "output_norm.weight": _vector(rng, n_embd)}
    for layer in range(n_layers):
        block = {
            **{f"{name}.weight": _vector(rng, n_embd) for name in ("attn_norm", "post_attention_norm")},
            **{f"{name}.weight": _vector(rng, n_embd) for name in ("ffn_norm", "post_ffw_norm")},
            "attn_q.weight": 2 * _matrix(rng, n_heads * head_dim, n_embd),
            "attn_k.weight": 2 * _matrix(rng, n_kv_heads * head_dim, n_embd),
            "attn_v.weight": _matrix(rng, n_kv_heads * head_dim, n_embd),
            "attn_output.weight": _matrix(rng, n_embd, n_heads * head_dim),
            "ffn_gate.weight": _matrix(rng, n_ff, n_embd),
            "ffn_up.weight": _matrix(rng, n_ff, n_embd),
            "ffn_down.weight": _matrix(rng, n_embd, n_ff),
        }
        tensors |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    return _write(path, metadata, tensors)


def recurrent_model(path: Path) -> Path:
    """Mamba: recurrent states instead of keys and values."""
    rng = np.random.default_rng(2)
    n_embd, n_layers, kernel, n_state, rank = 32, 2, 4, 8, 6
    n_inner = 2 * n_embd
    metadata = _metadata("mamba", n_embd, n_layers) | {
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": n_inner,
        "mamba.ssm.state_size": n_state,
        "mamba.ssm.time_step_rank": rank,
    }
    tensors = {"token_embd.weight": _matrix(rng, _n_vocab(), n_embd), "output_norm.weight": _vector(rng, n_embd)}
    for layer in range(n_layers):
        block = {
            "attn_norm.weight": _vector(rng, n_embd),
            "ssm_in.weight": _matrix(rng, 2 * n_inner, n_embd),
            "ssm_conv1d.weight": _matrix(rng, n_inner, kernel),
            "ssm_conv1d.bias": _vector(rng, n_inner),
            "ssm_x.weight": _matrix(rng, rank + 2 * n_state, n_inner),
            "ssm_dt.weight": _matrix(rng, n_inner, rank),
            "ssm_dt.bias": _vector(rng, n_inner),
            "ssm_a": -rng.uniform(0.1, 1, (n_inner, n_state)).astype(np.float32),
            "ssm_d": _vector(rng, n_inner),
            "ssm_out.weight": _matrix(rng, n_embd, n_inner),
        }
        tensors |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    return _write(path, metadata, tensors)


def sentencepiece_model(path: Path, *, byte_tokens: bool) -> Path:
    """Llama with a SentencePiece vocabulary of a few words, with or without byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *"\N{LOWER ONE EIGHTH BLOCK}helo", "he", "hell", "hello"]
    kinds = ["unknown", "control", "control", *["normal"] * (len(tokens) - 3)]
    if byte_tokens:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        kinds += ["byte"] * 256
    model = make_tiny_model("llama")
    metadata = {key: value for key, value in model.metadata.items() if not key.startswith("tokenizer.")} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_KINDS[kind] for kind in kinds],
    }
    rows = {
        name: StoredTensor.pack(model.tensors[name].values()[: len(tokens)], "f32")
        for name in ("token_embd.weight", "output.weight")
    }
    return write_gguf(path, metadata, model.tensors | rows)


def wide_model(path: Path, n_ff: int) -> Path:
    """Llama with a feed-forward network so wide that its memory can be measured."""
    rng = np.random.default_rng(3)
    model = make_tiny_model("llama")
    wide = {
        name: StoredTensor.pack(_matrix(rng, *[n_ff if n == model.shape.n_ff else n for n in tensor.shape]), "f16")
        for name, tensor in model.tensors.items()
        if ".ffn_" in name and "norm" not in name
    }
    return write_gguf(path, model.metadata | {"llama.feed_forward_length": n_ff}, model.tensors | wide)


def changed_model(path: Path, **metadata: Value | None) -> Path:
    """The tiny llama with other metadata: ``__`` in keys stands for a dot; the value None removes a key."""
    model = make_tiny_model("llama")
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    changed = {key: value for key, value in (model.metadata | keys).items() if value is not None}
    return TinyModel(model.shape, model.tensors, changed).write(path)


def _metadata(architecture: str, n_embd: int, n_layers: int) -> dict[str, Value]:
    tokenizer = {key: value for key, value in make_tiny_model("qwen3").metadata.items() if key.startswith("tokenizer.")}
    return tokenizer | {
        "general.architecture": architecture,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": n_embd,
        f"{architecture}.block_count": n_layers,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
    }


def _n_vocab() -> int:
    return int(make_tiny_model("qwen3").tensors["token_embd.weight"].shape[0])


def _write(path: Path, metadata: dict[str, Value], tensors: dict[str, NDArray[np.float32]]) -> Path:
    return write_gguf(path, metadata, {name: StoredTensor.pack(values, "f32") for name, values in tensors.items()})


def _matrix(rng: np.random.Generator, n_out: int, n_in: int) -> NDArray[np.float32]:
    return rng.standard_normal((n_out, n_in), np.float32) / np.float32(np.sqrt(n_in))


def _vector(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    return (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)
