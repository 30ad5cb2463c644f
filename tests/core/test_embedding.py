"""Embeddings over a context whose hidden states follow a formula, and errors of contexts without hidden states."""

from __future__ import annotations

import numpy as np
import pytest

import slm_core as slm
from slm_core.context import ContextBase
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.embedding import embed, token_states
from slm_core.errors import ContextFull, InvalidOption, InvalidSequence, InvalidSnapshot, UnsupportedOutput
from slm_core.types import Capability, ContextOptions, EditLevel, Pooling, Pos

DECODER = frozenset({Capability.EMBEDDINGS})
ENCODER = DECODER | {Capability.ENCODER}


class Sums(ContextBase):
    """The hidden state of a token is its id, its position, and the sum of the tokens that it attends to."""

    def __init__(self, able=DECODER, n_ctx=100, n_seq_max=3, n_batch=10):
        super().__init__(
            ContextOptions(n_ctx, n_seq_max, n_batch),
            backend="sums",
            fingerprint="f",
            n_vocab=50,
            edit_level=EditLevel.CUT,
            capabilities=able,
            payload_format="",
            n_embd=3,
        )
        self.held = [[] for _ in range(n_seq_max)]
        self.batches = []

    def _engine_embed(self, batch):
        self.batches.append((batch.seq_ids.tolist(), batch.logits_mask.tolist()))
        rows = []
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            self.held[seq_id].append(int(token))
            seen = (
                batch.tokens[batch.seq_ids == seq_id] if Capability.ENCODER in self.capabilities else self.held[seq_id]
            )
            rows.append([token, position, sum(seen)])
        if Capability.ENCODER in self.capabilities:
            self.held = [[] for _ in self.held]
        return np.array(rows, np.float32)[batch.logits_mask]

    def _engine_decode(self, batch):
        raise AssertionError

    def _engine_drop(self, seq_id):
        self.held[seq_id] = []

    _engine_fork = _engine_truncate = _engine_cut = _engine_export = _engine_import = _engine_decode
    _engine_check_payload = _engine_decode

    def _engine_close(self):
        pass


@pytest.mark.parametrize(
    ("pooling", "able", "expected"),
    [
        ("last", DECODER, [4, 2, 9]),
        ("mean", DECODER, [3, 1, 16 / 3]),
        ("max", DECODER, [4, 2, 9]),
        ("cls", DECODER, [2, 0, 2]),
        ("mean", ENCODER, [3, 1, 9]),
        ("cls", ENCODER, [2, 0, 9]),
        (None, DECODER, [4, 2, 9]),
        (None, ENCODER, [3, 1, 9]),
    ],
)
def test_pooling(pooling, able, expected):
    context = Sums(able)
    embeddings = embed(context, [[2, 3, 4], [7]], pooling, normalize=False)
    assert embeddings.vectors.dtype == np.float32
    assert embeddings.vectors[0] == pytest.approx(expected)
    assert embeddings.vectors[1] == pytest.approx([7, 0, 7])
    assert embeddings.n_tokens == (3, 1)
    assert embeddings.pooling is Pooling(pooling or ("mean" if Capability.ENCODER in able else "last"))
    assert context.n_free == context.n_ctx


def test_texts_share_batches_and_long_texts_are_split_into_chunks():
    context = Sums()
    texts = [[1] * n for n in (4, 5, 2, 1, 1, 3, 25)]
    embeddings = embed(context, texts, "last", normalize=False)
    assert embeddings.vectors.tolist() == [[1, n - 1, n] for n in map(len, texts)]
    assert [seq_ids for seq_ids, _ in context.batches] == [
        [0] * 4 + [1] * 5,
        [0] * 2 + [1] + [2],
        [0] * 3,
        [0] * 10,
        [0] * 10,
        [0] * 5,
    ]
    assert [sum(mask) for _, mask in context.batches] == [2, 3, 1, 0, 0, 1], "only the last rows are requested"
    assert np.concatenate(list(token_states(context, texts))).shape == (41, 3)


def test_vectors_are_normalized_except_zero_vectors():
    vectors = embed(Sums(), [[3, 4], [0]], "last").vectors
    assert vectors[0] == pytest.approx(np.array([4, 1, 7]) / 66**0.5)
    assert vectors[1].tolist() == [0, 0, 0]
    assert embed(Sums(), []).vectors.shape == (0, 3)  # so that a product with a vector works


@pytest.mark.parametrize(
    ("context", "texts", "pooling", "error", "match"),
    [
        (Sums(), [[1]], "median", InvalidOption, "unknown pooling 'median' .accepted: last, mean, max, cls"),
        (Sums(), [[1], []], None, InvalidOption, "text 1 has no tokens"),
        (Sums(ENCODER), [[1] * 11], None, InvalidOption, "text 0 has 11 tokens, .* at most 10"),
        (Sums(n_ctx=20), [[1] * 21], None, ContextFull, "is full"),
        (Sums(frozenset()), [[1]], None, UnsupportedOutput, "the backend sums gives no hidden states"),
    ],
)
def test_refusals_leave_the_context_empty(context, texts, pooling, error, match):
    with pytest.raises(error, match=match):
        embed(context, texts, pooling)
    assert context.n_free == context.n_ctx


def test_a_context_in_use_is_refused():
    context = Sums()
    batch = context.new_batch()
    batch.add(1, Pos(1, 0))
    context.embed(batch)
    with pytest.raises(InvalidSequence, match="an empty one"):
        embed(context, [[1]])
    assert context.length(1) == 1


def test_an_encoder_stores_nothing_and_has_no_logits():
    context = Sums(ENCODER)
    batch = context.new_batch()
    batch.extend([1, 2, 3], Pos(2, 0), logits="all")
    for _ in range(2):
        assert context.embed(batch)[:, 2].tolist() == [6, 6, 6]
    assert context.length(2) == 0
    with pytest.raises(UnsupportedOutput, match=r"is an encoder: it has hidden states \(embed\), and no logits"):
        context.decode(batch)
    empty = context.dump(2)
    context.restore(0, empty)
    hostile = SequenceSnapshot("sums", "", "f", np.array([1, 2], np.int32), (), b"").to_bytes()
    with pytest.raises(InvalidSnapshot, match="an encoder stores none"):
        context.restore(0, hostile)
    assert embed(Sums(), []).pooling is Pooling.LAST


def test_a_loaded_model_embeds_the_hidden_states_of_its_tokens():
    with slm.load(slm.demo_model_path(), backend="native") as model:
        states = model.hidden_states("a dog")
        embeddings = model.embed(["a dog", "x" * 600], pooling="mean", normalize=False)
        assert embeddings.vectors[0] == pytest.approx(states.mean(axis=0), abs=1e-4)
        assert embeddings.n_tokens[0] == len(states)
        assert model.info.pooling is None
        assert model.embed("a dog").pooling is Pooling.LAST
        assert model.embed("a dog").vectors.shape == (1, model.info.n_embd)
