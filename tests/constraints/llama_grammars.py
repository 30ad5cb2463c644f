"""llama.cpp's grammar sampler through its low-level API."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np


class LlamaGrammars:
    """llama.cpp's grammar sampler over one vocabulary."""

    def __init__(self, lib: Any, path: Path) -> None:
        self.lib = lib
        params = lib.llama_model_default_params()
        params.vocab_only = True
        params.use_extra_bufts = False
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp cannot load {path}"
        self.vocab = lib.llama_model_get_vocab(self._model)
        self.size: int = lib.llama_vocab_n_tokens(self.vocab)

    def begin(self, grammar: str) -> LlamaGrammar | None:
        """A sampler at the start of the grammar, or None if llama.cpp refuses the grammar."""
        sampler = self.lib.llama_sampler_init_grammar(self.vocab, grammar.encode(), b"root")
        return LlamaGrammar(self, sampler) if sampler else None

    def close(self) -> None:
        self.lib.llama_model_free(self._model)


class LlamaGrammar:
    """The state of one grammar, advanced token by token."""

    def __init__(self, grammars: LlamaGrammars, sampler: Any) -> None:
        self._grammars, self._sampler = grammars, sampler
        lib, size = grammars.lib, grammars.size
        self._cells = (lib.llama_token_data * size)()
        self._row = np.ctypeslib.as_array(ctypes.cast(self._cells, ctypes.POINTER(ctypes.c_float)), (size, 3))
        self._ids = self._row[:, 0].view(np.int32)

    def allowed(self) -> np.ndarray:
        """The mask of allowed next tokens, bool [V]."""
        lib = self._grammars.lib
        self._ids[:] = np.arange(len(self._ids))
        self._row[:, 1] = 0.0
        array = lib.llama_token_data_array(self._cells, len(self._cells), -1, False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        mask = np.zeros(len(self._cells), bool)
        mask[self._ids] = np.isfinite(self._row[:, 1])
        return mask

    def accept(self, token: int) -> None:
        self._grammars.lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        self._grammars.lib.llama_sampler_free(self._sampler)
