"""Which blocks of a model are computed in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_native.blocks import BlockRunner, Fused, Turn
from slm_native.kernels import FusedRwkv, KernelSet, PlainBlock, RwkvBlock
from slm_native.kv import Array
from slm_native.recurrent import through_rwkv
from slm_native.weights import Block


class Stretch(NamedTuple):
    """Blocks from ``first`` to ``stop``, as one call; or one of them, of which a part may be that."""

    first: int
    stop: int
    fused: Fused | None

    def is_one_call(self, wanted: NDArray[np.bool_] | None) -> bool:
        """Whether nothing but the call is to be done, for what is wanted of the last block."""
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


class RwkvStretch(NamedTuple):
    """RWKV-7's blocks from ``first`` to ``stop`` as one call, where all rows are wanted."""

    first: int
    stop: int
    kernels: KernelSet
    blocks: FusedRwkv
    fused: Fused | None = None

    def is_one_call(self, wanted: NDArray[np.bool_] | None) -> bool:
        """Likewise."""
        return wanted is None

    def run(
        self,
        streams: Sequence[Array],
        turns: Sequence[Turn],
        own: Sequence[Array | None],
        wanted: NDArray[np.bool_] | None,
    ) -> list[Array]:
        """Likewise, of one stream."""
        (x,) = streams
        layers = [turn.state for turn in turns[self.first : self.stop] if turn.state is not None]
        return [through_rwkv(self.kernels, self.blocks, x, turns[self.first].groups, layers)]


AnyStretch: TypeAlias = Stretch | RwkvStretch


def one_by_one(n_blocks: int) -> Sequence[AnyStretch]:
    """Every block by itself, step by step."""
    return [Stretch(i, i + 1, None) for i in range(n_blocks)]


def fused_stretches(
    kernels: KernelSet, runner: BlockRunner, blocks: Sequence[Block], *, have_one_plan: bool
) -> Sequence[AnyStretch]:
    """As many blocks in one call as can be.

    Args:
        kernels: whose call it is.
        runner: knows what a block is made of.
        blocks: of the model, all of them.
        have_one_plan: whether a batch is the same to all of them; else each is a call of its own.
    """
    if (rwkv := _rwkv_stretches(kernels, [runner.rwkv(block) for block in blocks])) is not None:
        return rwkv
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


def _rwkv_stretches(kernels: KernelSet, blocks: Sequence[RwkvBlock | None]) -> Sequence[AnyStretch] | None:
    """The last block, of which some rows may be wanted, and those before it; None where these are other blocks."""
    stretches, last = [], len(blocks) - 1
    for first, stop in ((0, last), (last, len(blocks))):
        whole = [block for block in blocks[first:stop] if block is not None]
        fused = kernels.fuse_rwkv(whole) if len(whole) == stop - first > 0 else None
        if fused is not None:
            stretches.append(RwkvStretch(first, stop, kernels, fused))
        elif stop > first:
            return None
    return stretches


def _whole_or_begun(kernels: KernelSet, plain: PlainBlock) -> Fused | None:
    return _fused(kernels, [plain]) or _fused(kernels, [plain.attention_alone()])


def _fused(kernels: KernelSet, plain: Sequence[PlainBlock]) -> Fused | None:
    made = kernels.fuse(plain)
    return None if made is None else Fused(made, plain[-1].is_whole)


def _joins(fused: Fused | None) -> bool:
    """Whether nothing is to be done between a block and another like it."""
    return fused is not None and fused.is_whole
