"""Text with an image and a video in it, and what transformers makes of it, which is told where each token stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from native.architectures.engines import Rows, make_subject
from slm_core.protocols import Context
from slm_core.types import EMBEDDED, Pos

SECTIONS = [3, 3, 2]
KINDS = {
    "qwen2vl": ("qwen2_vl", "Qwen2VL"),
    "qwen3vl": ("qwen3_vl", "Qwen3VL"),
    "qwen3vlmoe": ("qwen3_vl_moe", "Qwen3VLMoe"),
}
"""Families, and what their modules and classes in transformers are called."""
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

    path: Path
    tokens: list[int]
    rows: Rows
    offsets: Rows
    expected: Rows


def make_example(folder: Path, family: str, given: Sequence[int]) -> Example:
    """An example of ``KINDS``, with these tokens [N] where there are no rows."""
    subject = make_subject(folder, family)
    tokens, offsets, places = list(given), np.zeros((N, 3), np.int32), np.empty((0, 3), np.int64)
    for begin, shape in GRIDS.items():
        grid = np.stack(np.indices(shape), -1).reshape(-1, 3)
        end = begin + len(grid)
        places = with_text(places, begin)
        places = np.concatenate([places, places.max() + 1 + grid])
        offsets[begin:end], tokens[begin:end] = grid, [EMBEDDED] * len(grid)
    rows = np.random.default_rng(8).standard_normal((N, subject.model.config.hidden_size)).astype(np.float32)
    expected = transformers_logits(subject.model, family, tokens, rows, with_text(places, N))
    return Example(subject.path, tokens, rows, offsets, expected)


def with_text(places: Rows, n: int) -> Rows:
    """Text up to ``n`` tokens, behind the furthest of all."""
    first = places.max(initial=-1) + 1
    return np.concatenate([places, np.repeat(np.arange(first, first + n - len(places)), 3).reshape(-1, 3)])


def transformers_logits(model: Any, family: str, tokens: Sequence[int], rows: Rows, places: Rows) -> Rows:
    """Of the text model that sees images, with the weights of the one that does not."""
    module, kind = KINDS[family]
    stated = model.config.to_dict() | {"model_type": None}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS, "mrope_interleaved": True}
    config = getattr(transformers, f"{kind}TextConfig")(**stated | {"rope_parameters": rope})
    config._attn_implementation = "eager"
    text = getattr(getattr(transformers.models, module), f"{kind}TextModel")(config).eval()
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
