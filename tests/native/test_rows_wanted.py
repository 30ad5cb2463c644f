"""Batches of which no row, or some rows, are wanted, in families whose blocks have more around them than llama's.

The oracle is the reference tier, in one batch of which all rows are wanted.
"""

from __future__ import annotations

import numpy as np
import pytest

from native.exact import exact
from slm_conformance.oracle.families import family_model
from slm_core.types import Pos

BOUND = 1e-4  # between tiers that compute in float32: docs/contract.md
FAMILIES = ("llama", "gemma3n", "gemma4", "gemma4_experts", "deepseek2", "deepseek2_lite", "qwen2moe", "llama4")
NOTHING = slice(0)
CHUNKS = {  # the tokens that each batch brings, and whose rows are wanted
    "nothing, then the last": [(70, NOTHING), (3, slice(-1, None))],
    "nothing twice, then some": [(1, NOTHING), (40, NOTHING), (30, slice(1, None, 3)), (1, slice(None))],
    "some, nothing, all": [(20, slice(None, None, 7)), (45, NOTHING), (8, slice(None))],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_not_wanted_change_no_others(tmp_path, load, random_tokens, assert_close, tier, family, chunks):
    path, tokens = family_model(tmp_path, family), random_tokens(sum(n for n, _ in chunks))
    options = exact(n_ctx=128, n_batch=128)
    with load(path).new_context(options) as context:
        every = decode(context, tokens, 0, slice(None))
    with load(path, tier).new_context(options) as context:
        start = 0
        for n, wanted in chunks:
            found = decode(context, tokens[start : start + n], start, wanted)
            expected = every[start : start + n][wanted]
            assert found.shape == expected.shape
            if len(found):
                assert_close(found, expected, BOUND)
            start += n


def decode(context, tokens, start, wanted):
    chosen = np.zeros(len(tokens), bool)
    chosen[wanted] = True
    batch = context.new_batch()
    for i, (token, is_wanted) in enumerate(zip(tokens, chosen, strict=True)):
        batch.add(token, Pos(0, start + i), logits=bool(is_wanted))
    return context.decode(batch).copy()
