"""Truncation: removing the end of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.errors import InvalidPosition, InvalidSequence
from slm_core.types import EditLevel, Pos


class TestTruncate(Scenarios):
    """Clause 3, at edit level TRUNCATE or above."""

    level = EditLevel.TRUNCATE
    on_one_model = (
        "test_anywhere_in_a_long_sequence",
        "test_several_long_sequences",
    )  # storage is the same for all weights

    def test_another_tail_gives_what_it_gives_alone(self, bench: Bench) -> None:
        """Clause 3: after a truncate, another tail gives the logits that it gives without the first tail."""
        context, tokens, other = bench.context(), bench.tokens(40), bench.tokens(20, seed=1)
        bench.feed(context, tokens)
        returned = context.truncate(Pos(0, 17))
        assert returned == Pos(0, 17), f"truncate says that the next token goes to {returned}, not to position 17"
        assert context.tokens(0) == tuple(tokens[:17]), "truncate(17) did not leave the first 17 tokens"
        expected = bench.oracle().decode(tokens[:17] + other)
        bench.agree(bench.feed(context, other), expected[17:], "another tail after truncate(17)")

    def test_at_zero(self, bench: Bench) -> None:
        """Clause 3: truncate(0) leaves an empty sequence, which can be filled again."""
        context, tokens = bench.context(), bench.tokens(30)
        before = bench.feed(context, tokens)
        context.truncate(Pos(0, 0))
        assert context.length(0) == 0, "truncate(0) left tokens"
        assert context.n_free == context.n_ctx, "truncate(0) did not free the positions"
        bench.same(bench.feed(context, tokens), before, "the whole prompt after truncate(0)")

    def test_at_the_end(self, bench: Bench) -> None:
        """Clause 3: a truncate at the length changes nothing."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        context.truncate(Pos(0, 20))
        expected = bench.oracle().decode(tokens)[20:]
        bench.agree(bench.feed(context, tokens[20:]), expected, "what follows truncate at the length")

    def test_past_the_end(self, bench: Bench) -> None:
        """Clause 3: a truncate past the length is refused, and changes nothing."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        for index in (21, 10_000):
            with bench.refused(f"truncate({index}) of 20 tokens", InvalidPosition, context=context):
                context.truncate(Pos(0, index))
        with bench.refused("truncate(-1)", InvalidPosition, context=context):
            context.truncate(Pos(0, -1))
        expected = bench.oracle().decode(tokens)[20:]
        bench.agree(bench.feed(context, tokens[20:]), expected, "what follows a refused truncate")

    def test_of_a_sequence_that_does_not_exist(self, bench: Bench) -> None:
        """Clause 1: an unknown sequence is refused."""
        context = bench.context(n_seq_max=2)
        for seq_id in (2, -1):
            with bench.refused(f"truncate of sequence {seq_id} of 2", InvalidSequence, context=context):
                context.truncate(Pos(seq_id, 0))

    def test_neighbours_are_untouched(self, bench: Bench) -> None:
        """Clause 7: a truncate of one sequence does not change other sequences."""
        context, ours, theirs = bench.context(), bench.tokens(30), bench.tokens(30, seed=1)
        bench.feed(context, theirs[:20], seq_id=1)
        bench.feed(context, ours, seq_id=0)
        context.truncate(Pos(0, 3))
        assert context.tokens(1) == tuple(theirs[:20]), "truncate of sequence 0 changed the tokens of sequence 1"
        expected = bench.oracle().decode(theirs)[20:]
        bench.agree(bench.feed(context, theirs[20:], seq_id=1), expected, "the neighbour of a truncated sequence")

    def test_frees_positions(self, bench: Bench) -> None:
        """Clause 3: a truncate frees positions: a full context takes as many tokens as were truncated."""
        context, tokens = bench.context(n_ctx=32), bench.tokens(42)
        bench.feed(context, tokens[:32])
        context.truncate(Pos(0, 22))
        assert context.n_free == 10, f"truncating 10 of 32 tokens in a full context freed {context.n_free} positions"
        expected = bench.oracle().decode(tokens[:22] + tokens[32:])[22:]
        bench.agree(bench.feed(context, tokens[32:]), expected, "tokens in the freed positions")

    def test_a_hundred_times(self, bench: Bench) -> None:
        """Clause 3: a hundred truncates do not add up errors, in a context with one sequence."""
        context, tokens = bench.context(n_ctx=36, n_seq_max=1), bench.tokens(32)
        before = bench.feed(context, tokens)
        for i in range(max(10, bench.workshop.share(100))):
            index = 31 - i % 5
            context.truncate(Pos(0, index))
            bench.feed(context, tokens[index:])
        context.truncate(Pos(0, 24))
        bench.same(bench.feed(context, tokens[24:]), before[24:], "the last rows after a hundred truncates")

    def test_anywhere_in_a_long_sequence(self, bench: Bench) -> None:
        """Clause 3: a long sequence is truncated far back, then at each of the positions of a page or block."""
        context, tokens = bench.context(n_ctx=512, n_seq_max=2, n_batch=256), bench.tokens(500)
        bench.feed(context, tokens, seq_id=1)
        expected = bench.oracle().decode(tokens)
        for index in range(400, 336, -max(1, 64 // bench.workshop.share(64))):
            context.truncate(Pos(1, index))
            rows = bench.feed(context, tokens[index : index + 1], seq_id=1)
            bench.agree(rows, expected[index : index + 1], f"the next token after truncate({index})")

    def test_numbers_of_numpy(self, bench: Bench) -> None:
        """Clause 1: sequence ids and positions may be integers of NumPy; other values are refused, nothing changes."""
        context, tokens, more = bench.context(), bench.tokens(30), bench.tokens(6, seed=1)
        bench.feed(context, tokens)
        numbers: tuple[Callable[[int], Any], ...] = (np.uint8, np.int16, np.uint32, np.int64, np.uint64)
        for number in numbers:
            reference = bench.oracle()
            reference.decode(tokens)
            context.fork(number(0), number(1))
            context.truncate(Pos(number(1), number(20)))
            reference.truncate(20)
            if bench.edit_level >= EditLevel.CUT:
                context.cut(Pos(number(1), number(3)), Pos(number(1), number(9)))
                reference.cut(3, 9)
            rows = bench.feed(context, more, seq_id=number(1))
            bench.agree(rows, reference.decode(more), f"edits whose numbers are {type(number(0)).__name__}")
            context.drop(number(1))
        for wrong in (1.0, 2.5):
            with bench.refused(f"truncate to {wrong!r}", InvalidPosition, context=context):
                context.truncate(Pos(0, wrong))  # type: ignore[arg-type]
            with bench.refused(f"drop({wrong!r})", InvalidSequence, context=context):
                context.drop(wrong)  # type: ignore[arg-type]
            with bench.refused(f"a fork into {wrong!r}", InvalidSequence, context=context):
                context.fork(0, wrong)  # type: ignore[arg-type]
            batch = context.new_batch()
            with bench.refused(f"a token of sequence {wrong!r}", InvalidSequence, context=context):
                batch.add(more[0], Pos(wrong, 0))  # type: ignore[arg-type]

    def test_several_long_sequences(self, bench: Bench) -> None:
        """Clauses 3, 5 and 6: long sequences with a common prompt are truncated far back, restored and forked."""
        n, length, n_prompt = 3, 200, 180
        context, prompt = bench.context(n_ctx=n * length, n_seq_max=n, n_batch=128), bench.tokens(n_prompt)
        tokens = [prompt + bench.tokens(length - n_prompt, seed=1 + seq_id) for seq_id in range(n)]
        expected = [bench.oracle().decode(each) for each in tokens]
        bench.feed(context, prompt)
        for seq_id in range(1, n):
            context.fork(0, seq_id)

        def check_next(seq_id: int, source: int, start: int, stop: int, what: str) -> None:
            rows = bench.feed(context, tokens[source][start:stop], seq_id)
            bench.agree(rows, expected[source][start:stop], f"sequence {seq_id} of {n} long ones, {what}")

        for seq_id in range(n):
            check_next(seq_id, seq_id, n_prompt, length, "after the prompt")
        dumps = [context.dump(seq_id) for seq_id in range(n)]
        for seq_id in range(n):
            index = 150 - 45 * seq_id
            context.truncate(Pos(seq_id, index))
            check_next(seq_id, seq_id, index, index + 3, f"truncated to {index}")
        for seq_id in range(n):
            context.restore(seq_id, dumps[seq_id])
            context.truncate(Pos(seq_id, length - 3))
            check_next(seq_id, seq_id, length - 3, length, "restored and truncated")
        for seq_id in range(n - 1, 0, -1):
            end = 60 + 40 * seq_id
            context.drop(seq_id)
            context.fork(0, seq_id, end)
            check_next(seq_id, 0, end, end + 3, f"a fork of {end} tokens")

    def test_interleaved_with_decoding(self, bench: Bench) -> None:
        """Clause 3: two sequences are truncated and decoded alternately."""
        context, reference = bench.context(), bench.oracle()
        random = np.random.default_rng(5)
        histories: dict[int, list[int]] = {0: [], 1: []}
        for i in range(16):
            seq_id = i % 2
            tokens = bench.tokens(int(random.integers(1, 9)), seed=i)
            rows = bench.feed(context, tokens, seq_id)
            bench.agree(rows, reference.decode(tokens, seq_id), f"turn {i} of two sequences that are truncated")
            histories[seq_id] += tokens
            index = int(random.integers(0, len(histories[seq_id]) + 1))
            context.truncate(Pos(seq_id, index))
            reference.truncate(index, seq_id)
            del histories[seq_id][index:]
        expected = {seq_id: list(context.tokens(seq_id)) for seq_id in histories}
        assert expected == histories, "after 16 truncates the context holds other tokens than it should"
