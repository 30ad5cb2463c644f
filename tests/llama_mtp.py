"""llama.cpp's multi-token prediction: a model's context, and a context of its MTP layer, driven as llama.cpp does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class LlamaMtp:
    """One sequence of a model with an MTP layer in llama.cpp, all in float32.

    The MTP layer at position p gets token p and the hidden state of token p - 1, which is zero for the first token.
    """

    def __init__(self, path: Path, n_ctx: int = 256) -> None:
        self._api: Any = llama_cpp
        params = self._api.llama_model_default_params()
        params.n_gpu_layers, params.load_mtp = 0, True
        self._model = self._api.llama_model_load_from_file(str(path).encode(), params)
        assert self._model and self._api.llama_model_n_layer_nextn(self._model) == 1
        self._n_vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._n_embd = self._api.llama_model_n_embd(self._model)
        self._target, self._layer = (self._context(n_ctx, kind) for kind in (0, self._api.LLAMA_CONTEXT_TYPE_MTP))
        llama_cpp_ext.llama_set_embeddings_nextn(self._target, True, False)
        llama_cpp_ext.llama_set_embeddings_nextn(self._layer, True, True)
        self._length = 0
        self._state = np.zeros((1, self._n_embd), np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for context in (self._layer, self._target):
            self._api.llama_free(context)
        self._api.llama_model_free(self._model)

    def decode(self, tokens: Sequence[int]) -> Rows:
        """Append tokens; the model's logits after each [T, V]."""
        batch = self._api.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, self._length + i, 1, 1
            batch.seq_id[i][0] = 0
        batch.n_tokens = len(tokens)
        assert self._api.llama_decode(self._target, batch) == 0
        self._api.llama_batch_free(batch)
        logits = self._rows(self._api.llama_get_logits(self._target), len(tokens), self._n_vocab)
        states = self._rows(llama_cpp_ext.llama_get_embeddings_nextn(self._target), len(tokens), self._n_embd)
        self._run_layer(tokens, np.concatenate([self._state, states[:-1]]), self._length)
        self._state, self._length = states[-1:], self._length + len(tokens)
        return logits

    def draft(self, token: int, n: int) -> Rows:
        """The layer's logits for the ``n`` tokens after ``token``, each continued with the largest [n, V]."""
        rows, state = [], self._state
        for i in range(n):
            row, state = self._run_layer([token], state, self._length + i)
            rows.append(row)
            token = int(row.argmax())
        memory = self._api.llama_get_memory(self._layer)
        assert self._api.llama_memory_seq_rm(memory, 0, self._length, -1)
        return np.concatenate(rows)

    def _run_layer(self, tokens: Sequence[int], states: Rows, first: int) -> tuple[Rows, Rows]:
        """Append tokens to the layer's sequence; the logits and the state after the last one."""
        api, states = self._api, np.ascontiguousarray(states)
        batch = api.llama_batch_ext_init(self._layer)
        for i, token in enumerate(tokens):
            index = api.llama_batch_ext_add_token(batch, 0, token)
            row = api.llama_embd(states[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, self._n_embd)
            assert index == i and api.llama_batch_ext_set_embd_token(batch, i, row)
            assert api.llama_batch_ext_set_pos(batch, i, (ctypes.c_int32 * 4)(first + i, 0, 0, 0))
        api.llama_batch_ext_set_output_logits(batch, len(tokens) - 1, True)
        assert api.llama_process(self._layer, 1, batch) == 0
        api.llama_batch_ext_free(batch)
        i = len(tokens) - 1
        logits = self._rows(api.llama_get_logits_ith(self._layer, i), 1, self._n_vocab)
        return logits, self._rows(llama_cpp_ext.llama_get_embeddings_nextn_ith(self._layer, i), 1, self._n_embd)

    def _context(self, n_ctx: int, kind: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.type_k = params.type_v = self._api.GGML_TYPE_F32
        params.ctx_type, params.n_threads, params.n_threads_batch = kind, 1, 1
        params.flash_attn_type = 0
        context = self._api.llama_init_from_model(self._model, params)
        assert context
        return context

    @staticmethod
    def _rows(source: Any, n: int, width: int) -> Rows:
        return np.ctypeslib.as_array(source, (n, width)).copy()
