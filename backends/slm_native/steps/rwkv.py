"""RWKV-7 layers: time mixing, then channel mixing. Both also read the previous token.

Shapes: B sequences of T tokens each, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_native.kernels.rwkv import RwkvBlock, RwkvOps
from slm_native.kv import Array
from slm_native.states import StateGroup, in_order
from slm_native.steps.base import Hidden, Step, StepInputs, shapes


@dataclass(frozen=True, slots=True, eq=False)
class RwkvStep(Step):
    """A whole layer.

    Attributes:
        ops: the kernel set.
        state: index of the layer among the recurrent layers.
        is_last: whether it is the model's last layer.
        block: weights of the layer.
    """

    ops: RwkvOps
    state: int
    is_last: bool
    block: RwkvBlock

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """Both mixings; in the last layer, channel mixing computes only the rows of the output mask."""
        ops, groups, block = self.ops, inputs.groups, self.block
        mixed = self._mix_time(ops.normed(x, block.time_norm), groups)
        if not self.is_last or inputs.output_mask is None:
            x = ops.add_product(x, mixed, block.time.output)
            return x + self._mix_channels(ops.normed(x, block.channel_norm), groups)
        needed = needed_rows(groups, inputs.output_mask)
        mixed = ops.rows(mixed, needed.rows)
        x = ops.add_product(ops.rows(x, needed.rows), mixed, block.time.output)
        channels = self._mix_some_channels(ops.normed(x, block.channel_norm), groups, needed)
        return ops.rows(x, needed.outputs) + channels

    def _mix_time(self, x: Array, groups: Sequence[StateGroup]) -> Array:
        """The input of time mixing's output matrix [T of the batch, E]; appends two parts of the new states."""
        ops, weights, outputs = self.ops, self.block.time, []
        for group in groups:
            rows = ops.rows(x, group.rows)
            batched = rows.reshape(len(group.before), -1, rows.shape[-1])
            last, state, _ = group.parts(self.state, ops)  # the third part is channel mixing's
            is_first = weights.first_value is None
            y, values, state = ops.time_mix(weights, batched, last, state, None if is_first else group.carried[0])
            if is_first:
                group.carried.append(values)
            group.after.append((_last_tokens(batched), state))
            outputs.append(y.reshape(len(rows), -1))
        return in_order(ops, groups, outputs)

    def _mix_channels(self, x: Array, groups: Sequence[StateGroup]) -> Array:
        """The output of channel mixing for ``x`` [T of the batch, E]; adds the third part of the new states."""
        ops, outputs = self.ops, []
        for group in groups:
            rows = ops.rows(x, group.rows)
            batched = rows.reshape(len(group.before), -1, rows.shape[-1])
            y = ops.channel_mix(self.block.channel, batched, group.parts(self.state, ops)[2])
            group.after[self.state] = (*group.after[self.state], _last_tokens(batched))
            outputs.append(y.reshape(rows.shape))
        return in_order(ops, groups, outputs)

    def _mix_some_channels(self, x: Array, groups: Sequence[StateGroup], needed: NeededRows) -> Array:
        """``_mix_channels`` for the rows of the output mask; ``x`` contains ``needed.rows`` only."""
        ops = self.ops
        states = [group.parts(self.state, ops)[2] for group in groups]  # [B, 1, E]
        for group, last in zip(groups, needed.last, strict=True):
            after = ops.rows(x, last).reshape(len(last), 1, -1)
            group.after[self.state] = (*group.after[self.state], after)
        rows_and_states = ops.concatenated([x, *(state.reshape(len(state), -1) for state in states)])
        tokens, before = (ops.rows(rows_and_states, rows) for rows in (needed.outputs, needed.before))
        if len(tokens) == 0:
            return tokens
        shape = len(tokens), 1, -1  # each token as a sequence of its own
        mixed = ops.channel_mix(self.block.channel, tokens.reshape(shape), before.reshape(shape))
        return mixed.reshape(len(tokens), -1)

    def describe(self) -> str:
        """See ``Step``."""
        time, channel = self.block.time, self.block.channel
        linears = {"receptance": time.receptance, "output": time.output, "up": channel.up, "down": channel.down}
        return f"RWKV-7 {shapes(linears)}"


class NeededRows(NamedTuple):
    """The rows that channel mixing reads to compute the rows of an output mask.

    Attributes:
        rows: the mask's rows, the row before each, and the last row of each sequence, in the order of the batch.
        outputs: indices of the mask's rows in ``rows``.
        before: indices of the rows before ``outputs``. Indices after ``rows`` are states before the batch, group by
            group.
        last: indices of the last rows of each group's sequences.
    """

    rows: NDArray[np.intp]
    outputs: NDArray[np.intp]
    before: NDArray[np.intp]
    last: Sequence[NDArray[np.intp]]


def needed_rows(groups: Sequence[StateGroup], output_mask: NDArray[np.bool_]) -> NeededRows:
    """The rows that channel mixing reads for an output mask [T of the batch]."""
    n_tokens, n_states = len(output_mask), 0
    before, last = np.empty(n_tokens, np.intp), []
    for group in groups:
        tokens = np.arange(n_tokens)[group.rows].reshape(len(group.before), -1)  # [B, T]
        before[tokens[:, 1:]] = tokens[:, :-1]
        before[tokens[:, 0]] = n_tokens + n_states + np.arange(len(tokens))
        n_states += len(tokens)
        last.append(tokens[:, -1])
    outputs = np.flatnonzero(output_mask)
    earlier = before[outputs]
    rows = np.unique(np.concatenate([outputs, earlier[earlier < n_tokens], *last]))
    indices = np.concatenate([np.zeros(n_tokens, np.intp), len(rows) + np.arange(n_states)])
    indices[rows] = np.arange(len(rows))
    return NeededRows(rows, indices[outputs], indices[earlier], [indices[each] for each in last])


def _last_tokens(x: Array) -> Array:
    """The last token of each sequence [B, 1, E], copied so that the other tokens can be freed."""
    return x[:, -1:] * 1
