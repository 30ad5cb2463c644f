"""Rows that stand apart in time, height and width, against transformers, which is told where each token stands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from native.architectures.engines import Rows, make_subject
from slm_core.errors import UnsupportedInput
from slm_core.protocols import Context
from slm_core.types import EMBEDDED, Capability, ContextOptions, KvType, Pos

BOUND = 1e-4  # clause 9 of the contract: float32, relative
SECTIONS = [3, 3, 2]
KINDS = {"qwen2vl": "Qwen2VL", "qwen3vl": "Qwen3VL"}
OPTIONS = ContextOptions(n_ctx=256, n_seq_max=3, n_batch=128, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
GRIDS = {20: (1, 4, 6), 60: (3, 2, 3)}  # where an image begins, and a video: frames, rows, columns
N = 100


class Example(NamedTuple):
    """Text with an image and a video in it.

    Attributes:
        path: the file.
        tokens: ids [T], ``EMBEDDED`` where a row stands.
        rows: [T, E], of which those are used.
        offsets: [T, 3], each from the start of its image.
        expected: logits of transformers [T, V].
    """

    path: Any
    tokens: list[int]
    rows: Rows
    offsets: Rows
    expected: Rows


@pytest.fixture(scope="module", params=KINDS)
def example(request, tmp_path_factory, random_tokens) -> Example:
    subject = make_subject(tmp_path_factory.mktemp("family"), request.param)
    tokens, offsets, places = random_tokens(N), np.zeros((N, 3), np.int32), np.empty((0, 3), np.int64)
    for begin, shape in GRIDS.items():
        grid = np.stack(np.indices(shape), -1).reshape(-1, 3)
        end = begin + len(grid)
        places = with_text(places, begin)
        places = np.concatenate([places, places.max() + 1 + grid])
        offsets[begin:end], tokens[begin:end] = grid, [EMBEDDED] * len(grid)
    rows = np.random.default_rng(8).standard_normal((N, subject.model.config.hidden_size)).astype(np.float32)
    expected = transformers_logits(subject.model, KINDS[request.param], tokens, rows, with_text(places, N))
    return Example(subject.path, tokens, rows, offsets, expected)


def with_text(places: Rows, n: int) -> Rows:
    """Text up to ``n`` tokens, behind the furthest of all."""
    first = places.max(initial=-1) + 1
    return np.concatenate([places, np.repeat(np.arange(first, first + n - len(places)), 3).reshape(-1, 3)])


def transformers_logits(model: Any, kind: str, tokens: Sequence[int], rows: Rows, places: Rows) -> Rows:
    """Of the text model that sees images, with the weights of the one that does not."""
    stated = model.config.to_dict() | {"model_type": None}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS, "mrope_interleaved": True}
    config = getattr(transformers, f"{kind}TextConfig")(**stated | {"rope_parameters": rope})
    config._attn_implementation = "eager"
    body = getattr(transformers.models, kind.lower().replace("vl", "_vl"))
    text = getattr(body, f"{kind}TextModel")(config).eval()
    text.load_state_dict(model.model.state_dict())
    x = torch.from_numpy(rows.copy())
    given = torch.tensor(tokens) != EMBEDDED
    x[given] = model.model.embed_tokens.weight.detach()[torch.tensor(tokens)[given]]
    with torch.inference_mode():
        states = text(inputs_embeds=x[None], position_ids=torch.from_numpy(places.T.copy())[:, None]).last_hidden_state
        logits: Rows = model.lm_head(states)[0].numpy()
    return logits


def feed(context: Context, example: Example, start: int, stop: int, seq_id: int = 0) -> Rows:
    """Decode a part; images that begin before it go on."""
    batch, at = context.new_batch(), start
    while at < stop:
        grid = next((begin for begin, shape in GRIDS.items() if begin <= at < begin + np.prod(shape)), None)
        if grid is None:
            end = min([stop, *(begin for begin in GRIDS if begin > at)])
            batch.extend(example.tokens[at:end], Pos(seq_id, at), logits="all")
        else:
            end = min(stop, grid + int(np.prod(GRIDS[grid])))
            passed = example.offsets[grid:at].max(initial=-1) + 1
            offsets = example.offsets[at:end] - passed
            batch.add_embeddings(example.rows[at:end], Pos(seq_id, at), offsets=offsets, logits="all")
        at = end
    return context.decode(batch).copy()


def test_rows_in_a_grid_equal_transformers(example, tier, load, assert_close):
    with load(example.path, tier).new_context(OPTIONS) as context:
        assert Capability.GRID_POSITIONS in context.capabilities
        assert_close(feed(context, example, 0, N), example.expected, BOUND)


def test_an_image_in_pieces_is_the_same(example, load, assert_close):
    with load(example.path).new_context(OPTIONS) as context:
        bounds = [0, 10, 33, 40, 61, 62, 75, 90, N]
        rows = [feed(context, example, *pair) for pair in itertools.pairwise(bounds)]
    assert_close(np.concatenate(rows), example.expected, BOUND)


def test_what_is_held_knows_where_it_stands(example, load, assert_close):
    """Behind a fork in an image, a truncate in it, and a dump; each goes on as it would have."""
    model = load(example.path)
    with model.new_context(OPTIONS) as context, model.new_context(OPTIONS) as other:
        feed(context, example, 0, 70)
        context.fork(0, 1, 30)
        assert_close(feed(context, example, 30, 80, seq_id=1), example.expected[30:80], BOUND)
        context.truncate(Pos(0, 65))
        other.restore(2, context.dump(0))
        assert_close(feed(context, example, 65, N), example.expected[65:], BOUND)
        assert_close(feed(other, example, 65, N, seq_id=2), example.expected[65:], BOUND)


def test_models_without_sections_refuse_offsets(tmp_path, load):
    subject = make_subject(tmp_path, "qwen2")
    with load(subject.path).new_context(OPTIONS) as context:
        batch = context.new_batch()
        rows = np.ones((2, subject.model.config.hidden_size), np.float32)
        batch.add_embeddings(rows, Pos(0, 0), offsets=np.array([[0, 0, 0], [1, 1, 1]]))
        context.decode(batch)  # as tokens would
        batch.clear()
        batch.add_embeddings(rows, Pos(0, 2), offsets=np.array([[0, 0, 0], [0, 1, 0]]))
        with pytest.raises(UnsupportedInput, match="grid_positions"):
            context.decode(batch)
