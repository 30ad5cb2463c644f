"""Decoding beyond learned positions raises, where llama.cpp would abort the process."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import N_CTX
from slm_core.errors import InvalidPosition
from slm_core.plugins import registry
from slm_core.types import ContextOptions, ModelOptions, Pos


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
