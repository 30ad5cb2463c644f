"""Decoding: whole prompts, chunks, several sequences, full contexts, and invalid batches."""

from __future__ import annotations

import itertools

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.context.batch import TokenBatch
from slm_core.errors import BatchFull, ContextFull, InvalidPosition, InvalidSequence, InvalidToken, SlmError
from slm_core.types import Capability, EditLevel, Pos


class TestDecode(Scenarios):
    """Logits of batches of any shape equal those of the reference."""

    def test_a_prompt_in_one_batch(self, bench: Bench) -> None:
        """Clause 8: a prompt gives a float32 row of V logits for each token whose row is requested."""
        context, tokens = bench.context(), bench.tokens(40)
        batch = bench.batch(context, (0, 0, tokens))
        rows = context.decode(batch)
        assert isinstance(rows, np.ndarray), f"logits are a {type(rows).__name__}, not an array of NumPy"
        assert rows.dtype == np.float32, f"logits are {rows.dtype}, not float32"
        assert rows.shape == (40, bench.vocab.size), f"40 rows were asked for, the logits have shape {rows.shape}"
        assert context.tokens(0) == tuple(tokens), "the context does not hold the tokens that were decoded"
        bench.agree(rows, bench.oracle().decode(tokens), "a prompt of 40 tokens in one batch")

    def test_a_prompt_in_chunks(self, bench: Bench) -> None:
        """Clause 8: a prompt in chunks, or token by token, gives the same logits."""
        tokens = bench.tokens(40)
        expected = bench.oracle().decode(tokens)
        for chunk in (1, 7, 16, 39):
            rows = bench.feed(bench.context(), tokens, chunk=chunk)
            bench.agree(rows, expected, f"a prompt of 40 tokens in chunks of {chunk}")

    def test_strangers_in_a_batch(self, bench: Bench) -> None:
        """Clause 7: three sequences with interleaved tokens give the logits that each gives alone."""
        context, lengths = bench.context(), (9, 14, 5)
        runs = [bench.tokens(n, seed=n) for n in lengths]
        batch, order = context.new_batch(), []
        for i in range(max(lengths)):
            for seq_id in (2, 0, 1):
                if i < lengths[seq_id]:
                    batch.add(runs[seq_id][i], Pos(seq_id, i), logits=True)
                    order.append((seq_id, i))
        rows = context.decode(batch).copy()
        expected = [bench.oracle().decode(run) for run in runs]
        bench.agree(rows, np.array([expected[s][i] for s, i in order]), "three shuffled sequences in one batch")

    def test_strangers_beside_a_long_history(self, bench: Bench) -> None:
        """Clause 7: sequences of different lengths, one token each in a batch, give the logits of each alone."""
        context, reference = bench.context(), bench.oracle()
        histories = {seq_id: bench.tokens(n, seed=seq_id) for seq_id, n in ((0, 50), (1, 3), (3, 17))}
        for seq_id, tokens in histories.items():
            bench.feed(context, tokens, seq_id)
            reference.decode(tokens, seq_id)
        for step in range(4):
            new = {seq_id: bench.tokens(1, seed=10 * step + seq_id) for seq_id in histories}
            runs = [(seq_id, context.length(seq_id), tokens) for seq_id, tokens in new.items()]
            rows = context.decode(bench.batch(context, *runs)).copy()
            expected = np.concatenate([reference.decode(tokens, seq_id) for seq_id, tokens in new.items()])
            bench.agree(rows, expected, f"step {step} of three sequences that grow together")

    def test_rows_come_in_the_order_of_the_batch(self, bench: Bench) -> None:
        """Context: rows come in the order of the batch, whatever their sequences."""
        context = bench.context()
        runs = {seq_id: bench.tokens(6, seed=seq_id) for seq_id in (3, 1, 2)}
        batch = context.new_batch()
        expected_rows = []
        for seq_id, tokens in runs.items():
            for i, token in enumerate(tokens):
                batch.add(token, Pos(seq_id, i), logits=(i + seq_id) % 2 == 0)
                if (i + seq_id) % 2 == 0:
                    expected_rows.append((seq_id, i))
        rows = context.decode(batch).copy()
        expected = {seq_id: bench.oracle().decode(tokens) for seq_id, tokens in runs.items()}
        bench.agree(rows, np.array([expected[s][i] for s, i in expected_rows]), "every other row of three sequences")

    def test_rows_not_asked_for(self, bench: Bench) -> None:
        """Context: tokens without a requested row give none, and later logits do not change."""
        context, tokens = bench.context(), bench.tokens(20)
        batch = context.new_batch()
        batch.extend(tokens[:19], Pos(0, 0))
        rows = context.decode(batch)
        assert rows.shape == (0, bench.vocab.size), f"no row was asked for, the logits have shape {rows.shape}"
        batch.clear()
        batch.extend(tokens[19:], Pos(0, 19), logits="last")
        expected = bench.oracle().decode(tokens)[19:]
        bench.agree(context.decode(batch), expected, "the one row asked for, after 19 that were not")

    def test_rows_stay_while_other_contexts_decode(self, bench: Bench) -> None:
        """Context: rows stay valid until the next call on their own context, while other contexts decode."""
        context, other, tokens = bench.context(), bench.context(), bench.tokens(12)
        rows = context.decode(bench.batch(context, (0, 0, tokens)))
        other.decode(bench.batch(other, (0, 0, bench.tokens(12, seed=1))))
        other.close()
        bench.agree(rows, bench.oracle().decode(tokens), "rows, after another context of the model has decoded")

    def test_an_empty_batch(self, bench: Bench) -> None:
        """Context: an empty batch gives no rows and changes nothing."""
        context, tokens = bench.context(), bench.tokens(10)
        bench.feed(context, tokens[:9])
        rows = context.decode(context.new_batch())
        assert rows.shape == (0, bench.vocab.size), f"an empty batch gave logits of shape {rows.shape}"
        expected = bench.oracle().decode(tokens)[9:]
        bench.agree(bench.feed(context, tokens[9:]), expected, "what follows an empty batch")

    def test_a_batch_used_again(self, bench: Bench) -> None:
        """Batch: a batch that is decoded, cleared and filled again works like a new one."""
        context, tokens = bench.context(), bench.tokens(24)
        batch, rows = context.new_batch(capacity=8), []
        for first in range(0, 24, 8):
            batch.clear()
            batch.extend(tokens[first : first + 8], Pos(0, first), logits="all")
            rows.append(context.decode(batch).copy())
        bench.agree(np.concatenate(rows), bench.oracle().decode(tokens), "one batch, used three times")


class TestDecodeLimits(Scenarios):
    """The limits of a context: they can be reached exactly, and going past them raises and changes nothing."""

    on_one_model = ("test_long_sequences",)  # storage is the same for all weights

    def test_n_batch_exactly(self, bench: Bench) -> None:
        """Context: ``n_batch`` tokens are decoded in one call."""
        context, tokens = bench.context(n_batch=24), bench.tokens(24)
        rows = context.decode(bench.batch(context, (0, 0, tokens)))
        bench.agree(rows, bench.oracle().decode(tokens), "a batch of n_batch tokens")

    def test_more_than_n_batch(self, bench: Bench) -> None:
        """Clause 1: more than ``n_batch`` tokens are refused with ``BatchFull``."""
        context, tokens = bench.context(n_batch=24), bench.tokens(32)
        bench.feed(context, tokens[:5])
        batch = TokenBatch(25)
        batch.extend(tokens[5:30], Pos(0, 5), logits="last")
        with bench.refused("a batch of 25 tokens where n_batch is 24", BatchFull, context=context):
            context.decode(batch)
        expected = bench.oracle().decode(tokens)[5:]
        rows = bench.feed(context, tokens[5:], chunk=9)
        bench.agree(rows, expected, "what follows a batch that was too large")

    def test_the_batch_has_a_capacity(self, bench: Bench) -> None:
        """Batch: ``new_batch`` has room for ``n_batch`` tokens; a run that does not fit, or of no ids, is refused."""
        context = bench.context(n_batch=24)
        batch = context.new_batch()
        assert batch.capacity == 24, f"new_batch() has room for {batch.capacity} tokens, not for n_batch, 24"
        batch.extend(bench.tokens(20), Pos(0, 0))
        with bench.refused("5 tokens into a batch with room for 4", BatchFull):
            batch.extend(bench.tokens(5), Pos(0, 20))
        wrong = {"fractions": [1, 1.5], "a table": [[1, 2]], "id -1": [1, -1], "id 2^31": [1, 2**31]}
        for what, tokens in wrong.items():
            with bench.refused(f"{what} in place of a run of token ids", InvalidToken):
                batch.extend(tokens, Pos(0, 20))  # type: ignore[arg-type]
        assert len(batch) == 20, f"a refused extend left {len(batch)} tokens in the batch instead of 20"

    def test_n_ctx_exactly(self, bench: Bench) -> None:
        """Context: one sequence can fill all positions of the context."""
        context, tokens = bench.context(n_ctx=48, n_seq_max=3, n_batch=32), bench.tokens(48)
        rows = bench.feed(context, tokens, seq_id=2)
        assert context.n_free == 0, f"48 tokens in a context of 48 leave {context.n_free} positions free"
        bench.agree(rows, bench.oracle().decode(tokens), "a sequence that fills the context")

    def test_overflow_in_prefill(self, bench: Bench) -> None:
        """Clause 1: a prompt that does not fit raises ``ContextFull(needed, free)``; the context stays usable."""
        context, tokens = bench.context(n_ctx=48, n_batch=32), bench.tokens(48)
        bench.feed(context, tokens[:40])
        with bench.refused("9 tokens where 8 positions are free", ContextFull, context=context):
            context.decode(bench.batch(context, (0, 40, bench.tokens(9, seed=1))))
        expected = bench.oracle().decode(tokens)[40:]
        bench.agree(bench.feed(context, tokens[40:]), expected, "the last 8 tokens, after 9 were refused")

    def test_overflow_in_generation(self, bench: Bench) -> None:
        """Clause 1: the next token in a full context raises ``ContextFull``; the context works again with room."""
        context, tokens = bench.context(n_ctx=48, n_batch=32), bench.tokens(48)
        bench.feed(context, tokens[:32], seq_id=0)
        bench.feed(context, bench.tokens(16, seed=1), seq_id=1)
        with bench.refused("a token in a full context", ContextFull, context=context):
            context.decode(bench.batch(context, (0, 32, tokens[32:33])))
        try:
            context.decode(bench.batch(context, (0, 32, tokens[32:33])))
        except ContextFull as error:
            counts = (error.needed, error.free)
            assert counts == (1, 0), (
                f"ContextFull says (needed, free) = {counts}; 1 token is needed, 0 positions are free"
            )
        context.drop(1)
        expected = bench.oracle().decode(tokens)[32:]
        bench.agree(bench.feed(context, tokens[32:]), expected, "what follows an overflow, once there is room")

    def test_many_sequences(self, bench: Bench) -> None:
        """Clause 7: 16 sequences in one batch give the logits that each gives alone, in the next batch, too."""
        context, runs = bench.context(n_seq_max=16), [bench.tokens(5, seed=seq_id) for seq_id in range(16)]
        expected = [bench.oracle().decode(run) for run in runs]
        for first, end in ((0, 3), (3, 5)):
            batch = bench.batch(context, *((seq_id, first, run[first:end]) for seq_id, run in enumerate(runs)))
            rows = context.decode(batch).reshape(16, end - first, -1)
            for seq_id in range(16):
                bench.agree(rows[seq_id], expected[seq_id][first:end], f"sequence {seq_id} of 16 in one batch")

    def test_long_sequences(self, bench: Bench) -> None:
        """Context: a sequence can be as long as ``n_ctx``; long forks share storage; others can use freed positions."""
        n_shared = 0 if Capability.SHARED_FORK not in bench.capabilities else 150
        n_ctx = 600 + 150 - n_shared
        context = bench.context(n_ctx=n_ctx, n_seq_max=2, n_batch=256)
        tokens, others = bench.tokens(590), bench.tokens(300, seed=1)
        bench.feed(context, tokens[:150])
        context.fork(0, 1)
        rows = bench.feed(context, tokens[150:])
        assert context.n_free == 10, f"590 tokens and a fork of 150 in {n_ctx} positions leave {context.n_free} free"
        expected = bench.oracle().decode(tokens)
        bench.agree(rows[-8:], expected[-8:], "the last 8 of 590 tokens")
        if bench.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(0, 470))
            rows = bench.feed(context, tokens[470:478])
            bench.agree(rows, expected[470:478], "8 of 590 tokens again, after they were truncated to 470")
        context.drop(0)
        assert context.n_free == n_ctx - 150, f"a fork of 150 is all that is held, and n_free is {context.n_free}"
        last_rows = bench.feed(context, others, seq_id=1)[-8:]
        expected_of_others = bench.oracle().decode([*tokens[:150], *others])[-8:]
        what = "the last 8 of 300 tokens after a fork of 150 whose other side was dropped"
        bench.agree(last_rows, expected_of_others, what)
        if bench.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(1, 10))
            rows = bench.feed(context, tokens[:240])
            bench.agree(rows[-8:], expected[232:240], "the last 8 of 240 tokens in positions that a truncate freed")

    def test_sequences_share_the_positions(self, bench: Bench) -> None:
        """Context: all sequences together hold at most ``n_ctx`` tokens."""
        context = bench.context(n_ctx=48, n_seq_max=3)
        free = []
        for seq_id, n in ((0, 20), (2, 5), (1, 10)):
            bench.feed(context, bench.tokens(n, seed=seq_id), seq_id)
            free.append(context.n_free)
        assert free == [28, 23, 13], f"after 20, 25 and 35 tokens of 48, n_free was {free}"


class TestDecodeRefusals(Scenarios):
    """Clause 1: an invalid batch is refused, and nothing changes."""

    def test_a_token_outside_the_vocabulary(self, bench: Bench) -> None:
        """Clause 1: token ids below 0 and from V on raise ``InvalidToken``, anywhere in the batch."""
        size = bench.vocab.size
        for bad, at in itertools.product((-1, size, size + 1000, 2**31 - 1), (0, 5, 9)):
            tokens = bench.tokens(10, seed=1)
            tokens[at] = bad
            self._refused_then_goes_on(bench, f"token {bad} of {size}", InvalidToken, [(0, 20, tokens)])

    def test_a_position_that_is_not_the_next(self, bench: Bench) -> None:
        """Clause 1: a gap, a position that is held already, and position 0 again raise ``InvalidPosition``."""
        for first in (21, 19, 0, 500):
            runs = [(0, first, bench.tokens(4, seed=1))]
            self._refused_then_goes_on(bench, f"position {first} of a sequence of 20", InvalidPosition, runs)

    def test_a_gap_inside_a_batch(self, bench: Bench) -> None:
        """Clause 1: positions must be contiguous inside a batch, too."""
        for second in (25, 23):
            runs = [(0, 20, bench.tokens(4, seed=1)), (0, second, bench.tokens(4, seed=2))]
            self._refused_then_goes_on(bench, f"position {second} after 20 to 23", InvalidPosition, runs)

    def test_a_sequence_that_does_not_exist(self, bench: Bench) -> None:
        """Clause 1: sequence numbers from ``n_seq_max`` on raise ``InvalidSequence``."""
        for seq_id in (4, 1000):
            runs = [(seq_id, 0, bench.tokens(4, seed=1))]
            self._refused_then_goes_on(bench, f"sequence {seq_id} of 4", InvalidSequence, runs)

    def test_a_bad_run_after_a_good_one(self, bench: Bench) -> None:
        """Clause 1: all tokens are checked before any is decoded: the valid run of a bad batch leaves no trace."""
        good = (0, 20, bench.tokens(6, seed=1))
        for error, bad in (
            (InvalidPosition, (1, 3, bench.tokens(2))),
            (InvalidSequence, (9, 0, bench.tokens(2))),
            (InvalidToken, (1, 0, [bench.vocab.size])),
        ):
            self._refused_then_goes_on(bench, f"a good run before one with {error.__name__}", error, [good, bad])

    @staticmethod
    def _refused_then_goes_on(
        bench: Bench, why: str, error: type[SlmError], runs: list[tuple[int, int, list[int]]]
    ) -> None:
        """Decode 20 tokens, require that ``runs`` are refused, and that the sequences continue as before."""
        context, tokens, other = bench.context(), bench.tokens(24), bench.tokens(4, seed=3)
        bench.feed(context, tokens[:20])
        with bench.refused(why, error, context=context):
            context.decode(bench.batch(context, *runs))
        expected = bench.oracle().decode(tokens)[20:]
        bench.agree(bench.feed(context, tokens[20:]), expected, f"what follows {why}, which was refused")
        expected = bench.oracle().decode(other)
        bench.agree(bench.feed(context, other, seq_id=1), expected, f"another sequence after {why}, which was refused")
