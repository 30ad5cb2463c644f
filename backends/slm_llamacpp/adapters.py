"""Adapters (LoRA, control vectors) in llama.cpp: which ones it computes, and its objects for them."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from slm_core.adapters import Adapter, AdapterSet, BaseModel, summed_directions, write_adapter
from slm_core.architectures import architecture_names
from slm_core.errors import DecodeFailed, InvalidModelFile, UnsupportedModel
from slm_llamacpp import logs
from slm_llamacpp.handle import Handle

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_CHANGED = """
attn_q attn_k attn_v attn_qkv attn_output ffn_gate ffn_up ffn_down ffn_gate_inp ffn_gate_shexp ffn_up_shexp
ffn_down_shexp ssm_in ssm_out ssm_x ssm_dt in_proj out_proj inp_gate proj laurel_l laurel_r time_mix_key
time_mix_output channel_mix_key
"""
"""Matrices of a block whose changes llama.cpp computes, as experiments show. It ignores changes of other matrices."""
_LATENT, _IGNORED_WITH_LATENTS = "blk.0.attn_kv_a_mqa.weight", ("attn_q", "output")
"""In models with latent attention (MLA), llama.cpp also ignores changes of these matrices."""
_UNSTEERED = ("bert", "modern-bert", "nomic-bert")
"""Architectures for which llama.cpp ignores control vectors. For all other known ones it applies them, as experiments
show."""


class LlamaCppAdapters:
    """llama.cpp's objects for the adapters of one model. An object is freed when nothing uses its adapter any more.

    Args:
        api: the low-level functions.
        model: the model.
        base: its architecture, sizes and tensors.
    """

    def __init__(self, api: Any, model: Handle, base: BaseModel) -> None:
        self._api = api
        self._model = model
        self._architecture = base.architecture
        self._n_layers, self._n_embd = base.n_layers, base.n_embd
        self._is_tied = _OUTPUT not in base.shapes
        self._ignored = _IGNORED_WITH_LATENTS if _LATENT in base.shapes else ()
        self._handles: weakref.WeakKeyDictionary[Adapter, Handle] = weakref.WeakKeyDictionary()

    def prepare(self, adapter: Adapter) -> None:
        """Load an adapter.

        Raises:
            UnsupportedModel: llama.cpp does not compute the adapter's changes.
            InvalidModelFile: llama.cpp refuses the adapter.
        """
        if self._architecture not in architecture_names():
            raise UnsupportedModel(
                "llama.cpp ignores changes of some matrices, and some control vectors: it is unknown which for"
                f" {self._architecture!r:.80} models"
            )
        if adapter.directions:
            self._check_steered()
            return  # llama.cpp has no object for a control vector
        for name in adapter.info.tensors:
            self._check(name)
        with tempfile.TemporaryDirectory() as folder, self._model.use() as model, logs.collected() as complaints:
            path = Path(folder) / "adapter.gguf"  # written from the checked tensors, also for PEFT directories
            write_adapter(adapter, self._architecture, path)
            pointer = self._api.llama_adapter_lora_init(model, os.fsencode(path))
        if not pointer:
            raise InvalidModelFile(f"{adapter.info.path}: llama.cpp cannot load it: {logs.reason_in(complaints)}")
        handle = Handle(pointer, self._api.llama_adapter_lora_free, adapter.info.name)
        self._handles[adapter] = handle
        weakref.finalize(adapter, handle.free).atexit = False  # at exit the system frees the memory

    def use(self, context: int, adapters: AdapterSet) -> None:
        """Make a context compute with these adapters only; the caller keeps them alive.

        Raises:
            DecodeFailed: llama.cpp refuses them.
        """
        low_rank = [use for use in adapters if use.adapter.changes]
        n = len(low_rank)
        kind: Any = self._api.llama_adapter_lora_p_ctypes * n
        pointers, scales = kind(), (ctypes.c_float * n)(*(use.scale for use in low_rank))
        for i, (adapter, _) in enumerate(low_rank):
            with self._handles[adapter].use() as pointer:
                pointers[i] = pointer
        if self._api.llama_set_adapters_lora(context, pointers, n, scales) or not self._steered(context, adapters):
            raise DecodeFailed("llama.cpp cannot compute with these adapters")

    def _steered(self, context: int, adapters: AdapterSet) -> bool:
        """Replace the control vectors of a context by those of ``adapters``; False if llama.cpp refuses."""
        directions, set_vector = summed_directions(adapters), self._api.llama_set_adapter_cvec
        if not directions:
            return not set_vector(context, None, 0, self._n_embd, -1, -1)
        rows = np.zeros((self._n_layers - 1, self._n_embd), np.float32)  # layer 0 has none
        for layer, direction in directions.items():
            rows[layer - 1] = direction
        data = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))  # llama.cpp copies the numbers
        return not set_vector(context, data, rows.size, self._n_embd, 1, self._n_layers - 1)

    def free(self) -> None:
        """Free all objects before the model: llama.cpp frees them with the model, and the handles would do so again."""
        for handle in list(self._handles.values()):
            handle.free()

    def _check_steered(self) -> None:
        if self._architecture in _UNSTEERED:
            raise UnsupportedModel(f"llama.cpp ignores control vectors of {self._architecture!r} models")

    def _check(self, name: str) -> None:
        if name == _EMBEDDING and self._is_tied:
            raise UnsupportedModel(
                f"llama.cpp cannot compute an adapter that changes {name} of a model without {_OUTPUT}"
            )
        kind = name.removesuffix(".weight").rpartition(".")[2]
        is_known = name in (_EMBEDDING, _OUTPUT) or (name.startswith("blk.") and kind in _CHANGED.split())
        if not is_known or kind in self._ignored:
            raise UnsupportedModel(f"llama.cpp ignores the changes that an adapter makes of {name}")
