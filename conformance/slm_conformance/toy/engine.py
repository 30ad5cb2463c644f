"""The toy's engine: float32, one token at a time. It stands for an engine of your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.weights import Weights, rope_frequencies, section_of_pairs
from slm_core.context.inputs import Held, next_mrope_position, offset_of, row_of, token_of

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """What the engine remembers of one token. Never changed, so sequences may share it.

    Attributes:
        token: the token, with its embedding row and its bidirectional block, if any.
        keys: rotated to the token's position, float32 [L, K, D].
        values: float32 [L, K, D].
    """

    token: Held
    keys: Array
    values: Array


Step: TypeAlias = Callable[[Held, Sequence[Cell]], tuple[Cell, Array]]
"""Runs one token or row after cells; returns its cell, and its logits or hidden state."""


class ToyEngine:
    """A forward pass without any state of its own.

    Args:
        weights: the model.
    """

    def __init__(self, weights: Weights) -> None:
        self.shape = weights.shape
        self.n_vocab = weights.n_vocab
        self._tensors = weights.tensors
        self._frequencies = rope_frequencies(weights)
        self._section_of = section_of_pairs(weights.shape)

    @property
    def table(self) -> Array:
        """The embeddings of tokens, [V, E]."""
        return self._tensors["token_embd.weight"]

    def step(self, token: Held, past: Sequence[Cell]) -> tuple[Cell, Array]:
        """Run one token after ``past``; returns what to remember of it, and the logits, float32 [V]."""
        cell, state = self.state(token, past)
        return cell, self.logits(state)

    def state(self, token: Held, past: Sequence[Cell]) -> tuple[Cell, Array]:
        """The same, with the hidden state after the last norm in place of logits, float32 [E]."""
        (cell,), (state,) = self.bidirectional_block([token], past)
        return cell, state

    def logits(self, state: Array) -> Array:
        """The logits [V] of a hidden state [E]."""
        return self._linear("token_embd" if self.shape.tied else "output", state)

    def bidirectional_block(self, tokens: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], list[Array]]:
        """Run tokens that attend to each other and to ``past``; returns their cells and hidden states."""
        shape, n = self.shape, len(tokens)
        kept = np.empty((2, shape.n_layers, len(past) + n, shape.n_kv_heads, shape.head_dim), np.float32)
        if past:
            kept[0, :, :-n] = np.stack([cell.keys for cell in past], axis=1)
            kept[1, :, :-n] = np.stack([cell.values for cell in past], axis=1)
        positions = self.mrope_positions(tokens, past)
        xs = [self.table[token_of(one)] if (row := row_of(one)) is None else row for one in tokens]  # of [E]
        for layer in range(shape.n_layers):
            block = f"blk.{layer}."
            mixed = self._attend(block, [self._norm(block + "attn_norm", x) for x in xs], positions, *kept[:, layer])
            xs = [self._fed(block, x + y) for x, y in zip(xs, mixed, strict=True)]
        # Copies: views would keep all that came before in memory, once for each cell.
        cells = [Cell(token, kept[0, :, i - n].copy(), kept[1, :, i - n].copy()) for i, token in enumerate(tokens)]
        return cells, [self._norm("output_norm", x) for x in xs]

    def moved(self, cell: Cell, by: int) -> Cell:
        """The cell as if its token stood ``by`` positions further on: the key is rotated again, the value stays."""
        return Cell(cell.token, self._rotate(cell.keys, np.full(3, by)), cell.values)

    def mrope_positions(self, tokens: Sequence[Held], past: Sequence[Cell]) -> list[NDArray[np.int64]]:
        """The M-RoPE positions of tokens after ``past``, in time, height and width, each [3]."""
        position, positions = next_mrope_position(cell.token for cell in past), []
        for token in tokens:
            positions.append(position + np.array(offset_of(token)))
            position = next_mrope_position([token], position)
        return positions

    def _fed(self, block: str, x: Array) -> Array:
        h = self._norm(block + "ffn_norm", x)
        gate = self._linear(block + "ffn_gate", h)
        return x + self._linear(block + "ffn_down", gate / (1 + np.exp(-gate)) * self._linear(block + "ffn_up", h))

    def _attend(
        self, block: str, xs: Sequence[Array], positions: Sequence[NDArray[np.int64]], keys: Array, values: Array
    ) -> list[Array]:
        """Attention of the tokens to all tokens; fills the last rows of ``keys`` and ``values``, [S, K, D]."""
        first = len(keys) - len(xs)
        for i, (x, position) in enumerate(zip(xs, positions, strict=True), first):
            keys[i] = self._rotate(self._heads(block + "attn_k", x), position)
            values[i] = self._linear(block + "attn_v", x).reshape(-1, self.shape.head_dim)
        return [self._mixed(block, x, keys, values, position) for x, position in zip(xs, positions, strict=True)]

    def _mixed(self, block: str, x: Array, keys: Array, values: Array, position: NDArray[np.int64]) -> Array:
        shape = self.shape
        q = self._rotate(self._heads(block + "attn_q", x), position)
        q = q.reshape(shape.n_kv_heads, -1, shape.head_dim)  # [K, G, D]
        scores = np.einsum("kgd,skd->kgs", q, keys) / np.float32(np.sqrt(shape.head_dim))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return self._linear(block + "attn_output", np.einsum("kgs,skd->kgd", weights, values).ravel())

    def _heads(self, name: str, x: Array) -> Array:
        return self._head_norm(name, self._linear(name, x).reshape(-1, self.shape.head_dim))

    def _linear(self, name: str, x: Array) -> Array:
        result: Array = self._tensors[f"{name}.weight"] @ x
        bias = self._tensors.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _norm(self, name: str, x: Array) -> Array:
        scale = np.float32(1) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.shape.norm_eps))
        normalised: Array = x * scale * self._tensors[f"{name}.weight"]
        return normalised

    def _head_norm(self, name: str, x: Array) -> Array:
        return self._norm(f"{name}_norm", x) if f"{name}_norm.weight" in self._tensors else x

    def _rotate(self, x: Array, by: NDArray[np.int64]) -> Array:
        """Rotate heads, [..., D], by positions [3]; pairs are adjacent in llama files, else half a head apart."""
        cos, sin = (f(by[self._section_of] * self._frequencies).astype(np.float32) for f in (np.cos, np.sin))
        rotated = np.empty_like(x)
        half = self.shape.head_dim // 2
        adjacent = self.shape.architecture == "llama"
        first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if adjacent else (np.s_[..., :half], np.s_[..., half:])
        rotated[first] = x[first] * cos - x[second] * sin
        rotated[second] = x[first] * sin + x[second] * cos
        return rotated
