"""Models with a layer for multi-token prediction (MTP): random weights, and weights with which it predicts well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.families import family_tensors, write_family
from slm_conformance.oracle.gguf_writer import StoredTensor

FAMILY = "small_mtp"
_STEP = 7  # coprime with the size of the vocabulary
_SILENT = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")


def next_token(token: int, n_vocab: int) -> int:
    """The token that follows ``token`` in ``predictable_model``."""
    return (token + _STEP) % n_vocab


def predictable_model(path: Path, family: str = FAMILY, *, right: bool = True) -> Path:
    """Write a model whose next token is ``next_token`` of the last one, by a wide margin; returns ``path``.

    All blocks add zero, so the hidden state is the normalized embedding of the last token. The MTP layer reads the
    embedding only, so it predicts the same.

    Args:
        path: the new file.
        family: the family of the file.
        right: whether the MTP layer reads the embedding; else it reads the state before, and is always wrong.
    """
    shapes, rng = family_tensors(family), np.random.default_rng(5)
    tensors = {name: _random(rng, name, shape) for name, shape in shapes.items()}
    table = tensors["token_embd.weight"]
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    n_vocab, n_embd = table.shape
    after = [next_token(token, n_vocab) for token in range(n_vocab)]
    tensors["output.weight"][after] = 3 * np.sqrt(n_embd) * table / n_embd * 8
    projection = next(name for name in shapes if name.endswith("eh_proj.weight"))
    eye, nothing = np.eye(n_embd, dtype=np.float32), np.zeros((n_embd, n_embd), np.float32)
    tensors[projection] = np.concatenate((eye, nothing) if right else (nothing, eye), axis=1)
    return write_family(path, family, {name: StoredTensor.pack(values, "f32") for name, values in tensors.items()})


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if name.endswith(_SILENT):
        return np.zeros(shape, np.float32)
    if "norm" in name:
        return np.ones(shape, np.float32)
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
