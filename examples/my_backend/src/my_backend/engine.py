"""The engine: qwen3 in float32.

The cache has *unrotated* keys; attention rotates them. So the position of a key is its index in the cache, and a cut
only removes rows. A faster engine would cache rotated keys, and rotate them again in a cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType, GgufFile, TensorInfo

Array = NDArray[np.float32]

_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


@dataclass(frozen=True, slots=True)
class Config:
    """The dimensions of a model."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    rope_freq_base: float
    norm_eps: float

    @classmethod
    def read(cls, file: GgufFile) -> Config:
        """The dimensions in the header of a file.

        Raises:
            UnsupportedModel: anything but a plain qwen3.
            InvalidModelFile: the dimensions are missing or invalid.
        """
        architecture = file.require("general.architecture", str)
        if architecture != "qwen3":
            raise UnsupportedModel(f"architecture {architecture!r} (accepted: qwen3)")
        scaling = file.get("qwen3.rope.scaling.type", str, "none")
        if scaling != "none":
            raise UnsupportedModel(f"rope scaling {scaling!r} (accepted: none)")
        n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim = sizes = [
            file.require(f"qwen3.{key}", int) for key in _SIZES
        ]
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or min(sizes) < 1 or n_heads % n_kv_heads or head_dim % 2:
            named = ", ".join(f"{key} {size}" for key, size in zip(_SIZES, sizes, strict=True))
            raise InvalidModelFile(f"{file.path}: no embeddings, or sizes that do not go together: {named}")
        return cls(
            n_layers,
            n_embd,
            n_ff,
            n_heads,
            n_kv_heads,
            head_dim,
            n_vocab=embedding.shape[0],
            rope_freq_base=file.get("qwen3.rope.freq_base", float, 1e6),
            norm_eps=file.require("qwen3.attention.layer_norm_rms_epsilon", float),
        )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that the forward pass reads."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        yield "output_norm.weight", (self.n_embd,)
        for layer in range(self.n_layers):
            block = f"blk.{layer}."
            yield f"{block}attn_norm.weight", (self.n_embd,)
            yield f"{block}attn_q.weight", (queries, self.n_embd)
            yield f"{block}attn_k.weight", (keys, self.n_embd)
            yield f"{block}attn_v.weight", (keys, self.n_embd)
            yield f"{block}attn_q_norm.weight", (self.head_dim,)
            yield f"{block}attn_k_norm.weight", (self.head_dim,)
            yield f"{block}attn_output.weight", (self.n_embd, queries)
            yield f"{block}ffn_norm.weight", (self.n_embd,)
            yield f"{block}ffn_gate.weight", (self.n_ff, self.n_embd)
            yield f"{block}ffn_up.weight", (self.n_ff, self.n_embd)
            yield f"{block}ffn_down.weight", (self.n_embd, self.n_ff)


_SIZES = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
)


def check_readable(file: GgufFile) -> Config:
    """Check that the engine can read all tensors of a file; returns the dimensions.

    Raises:
        UnsupportedModel: another architecture, or a weight type that is unknown here.
        InvalidModelFile: a tensor is missing, or has another shape than the dimensions say.
    """
    config = Config.read(file)
    shapes = dict(config.tensors())
    if "output.weight" in file.tensors:  # else the output uses the embeddings
        shapes["output.weight"] = (config.n_vocab, config.n_embd)
    unknown = sorted(set(file.tensors) - set(shapes))
    if unknown:
        raise UnsupportedModel(f"tensor {unknown[0]!r} is no part of a qwen3 that this engine knows")
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None or info.shape != shape:
            actual = "missing" if info is None else f"of shape {info.shape}"
            raise InvalidModelFile(f"{file.path}: tensor {name!r} is {actual}, the dimensions say {shape}")
        if info.ggml_type not in (GgmlType.F32, GgmlType.F16, GgmlType.Q8_0):
            raise UnsupportedModel(f"tensor {name!r} is {info.ggml_type.name} (accepted: F32, F16, Q8_0)")
    return config


def _values(file: GgufFile, info: TensorInfo) -> Array:
    data = file.tensor_data(info.name).tobytes()
    if info.ggml_type is GgmlType.Q8_0:
        blocks = np.frombuffer(data, _Q8_0)
        flat = blocks["values"] * blocks["scale"].astype(np.float32)[:, None]
    else:
        flat = np.frombuffer(data, "<f4" if info.ggml_type is GgmlType.F32 else "<f2").astype(np.float32)
    return flat.reshape(info.shape)


class Qwen3:
    """A forward pass without state.

    Args:
        file: the model; may be closed afterwards.
    """

    def __init__(self, file: GgufFile) -> None:
        self.config = check_readable(file)
        self._weights = {name: _values(file, info) for name, info in file.tensors.items()}
        half = np.arange(0, self.config.head_dim, 2) / self.config.head_dim
        self._frequencies = self.config.rope_freq_base**-half  # radians per position, [D/2]

    def empty(self) -> Array:
        """An empty cache: keys and values of each layer, float32 [2, L, S=0, K, D]."""
        c = self.config
        return np.empty((2, c.n_layers, 0, c.n_kv_heads, c.head_dim), np.float32)

    def forward(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_], past: Array) -> tuple[Array, Array]:
        """Run tokens of one sequence.

        Args:
            tokens: int32 [T].
            mask: the tokens that get logits, bool [T].
            past: the cache of the tokens before them, [2, L, S, K, D]; not changed.

        Returns:
            Logits of the mask's n tokens, float32 [n, V], and the grown cache, [2, L, S+T, K, D].
        """
        cache = np.concatenate((past, np.empty((*past.shape[:2], len(tokens), *past.shape[3:]), np.float32)), axis=2)
        x = self._weights["token_embd.weight"][tokens]  # [T, E]
        for layer in range(self.config.n_layers):
            block = f"blk.{layer}."
            x = x + self._attend(block, self._norm(block + "attn_norm", x), cache[0, layer], cache[1, layer])
            x = x + self._feed_forward(block, self._norm(block + "ffn_norm", x))
        head = "output.weight" if "output.weight" in self._weights else "token_embd.weight"
        return self._norm("output_norm", x[mask]) @ self._weights[head].T, cache

    def _attend(self, block: str, x: Array, keys: Array, values: Array) -> Array:
        """Attention; fills the last rows of ``keys`` and ``values``, [S+T, K, D]."""
        c, n_tokens, n_all = self.config, len(x), len(keys)
        first = n_all - n_tokens
        q = self._norm(block + "attn_q_norm", self._linear(block + "attn_q", x).reshape(n_tokens, -1, c.head_dim))
        k = self._linear(block + "attn_k", x).reshape(n_tokens, -1, c.head_dim)
        keys[first:] = self._norm(block + "attn_k_norm", k)
        values[first:] = self._linear(block + "attn_v", x).reshape(n_tokens, -1, c.head_dim)
        q = self._rotated(q, first).reshape(n_tokens, c.n_kv_heads, -1, c.head_dim)  # [T, K, G, D]
        scores = np.einsum("tkgd,skd->kgts", q, self._rotated(keys, 0)) / np.float32(np.sqrt(c.head_dim))
        scores[..., np.arange(n_all) > np.arange(first, n_all)[:, None]] = -np.inf  # no token attends to later ones
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("kgts,skd->tkgd", weights, values).reshape(n_tokens, -1)
        return self._linear(block + "attn_output", attended)

    def _feed_forward(self, block: str, x: Array) -> Array:
        gate = self._linear(block + "ffn_gate", x)
        with np.errstate(over="ignore"):  # the result, 0, is the right limit
            gated = gate / (1 + np.exp(-gate))
        return self._linear(block + "ffn_down", gated * self._linear(block + "ffn_up", x))

    def _linear(self, name: str, x: Array) -> Array:
        product: Array = x @ self._weights[f"{name}.weight"].T
        return product

    def _norm(self, name: str, x: Array) -> Array:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.config.norm_eps))
        normalised: Array = x / scale * self._weights[f"{name}.weight"]
        return normalised

    def _rotated(self, x: Array, first: int) -> Array:
        """Rotate heads, [T, heads, D], to the positions from ``first`` on; the two numbers of a pair are D/2 apart."""
        angles = np.arange(first, first + len(x))[:, None, None] * self._frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate((left * cos - right * sin, left * sin + right * cos), axis=-1)
