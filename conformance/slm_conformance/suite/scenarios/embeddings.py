"""Hidden states instead of logits, and embeddings of texts, which are pooled hidden states."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.tolerance import N_SAMPLE
from slm_conformance.suite.workshop import Rows
from slm_core.embedding import embed
from slm_core.errors import ContextFull, InvalidPosition, InvalidToken, UnsupportedOutput
from slm_core.protocols import Context
from slm_core.types import Capability, Pooling, Pos


class TestEmbeddings(Scenarios):
    """Clause 11: ``embed`` gives the output of the last norm; all else is as in ``decode``."""

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: ``embed`` works if ``EMBEDDINGS`` is declared, and raises ``UnsupportedOutput`` otherwise."""
        context = bench.context()
        batch = bench.batch(context, (0, 0, bench.tokens(5)))
        if Capability.EMBEDDINGS not in context.capabilities:
            with bench.refused("embed of a context that declares no embeddings", UnsupportedOutput, context=context):
                context.embed(batch)
            return
        states = context.embed(batch)
        shape = 5, bench.model.info.n_embd
        assert isinstance(states, np.ndarray), f"hidden states are a {type(states).__name__}, not an array of NumPy"
        assert states.dtype == np.dtype(np.float32) and states.shape == shape, (
            f"hidden states of 5 tokens are {states.dtype} {states.shape}, not float32 {shape}"
        )

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clauses 9 and 11: hidden states equal the reference's, in batches of 64."""
        tokens = bench.tokens(N_SAMPLE)
        context, expected = _context(bench), bench.reference().embed(tokens)
        bench.states_agree(_feed(context, tokens, 64), expected, f"hidden states of {N_SAMPLE} tokens")

    def test_among_strangers(self, bench: Bench) -> None:
        """Clauses 7 and 8: token by token, and with another sequence in the batch, hidden states are the same."""
        tokens, others = bench.tokens(12), bench.tokens(12, seed=1)
        context, expected = _context(bench), bench.reference().embed(tokens)
        bench.states_agree(_feed(context, tokens, 1), expected, "hidden states token by token")
        context.drop(0)
        batch = context.new_batch()
        for i in range(12):
            batch.add(others[i], Pos(1, i), logits=False)
            batch.add(tokens[i], Pos(0, i), logits=True)
        bench.states_agree(context.embed(batch), expected, "hidden states, in turns with another sequence")

    def test_rows_asked_for(self, bench: Bench) -> None:
        """Clause 11: requested rows come in the order of the batch; none if none is requested."""
        tokens, context = bench.tokens(9), _context(bench)
        expected, batch = bench.reference().embed(tokens), context.new_batch()
        indices = [1, 2, 6]
        for i, token in enumerate(tokens):
            batch.add(token, Pos(0, i), logits=i in indices)
        bench.states_agree(context.embed(batch), expected[indices], "hidden states of tokens 1, 2 and 6 of 9")
        batch.clear()
        batch.extend(tokens, Pos(1, 0))
        shapes = context.embed(batch).shape, context.embed(context.new_batch()).shape
        assert shapes == ((0, expected.shape[1]),) * 2, f"no row asked for, and an empty batch, give shapes {shapes}"

    def test_in_turns_with_decode(self, bench: Bench) -> None:
        """Clause 11: ``embed`` adds tokens to the cache like ``decode``, and the next logits follow from them."""
        tokens, context, reference = bench.tokens(30), _context(bench), bench.reference()
        reference.decode(tokens[:10])
        bench.feed(context, tokens[:10])
        bench.states_agree(_feed(context, tokens[10:20], 10), reference.embed(tokens[10:20]), "embed after decode")
        assert context.tokens(0) == tuple(tokens[:20]), "10 tokens decoded, 10 embedded: the sequence holds others"
        bench.agree(bench.feed(context, tokens[20:]), reference.decode(tokens[20:]), "decode after embed")

    def test_refusals(self, bench: Bench) -> None:
        """Clauses 1 and 11: ``embed`` refuses the batches that ``decode`` refuses, and nothing changes."""
        context, size = _context(bench, n_ctx=40), bench.vocab.size
        _feed(context, bench.tokens(20), 20)
        for why, first, tokens, error in (
            ("a token outside the vocabulary", 20, [1, size], InvalidToken),
            ("a position that is not the next", 21, [1], InvalidPosition),
            ("more tokens than positions", 20, [1] * 21, ContextFull),
        ):
            with bench.refused(f"embed with {why}", error, context=context):
                context.embed(bench.batch(context, (0, first, tokens)))

    def test_pooled(self, bench: Bench) -> None:
        """Clause 11: texts embedded together give the vectors of each alone, for each pooling, and leave no trace."""
        context = _context(bench)
        texts = [bench.tokens(n, seed=n) for n in (7, 1, 12, 3, 20, 70)]
        states = [bench.reference().embed(text) for text in texts]
        for pooling in Pooling:
            vectors = embed(context, texts, pooling, normalize=False).vectors
            expected = np.stack([_pooled(rows, pooling) for rows in states])
            # A mean or maximum changes by at most the sum of the changes of all rows.
            allowed = [bench.tolerance.state * np.linalg.norm(rows) for rows in states]
            errors = np.linalg.norm(vectors - expected, axis=1)
            assert (errors <= allowed).all(), (
                f"embeddings by {pooling} are {errors.round(6).tolist()} away, allowed {np.round(allowed, 6).tolist()}"
            )
            lengths = np.linalg.norm(embed(context, texts, pooling).vectors, axis=1)
            assert np.abs(lengths - 1).max() < 1e-5, f"normalized embeddings have the lengths {lengths}"
        assert context.n_free == context.n_ctx, "embedding left something in the context"


def _context(bench: Bench, n_ctx: int = 256) -> Context:
    if Capability.EMBEDDINGS not in bench.capabilities:
        pytest.skip("declared absent: embeddings")
    return bench.context(n_ctx=n_ctx)


def _feed(context: Context, tokens: list[int], chunk: int) -> Rows:
    rows = []
    for first in range(0, len(tokens), chunk):
        batch = context.new_batch()
        batch.extend(tokens[first : first + chunk], Pos(0, context.length(0)), logits="all")
        rows.append(context.embed(batch).copy())
    return np.concatenate(rows)


def _pooled(states: Rows, pooling: Pooling) -> Rows:
    columns = states.T
    ways = {Pooling.LAST: columns[:, -1], Pooling.CLS: columns[:, 0], Pooling.MEAN: columns.sum(1) / len(states)}
    return ways[pooling] if pooling in ways else np.sort(columns, axis=1)[:, -1]
