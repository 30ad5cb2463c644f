"""A tiny model for the self-check, made in memory: grouped-query attention and several number formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.gguf.writer import GgufWriter, NewTensor, PlainValue, stored
from slm_core.quant import quantize

_ARCHITECTURE, _ALIGNMENT = "qwen3", 32
_L, _E, _F, _H, _K, _D = 2, 128, 256, 4, 2, 64
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6  # kinds of tokens
_TOKENS = ["<unk>", "<s>", "</s>", *_BYTES]
_KINDS = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * len(_BYTES)]

# One format for each kind of product in the graph: 4-bit codes, 8-bit codes, blocks of 16, correction term, no codes.
_MATRICES = {
    "attn_q": ((_H * _D, _E), GgmlType.Q8_0),
    "attn_k": ((_K * _D, _E), GgmlType.Q8_0),
    "attn_v": ((_K * _D, _E), GgmlType.Q4_0),
    "attn_output": ((_E, _H * _D), GgmlType.F16),
    "ffn_gate": ((_F, _E), GgmlType.Q4_0),
    "ffn_up": ((_F, _E), GgmlType.Q4_1),
    "ffn_down": ((_E, _F), GgmlType.Q6_K),
}
_NORMS = {"attn_norm": _E, "ffn_norm": _E, "attn_q_norm": _D, "attn_k_norm": _D}


def check_model() -> bytes:
    """The GGUF file; the same bytes in every call."""
    tensors, data = [], []
    for name, ggml_type, values in _tensors(np.random.default_rng(0)):
        packed = quantize(values if values.ndim == 2 else values[None], ggml_type).tobytes()
        tensors.append(NewTensor(name, values.shape, ggml_type, len(packed)))
        data.append(packed.ljust(-(-len(packed) // _ALIGNMENT) * _ALIGNMENT, b"\0"))
    metadata = {key: stored(value) for key, value in _metadata().items()}
    return GgufWriter(metadata, tensors, _ALIGNMENT).header + b"".join(data)


def _tensors(rng: np.random.Generator) -> Iterator[tuple[str, GgmlType, NDArray[np.float32]]]:
    """Random weights, scaled so that products with values around 1 are around 1."""
    yield "token_embd.weight", GgmlType.Q8_0, _matrix(rng, (len(_TOKENS), _E)) * np.float32(_E**0.5)
    yield "output.weight", GgmlType.Q8_0, _matrix(rng, (len(_TOKENS), _E))
    yield "output_norm.weight", GgmlType.F32, _norm(rng, _E)
    for layer in range(_L):
        for name, (shape, ggml_type) in _MATRICES.items():
            yield f"blk.{layer}.{name}.weight", ggml_type, _matrix(rng, shape)
        for name, width in _NORMS.items():
            yield f"blk.{layer}.{name}.weight", GgmlType.F32, _norm(rng, width)


def _matrix(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
    return values


def _norm(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    return rng.uniform(0.8, 1.2, width).astype(np.float32)


def _metadata() -> Mapping[str, PlainValue]:
    architecture_keys: Mapping[str, PlainValue] = {
        "block_count": _L,
        "context_length": 512,
        "embedding_length": _E,
        "feed_forward_length": _F,
        "attention.head_count": _H,
        "attention.head_count_kv": _K,
        "attention.key_length": _D,
        "attention.value_length": _D,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e4,
    }
    return {
        "general.architecture": _ARCHITECTURE,
        **{f"{_ARCHITECTURE}.{key}": value for key, value in architecture_keys.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": _TOKENS,
        "tokenizer.ggml.token_type": _KINDS,
        "tokenizer.ggml.scores": [0.0] * len(_TOKENS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
