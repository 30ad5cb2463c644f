"""Decoding beyond learned positions raises, where llama.cpp would abort the process; and beyond an ignored window."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import N_CTX
from slm_core.errors import InvalidPosition
from slm_core.plugins import registry
from slm_core.types import ContextOptions, ModelOptions, Pos
from tests.llamacpp.models import changed_model


def test_decoding_beyond_learned_positions_is_refused_and_changes_nothing(
    tmp_path, feed, random_tokens, llama_cpp_logits
):
    tokens, path = random_tokens(N_CTX + 1), family_model(tmp_path, "gpt2")
    with registry().backend("llamacpp").load(path, ModelOptions(n_threads=1)) as model:
        context = model.new_context(ContextOptions(n_ctx=N_CTX + 64, n_batch=N_CTX + 64))
        for call in (context.decode, context.embed):
            batch = context.new_batch()
            batch.extend(tokens, Pos(0, 0), logits="last")
            with pytest.raises(InvalidPosition, match=f"position {N_CTX} of sequence 0: .* 0 to {N_CTX - 1}"):
                call(batch)
            assert context.length(0) == 0
        last = feed(context, tokens[:N_CTX])[-1]
        expected = llama_cpp_logits(path, tokens[:N_CTX])[-1]
        assert np.linalg.norm(last - expected) < 1e-2 * np.linalg.norm(expected), (
            "keys and values are in f16, so the bound is 1e-2"
        )


def test_decoding_beyond_a_window_that_llama_cpp_ignores_is_refused(tmp_path, feed, random_tokens):
    """Up to the window, the logits are those of the same weights without a window."""
    tokens, rows = random_tokens(9), []
    for name, keys in (("plain", {}), ("window", {"llama__attention__sliding_window": 8})):
        path = changed_model(tmp_path / f"{name}.gguf", **keys)
        with registry().backend("llamacpp").load(path, ModelOptions(n_threads=1)) as model:
            context = model.new_context(ContextOptions(n_ctx=16))
            rows.append(feed(context, tokens[:8]))
            if name == "window":
                with pytest.raises(InvalidPosition, match=r"position 8 of sequence 0: llama\.cpp ignores .* 0 to 7"):
                    feed(context, tokens[8:])
                assert context.length(0) == 8
    assert np.array_equal(*rows)
