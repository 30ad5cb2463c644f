"""The sequence that an error of a context names."""

from __future__ import annotations

from collections.abc import Callable

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.errors import ContextError, ContextFull, InvalidPosition, InvalidSequence, InvalidToken
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos

_Call = Callable[[], object]


class TestErrors(Scenarios):
    """Clause 1: an error names its sequence, so that a server knows which of its sequences is concerned."""

    def test_name_the_sequence_without_room(self, bench: Bench) -> None:
        """Clause 1: ``ContextFull`` names the sequence without room; in a batch, that of the first such token."""
        context = self._context(bench)
        calls: dict[int, list[_Call]] = {
            0: [lambda: context.decode(bench.batch(context, (0, 20, bench.tokens(15))))],
            1: [lambda: context.decode(bench.batch(context, (1, 30, bench.tokens(15)), (0, 20, bench.tokens(3))))],
            2: [lambda: context.decode(bench.batch(context, (0, 20, bench.tokens(14)), (2, 0, bench.tokens(1))))],
        }
        other = bench.context()
        bench.feed(other, bench.tokens(40))
        data = other.dump(0)
        calls[2].append(lambda: context.restore(2, data))
        if Capability.SHARED_FORK not in bench.capabilities:
            calls[2].append(lambda: context.fork(1, 2))
        for seq_id, refused_calls in calls.items():
            for call in refused_calls:
                self._check_names_sequence(bench, context, call, seq_id, ContextFull)

    def test_name_the_sequence_of_a_bad_batch(self, bench: Bench) -> None:
        """Clause 1: a refused token or position names its sequence, and so does a sequence that does not exist."""
        context, size = self._context(bench), bench.vocab.size
        runs = (0, 20, bench.tokens(2))
        bad: dict[type[ContextError], tuple[int, _Call]] = {
            InvalidToken: (1, lambda: context.decode(bench.batch(context, runs, (1, 30, [5, size])))),
            InvalidPosition: (1, lambda: context.decode(bench.batch(context, runs, (1, 29, [5])))),
            InvalidSequence: (3, lambda: context.decode(bench.batch(context, runs, (3, 0, [5])))),
        }
        for error, (seq_id, call) in bad.items():
            self._check_names_sequence(bench, context, call, seq_id, error)

    def test_name_the_sequence_of_a_call(self, bench: Bench) -> None:
        """Clause 1: a call with an unknown sequence, or a position outside a sequence, names it."""
        context = self._context(bench)
        data = context.dump(0)
        unknown: dict[int, list[_Call]] = {
            5: [lambda: context.drop(5), lambda: context.dump(5), lambda: context.dump_parts(5)],
            4: [lambda: context.restore(4, data), lambda: context.length(4), lambda: context.tokens(4)],
            3: [lambda: context.fork(3, 2), lambda: context.fork(0, 3), lambda: context.n_exclusive(3)],
            1: [lambda: context.fork(0, 1)],
        }
        for seq_id, calls in unknown.items():
            for call in calls:
                self._check_names_sequence(bench, context, call, seq_id, InvalidSequence)
        outside: list[_Call] = [lambda: context.fork(1, 2, 31)]
        if bench.edit_level >= EditLevel.TRUNCATE:
            outside.append(lambda: context.truncate(Pos(1, 31)))
        if bench.edit_level >= EditLevel.CUT:
            outside += [lambda: context.cut(Pos(1, 5), Pos(1, 31)), lambda: context.cut(Pos(1, 5), Pos(1, 4))]
        for call in outside:
            self._check_names_sequence(bench, context, call, 1, InvalidPosition)

    @staticmethod
    def _context(bench: Bench) -> Context:
        """A context of 3 sequences, of which 0 holds 20 tokens and 1 holds 30; 14 positions are free."""
        context = bench.context(n_ctx=64, n_seq_max=3)
        bench.feed(context, bench.tokens(20))
        bench.feed(context, bench.tokens(30, seed=1), seq_id=1)
        return context

    @staticmethod
    def _check_names_sequence(
        bench: Bench, context: Context, call: _Call, seq_id: int, kind: type[ContextError]
    ) -> None:
        why = f"{kind.__name__} of sequence {seq_id}"
        with bench.refused(why, kind, context=context):
            try:
                call()
            except kind as error:
                assert error.seq_id == seq_id, f"{why}: its seq_id is {error.seq_id} ({error})"
                assert str(seq_id) in str(error), f"{why}: the message does not name it: {error}"
                raise
