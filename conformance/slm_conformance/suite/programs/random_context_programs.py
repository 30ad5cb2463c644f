"""Makes random programs, and shrinks failing ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from slm_conformance.oracle.runs import Kind, Run
from slm_conformance.suite.programs.context_steps import (
    Call,
    Clear,
    Cut,
    Decode,
    Drop,
    Dump,
    Fork,
    Restore,
    Sizes,
    Step,
    Truncate,
    Variant,
)
from slm_conformance.suite.programs.contract_model import ContractModel
from slm_core.types import Capability, EditLevel

_T = TypeVar("_T")
N_STEPS = 40
SIZES = (Sizes(24, 4, 8, 9), Sizes(12, 3, 5, 5), Sizes(48, 6, 16, 12), Sizes(200, 4, 70, 70))
"""Sizes of contexts, in turn: small ones fill up; the last has sequences longer than most engines' pages or blocks."""
_KINDS: dict[type[Step], float] = {
    Decode: 0.36,
    Fork: 0.16,
    Cut: 0.15,
    Truncate: 0.06,
    Dump: 0.09,
    Restore: 0.13,
    Drop: 0.04,
    Clear: 0.01,
}
_VARIANTS: dict[Variant, float] = {
    "own": 0.38,
    "foreign": 0.26,
    "format": 0.1,
    "truncated": 0.04,
    "short": 0.12,
    "model": 0.04,
    "token": 0.06,
}
_N_NAMES = 3


class ProgramMaker:
    """Makes programs of mostly legal steps; a model of the contract knows which edits are legal.

    Args:
        n_vocab: vocabulary size V.
        edit_level: the contexts' edit level.
        capabilities: the contexts' capabilities.
        seed: equal programs for an equal seed.
        sizes: sizes of the context.
    """

    def __init__(
        self, n_vocab: int, edit_level: EditLevel, capabilities: frozenset[Capability], seed: int, sizes: Sizes
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._model = ContractModel(n_vocab, edit_level, capabilities, sizes)
        self._sizes = sizes

    def make(self, n_steps: int = N_STEPS) -> list[Step]:
        """A program."""
        program: list[Step] = []
        for kind in self._rng.choice(np.array(list(_KINDS)), n_steps, p=list(_KINDS.values())):
            program.append(self._step(kind))
            self._model.play(program[-1])
        return program

    def _step(self, kind: type[Step]) -> Step:
        if kind is Decode or (self._model.n_free == self._sizes.n_ctx and not self._rarely(0.1)):
            return self._decode()
        seq_id = self._sequence(0.95)
        if kind is Fork:
            return self._fork(seq_id)
        if kind is Truncate:
            return Truncate(seq_id, self._index(seq_id))
        if kind is Cut:
            ends = [self._index(seq_id), self._index(seq_id)]
            return Cut(seq_id, *(ends if self._rarely(0.05) else sorted(ends)))
        if kind is Dump or (kind is Restore and not self._model.dumps):
            return Dump(seq_id, self._below(_N_NAMES))
        if kind is Restore:
            names = sorted(self._model.dumps)
            return Restore(self._sequence(0.6), names[self._below(len(names))], self._one_of(_VARIANTS))
        return Drop(seq_id) if kind is Drop else Clear()

    def _fork(self, src: int) -> Step:
        """A fork into an empty sequence; if there is none, usually one is emptied."""
        empty = [seq_id for seq_id in range(self._sizes.n_seq_max) if not self._model.length(seq_id)]
        if self._rarely(0.05):
            return Fork(src, self._sequence(0.5), None)
        if not empty:
            return Drop(self._sequence(1))
        return Fork(src, empty[self._below(len(empty))], self._index(src) if self._rarely(0.6) else None)

    def _decode(self) -> Decode:
        runs: list[Run] = []
        for _ in range(1 + self._below(3)):
            n_remaining = self._sizes.n_batch - sum(len(run.tokens) for run in runs)
            if n_remaining > 0 or self._rarely(0.05):
                runs.append(self._run(max(1, n_remaining) if self._rarely(0.95) else self._sizes.longest))
        call: Call = self._one_of({"decode": 0.8, "embed": 0.12, "top": 0.08})
        if call != "decode" and not self._has(Capability.EMBEDDINGS if call == "embed" else Capability.DEVICE_SAMPLING):
            call = "decode"
        in_own_sequences = len({run.seq_id for run in runs}) == len(runs)
        plain = in_own_sequences and all(run.kind == "tokens" and not run.block for run in runs)
        every = int(self._rng.choice([1, 2, 3, 0], p=[0.76, 0.1, 0.07, 0.07]))
        return Decode(tuple(runs), call, every, plain and self._rarely(0.3))

    def _run(self, n_free: int) -> Run:
        most = min(n_free, self._sizes.longest if self._rarely(0.25) else 3)
        tokens = self._rng.integers(0, self._model.n_vocab, 1 + self._below(most)).tolist()
        if self._rarely(0.02):
            tokens[-1] = self._model.n_vocab
        shift = int(self._rng.choice([-1, 1])) if self._rarely(0.03) else 0
        kind: Kind = self._one_of({"tokens": 0.76, "rows": 0.12, "image": 0.12})
        if kind == "image" and not self._has(Capability.MROPE_POSITIONS):
            kind = "rows"
        if kind == "rows" and not self._has(Capability.EMBEDDING_INPUT):
            kind = "tokens"
        block = self._rarely(0.15) and self._has(Capability.BIDIRECTIONAL_BLOCKS)
        return Run(self._sequence(0.3), shift, tuple(tokens), kind, block)

    def _has(self, capability: Capability) -> bool:
        """Whether to use a capability: if it is declared, and otherwise sometimes, to be refused."""
        return capability in self._model.capabilities or self._rarely(0.03)

    def _sequence(self, p_full: float) -> int:
        """A sequence; with probability ``p_full`` one that is not empty, if there is one."""
        if self._rarely(0.02):
            return self._sizes.n_seq_max
        full = [seq_id for seq_id in range(self._sizes.n_seq_max) if self._model.length(seq_id)]
        return full[self._below(len(full))] if full and self._rarely(p_full) else self._below(self._sizes.n_seq_max)

    def _index(self, seq_id: int) -> int:
        length = self._model.length(seq_id)
        if self._rarely(0.03):
            return length + 1
        if self._rarely(0.25):  # at the block sizes of engines
            edges = [i for i in (0, 1, 63, 64, 65, length - 1, length) if 0 <= i <= length]
            return edges[self._below(len(edges))]
        return self._below(length + 1)

    def _one_of(self, choices: dict[_T, float]) -> _T:
        return list(choices)[int(self._rng.choice(len(choices), p=list(choices.values())))]

    def _below(self, n: int) -> int:
        return int(self._rng.integers(n))

    def _rarely(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)


def shrink(program: Sequence[Step], fails: Callable[[Sequence[Step]], bool], n_tries: int = 400) -> list[Step]:
    """A shorter program that also fails: omits steps, many at a time at first, then simplifies the others.

    Args:
        program: a failing program.
        fails: whether a program fails.
        n_tries: most programs to try.
    """
    smallest, tried, restart = list(program), 0, True
    while restart:
        restart = False
        for smaller in _smaller(smallest):
            if tried == n_tries:
                return smallest
            tried += 1
            if fails(smaller):
                smallest, restart = smaller, True
                break
    return smallest


def _smaller(program: list[Step]) -> Iterator[list[Step]]:
    size = max(1, len(program) // 2)
    while size:
        for first in range(len(program) - size, -1, -size):
            yield program[:first] + program[first + size :]
        size //= 2
    for i, step in enumerate(program):
        for plainer in _plainer(step):
            yield [*program[:i], plainer, *program[i + 1 :]]


def _plainer(step: Step) -> Iterator[Step]:
    if isinstance(step, Decode):
        yield from _plainer_decodes(step)
    if isinstance(step, Fork) and step.end is not None:
        yield dataclasses.replace(step, end=None)
    if isinstance(step, Restore) and step.variant in ("foreign", "format"):
        yield dataclasses.replace(step, variant="own")


def _plainer_decodes(step: Decode) -> Iterator[Decode]:
    for simple in (
        dataclasses.replace(step, call="decode"),
        dataclasses.replace(step, every=1),
        dataclasses.replace(step, woven=False),
    ):
        if simple != step:
            yield simple
    for i, run in enumerate(step.runs):
        before, after = step.runs[:i], step.runs[i + 1 :]
        if len(step.runs) > 1:
            yield dataclasses.replace(step, runs=(*before, *after))
        for plainer in _plainer_runs(run):
            yield dataclasses.replace(step, runs=(*before, plainer, *after))


def _plainer_runs(run: Run) -> Iterator[Run]:
    if len(run.tokens) > 1:
        for n in (1, len(run.tokens) // 2, len(run.tokens) - 1):
            yield dataclasses.replace(run, tokens=run.tokens[:n])
    if run.block:
        yield dataclasses.replace(run, block=False)
    if run.kind != "tokens":
        yield dataclasses.replace(run, kind="tokens")
