"""Text with an image and a video, and the logits of transformers for its M-RoPE positions."""

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
"""By family: the module and classes in transformers."""
IMAGES = {20: (1, 4, 6), 60: (3, 2, 3)}  # the first position of an image and of a video: frames, rows, columns
N = 100


class Example(NamedTuple):
    """Text with an image and a video.

    Attributes:
        path: the file.
        tokens: ids [T], with ``EMBEDDED`` for embedding rows.
        rows: embedding rows [T, E], used if the token is ``EMBEDDED``.
        offsets: M-RoPE offsets [T, 3] from the start of the image.
        expected: logits of transformers [T, V].
    """

    path: Path
    tokens: list[int]
    rows: Rows
    offsets: Rows
    expected: Rows


def make_example(folder: Path, family: str, text: Sequence[int]) -> Example:
    """An example of ``KINDS``; ``text`` [N] has the tokens outside the images."""
    subject = make_subject(folder, family)
    tokens, offsets, positions = list(text), np.zeros((N, 3), np.int32), np.empty((0, 3), np.int64)
    for begin, shape in IMAGES.items():
        patches = np.stack(np.indices(shape), -1).reshape(-1, 3)
        end = begin + len(patches)
        positions = with_text(positions, begin)
        positions = np.concatenate([positions, positions.max() + 1 + patches])
        offsets[begin:end], tokens[begin:end] = patches, [EMBEDDED] * len(patches)
    rows = np.random.default_rng(8).standard_normal((N, subject.model.config.hidden_size)).astype(np.float32)
    expected = transformers_logits(subject.model, family, tokens, rows, with_text(positions, N))
    return Example(subject.path, tokens, rows, offsets, expected)


def with_text(positions: Rows, n: int) -> Rows:
    """Positions continued by text up to ``n`` tokens; text begins after the highest position so far."""
    first = positions.max(initial=-1) + 1
    return np.concatenate([positions, np.repeat(np.arange(first, first + n - len(positions)), 3).reshape(-1, 3)])


def transformers_logits(model: Any, family: str, tokens: Sequence[int], rows: Rows, positions: Rows) -> Rows:
    """Logits of the vision-language model's text model, with the weights of the text-only model."""
    module, kind = KINDS[family]
    stated = model.config.to_dict() | {"model_type": None}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS, "mrope_interleaved": True}
    config = getattr(transformers, f"{kind}TextConfig")(**stated | {"rope_parameters": rope})
    config._attn_implementation = "eager"
    text = getattr(getattr(transformers.models, module), f"{kind}TextModel")(config).eval()
    text.load_state_dict(model.model.state_dict())
    x = torch.from_numpy(rows.copy())
    is_text = torch.tensor(tokens) != EMBEDDED
    x[is_text] = model.model.embed_tokens.weight.detach()[torch.tensor(tokens)[is_text]]
    with torch.inference_mode():
        states = text(
            inputs_embeds=x[None], position_ids=torch.from_numpy(positions.T.copy())[:, None]
        ).last_hidden_state
        logits: Rows = model.lm_head(states)[0].numpy()
    return logits


def feed(context: Context, example: Example, start: int, stop: int, seq_id: int = 0) -> Rows:
    """Decode the inputs [start, stop); images that begin before ``start`` continue."""
    batch, at = context.new_batch(), start
    while at < stop:
        image = next((begin for begin, shape in IMAGES.items() if begin <= at < begin + np.prod(shape)), None)
        if image is None:
            end = min([stop, *(begin for begin in IMAGES if begin > at)])
            batch.extend(example.tokens[at:end], Pos(seq_id, at), logits="all")
        else:
            end = min(stop, image + int(np.prod(IMAGES[image])))
            n_positions = example.offsets[image:at].max(initial=-1) + 1
            offsets = example.offsets[at:end] - n_positions
            batch.add_embeddings(example.rows[at:end], Pos(seq_id, at), offsets=offsets, logits="all")
        at = end
    return context.decode(batch).copy()
