"""Bidirectional blocks against transformers, in gemma3's layers with and without sliding windows."""

from __future__ import annotations

from bidirectional_example import N, feed_blocks, transformers_logits
from native.architectures.engines import make_subject
from slm_core.types import ContextOptions, KvType

BOUND = 1e-4
OPTIONS = ContextOptions(n_ctx=512, n_seq_max=2, n_batch=256, kv_type_k=KvType.F32, kv_type_v=KvType.F32)


def test_bidirectional_blocks_equal_transformers(tmp_path, tier, load, random_tokens, assert_close):
    gemma3, tokens = make_subject(tmp_path, "gemma3"), random_tokens(N)
    with load(gemma3.path, tier).new_context(OPTIONS) as context:
        assert_close(feed_blocks(context, tokens), transformers_logits(gemma3.model, tokens), BOUND)
