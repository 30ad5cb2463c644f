"""A model that llama.cpp has loaded."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters import BaseModel, LoadedAdapters
from slm_core.architectures import EMBEDDING
from slm_core.context import ModelBase
from slm_core.errors import InvalidModelFile, InvalidOption, ModelError, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.protocols import Vocab
from slm_core.quant import dequantize_rows
from slm_core.tokenization import MissingVocab, has_vocab
from slm_core.types import ContextOptions, Progress
from slm_llamacpp import BACKEND, library, logs
from slm_llamacpp.adapters import LlamaCppAdapters
from slm_llamacpp.anonymous_file import AnonymousFile
from slm_llamacpp.bidirectional_blocks import blocks_of
from slm_llamacpp.context import LlamaCppContext
from slm_llamacpp.encoder import LlamaCppEncoder
from slm_llamacpp.handle import Handle
from slm_llamacpp.memory import has_mrope
from slm_llamacpp.mrope_context import MropeContext
from slm_llamacpp.options import SPLIT_MODES, LoadOptions, Settings
from slm_llamacpp.positions import position_limit
from slm_llamacpp.shifts import moves_keys
from slm_llamacpp.source import is_encoder
from slm_llamacpp.vocab import LlamaCppVocab

_ALL_LAYERS = -1
_UNSUPPORTED = (
    "unknown model architecture",
    "unsupported",
    "not supported",
    "unknown pre-tokenizer",
    "unknown tokenizer",
)


class LlamaCppModel(ModelBase):
    """A model with llama.cpp's weights and vocabulary. Immutable; threads may share it.

    Args:
        api: the low-level functions.
        gguf: the model, already checked; not needed afterwards.
        file: its file; a file of bytes is closed with the model.
        settings: device, threads and options.
        progress: called with the share that is loaded; raising an exception cancels the load.

    Raises:
        InvalidModelFile, UnsupportedModel: llama.cpp refuses the file; the message has its reason.

    Attributes:
        head_dim: width of a head's key; None if layers differ or the file does not have it.
        moves_keys: whether keys can move to other positions.
        positions: the limit of positions; None without a limit.
        longest_block: most tokens of a bidirectional block; 0 for no blocks.
        lora: llama.cpp's objects for adapters.
    """

    def __init__(
        self, api: Any, gguf: GgufFile, file: Path | AnonymousFile, settings: Settings, progress: Progress | None
    ) -> None:
        self._api = api
        self._file = file
        self._settings = settings
        self.head_dim = _head_dim(gguf)
        self.moves_keys = moves_keys(gguf)
        info = model_info(gguf, backend=f"{BACKEND} {library.version()}", device=settings.device.label)
        info = replace(info, settings=settings.named())
        self._handle = Handle(_load(api, gguf, _path(file), settings, progress), api.llama_model_free, gguf.path.name)
        weakref.finalize(self, self._handle.free).atexit = False  # at exit the system frees the memory
        self._is_encoder = is_encoder(gguf)
        self.positions = position_limit(gguf)
        self.longest_block, self._row_scale = blocks_of(gguf)
        try:
            vocab: Vocab = MissingVocab(str(gguf.path), info.n_vocab)
            if has_vocab(gguf):
                vocab = LlamaCppVocab(api, self._handle, gguf)
            self._check_generates(gguf)
        except BaseException:
            self._handle.free()
            raise
        base = BaseModel.of(gguf)
        self.lora = LlamaCppAdapters(api, self._handle, base)
        weakref.finalize(self, self.lora.free).atexit = False  # runs before the finalizer that frees the model
        super().__init__(info, vocab, LoadedAdapters(base, self.lora.prepare))

    @property
    def loaded_adapters(self) -> LoadedAdapters:
        """The adapters, for contexts."""
        return self._adapters

    def table_rows(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """The inputs [T, E] of tokens [T] as embedding rows for llama.cpp, float32."""
        with GgufFile.open(_path(self._file)) as file:
            table = file.tensors[EMBEDDING]
            rows = dequantize_rows(file.tensor_data(EMBEDDING), table.ggml_type, table.shape[1], tokens)
        return rows * np.float32(self._row_scale)

    def _engine_context(self, options: ContextOptions) -> LlamaCppContext | LlamaCppEncoder:
        with self._handle.use() as pointer:
            return self._kind(pointer)(self, self._api, pointer, options, self._settings)

    def _kind(self, pointer: int) -> type[LlamaCppContext | LlamaCppEncoder]:
        if self._is_encoder:
            return LlamaCppEncoder
        return MropeContext if has_mrope(self._api, pointer) else LlamaCppContext

    def _engine_close(self) -> None:
        self._handle.retire()
        self.lora.free()
        self._handle.free()
        if isinstance(self._file, AnonymousFile):
            self._file.close()
        library.return_memory()

    def _check_generates(self, gguf: GgufFile) -> None:
        with self._handle.use() as pointer:
            if self._api.llama_model_has_encoder(pointer) or self._api.llama_model_is_diffusion(pointer):
                raise UnsupportedModel(f"{gguf.path}: not a model that generates text token by token")


def _path(file: Path | AnonymousFile) -> Path:
    return file.path if isinstance(file, AnonymousFile) else file


def _load(api: Any, gguf: GgufFile, path: Path, settings: Settings, progress: Progress | None) -> int:
    """Load the file with llama.cpp; returns its pointer."""
    raised: list[BaseException] = []

    def report(share: float, _user_data: int | None) -> bool:
        try:
            if progress is not None:
                progress(share)
        except BaseException as error:  # also an interrupt; raised again after llama.cpp has returned
            raised.append(error)
            return False
        return True

    params, kept_alive = _model_params(api, settings)
    callback = api.llama_progress_callback(report)
    params.progress_callback = callback
    with logs.collected() as complaints:
        pointer: int | None = api.llama_model_load_from_file(os.fsencode(path), params)
    del kept_alive
    if raised or not pointer:
        if pointer:
            api.llama_model_free(pointer)
        raise raised[0] if raised else _load_error(gguf, logs.reason_in(complaints))
    if settings.options.use_mlock and any("mlock" in line for _, line in complaints):
        api.llama_model_free(pointer)
        raise InvalidOption("use_mlock=True, but the system does not let this process lock so much memory (ulimit -l)")
    return pointer


def _head_dim(gguf: GgufFile) -> int | None:
    """Width of a head's key; None if layers differ or the file has none."""
    architecture = gguf.require("general.architecture", str)
    key = gguf.metadata.get(f"{architecture}.attention.key_length")
    n_embd, n_heads = (gguf.metadata.get(f"{architecture}.{k}") for k in ("embedding_length", "attention.head_count"))
    if key is None and isinstance(n_embd, int) and isinstance(n_heads, int) and n_heads > 0:
        return n_embd // n_heads
    return key if isinstance(key, int) else None


def _model_params(api: Any, settings: Settings) -> tuple[Any, list[Any]]:
    """llama.cpp's parameters, and the objects that they point to."""
    options, gpus = settings.options, settings.device.gpus
    devices = (ctypes.c_void_p * (len(gpus) + 1))(*(gpu.handle for gpu in gpus), None)
    shares = (ctypes.c_float * api.llama_max_devices())(*(options.tensor_split or ()))
    params = api.llama_model_default_params()
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.n_gpu_layers = 0 if not gpus else _ALL_LAYERS if options.n_gpu_layers is None else options.n_gpu_layers
    params.load_mode = _load_mode(api, options)
    params.use_extra_bufts = settings.repack
    params.check_tensors = bool(options.check_tensors)
    if options.split_mode is not None:
        params.split_mode = SPLIT_MODES.index(options.split_mode)
    if options.main_gpu is not None:
        params.main_gpu = options.main_gpu
    if options.tensor_split is not None:
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    return params, [devices, shares]


def _load_mode(api: Any, options: LoadOptions) -> int:
    mode: int
    if options.use_mlock:
        mode = api.LLAMA_LOAD_MODE_MLOCK if options.use_mmap is False else api.LLAMA_LOAD_MODE_MMAP_MLOCK
    elif options.use_mmap is None:
        mode = api.LLAMA_LOAD_MODE_AUTO
    else:
        mode = api.LLAMA_LOAD_MODE_MMAP if options.use_mmap else api.LLAMA_LOAD_MODE_NONE
    for name, supported in (("use_mmap", api.llama_supports_mmap()), ("use_mlock", api.llama_supports_mlock())):
        if getattr(options, name) and not supported:
            raise InvalidOption(f"{name}=True, which llama.cpp cannot do on this system (accepted: False)")
    return mode


def _load_error(gguf: GgufFile, reason: str) -> ModelError:
    kind = UnsupportedModel if any(words in reason for words in _UNSUPPORTED) else InvalidModelFile
    return kind(f"{gguf.path}: llama.cpp cannot load it: {reason}")
