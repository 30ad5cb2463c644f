"""Cuts: keys are re-rotated to their new positions, values stay."""

from __future__ import annotations

import pytest

from slm_conformance.oracle.twin import Oracle
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.errors import ContextFull, InvalidPosition, InvalidSequence
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos


class TestCut(Scenarios):
    """Clause 4, at edit level CUT: logits after a cut equal those of the float64 reference after the same cut."""

    level = EditLevel.CUT

    def test_of_a_span(self, bench: Bench) -> None:
        """Clause 4: a cut at the head, a cut in the middle, and a cut of one token equal the reference's."""
        for bounds in ((0, 11), (13, 22), (20, 21)):
            self._cut_and_go_on(bench, bounds)

    def test_at_the_tail(self, bench: Bench) -> None:
        """Clause 4: a cut of the last tokens is a truncate."""
        self._cut_and_go_on(bench, (31, 40))

    def test_of_nothing(self, bench: Bench) -> None:
        """Clause 4: an empty cut changes nothing, at any position."""
        for index in (0, 17, 40):
            self._cut_and_go_on(bench, (index, index))

    def test_of_everything(self, bench: Bench) -> None:
        """Clause 4: after a cut of the whole sequence, the sequence is empty and can be filled again."""
        context, tokens = bench.context(), bench.tokens(30)
        before = bench.feed(context, tokens)
        assert context.cut(Pos(0, 0), Pos(0, 30)) == Pos(0, 0), "after all was cut, the next token goes to position 0"
        assert context.n_free == context.n_ctx, "cutting everything did not free the positions"
        bench.same(bench.feed(context, tokens), before, "a prompt after everything was cut")

    def test_again_and_again(self, bench: Bench) -> None:
        """Clause 4: cuts add up: a key that moved twice is rotated by the sum."""
        self._cut_and_go_on(bench, (3, 8), (10, 14), (0, 2), (20, 21))

    def test_across_an_earlier_cut(self, bench: Bench) -> None:
        """Clause 4: a cut may remove tokens from both sides of an earlier cut."""
        self._cut_and_go_on(bench, (15, 20), (10, 24))

    def test_between_decodes(self, bench: Bench) -> None:
        """Clause 4: tokens that were decoded after a cut can be cut, too; also in a context with one sequence."""
        context, reference = bench.context(n_seq_max=1), bench.oracle()
        for i, bounds in enumerate([(2, 5), (0, 9), (7, 8), (12, 20), (1, 17)]):
            tokens = bench.tokens(15, seed=i)
            bench.agree(bench.feed(context, tokens), reference.decode(tokens), f"15 tokens after {i} cuts")
            self._cut(context, reference, *bounds)
        more = bench.tokens(6, seed=9)
        bench.agree(bench.feed(context, more), reference.decode(more), "6 tokens after 5 cuts")

    def test_with_each_kv_type(self, bench: Bench) -> None:
        """Clause 4: with each KV type, keys that are stored with rounding are rotated."""
        tokens, more = bench.tokens(40), bench.tokens(12, seed=1)
        for kv_type in bench.kv_types:
            context, reference = bench.context(kv_type=kv_type), bench.oracle()
            if context.edit_level < EditLevel.CUT:
                continue
            bench.feed(context, tokens)
            reference.decode(tokens)
            self._cut(context, reference, 3, 17)
            rows, what = bench.feed(context, more), f"12 tokens after cut(3, 17) of 40 with a {kv_type.value} KV cache"
            # Rotated keys may be rounded once more.
            bench.agree_in_the_mean(rows, reference.decode(more), what, kv_type, factor=2)

    def test_across_pages(self, bench: Bench) -> None:
        """Clause 4: cuts may begin and end anywhere in a long sequence."""
        tokens, more = bench.tokens(140), bench.tokens(8, seed=1)
        for start, end in ((1, 130), (63, 65), (31, 97)):
            context, reference = bench.context(), bench.oracle()
            bench.feed(context, tokens)
            reference.decode(tokens)
            self._cut(context, reference, start, end)
            bench.agree(bench.feed(context, more), reference.decode(more), f"8 tokens after cut({start}, {end}) of 140")

    def test_and_64_tokens_more(self, bench: Bench) -> None:
        """Clause 4: 64 tokens after a cut, the error has not grown."""
        context, reference, tokens, more = (
            bench.context(),
            bench.oracle(),
            bench.tokens(30),
            bench.tokens(64, seed=1),
        )
        bench.feed(context, tokens)
        reference.decode(tokens)
        self._cut(context, reference, 6, 19)
        bench.agree(bench.feed(context, more, chunk=1), reference.decode(more), "64 single tokens after a cut")

    def test_neighbours_are_untouched(self, bench: Bench) -> None:
        """Clause 7: a cut in one sequence does not change other sequences."""
        context, ours, theirs = bench.context(), bench.tokens(30), bench.tokens(30, seed=1)
        bench.feed(context, theirs[:20], seq_id=1)
        bench.feed(context, ours, seq_id=0)
        context.cut(Pos(0, 2), Pos(0, 19))
        expected = bench.oracle().decode(theirs)[20:]
        bench.agree(bench.feed(context, theirs[20:], seq_id=1), expected, "the neighbour of a sequence that was cut")

    def test_of_a_fork(self, bench: Bench) -> None:
        """Clauses 4 and 5: a cut of shared storage does not change the other side of the fork, across pages, too."""
        for cut_side, other_side, n_tokens, end in ((0, 1, 30, 12), (1, 0, 30, 12), (0, 1, 100, 75), (1, 0, 100, 75)):
            context, reference, tokens = bench.context(), bench.oracle(), bench.tokens(n_tokens)
            bench.feed(context, tokens)
            reference.decode(tokens)
            context.fork(0, 1)
            reference.fork(0, 1)
            self._cut(context, reference, 5, end, seq_id=cut_side)
            for seq_id, name in ((other_side, "the other side of a fork"), (cut_side, "the side that was cut")):
                more = bench.tokens(6, seed=1)
                bench.agree(bench.feed(context, more, seq_id), reference.decode(more, seq_id), name)

    def test_then_truncate(self, bench: Bench) -> None:
        """Clauses 3 and 4: ``truncate`` to positions before and after an earlier cut."""
        for index in (20, 8, 3):
            context, reference, tokens = bench.context(), bench.oracle(), bench.tokens(30)
            bench.feed(context, tokens)
            reference.decode(tokens)
            self._cut(context, reference, 5, 10)
            context.truncate(Pos(0, index))
            reference.truncate(index)
            more = bench.tokens(6, seed=1)
            bench.agree(bench.feed(context, more), reference.decode(more), f"a cut of (5, 10), then truncate({index})")

    def test_frees_positions(self, bench: Bench) -> None:
        """Clause 4: a cut frees positions: a full context takes as many tokens as were cut."""
        context, reference, tokens = bench.context(n_ctx=32), bench.oracle(), bench.tokens(32)
        bench.feed(context, tokens)
        reference.decode(tokens)
        self._cut(context, reference, 8, 18)
        assert context.n_free == 10, f"cutting 10 of 32 tokens in a full context freed {context.n_free} positions"
        more = bench.tokens(10, seed=1)
        bench.agree(bench.feed(context, more), reference.decode(more), "tokens in positions that a cut freed")

    def test_of_a_fork_without_room(self, bench: Bench) -> None:
        """Clause 1: a cut copies shared keys before it moves them; without room it raises and changes nothing."""
        if Capability.SHARED_FORK not in bench.capabilities:
            pytest.skip("declared absent: forks do not share storage, so a cut never needs room")
        context, tokens = bench.context(n_ctx=32), bench.tokens(32)
        bench.feed(context, tokens[:15])
        context.fork(0, 1)
        bench.feed(context, tokens[15:30])
        for end in (3, 12):
            with bench.refused(
                f"a cut that must copy {15 - end} shared positions into 2", ContextFull, context=context
            ):
                context.cut(Pos(1, 0), Pos(1, end))
        expected = bench.oracle().decode(tokens)[30:]
        bench.agree(bench.feed(context, tokens[30:]), expected, "what follows a cut that had no room")
        context.truncate(Pos(0, 29))
        context.cut(Pos(1, 0), Pos(1, 12))  # copies 3 positions into 3
        assert context.n_free == 0, f"a cut copied 3 shared positions into 3, and {context.n_free} are free"

    def test_of_a_fork_into_freed_positions(self, bench: Bench) -> None:
        """Clauses 1 and 4: the copies of a cut take any free positions, also those of a sequence dropped in between."""
        if Capability.SHARED_FORK not in bench.capabilities:
            pytest.skip("declared absent: forks do not share storage, so a cut never needs room")
        context, reference = bench.context(n_ctx=160), bench.oracle()
        for seq_id, n in ((0, 56), (2, 48), (3, 48)):
            bench.feed(context, bench.tokens(n, seed=seq_id), seq_id)
        reference.decode(bench.tokens(56))
        context.drop(2)
        for seq_id in (1, 2):
            context.fork(0, seq_id)
            reference.fork(0, seq_id)
        self._cut(context, reference, 1, 4, seq_id=1)  # a cut at the start need not move keys
        for seq_id, more in ((1, bench.tokens(2, seed=8)), (2, bench.tokens(2, seed=9))):
            what = f"sequence {seq_id}, after a cut of a fork into positions that a dropped sequence had"
            bench.agree(bench.feed(context, more, seq_id), reference.decode(more, seq_id), what)
        assert context.n_free == 0, f"of 160 positions, {context.n_free} are free, not 0"

    def test_reversed_or_outside(self, bench: Bench) -> None:
        """Clause 1: ``end`` before ``start``, and positions outside the sequence, are refused."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        for start, end in ((12, 11), (20, 0), (3, 21), (21, 21), (-1, 4)):
            with bench.refused(f"cut({start}, {end}) of 20 tokens", InvalidPosition, context=context):
                context.cut(Pos(0, start), Pos(0, end))
        expected = bench.oracle().decode(tokens)[20:]
        bench.agree(bench.feed(context, tokens[20:]), expected, "what follows a refused cut")

    def test_of_two_sequences_or_none(self, bench: Bench) -> None:
        """Clause 1: both ends of a cut must be in the same, existing sequence."""
        context = bench.context()
        bench.feed(context, bench.tokens(20), seq_id=0)
        bench.feed(context, bench.tokens(20), seq_id=1)
        for start, end in ((Pos(0, 2), Pos(1, 5)), (Pos(4, 0), Pos(4, 0)), (Pos(-1, 0), Pos(-1, 0))):
            with bench.refused(f"cut({start}, {end})", InvalidSequence, context=context):
                context.cut(start, end)

    def _cut_and_go_on(self, bench: Bench, *cuts: tuple[int, int]) -> None:
        context, reference, tokens = bench.context(), bench.oracle(), bench.tokens(40)
        bench.feed(context, tokens)
        reference.decode(tokens)
        for start, end in cuts:
            self._cut(context, reference, start, end)
        more = bench.tokens(12, seed=1)
        what = ", ".join(f"cut({start}, {end})" for start, end in cuts)
        bench.agree(bench.feed(context, more), reference.decode(more), f"12 tokens after {what} of 40")

    @staticmethod
    def _cut(context: Context, reference: Oracle, start: int, end: int, seq_id: int = 0) -> None:
        tokens = context.tokens(seq_id)
        returned = context.cut(Pos(seq_id, start), Pos(seq_id, end))
        reference.cut(start, end, seq_id)
        remaining = tokens[:start] + tokens[end:]
        assert returned == Pos(seq_id, len(remaining)), (
            f"cut({start}, {end}) of {len(tokens)} tokens returned {returned}"
        )
        assert context.tokens(seq_id) == remaining, (
            f"cut({start}, {end}) left other tokens than the tokens around the span"
        )
