"""Spans against transformers, which takes a mask of any form: gemma3's layers with windows, and those without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from native.architectures.engines import make_subject
from slm_core.types import ContextOptions, KvType, Pos

N, WINDOW, BOUND = 200, 48, 1e-4
SPANS = ((30, 100), (100, 104), (120, 180), (185, 188))  # some longer than the window, and side by side
OPTIONS = ContextOptions(n_ctx=512, n_seq_max=2, n_batch=256, kv_type_k=KvType.F32, kv_type_v=KvType.F32)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("family"), "gemma3")


@pytest.fixture(scope="module")
def tokens(random_tokens) -> list[int]:
    return random_tokens(N)


def expected_logits(model, tokens):
    """As transformers does it for gemma3's images: tokens of one see each other, however narrow the window."""
    distance = np.arange(N)[:, None] - np.arange(N)
    together = np.zeros((N, N), bool)
    for first, end in SPANS:
        together[first:end, first:end] = True
    seen = {"full_attention": distance >= 0, "sliding_attention": (distance >= 0) & (distance < WINDOW)}
    masks = {
        kind: torch.from_numpy(np.where(mask | together, 0, -np.inf).astype(np.float32))[None, None]
        for kind, mask in seen.items()
    }
    with torch.inference_mode():
        return model(torch.tensor([tokens]), attention_mask=masks).logits[0].numpy()


def test_spans_equal_transformers(gemma3, tier, load, tokens, assert_close):
    assert gemma3.model.config.sliding_window == WINDOW
    with load(gemma3.path, tier).new_context(OPTIONS) as context:
        batch, rows = context.new_batch(), []
        for start, stop in ((0, 110), (110, N)):
            batch.clear()
            done = start
            for first, end in ((first, end) for first, end in SPANS if start <= first < stop):
                batch.extend(tokens[done:first], Pos(0, done), logits="all")
                batch.extend(tokens[first:end], Pos(0, first), logits="all")
                batch.join(end - first)
                batch.add(tokens[0], Pos(1, context.length(1) + int((batch.seq_ids == 1).sum())))  # a stranger
                done = end
            batch.extend(tokens[done:stop], Pos(0, done), logits="all")
            rows.append(context.decode(batch).copy())
    assert_close(np.concatenate(rows), expected_logits(gemma3.model, tokens), BOUND)
