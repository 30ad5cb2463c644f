"""Making random programs, and shrinking those that go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from slm_conformance.programs import (
    N_SEQ_MAX,
    Clear,
    ContractModel,
    Cut,
    Decode,
    Drop,
    Dump,
    Fork,
    Restore,
    Run,
    Step,
    Truncate,
)
from slm_core.types import Capability, EditLevel

N_STEPS = 40
_KINDS: dict[type[Step], float] = {
    Decode: 0.38,
    Fork: 0.14,
    Cut: 0.14,
    Truncate: 0.08,
    Dump: 0.08,
    Restore: 0.12,
    Drop: 0.05,
    Clear: 0.01,
}


class ProgramMaker:
    """Makes programs most of whose steps are legal; a model led along says what is there to be edited.

    Args:
        n_vocab: vocabulary size V.
        edit_level: what the contexts declare.
        capabilities: likewise.
        seed: equal programs for an equal one.
    """

    def __init__(self, n_vocab: int, edit_level: EditLevel, capabilities: frozenset[Capability], seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._declared = n_vocab, edit_level, capabilities
        self._model = ContractModel(*self._declared)

    def make(self) -> list[Step]:
        """A program."""
        program: list[Step] = []
        self._model = ContractModel(*self._declared)
        for kind in self._rng.choice(np.array(list(_KINDS)), N_STEPS, p=list(_KINDS.values())):
            program.append(self._step(kind))
            self._model.play(program[-1])
        return program

    def _step(self, kind: type[Step]) -> Step:
        seq_id = self._sequence()
        name = self._below(2)
        if kind is Decode:
            return Decode(tuple(self._run() for _ in range(1 + self._below(3))))
        if kind is Fork:
            return Fork(seq_id, self._sequence(), self._index(seq_id) if self._rarely(0.6) else None)
        if kind is Truncate:
            return Truncate(seq_id, self._index(seq_id))
        if kind is Cut:
            ends = [self._index(seq_id), self._index(seq_id)]
            return Cut(seq_id, *(ends if self._rarely(0.1) else sorted(ends)))
        if kind is Dump:
            return Dump(seq_id, name)
        if kind is Restore:
            return Restore(seq_id, name, damaged=self._rarely(0.1))
        return Drop(seq_id) if kind is Drop else Clear()

    def _run(self) -> Run:
        most = 9 if self._rarely(0.1) else 3
        tokens = self._rng.integers(0, self._model.n_vocab, 1 + self._below(most)).tolist()
        if self._rarely(0.03):
            tokens[-1] = self._model.n_vocab
        shift = int(self._rng.choice([-1, 1])) if self._rarely(0.04) else 0
        return Run(self._sequence(), shift, tuple(tokens))

    def _sequence(self) -> int:
        return N_SEQ_MAX if self._rarely(0.03) else self._below(N_SEQ_MAX)

    def _index(self, seq_id: int) -> int:
        beyond = 1 if self._rarely(0.1) else 0
        return self._below(self._model.length(seq_id) + 1) + beyond

    def _below(self, n: int) -> int:
        return int(self._rng.integers(n))

    def _rarely(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)


def shrink(program: Sequence[Step], fails: Callable[[Sequence[Step]], bool], n_tries: int = 400) -> list[Step]:
    """A shorter program that fails, too: steps are left out, many at a time at first, then the others made plainer.

    Args:
        program: it fails.
        fails: whether a program does.
        n_tries: programs that may be tried.
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
        for i, run in enumerate(step.runs):
            others = step.runs[:i], step.runs[i + 1 :]
            if len(step.runs) > 1:
                yield Decode((*others[0], *others[1]))
            if len(run.tokens) > 1:
                for tokens in (run.tokens[:1], run.tokens[:-1]):
                    yield Decode((*others[0], dataclasses.replace(run, tokens=tokens), *others[1]))
    if isinstance(step, Fork) and step.end is not None:
        yield dataclasses.replace(step, end=None)
