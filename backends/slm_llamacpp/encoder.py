"""A context of an encoder: llama.cpp returns hidden states and keeps no cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from slm_core.adapters import AdapterSet
from slm_core.context import ContextBase, check_context_options, check_position_limit
from slm_core.context.finite import check_states
from slm_core.errors import DecodeFailed, UnsupportedOutput
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, States
from slm_llamacpp import BACKEND, library, logs
from slm_llamacpp.batchbuffers import BatchBuffers
from slm_llamacpp.context import copied, created, kv_type
from slm_llamacpp.forks import before_computing
from slm_llamacpp.options import Settings

if TYPE_CHECKING:
    from slm_llamacpp.model import LlamaCppModel


class LlamaCppEncoder(ContextBase):
    """Runs whole sequences.

    Args:
        model: the model; the context keeps it alive.
        api: the low-level functions.
        model_pointer: llama.cpp's pointer to the model.
        options: the sizes; KV types are only checked.
        settings: device, threads and options of the model.

    Raises:
        InvalidOption: llama.cpp cannot create such a context; the message gives its reason.
    """

    def __init__(
        self, model: LlamaCppModel, api: Any, model_pointer: int, options: ContextOptions, settings: Settings
    ) -> None:
        check_context_options(options)
        for asked in (options.kv_type_k, options.kv_type_v):
            kv_type(asked)
        self._api, self._model = api, model
        self._pointer = created(api, model_pointer, _params(api, options, settings), options)
        self._free = weakref.finalize(self, api.llama_free, self._pointer)
        self._free.atexit = False  # at exit the system frees the memory
        self._buffers = BatchBuffers(
            api, min(options.n_batch, options.n_ctx), np.arange(options.n_seq_max, dtype=np.int32)[:, None]
        )
        super().__init__(
            options,
            backend=BACKEND,
            fingerprint=model.info.fingerprint,
            n_vocab=model.vocab.size,
            edit_level=EditLevel.REPLAY,
            capabilities=frozenset({Capability.EMBEDDINGS, Capability.ENCODER, Capability.ADAPTERS}),
            payload_format="",
            n_embd=api.llama_model_n_embd_out(model_pointer),
            adapters=model.loaded_adapters,
        )
        self._used: AdapterSet = ()  # keeps the adapters alive: llama.cpp computes with pointers to them

    def _engine_use(self, adapters: AdapterSet) -> None:
        self._model.lora.use(self._pointer, adapters)
        self._used = adapters

    def _engine_embed(self, batch: Batch) -> States:
        if self._model.positions is not None:
            check_position_limit(batch, *self._model.positions)
        all_tokens = np.ones(len(batch), np.bool_)
        filled = self._buffers.fill(batch.tokens, batch.seq_ids, batch.positions, all_tokens)
        before_computing(self._api, self._pointer)
        with logs.collected() as complaints:
            failure = self._api.llama_encode(self._pointer, filled)
        if failure:
            raise DecodeFailed(f"llama.cpp could not encode: {logs.reason_in(complaints)} (code {failure})")
        rows = copied(self._api.llama_get_embeddings(self._pointer), len(batch), self._n_embd)
        check_states(rows)
        return rows[batch.logits_mask]

    def _engine_decode(self, batch: Batch) -> Logits:
        raise UnsupportedOutput("this model is an encoder")

    def _engine_drop(self, seq_id: int) -> None:
        self._never()

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._never()

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._never()

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        self._never()

    def _engine_export(self, seq_id: int) -> bytes:
        return self._never()

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        self._never()

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        self._never()

    def _engine_close(self) -> None:
        self._free()
        library.return_memory()

    def _never(self) -> bytes:
        """Never called: the base class calls it only for sequences with tokens."""
        raise AssertionError("an encoder's sequences are empty")


def _params(api: Any, options: ContextOptions, settings: Settings) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx = max(options.n_ctx, options.n_seq_max)
    # A sequence runs as a whole. llama.cpp ends the process if the capacity of a batch is below the number of
    # sequences.
    params.n_batch = params.n_ubatch = max(min(options.n_batch, options.n_ctx), options.n_seq_max)
    params.n_seq_max = options.n_seq_max
    params.n_threads = params.n_threads_batch = settings.n_threads
    params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embeddings = params.kv_unified = params.no_perf = True
    return params
