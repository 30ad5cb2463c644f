"""Forks: copies of a sequence that continue independently."""

from __future__ import annotations

import pytest

from slm_conformance.oracle.factories import SHAPES, SMALL_SHAPES
from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.lifecycle import resident_bytes
from slm_core.errors import ContextFull, InvalidPosition, InvalidSequence
from slm_core.types import Capability, EditLevel, Pos


class TestFork(Scenarios):
    """Clause 5: a copy and its original share storage if declared, and never see each other's later tokens."""

    on_one_model = ("test_shared_storage_takes_no_memory",)

    def test_the_copy_goes_on_as_the_original(self, bench: Bench) -> None:
        """Clause 5: after the same tokens, copy and original give the same logits."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        assert context.fork(0, 2) == Pos(2, 20), "fork says where the copy's next token goes: position 20"
        assert context.tokens(2) == tuple(tokens[:20]), "the copy holds other tokens than the original"
        expected = bench.oracle().decode(tokens)[20:]
        bench.agree(bench.feed(context, tokens[20:], seq_id=2), expected, "a fork that continues")

    def test_copy_and_original_diverge(self, bench: Bench) -> None:
        """Clause 5: copy and original do not see each other's later tokens, alternately or in one batch."""
        context, reference, tokens = bench.context(), bench.oracle(), bench.tokens(20)
        bench.feed(context, tokens)
        reference.decode(tokens)
        context.fork(0, 1)
        reference.fork(0, 1)
        for i in range(3):
            for seq_id in (1, 0):
                more = bench.tokens(5, seed=10 * i + seq_id)
                rows = bench.feed(context, more, seq_id)
                bench.agree(rows, reference.decode(more, seq_id), f"turn {i} of sequence {seq_id} after a fork")

    def test_many_copies(self, bench: Bench) -> None:
        """Clause 5: n copies with different tails are decoded in one batch."""
        context, tokens = bench.context(n_seq_max=6), bench.tokens(20)
        bench.feed(context, tokens)
        tails = {seq_id: bench.tokens(4, seed=seq_id) for seq_id in range(6)}
        for seq_id in range(1, 6):
            context.fork(0, seq_id)
        rows = context.decode(bench.batch(context, *((seq_id, 20, tail) for seq_id, tail in tails.items()))).copy()
        for seq_id, tail in tails.items():
            expected = bench.oracle().decode(tokens + tail)[20:]
            bench.agree(rows[4 * seq_id : 4 * seq_id + 4], expected, f"copy {seq_id} of 5")

    def test_a_copy_of_a_copy(self, bench: Bench) -> None:
        """Clause 5: a copy that was continued can be forked again."""
        context, reference = bench.context(), bench.oracle()
        for seq_id in range(4):
            tokens = bench.tokens(8, seed=seq_id)
            rows = bench.feed(context, tokens, seq_id)
            bench.agree(rows, reference.decode(tokens, seq_id), f"a copy, {seq_id} forks away from the original")
            if seq_id < 3:
                context.fork(seq_id, seq_id + 1)
                reference.fork(seq_id, seq_id + 1)

    def test_of_the_first_tokens(self, bench: Bench) -> None:
        """Clause 5: ``end`` copies the first tokens only; 0 copies nothing."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens)
        for seq_id, end in ((1, 13), (2, 0), (3, 30)):
            assert context.fork(0, seq_id, end) == Pos(seq_id, end), f"fork(end={end}) returned another place"
            assert context.tokens(seq_id) == tuple(tokens[:end]), f"fork(end={end}) copied other tokens"
            tail = bench.tokens(5, seed=seq_id)
            expected = bench.oracle().decode(tokens[:end] + tail)[end:]
            bench.agree(bench.feed(context, tail, seq_id), expected, f"a fork of the first {end} tokens")

    def test_dropping_one_leaves_the_other(self, bench: Bench) -> None:
        """Clause 5: dropping either side of a fork does not change the other."""
        for dropped, other in ((0, 1), (1, 0)):
            context, tokens = bench.context(), bench.tokens(30)
            bench.feed(context, tokens[:20])
            context.fork(0, 1)
            context.drop(dropped)
            assert context.length(dropped) == 0, "a dropped sequence still holds tokens"
            # Overwrites the freed storage, if any.
            bench.feed(context, bench.tokens(25, seed=1), seq_id=2)
            expected = bench.oracle().decode(tokens)[20:]
            bench.agree(bench.feed(context, tokens[20:], other), expected, "a fork, after the other side was dropped")

    def test_truncating_one_leaves_the_other(self, bench: Bench) -> None:
        """Clause 5: truncating either side of a fork, and decoding other tokens there, does not change the other."""
        bench.requires(EditLevel.TRUNCATE)
        for truncated, other in ((0, 1), (1, 0)):
            context, tokens = bench.context(), bench.tokens(30)
            bench.feed(context, tokens[:20])
            context.fork(0, 1)
            context.truncate(Pos(truncated, 7))
            bench.feed(context, bench.tokens(13, seed=1), seq_id=truncated)
            expected = bench.oracle().decode(tokens)[20:]
            bench.agree(bench.feed(context, tokens[20:], other), expected, "a fork, after the other side was truncated")

    def test_shares_storage_as_declared(self, bench: Bench) -> None:
        """Clause 5: a shared fork takes no positions until written; a copy takes its length."""
        context = bench.context(n_ctx=64)
        bench.feed(context, bench.tokens(24))
        context.fork(0, 1)
        declared = Capability.SHARED_FORK in bench.capabilities
        free = 64 - 24 if declared else 64 - 48
        says = "declared" if declared else "not declared"
        assert context.n_free == free, f"shared_fork is {says}; after a fork of 24 tokens n_free is {context.n_free}"
        bench.feed(context, bench.tokens(5), seq_id=1)
        assert context.n_free == free - 5, "5 tokens after a fork took another number of positions"
        context.drop(0)
        assert context.n_free == 64 - 29, "when one side was dropped, the other's 29 positions and no others stay taken"

    def test_what_dropping_would_free(self, bench: Bench) -> None:
        """Clause 5: ``n_exclusive`` says how many positions dropping a sequence would free; dropping it frees them."""
        context = bench.context(n_ctx=96, n_seq_max=4)
        bench.feed(context, bench.tokens(20))
        context.fork(0, 1, 12)
        bench.feed(context, bench.tokens(5, seed=1), seq_id=1)
        n_shared = 12 if Capability.SHARED_FORK in bench.capabilities else 0
        for seq_id, expected in ((0, 20 - n_shared), (1, 17 - n_shared), (2, 0)):
            n_exclusive = context.n_exclusive(seq_id)
            assert n_exclusive == expected, (
                f"n_exclusive({seq_id}) is {n_exclusive}, not {expected}; {n_shared} are shared"
            )
        free = context.n_free
        context.drop(0)
        assert context.n_free == free + 20 - n_shared, "drop freed another number of positions than n_exclusive said"
        assert context.n_exclusive(1) == 17, "the other side is dropped, and its positions still count as shared"
        with bench.refused("n_exclusive of a sequence that is not there", InvalidSequence, context=context):
            context.n_exclusive(4)

    def test_what_it_decodes_again(self, bench: Bench) -> None:
        """Clause 5: ``fork_cost`` counts the tokens to decode again: 0 for the whole sequence, or plain attention."""
        context, tokens = bench.context(), bench.tokens(200)
        bench.feed(context, tokens)
        before, is_plain = contents_of(context), bench.name.partition("-")[0] in SHAPES | SMALL_SHAPES
        assert context.fork_cost(0) == context.fork_cost(0, 200) == 0, "a fork of a whole sequence decodes tokens again"
        assert context.fork_cost(0, 0) == context.fork_cost(1) == 0, "a fork of nothing decodes nothing again"
        for end in (199, 130, 17, 1) if bench.edit_level >= EditLevel.TRUNCATE else ():
            cost, most = context.fork_cost(0, end), 0 if is_plain else end
            assert 0 <= cost <= most, f"fork_cost(0, {end}) is {cost} (accepted: 0 to {most})"
            assert context.fork_cost(0, end) == cost, f"fork_cost(0, {end}) is {cost}, and then another number"
        assert contents_of(context) == before, "fork_cost has changed the context"
        with bench.refused("fork_cost of a sequence that is not there", InvalidSequence, context=context):
            context.fork_cost(4)
        for end in (201, -1):
            with bench.refused(f"fork_cost of 200 tokens with end={end}", InvalidPosition, context=context):
                context.fork_cost(0, end)

    def test_shared_storage_takes_no_memory(self, bench: Bench) -> None:
        """Clause 5: if forks share storage, 32 forks take no memory for keys and values."""
        if Capability.SHARED_FORK not in bench.capabilities:
            pytest.skip("declared absent: shared_fork")
        n_tokens, n_forks = 400, 32
        kv_bytes = bench.weights().kv_bytes(n_tokens, 2)  # at least float16
        context = bench.context(n_ctx=512, n_seq_max=1 + n_forks, n_batch=256)
        tokens = bench.tokens(n_tokens)
        bench.feed(context, tokens)
        before = resident_bytes(of_files=False)
        for seq_id in range(1, 1 + n_forks):
            context.fork(0, seq_id)
        grown, allowed = resident_bytes(of_files=False) - before, n_forks * kv_bytes // 4
        assert grown <= allowed, (
            f"{n_forks} forks of {n_tokens} tokens take {grown / 2**20:.1f} MiB (allowed: {allowed / 2**20:.1f} MiB)"
        )

    def test_without_room(self, bench: Bench) -> None:
        """Clause 1: a copy that does not fit is refused; a fork that shares storage always fits."""
        context, tokens = bench.context(n_ctx=40), bench.tokens(26)
        bench.feed(context, tokens[:24])
        if Capability.SHARED_FORK in bench.capabilities:
            context.fork(0, 1)
            assert context.length(1) == 24, "a shared fork of 24 tokens holds another number"
        else:
            with bench.refused("a copy of 24 positions into 16", ContextFull, context=context):
                context.fork(0, 1)
        expected = bench.oracle().decode(tokens)[24:]
        bench.agree(bench.feed(context, tokens[24:]), expected, "what follows a fork in a context without much room")

    def test_into_a_sequence_that_is_taken(self, bench: Bench) -> None:
        """Clause 1: the destination must be another sequence that exists and is empty."""
        context = bench.context(n_seq_max=3)
        bench.feed(context, bench.tokens(20), seq_id=0)
        bench.feed(context, bench.tokens(4), seq_id=1)
        for src, dst in ((0, 1), (0, 0), (2, 2), (0, 3), (3, 0), (0, -1), (-1, 2)):
            with bench.refused(f"fork({src}, {dst}) where 0 and 1 of 3 are taken", InvalidSequence, context=context):
                context.fork(src, dst)

    def test_of_more_than_there_is(self, bench: Bench) -> None:
        """Clause 1: ``end`` past the length, or negative, is refused."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        for end in (21, -1):
            with bench.refused(f"fork of 20 tokens with end={end}", InvalidPosition, context=context):
                context.fork(0, 1, end)


class TestDrop(Scenarios):
    """Context: ``drop`` and ``clear`` forget whole sequences."""

    def test_one_sequence(self, bench: Bench) -> None:
        """Context: ``drop`` empties one sequence, which can be filled again; others do not change."""
        context, ours, theirs = bench.context(), bench.tokens(20), bench.tokens(24, seed=1)
        before = bench.feed(context, ours, seq_id=0)
        bench.feed(context, theirs[:20], seq_id=1)
        context.drop(0)
        assert (context.length(0), context.length(1)) == (0, 20), "drop(0) did not empty sequence 0 alone"
        assert context.n_free == context.n_ctx - 20, "drop did not free the positions of the sequence"
        bench.same(bench.feed(context, ours, seq_id=0), before, "a dropped sequence that begins anew")
        expected = bench.oracle().decode(theirs)[20:]
        bench.agree(bench.feed(context, theirs[20:], seq_id=1), expected, "the neighbour of a dropped sequence")

    def test_an_empty_one_or_none(self, bench: Bench) -> None:
        """Clause 1: dropping an empty sequence does nothing; a sequence that does not exist is refused."""
        context = bench.context(n_seq_max=2)
        bench.feed(context, bench.tokens(9))
        context.drop(1)
        for seq_id in (2, -1):
            with bench.refused(f"drop({seq_id}) of 2 sequences", InvalidSequence, context=context):
                context.drop(seq_id)
        assert context.length(0) == 9, "dropping an empty sequence changed another"

    def test_all(self, bench: Bench) -> None:
        """Context: after ``clear``, the context is like a new one."""
        context, tokens = bench.context(), bench.tokens(20)
        before = bench.feed(context, tokens)
        bench.feed(context, bench.tokens(20, seed=1), seq_id=3)
        context.clear()
        lengths = [context.length(seq_id) for seq_id in range(4)]
        assert (lengths, context.n_free) == ([0] * 4, context.n_ctx), f"after clear: lengths {lengths}"
        bench.same(bench.feed(context, tokens, seq_id=2), before, "a prompt after clear")
