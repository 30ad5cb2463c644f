"""The oracle: llama, qwen2, qwen3 and qwen2vl in float64, written to be read.

The cache of a layer holds the *unrotated* key and the value of each token. Attention rotates keys to their current
positions, which are their indexes in the list. So edits follow the definitions of the contract: a cut deletes rows, and
later rows keep their values at their new positions. Rows with M-RoPE positions also have offsets in time, height and
width from their default position: the highest M-RoPE position before them, plus one. The bias of a key is added to its
scores with all queries but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.factories import ModelShape
from slm_conformance.oracle.weights import Weights, rope_frequencies, section_of_pairs

Array = NDArray[np.float64]
Offset = tuple[int, int, int]
"""An M-RoPE offset in time, height and width."""
Rounding = Callable[[Array], Array]


def exact(x: Array) -> Array:
    """No rounding."""
    return x


@dataclass(slots=True)
class LayerCache:
    """The KV cache of a layer for one sequence."""

    keys: Array  # [S, K, D], unrotated
    values: Array  # [S, K, D]


def empty_cache(shape: ModelShape) -> LayerCache:
    """The cache of a layer for an empty sequence."""
    empty = np.empty((0, shape.n_kv_heads, shape.head_dim))
    return LayerCache(empty, empty)


class Reference:
    """A context with any number of sequences, without limits and checks.

    Args:
        weights: the model.
        round_inputs: rounds the input vector of each matrix product; tolerances are derived with it.
        round_kv: rounds the keys and values of the KV cache.
        round_queries: rounds the queries that are multiplied with cached keys.
        round_attention: rounds the attention weights that are multiplied with cached values.
    """

    name: ClassVar[str] = "the float64 reference"

    def __init__(
        self,
        weights: Weights,
        round_inputs: Rounding = exact,
        round_kv: Rounding = exact,
        round_queries: Rounding = exact,
        round_attention: Rounding = exact,
    ) -> None:
        self._shape = weights.shape
        self._tensors = weights.doubles()
        self._frequencies = rope_frequencies(weights)
        self._section_of = section_of_pairs(weights.shape)
        self._round_inputs = round_inputs
        self._round_kv = round_kv
        self._round_queries = round_queries
        self._round_attention = round_attention
        self._sequences: dict[int, list[LayerCache]] = {}
        self._offsets: dict[int, list[Offset]] = {}
        self._biases: dict[int, Array] = {}

    def length(self, seq_id: int = 0) -> int:
        """The number of tokens of a sequence."""
        return len(self._caches(seq_id)[0].keys)

    def table(self, tokens: Sequence[int]) -> Array:
        """The rows of the embedding table for tokens, float64 [T, E]."""
        return self._tensors["token_embd.weight"][list(tokens)]

    def decode(self, tokens: Sequence[int], seq_id: int = 0) -> Array:
        """Append tokens to a sequence; returns the logits after each, float64 [T, V]."""
        return self.logits(self.embed(tokens, seq_id))

    def logits(self, states: Array) -> Array:
        """The logits [T, V] of hidden states [T, E], float64."""
        return self._linear("token_embd" if self._shape.tied else "output", states)

    def embed(self, tokens: Sequence[int], seq_id: int = 0) -> Array:
        """Append tokens to a sequence; returns the hidden state of each after the last norm, float64 [T, E]."""
        return self.embed_rows(self.table(tokens), seq_id)

    def layer_states(self, tokens: Sequence[int], seq_id: int = 0) -> Array:
        """Append tokens to a sequence; returns the output of each layer, float64 [L, T, E]."""
        return self._layers(self.table(tokens), seq_id)

    def embed_rows(
        self,
        x: Array,
        seq_id: int = 0,
        *,
        bidirectional: bool = False,
        offsets: Sequence[Offset] | None = None,
        bias: Array | None = None,
    ) -> Array:
        """The same for embedding rows [T, E] in place of tokens.

        Args:
            x: the rows.
            seq_id: the sequence.
            bidirectional: whether the rows attend to each other in both directions.
            offsets: M-RoPE offsets in time, height and width from the position of the first row [T].
            bias: attention biases of the rows [T].
        """
        outputs = self._layers(x, seq_id, bidirectional=bidirectional, offsets=offsets, bias=bias)
        return self._norm("output_norm", outputs[-1])

    def _layers(
        self,
        x: Array,
        seq_id: int,
        *,
        bidirectional: bool = False,
        offsets: Sequence[Offset] | None = None,
        bias: Array | None = None,
    ) -> Array:
        """The output of each layer for new embedding rows [T, E], float64 [L, T, E]."""
        caches = self._caches(seq_id)
        rotations = self._rotations(self._append_positions(self._offsets.setdefault(seq_id, []), len(x), offsets))
        biases = np.concatenate((self._biases_of(seq_id), np.zeros(len(x)) if bias is None else bias))
        self._biases[seq_id] = biases
        outputs: list[Array] = []
        for layer, cache in enumerate(caches):
            normed = self._norm(f"blk.{layer}.attn_norm", x)
            x = x + self._attention(layer, normed, cache, rotations, bidirectional, biases)
            x = x + self._feed_forward(layer, self._norm(f"blk.{layer}.ffn_norm", x))
            x = self._steered(layer, x)
            outputs.append(x)
        return np.stack(outputs)

    def fork(self, src: int, dst: int, end: int | None = None) -> None:
        """Make ``dst`` a copy of ``src[:end]``."""
        self._sequences[dst] = [LayerCache(cache.keys[:end], cache.values[:end]) for cache in self._caches(src)]
        self._offsets[dst] = self._offsets.get(src, [])[:end]
        self._biases[dst] = self._biases_of(src)[:end]

    def truncate(self, length: int, seq_id: int = 0) -> None:
        """Forget the tokens from position ``length`` on."""
        self.cut(length, self.length(seq_id), seq_id)

    def cut(self, start: int, end: int, seq_id: int = 0) -> None:
        """Forget [start, end); later tokens move down."""
        del self._offsets.setdefault(seq_id, [])[start:end]
        self._biases[seq_id] = np.delete(self._biases_of(seq_id), np.s_[start:end])
        for cache in self._caches(seq_id):
            cache.keys = np.delete(cache.keys, np.s_[start:end], axis=0)
            cache.values = np.delete(cache.values, np.s_[start:end], axis=0)

    def drop(self, seq_id: int = 0) -> None:
        """Forget a sequence."""
        self._sequences.pop(seq_id, None)
        self._offsets.pop(seq_id, None)
        self._biases.pop(seq_id, None)

    @staticmethod
    def _append_positions(earlier: list[Offset], n: int, offsets: Sequence[Offset] | None) -> Array:
        """Add the offsets of ``n`` tokens; returns the positions of all tokens, [S, 3]."""
        positions, next_position = _positions(earlier)
        start = next_position
        for i in range(n):
            position = (next_position,) * 3 if offsets is None else tuple(start + each for each in offsets[i])
            earlier.append((position[0] - next_position, position[1] - next_position, position[2] - next_position))
            positions.append(position)
            next_position = max(next_position, *(each + 1 for each in position))
        return np.array(positions, np.float64)

    def _caches(self, seq_id: int) -> list[LayerCache]:
        if seq_id not in self._sequences:
            self._sequences[seq_id] = [empty_cache(self._shape) for _ in range(self._shape.n_layers)]
        return self._sequences[seq_id]

    def _biases_of(self, seq_id: int) -> Array:
        """The attention bias of each key, [S]."""
        return self._biases.get(seq_id, np.empty(0))

    def _attention(
        self,
        layer: int,
        x: Array,
        cache: LayerCache,
        rotations: NDArray[np.complex128],
        bidirectional: bool,
        biases: Array | float = 0.0,
    ) -> Array:
        """Attention of the new tokens, x [T, E], to all tokens, cached and new.

        ``rotations`` [S, 1, D/2] and ``biases`` [S] are those of the keys.
        """
        shape, first = self._shape, len(cache.keys)
        q = self._head_norm(layer, "attn_q", self._heads(layer, "attn_q", x))  # [T, H, D]
        k = self._head_norm(layer, "attn_k", self._heads(layer, "attn_k", x))  # [T, K, D]
        v = self._heads(layer, "attn_v", x)
        cache.keys = np.concatenate((cache.keys, self._round_kv(k)))
        cache.values = np.concatenate((cache.values, self._round_kv(v)))
        length = len(cache.keys)
        group = shape.n_heads // shape.n_kv_heads
        keys = self._rotated(cache.keys, rotations).repeat(group, axis=1)  # [S, H, D]
        values = cache.values.repeat(group, axis=1)
        queries = self._round_queries(self._rotated(q, rotations[first:]))
        scores = queries.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) / np.sqrt(shape.head_dim)  # [H, T, S]
        scores += np.where(np.arange(length) == np.arange(first, length)[:, None], 0.0, biases)
        is_later = np.arange(length)[None, :] > np.arange(first, length)[:, None]  # [T, S]
        scores[:, is_later & (not bidirectional)] = -np.inf
        attended = self._round_attention(_softmax(scores)) @ values.transpose(1, 0, 2)  # [H, T, D]
        return self._linear(f"blk.{layer}.attn_output", attended.transpose(1, 0, 2).reshape(len(x), -1))

    def _steered(self, layer: int, x: Array) -> Array:
        """A layer's output [T, E] plus the direction of a control vector, if there is one."""
        direction = self._tensors.get(f"blk.{layer}.direction")
        return x if direction is None else x + direction

    def _feed_forward(self, layer: int, x: Array) -> Array:
        gate = self._linear(f"blk.{layer}.ffn_gate", x)
        gated = gate / (1 + np.exp(-gate)) * self._linear(f"blk.{layer}.ffn_up", x)
        return self._linear(f"blk.{layer}.ffn_down", gated)

    def _heads(self, layer: int, name: str, x: Array) -> Array:
        return self._linear(f"blk.{layer}.{name}", x).reshape(len(x), -1, self._shape.head_dim)

    def _linear(self, name: str, x: Array) -> Array:
        product: Array = self._round_inputs(x) @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return product if bias is None else product + bias

    def _head_norm(self, layer: int, name: str, x: Array) -> Array:
        return self._norm(f"blk.{layer}.{name}_norm", x) if f"blk.{layer}.{name}_norm.weight" in self._tensors else x

    def _norm(self, name: str, x: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normalised: Array = x / np.sqrt(mean_square + self._shape.norm_eps) * self._tensors[f"{name}.weight"]
        return normalised

    def _rotations(self, positions: Array) -> NDArray[np.complex128]:
        """The rotation of each pair of a head at positions [S, 3], as a factor of complex numbers, [S, 1, D/2]."""
        angles = positions[:, None, self._section_of] * self._frequencies
        return np.asarray(np.exp(1j * angles))

    def _rotated(self, x: Array, rotation: NDArray[np.complex128]) -> Array:
        """Rotate heads, x [S, heads, D].

        The two numbers of a rotated pair are adjacent in llama files and half a head apart in qwen files.
        """
        half = self._shape.head_dim // 2
        if self._shape.architecture == "llama":
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * rotation
            return np.stack((pairs.real, pairs.imag), axis=-1).reshape(x.shape)
        pairs = (x[..., :half] + 1j * x[..., half:]) * rotation
        return np.concatenate((pairs.real, pairs.imag), axis=-1)


def _positions(offsets: Sequence[Offset]) -> tuple[list[tuple[int, ...]], int]:
    """The positions of tokens with these offsets, and the position of the next token."""
    positions: list[tuple[int, ...]] = []
    next_position = 0
    for offset in offsets:
        positions.append(tuple(next_position + each for each in offset))
        next_position = max(next_position, *(each + 1 for each in positions[-1]))
    return positions, next_position


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normalised: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normalised
