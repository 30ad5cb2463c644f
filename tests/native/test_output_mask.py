"""Batches that request no rows of logits, or some, in families whose layers have more parts than llama's.

The oracle is the reference tier: one batch that requests all rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from native.exact import exact
from slm_conformance.oracle.families import family_model
from slm_core.types import Pos

BOUND = 1e-4  # relative, between tiers that compute in float32: clause 9 of docs/contract.md
FAMILIES = ("llama", "gemma3n", "gemma4", "gemma4_experts", "deepseek2", "deepseek2_lite", "qwen2moe", "llama4")
NOTHING = slice(0)
CHUNKS = {  # the number of tokens of each batch, and the rows it requests
    "nothing, then the last": [(70, NOTHING), (3, slice(-1, None))],
    "nothing twice, then some": [(1, NOTHING), (40, NOTHING), (30, slice(1, None, 3)), (1, slice(None))],
    "some, nothing, all": [(20, slice(None, None, 7)), (45, NOTHING), (8, slice(None))],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_skipping_output_rows_does_not_change_the_others(tmp_path, load, random_tokens, assert_close, tier, family):
    path, tokens = family_model(tmp_path, family), random_tokens(73)
    options = exact(n_ctx=128, n_batch=128)
    with load(path).new_context(options) as context:
        all_logits = decode(context, tokens, 0, slice(None))
    model = load(path, tier)
    for name, chunks in CHUNKS.items():
        with model.new_context(options) as context:
            start = 0
            for n, output_rows in chunks:
                actual = decode(context, tokens[start : start + n], start, output_rows)
                expected = all_logits[start : start + n][output_rows]
                assert actual.shape == expected.shape, name
                if len(actual):
                    assert_close(actual, expected, BOUND)
                start += n


def decode(context, tokens, start, output_rows):
    output_mask = np.zeros(len(tokens), bool)
    output_mask[output_rows] = True
    batch = context.new_batch()
    for i, (token, is_output) in enumerate(zip(tokens, output_mask, strict=True)):
        batch.add(token, Pos(0, start + i), logits=bool(is_output))
    return context.decode(batch).copy()
