"""Packs generated conversations into training batches of a fixed shape."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from attention import MASKED
from conversations import generate
from rendering import Encoded, Encoder

# Positions of some conversations jump ahead between messages, so that the model also meets distances that are longer
# than a training row (and gaps, as removed messages leave in a KV cache).
JUMP_SHARE = 0.15
LONGEST_JUMP = 300
MAX_POSITION = 1023


@dataclass
class Batch:
    """Rows of packed conversations: R rows of T tokens."""

    ids: torch.Tensor  # [R, T]
    targets: torch.Tensor  # [R, T], 1 where the token is trained on
    bias: torch.Tensor  # [R, 1, T, T] bfloat16, additive: causal within each conversation
    positions: torch.Tensor  # [R, T], restarting at 0 with every conversation
    n_tokens: int  # without padding


class Packer:
    """Endless batches of conversations.

    Args:
        encoder: turns a conversation into tokens.
        rng: source of the conversations.
        rows: rows per batch.
        length: tokens per row; longer conversations are skipped.
        mix: weight per skill, as in `conversations.MIX`.
        drills: share per drill, as in `conversations.DRILLS`.
    """

    MISSES = 10  # conversations that may fail to fit before a batch counts as full

    def __init__(
        self,
        encoder: Encoder,
        rng: random.Random,
        rows: int,
        length: int,
        mix: Mapping[str, float],
        drills: Mapping[str, float],
    ) -> None:
        self._encoder, self._rng = encoder, rng
        self._rows, self._length = rows, length
        self._mix, self._drills = mix, drills
        self._boundary = encoder.tokenizer.token_to_id("<|im_start|>")

    def batches(self) -> Iterator[Batch]:
        """Yield batches for ever."""
        while True:
            yield self._collate(self._fill())

    def _fill(self) -> list[list[Encoded]]:
        """Best-fit packing: each conversation goes to the fullest row that still has room."""
        rows: list[list[Encoded]] = [[] for _ in range(self._rows)]
        used = [0] * self._rows
        misses = 0
        while misses < self.MISSES:
            encoded = self._encoder.encode(generate(self._rng, mix=self._mix, drills=self._drills))
            size = len(encoded.ids)
            if size > self._length or not encoded.turns:
                continue
            fitting = [row for row in range(self._rows) if used[row] + size <= self._length]
            if not fitting:
                misses += 1
                continue
            fullest = max(fitting, key=used.__getitem__)
            rows[fullest].append(encoded)
            used[fullest] += size
        return rows

    def _collate(self, rows: list[list[Encoded]]) -> Batch:
        shape = (self._rows, self._length)
        ids, targets, segments, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(4))
        for row, conversations in enumerate(rows):
            start = 0
            for number, encoded in enumerate(conversations):
                end = start + len(encoded.ids)
                ids[row, start:end] = torch.tensor(encoded.ids)
                targets[row, start:end] = torch.tensor(encoded.mask)
                segments[row, start:end] = number + 1
                positions[row, start:end] = torch.tensor(self._positions(encoded.ids))
                start = end
        causal = torch.ones(self._length, self._length, dtype=torch.bool).tril()
        visible = (segments[:, :, None] == segments[:, None, :]) & causal
        bias = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill_(~visible, MASKED)
        return Batch(ids, targets, bias[:, None], positions, int((segments > 0).sum()))

    def _positions(self, ids: list[int]) -> list[int]:
        if self._rng.random() >= JUMP_SHARE:
            return list(range(len(ids)))
        positions, offset = [], 0
        for index, token in enumerate(ids):
            if token == self._boundary and self._rng.random() < 0.3:
                offset += self._rng.randint(1, LONGEST_JUMP)
            offset = min(offset, MAX_POSITION - len(ids))
            positions.append(index + offset)
        return positions
