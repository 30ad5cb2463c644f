"""The engine of the toy: float32, one sequence at a time. In a real backend, your engine takes its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.weights import Weights, rope_frequencies, section_of_pairs
from slm_core.context.inputs import Held, HeldInput, bias_of, next_mrope_position, offset_of, row_of, token_of
from slm_core.types import EMBEDDED

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The KV cache entry of one token. It is never changed, so sequences can share it.

    Attributes:
        token: the token, with its embedding row and its bidirectional block, if any.
        keys: rotated to the token's position, float32 [L, K, D].
        values: float32 [L, K, D].
    """

    token: Held
    keys: Array
    values: Array


Run: TypeAlias = Callable[[Sequence[Held], Sequence[Cell]], tuple[list[Cell], Array]]
"""Runs tokens or rows after cells. Returns their cells, and the logits or the hidden state of each."""


Rotation: TypeAlias = tuple[Array, Array]
"""Cosines and sines of the angle of each pair of a head, [T, 1, D/2] each."""


class ToyEngine:
    """A forward pass without state.

    Args:
        weights: the model.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.shape = weights.shape
        self.n_vocab = weights.n_vocab
        self._tensors = weights.tensors
        self._frequencies = rope_frequencies(weights)
        self._section_of = section_of_pairs(weights.shape)

    def with_changes(self, changes: Mapping[str, Array]) -> ToyEngine:
        """The engine of the model with these sums added to its tensors, and with directions ``blk.N.direction`` [E]."""
        tensors = {name: self._tensors.get(name, np.float32(0)) + change for name, change in changes.items()}
        return ToyEngine(dataclasses.replace(self._weights, tensors={**self._tensors, **tensors}))

    @property
    def table(self) -> Array:
        """The embeddings of tokens, [V, E]."""
        return self._tensors["token_embd.weight"]

    def run(self, tokens: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], Array]:
        """Run tokens after ``past``; returns their cells and the logits after each, float32 [T, V]."""
        cells, states = self.states(tokens, past)
        return cells, self.logits(states)

    def states(self, tokens: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], Array]:
        """Run tokens after ``past``; returns their cells and hidden states after the last norm, float32 [T, E]."""
        return self._forward(tokens, past, bidirectional=False)

    def predict(self, tokens: Sequence[Held], token: int, n: int) -> Array:
        """The logits of the ``n`` tokens after ``tokens`` and ``token`` from the MTP layer, float32 [n, V].

        All hidden states are computed again: nothing is kept between calls.
        """
        layer, states = ToyEngine(self._weights.mtp_layer()), np.zeros((1, self.shape.n_embd), np.float32)
        if tokens:
            states = np.concatenate([states, self.states(tokens, [])[1]])
        inputs: list[Held] = [*tokens, token]
        cells: list[Cell] = []
        rows = []
        for _ in range(n):
            new_cells, outputs = layer.states(self._mtp_inputs(inputs, states), cells)
            rows.append(self.logits(outputs[-1:]))
            cells, inputs, states = cells + new_cells, [int(rows[-1].argmax())], outputs[-1:]
        return np.concatenate(rows)

    def _mtp_inputs(self, tokens: Sequence[Held], states: Array) -> list[Held]:
        """The inputs of the MTP layer for tokens and the hidden states before them [T, E], as embedding rows."""
        prefix = f"blk.{self.shape.n_layers}.nextn."
        normed = self._norm(f"{prefix}enorm", self._embedded(tokens)), self._norm(f"{prefix}hnorm", states)
        projected = self._linear(f"{prefix}eh_proj", np.concatenate(normed, axis=1))
        return [HeldInput(EMBEDDED, row, bias=bias_of(one)) for one, row in zip(tokens, projected, strict=True)]

    def bidirectional_block(self, tokens: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], Array]:
        """Run tokens that attend to each other and to ``past``; returns their cells and hidden states [T, E]."""
        return self._forward(tokens, past, bidirectional=True)

    def step(self, token: Held, past: Sequence[Cell]) -> tuple[Cell, Array]:
        """Run one token after ``past``; returns its cell and the logits, float32 [V]."""
        (cell,), (logits,) = self.run([token], past)
        return cell, logits

    def state(self, token: Held, past: Sequence[Cell]) -> tuple[Cell, Array]:
        """Run one token after ``past``; returns its cell and its hidden state after the last norm, float32 [E]."""
        (cell,), (state,) = self.states([token], past)
        return cell, state

    def logits(self, states: Array) -> Array:
        """The logits [T, V] of hidden states [T, E]."""
        return self._linear("token_embd" if self.shape.tied else "output", states)

    def _forward(
        self, tokens: Sequence[Held], past: Sequence[Cell], *, bidirectional: bool
    ) -> tuple[list[Cell], Array]:
        """The cells and hidden states of tokens after ``past``."""
        cells, outputs = self.layers(tokens, past, bidirectional=bidirectional)
        return cells, self._norm("output_norm", outputs[-1])

    def layers(
        self, tokens: Sequence[Held], past: Sequence[Cell], *, bidirectional: bool
    ) -> tuple[list[Cell], list[Array]]:
        """The cells of tokens after ``past``, and the output of each layer, float32 [T, E]."""
        shape, n = self.shape, len(tokens)
        keys_and_values = np.empty((2, shape.n_layers, len(past) + n, shape.n_kv_heads, shape.head_dim), np.float32)
        if past:
            keys_and_values[0, :, :-n] = np.stack([cell.keys for cell in past], axis=1)
            keys_and_values[1, :, :-n] = np.stack([cell.values for cell in past], axis=1)
        rotation = self._rotation(np.array(self.mrope_positions(tokens, past)))
        biases = self.key_biases([*(cell.token for cell in past), *tokens])
        x, outputs = self._embedded(tokens), []
        for layer in range(shape.n_layers):
            block = f"blk.{layer}."
            normalised, (keys, values) = self._norm(block + "attn_norm", x), keys_and_values[:, layer]
            x = x + self._attend(block, normalised, rotation, keys, values, biases, bidirectional)
            x = self._feed_forward(block, x)
            x = x + self._tensors[block + "direction"] if block + "direction" in self._tensors else x
            outputs.append(x)
        # Copies: each view would keep the arrays of all earlier tokens in memory.
        cells = [
            Cell(token, keys_and_values[0, :, i - n].copy(), keys_and_values[1, :, i - n].copy())
            for i, token in enumerate(tokens)
        ]
        return cells, outputs

    def _embedded(self, tokens: Sequence[Held]) -> Array:
        return np.stack([self.table[token_of(one)] if (row := row_of(one)) is None else row for one in tokens])

    def key_biases(self, inputs: Sequence[Held]) -> Array:
        """The attention bias of each key, float32 [S]."""
        return np.array([bias_of(one) for one in inputs], np.float32)

    def moved(self, cell: Cell, by: int) -> Cell:
        """The cell ``by`` positions later: the key is rotated again, the value is the same."""
        return Cell(cell.token, self._rotate(cell.keys, self._rotation(np.full((1, 3), by))), cell.values)

    def mrope_positions(self, tokens: Sequence[Held], past: Sequence[Cell]) -> list[NDArray[np.int64]]:
        """The M-RoPE positions of tokens after ``past``, in time, height and width, each [3]."""
        position, positions = next_mrope_position(cell.token for cell in past), []
        for token in tokens:
            positions.append(position + np.array(offset_of(token)))
            position = next_mrope_position([token], position)
        return positions

    def _feed_forward(self, block: str, x: Array) -> Array:
        h = self._norm(block + "ffn_norm", x)
        gate = self._linear(block + "ffn_gate", h)
        return x + self._linear(block + "ffn_down", gate / (1 + np.exp(-gate)) * self._linear(block + "ffn_up", h))

    def _attend(
        self,
        block: str,
        x: Array,
        rotation: Rotation,
        keys: Array,
        values: Array,
        biases: Array,
        bidirectional: bool,
    ) -> Array:
        """Attention of the new tokens, x [T, E], to all tokens. It fills the last T keys and values [S, K, D]."""
        shape, n = self.shape, len(x)
        keys[-n:] = self._rotate(self._heads(block + "attn_k", x), rotation)
        values[-n:] = self._linear(block + "attn_v", x).reshape(n, -1, shape.head_dim)
        q = self._rotate(self._heads(block + "attn_q", x), rotation)
        q = q.reshape(n, shape.n_kv_heads, -1, shape.head_dim).transpose(1, 2, 0, 3)  # [K, G, T, D]
        scores = q @ keys.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(shape.head_dim))  # [K, G, T, S]
        own = np.arange(len(keys)) == np.arange(len(keys) - n, len(keys))[:, None]  # [T, S]
        scores += self.added_biases(biases, own)
        if not bidirectional:
            scores[..., np.arange(len(keys)) > np.arange(len(keys) - n, len(keys))[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(n, -1)
        return self._linear(block + "attn_output", mixed)

    @staticmethod
    def added_biases(biases: Array, own: NDArray[np.bool_]) -> Array:
        """The biases [S] that are added to scores [T, S]: 0 where a query meets its own key."""
        return np.where(own, np.float32(0), biases)

    def _heads(self, name: str, x: Array) -> Array:
        return self._head_norm(name, self._linear(name, x).reshape(len(x), -1, self.shape.head_dim))

    def _linear(self, name: str, x: Array) -> Array:
        result: Array = x @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _norm(self, name: str, x: Array) -> Array:
        scale = np.float32(1) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.shape.norm_eps))
        normalised: Array = x * scale * self._tensors[f"{name}.weight"]
        return normalised

    def _head_norm(self, name: str, x: Array) -> Array:
        return self._norm(f"{name}_norm", x) if f"{name}_norm.weight" in self._tensors else x

    def _rotation(self, positions: NDArray[np.int64]) -> Rotation:
        """The rotation to M-RoPE positions [T, 3]."""
        angles = positions[:, self._section_of] * self._frequencies
        return np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]

    def _rotate(self, x: Array, rotation: Rotation) -> Array:
        """Rotate heads, [T, heads, D]; pairs are adjacent in llama files, else half a head apart."""
        cos, sin = rotation
        rotated = np.empty_like(x)
        half = self.shape.head_dim // 2
        adjacent = self.shape.architecture == "llama"
        first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if adjacent else (np.s_[..., :half], np.s_[..., half:])
        rotated[first] = x[first] * cos - x[second] * sin
        rotated[second] = x[first] * sin + x[second] * cos
        return rotated
