"""Runs: consecutive inputs of one sequence in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["tokens", "rows", "image"]

IMAGE_WIDTH = 2
"""The number of patches in a row of an image."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive inputs of one sequence in a batch.

    Attributes:
        seq_id: the sequence.
        shift: the distance of the first position from the right one; 0 is right.
        tokens: the tokens; for rows and images, the seeds of the rows.
        kind: tokens, embedding rows, or the rows of an image, which have M-RoPE offsets.
        block: whether the inputs form a bidirectional block.
    """

    seq_id: int
    shift: int
    tokens: tuple[int, ...]
    kind: Kind = "tokens"
    block: bool = False


def image_offsets(n: int) -> list[tuple[int, int, int]]:
    """M-RoPE offsets of an image of ``n`` rows: its patches in time, height and width."""
    return [(0, i // IMAGE_WIDTH, i % IMAGE_WIDTH) for i in range(n)]
