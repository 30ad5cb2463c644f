"""llama.cpp's samplers through its low-level API: rows of logits in, remaining tokens and probabilities out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Make = Callable[[Any, Any], Any]
"""Makes a sampler from the module ``llama_cpp`` and a vocabulary."""


class LlamaSampler:
    """One sampler of llama.cpp. ``close`` frees it."""

    def __init__(self, make: Make, vocab: object = None) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._sampler = make(llama_cpp, vocab)
        self.selected: int | None = None

    def apply(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The remaining tokens of a row: ids int64 [n], ascending, and their probabilities, float64 [n]."""
        data = (self._api.llama_token_data * len(row))()
        table = np.frombuffer(data, np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")]))
        table["id"], table["logit"] = np.arange(len(row)), row
        array = self._api.llama_token_data_array(data, len(row), -1, False)
        self._api.llama_sampler_apply(self._sampler, ctypes.byref(array))
        remaining_bytes = np.ctypeslib.as_array(
            ctypes.cast(array.data, ctypes.POINTER(ctypes.c_uint8)), (array.size * table.itemsize,)
        )
        remaining = remaining_bytes.view(table.dtype).copy()
        self.selected = None if array.selected < 0 else int(remaining["id"][array.selected])
        remaining = remaining[np.isfinite(remaining["logit"])]
        remaining = remaining[np.argsort(remaining["id"])]
        weights = np.exp(remaining["logit"].astype(np.float64) - remaining["logit"].max())
        return remaining["id"].astype(np.int64), weights / weights.sum()

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._api.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        self._api.llama_sampler_free(self._sampler)


class LlamaVocab:
    """The vocabulary of a model file, for the DRY sampler of llama.cpp."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.handle = llama_cpp.llama_model_get_vocab(self._model)

    def close(self) -> None:
        self._api.llama_model_free(self._model)
