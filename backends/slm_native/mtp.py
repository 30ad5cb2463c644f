"""Multi-token prediction (MTP): an extra layer after the last one, which predicts one more token.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2): the layer at position p reads the embedding of token p, and
the model's hidden state of token p - 1 after the last norm. Its output, normalized, gives the logits of token p + 1,
and is the hidden state for the layer at position p + 1. As in llama.cpp, the state before the first token is zero, and
a draft continues with normalized states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.protocols import Batch
from slm_native.kernels import KernelSet, Linear, Norm, Weight
from slm_native.kv import Array
from slm_native.kv.plan import rows_by_sequence
from slm_native.steps import Step, StepInputs, run_steps

_KEPT_TOKENS = 65
"""States per sequence: for the longest draft and the token before it. Verification truncates to any of these tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class MtpWeights:
    """The weights of an MTP layer outside its transformer block."""

    embedding_norm: Norm | None  # [E]
    state_norm: Norm | None  # [E]
    projection: Linear  # (E, 2 E), embedding first
    output_norm: Norm | None  # [E]
    output: Linear  # (V, E)
    token_embd: Weight | None  # (V, E); None for the model's


class MtpLayer:
    """An MTP layer, lowered to steps.

    Args:
        kernels: the kernel set.
        weights: its weights outside the block.
        steps: the steps of its block.
    """

    def __init__(self, kernels: KernelSet, weights: MtpWeights, steps: Sequence[Step]) -> None:
        self._kernels = kernels
        self.weights = weights
        self._steps = steps

    def run(self, embedded: Array, states: Array, inputs: StepInputs) -> Array:
        """Write the layer's keys and values; returns its hidden states for the rows of the output mask.

        Args:
            embedded: embeddings of the tokens [T, E].
            states: the hidden state of the token before each token [T, E].
            inputs: the batch.

        Returns:
            [rows, E], normalized.
        """
        kernels, weights = self._kernels, self.weights
        normed = kernels.normed(embedded, weights.embedding_norm), kernels.normed(states, weights.state_norm)
        x = run_steps(self._steps, kernels.linear(kernels.concatenated(normed, axis=1), weights.projection), inputs)
        return kernels.normed(x, weights.output_norm) if len(x) else x


class Rows(NamedTuple):
    """The tokens of one sequence in a batch.

    Attributes:
        seq_id: the sequence.
        which: indices of the tokens in the batch [n].
        start: position of the first token.
    """

    seq_id: int
    which: NDArray[np.intp]
    start: int


@dataclass(slots=True, eq=False)
class BatchStates:
    """The hidden states before and after the tokens of a batch.

    Attributes:
        sequences: the tokens of each sequence of the batch.
        before: the state of the token before each sequence's first token in the batch [B, E].
        after: the state of each token [T, E]; filled in by the forward pass.
    """

    sequences: Sequence[Rows]
    before: Array
    after: Array | None = None

    def shifted(self, kernels: KernelSet, states: Array) -> Array:
        """The state of the token before each token [T, E]. ``states`` [T, E] are the states of the batch's tokens."""
        sources = np.empty(len(states), np.intp)
        for i, rows in enumerate(self.sequences):
            sources[rows.which] = [i, *(len(self.sequences) + rows.which[:-1])]
        return kernels.rows(kernels.concatenated([self.before, states]), sources)


def rows_of(batch: Batch) -> list[Rows]:
    """The tokens of each sequence of a batch."""
    every = np.arange(len(batch))
    return [
        Rows(seq_id, every[rows], int(batch.positions[rows][0])) for seq_id, rows in rows_by_sequence(batch.seq_ids)
    ]


class KeptStates:
    """The hidden states of the last tokens of each sequence.

    Args:
        kernels: the kernel set.
        n_embd: embedding width E.
    """

    def __init__(self, kernels: KernelSet, n_embd: int) -> None:
        self._kernels = kernels
        self.zero: Array = kernels.from_host(np.zeros((1, n_embd), np.float32))
        self._kept: dict[int, tuple[int, Array]] = {}  # first position, states [n, E]

    def at(self, seq_id: int, position: int) -> Array | None:
        """The state [1, E] of the token at a position of a sequence; None if it is not kept."""
        first, states = self._kept.get(seq_id, (0, self.zero[:0]))
        i = position - first
        return self._kernels.rows(states, slice(i, i + 1)) if 0 <= i < len(states) else None

    def keep(self, batch: BatchStates) -> None:
        """Replace the stored states of the batch's sequences by the last states of the batch, which has run."""
        assert batch.after is not None, "the batch has run"
        for seq_id, which, start in batch.sequences:
            n_left_out = max(0, len(which) - _KEPT_TOKENS)
            self.put(seq_id, start + n_left_out, self._kernels.rows(batch.after, which[n_left_out:]))

    def put(self, seq_id: int, first: int, states: Array) -> None:
        """Keep the states [n, E] of the tokens from position ``first`` on."""
        self._kept[seq_id] = first, states

    def fork(self, src: int, dst: int) -> None:
        """Let ``dst``, a copy of ``src`` or of its beginning, share the states."""
        if src in self._kept:
            self._kept[dst] = self._kept[src]

    def forget(self, seq_id: int) -> None:
        """Forget the states of a sequence."""
        self._kept.pop(seq_id, None)
