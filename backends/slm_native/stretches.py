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

    def run(self, x: Array, turns: Sequence[Turn], wanted: NDArray[np.bool_] | None) -> Array:
        """What leaves the last of several blocks, of ``x`` that enters the first; see ``FusedBlocks.run``."""
        assert self.fused is not None, "one call"
        mine = turns[self.first : self.stop]
        caches = [turn.cache for turn in mine if turn.cache is not None]
        return self.fused.blocks.run(x, [turn.place.rotation for turn in mine], mine[0].pages, caches, wanted)


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
    single = [None if each is None else _fused(kernels, [each]) for each in plain]
    stretches: list[Stretch] = []
    for joins, group in itertools.groupby(range(len(blocks)), lambda i: have_one_plan and _joins(blocks[i], single[i])):
        several = list(group)
        if joins:
            as_one = _fused(kernels, [each for i in several if (each := plain[i]) is not None])
            stretches.append(Stretch(several[0], several[-1] + 1, as_one))
        else:
            stretches += [Stretch(i, i + 1, single[i]) for i in several]
    return stretches


def _fused(kernels: KernelSet, plain: Sequence[PlainBlock]) -> Fused | None:
    made = kernels.fuse(plain)
    return None if made is None else Fused(made, plain[-1].up is not None)


def _joins(block: Block, fused: Fused | None) -> bool:
    """Whether nothing is to be done between the block and another like it."""
    beside = (block.embedding, block.output_scale, block.altup)
    return fused is not None and fused.is_whole and all(part is None for part in beside)
