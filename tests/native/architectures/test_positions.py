"""Learned positions, which are limited, and LongRoPE, which depends on the length of the context."""

from __future__ import annotations

import pytest

from native.exact import exact
from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import N_CTX
from slm_core.errors import InvalidPosition


def test_decoding_beyond_learned_positions_is_refused_and_changes_nothing(
    tmp_path, tier, load, feed, random_tokens, assert_close
):
    tokens = random_tokens(N_CTX + 1)
    model = load(family_model(tmp_path, "gpt2"), tier)
    with model.new_context(exact(n_ctx=N_CTX + 64, n_batch=N_CTX + 64)) as context:
        with pytest.raises(InvalidPosition, match=f"position {N_CTX} of sequence 0: .* 0 to {N_CTX - 1}"):
            feed(context, tokens)
        assert context.length(0) == 0
        whole = feed(context, tokens[:N_CTX])
        with pytest.raises(InvalidPosition):
            feed(context, tokens[:1])
        assert context.length(0) == N_CTX
        with model.new_context(exact(n_ctx=64)) as other:
            assert_close(feed(other, tokens[:40]), whole[:40], 1e-4)


def test_a_dump_of_a_long_context_is_replayed_in_a_short_one(tmp_path, load, feed, random_tokens, assert_close):
    """LongRoPE rotates keys of the two contexts by different tables, so the payload cannot be loaded."""
    tokens, model = random_tokens(50), load(family_model(tmp_path, "phi3_long"))
    with (
        model.new_context(exact(n_ctx=128)) as long,
        model.new_context(exact(n_ctx=64)) as short,
        model.new_context(exact(n_ctx=64)) as fresh,
    ):
        feed(long, tokens)
        short.restore(0, long.dump(0))
        feed(fresh, tokens)
        expected = feed(fresh, tokens[:5])
        assert_close(feed(short, tokens[:5]), expected, 1e-5)
        assert abs(feed(long, tokens[:5]) - expected).max() > 0.1, "the tables differ"
