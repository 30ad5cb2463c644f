"""The three engines that must agree, each from tokens to logits; and the files that they agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from native.architectures.cases import CASES, Case
from native.architectures.conversion import converted_tensors, randomize
from slm_conformance.oracle.families import family_model, family_of, family_tensors, write_family
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.protocols import Context
from slm_core.types import Pos

Rows = NDArray[np.floating]
N_PREFILL, N_DECODE = 184, 16  # the KV cache of 64 tokens a page has a new page while decoding


class Subject(NamedTuple):
    """A family's file and the transformers model that it was converted from; None if transformers has no such class."""

    path: Path
    model: Any


def make_subject(folder: Path, family: str, cases: Mapping[str, Case | str] = CASES) -> Subject:
    """Random weights of a family, converted from transformers if it has the class, else made from the table."""
    case = cases[family]
    if isinstance(case, str):
        return Subject(family_model(folder, family), None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = case.make(family)
    randomize(model, seed=1)
    case.prepare(model, family_of(family))
    return Subject(write_family(folder / f"{family}.gguf", family, _tensors(family, case, model)), model)


def _tensors(family: str, case: Case, model: Any) -> dict[str, StoredTensor]:
    about = family_of(family)
    tensors = converted_tensors(
        model, about.architecture, int(str(about.metadata["block_count"])), about.metadata, case.changes
    )
    tensors |= case.extra(model)
    expected_shapes = family_tensors(family)
    assert tensors.keys() == expected_shapes.keys(), (
        f"the conversion differs in {sorted(tensors.keys() ^ expected_shapes.keys())}"
    )
    wrong = [name for name, shape in expected_shapes.items() if tensors[name].shape != shape]
    assert not wrong, f"the conversion has other shapes of {wrong}"
    return {name: StoredTensor.pack(values, "f32") for name, values in tensors.items()}


def transformers_logits(model: Any, tokens: Sequence[int]) -> Rows:
    """Logits after each token, float32 [T, V], of one forward pass."""
    with torch.inference_mode():
        rows: Rows = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return rows


def transformers_states(model: Any, tokens: Sequence[int]) -> Rows:
    """Hidden states after the last norm, float32 [T, E], of one forward pass of a causal language model."""
    return encoder_states(
        model.model if model.base_model is model else model.base_model, tokens
    )  # llama4: skip the vision model


def encoder_states(body: Any, tokens: Sequence[int]) -> Rows:
    """Like ``transformers_states``, of a model without logits."""
    with torch.inference_mode():
        rows: Rows = body(torch.tensor([list(tokens)])).last_hidden_state[0].float().numpy()
    return rows


def native_logits(context: Context, tokens: Sequence[int], chunks: Sequence[int]) -> Rows:
    """Logits after each token, decoded in batches of the sizes ``chunks``."""
    rows, start = [], 0
    for n in chunks:
        batch = context.new_batch()
        batch.extend(tokens[start : start + n], Pos(0, start), logits="all")
        rows.append(context.decode(batch).copy())
        start += n
    return np.concatenate(rows)
