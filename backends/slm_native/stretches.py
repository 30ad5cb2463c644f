"""Which blocks of a model are computed in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_native.blocks import BlockRunner, Fused, Turn
from slm_native.kernels import KernelSet, PlainBlock
from slm_native.kv import Array
from slm_native.weights import Block


class Stretch(NamedTuple):
    """Blocks from ``first`` to ``stop``, as one call; or one of them, of which a part may be that."""

    first: int
    stop: int
    fused: Fused | None

    @property
    def is_one_call(self) -> bool:
        """Whether nothing but the call is to be done."""
        return self.fused is not None and self.stop > self.first + 1

    def run(
        self,
        streams: Sequence[Array],
        turns: Sequence[Turn],
        own: Sequence[Array | None],
        wanted: NDArray[np.bool_] | None,
    ) -> list[Array]:
        """What leaves the last of several blocks, of streams that enter the first; see ``FusedBlocks.run``.

        Args:
            streams: [T, E] each.
            turns: of all blocks of the model.
            own: their own embeddings of the tokens, likewise.
            wanted: which tokens' rows are wanted [T], None for all.
        """
        assert self.fused is not None, "one call"
        mine = turns[self.first : self.stop]
        caches = [turn.cache for turn in mine if turn.cache is not None]
        rotations = [turn.place.rotation for turn in mine]
        return self.fused.blocks.run(streams, rotations, mine[0].pages, caches, own[self.first : self.stop], wanted)


def one_by_one(n_blocks: int) -> list[Stretch]:
    """Every block by itself, step by step."""
    return [Stretch(i, i + 1, None) for i in range(n_blocks)]


def fused_stretches(
    kernels: KernelSet, runner: BlockRunner, blocks: Sequence[Block], *, have_one_plan: bool
) -> list[Stretch]:
    """As many blocks in one call as can be.

    Args:
        kernels: whose call it is.
        runner: knows what a block is made of.
        blocks: of the model, all of them.
        have_one_plan: whether a batch is the same to all of them; else each is a call of its own.
    """
    plain = [runner.plain(block, layer) for block, layer in zip(blocks, runner.spec.layers, strict=True)]
    single = [None if each is None else _whole_or_begun(kernels, each) for each in plain]
    stretches: list[Stretch] = []
    for joins, group in itertools.groupby(range(len(blocks)), lambda i: have_one_plan and _joins(single[i])):
        several = list(group)
        if joins:
            as_one = _fused(kernels, [each for i in several if (each := plain[i]) is not None])
            stretches.append(Stretch(several[0], several[-1] + 1, as_one))
        else:
            stretches += [Stretch(i, i + 1, single[i]) for i in several]
    return stretches


def _whole_or_begun(kernels: KernelSet, plain: PlainBlock) -> Fused | None:
    return _fused(kernels, [plain]) or _fused(kernels, [plain.attention_alone()])


def _fused(kernels: KernelSet, plain: Sequence[PlainBlock]) -> Fused | None:
    made = kernels.fuse(plain)
    return None if made is None else Fused(made, plain[-1].is_whole)


def _joins(fused: Fused | None) -> bool:
    """Whether nothing is to be done between a block and another like it."""
    return fused is not None and fused.is_whole
