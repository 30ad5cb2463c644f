"""Models from GGUF files: a graph built here, and cells that all sequences share."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from slm_core.adapters import Adapter, BaseModel, LoadedAdapters
from slm_core.architectures import EMBEDDING, POSITIONS, ModelSpec
from slm_core.errors import InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.protocols import Vocab
from slm_core.tokenization import model_vocab
from slm_core.types import KvType, Progress
from slm_onnx import BACKEND, attentioncheck, runtime
from slm_onnx.compiled import Compiler, uncaptured
from slm_onnx.context import Engine, OnnxContext, Sessions
from slm_onnx.coverage import read_supported
from slm_onnx.decoders import DecoderSessions
from slm_onnx.model import OnnxModel
from slm_onnx.options import CAPTURE, LoadOptions
from slm_onnx.ports import PLANES, Kinds
from slm_onnx.positions import Positions
from slm_onnx.products import GraphOptions
from slm_onnx.providers import Device
from slm_onnx.tensors import read_tensor, read_values

_RELEASES_CAPTURED = 1, 30  # first release whose sessions can release captured runs


def gguf_model(
    gguf: GgufFile, device: Device, threads: runtime.Threads, options: LoadOptions, progress: Progress
) -> OnnxModel:
    """Load a file.

    Args:
        gguf: the open file; the model closes it.
        device: its device.
        threads: for operators on the CPU.
        options: the caller's options.
        progress: called with the share that is done.

    Raises:
        InvalidOption: capture of runs with any shape, or padding on a device whose attention is correct for few tokens
            only.
        InvalidModelFile, UnsupportedModel: see ``read_supported``; or ONNX Runtime refuses the graph.
    """
    _check_capture(options)
    spec, read_factors = read_supported(gguf, on_cpu=device.is_cpu), functools.partial(read_values, gguf)
    for n_ctx in (1, sys.maxsize):  # raises now if the RoPE factors are invalid, of either table
        Positions(spec, n_ctx, read_factors)
    place = device.session_place(options.provider_options, threads)
    most_rows = _most_rows(device, place, options)
    graphs = _Graphs(gguf, spec, device, place, options, progress)
    vocab = _vocab_meanwhile(gguf, spec, lambda: graphs.sessions(device.kv_types[0], True))
    progress(1.0)
    info = model_info(gguf, backend=f"{BACKEND} {runtime.version()}", device=device.label, kv_type=device.kv_types[0])
    info = replace(info, settings=options.named(threads.n_threads, builds=True))
    engine = Engine(
        spec,
        read_factors,
        read_tensor(gguf, EMBEDDING),
        read_tensor(gguf, POSITIONS) if POSITIONS in gguf.tensors else None,
        graphs.sessions,
        device.kv_types,
        device,
        info.fingerprint,
        options.buckets,
        options.captures,
        most_rows,
        has_states=graphs.on_cpu_alone,
        adapted=graphs.adapted if graphs.on_cpu_alone else None,
    )
    reason = "on this device" if not device.is_cpu else "with buckets=True"
    adapters = LoadedAdapters(BaseModel.of(gguf) if graphs.on_cpu_alone else None, check_adapter, reason)
    new_context = functools.partial(OnnxContext, engine, adapters=adapters)
    return OnnxModel(info, vocab, new_context, device.provider.lock, gguf.close, adapters)


class _Graphs:
    """The graphs of a model, compiled to sessions when they are first used.

    Attributes:
        on_cpu_alone: whether all batches run on the CPU in their own shapes.
    """

    def __init__(
        self,
        gguf: GgufFile,
        spec: ModelSpec,
        device: Device,
        place: runtime.Place,
        options: LoadOptions,
        progress: Progress,
    ) -> None:
        self._gguf, self._spec, self._device, self._place, self._options = gguf, spec, device, place, options
        self._progress = [progress]  # called for the first sessions only; other sessions are made after loading
        self._sessions: dict[tuple[KvType, bool], Sessions] = {}
        self._adapted: dict[tuple[KvType, bool], DecoderSessions] = {}
        self.on_cpu_alone = device.is_cpu and not options.buckets

    def sessions(self, kv_type: KvType, is_alone: bool) -> Sessions:
        """The sessions for a KV type, for one sequence or for several."""
        has_bias = _needs_bias(self._spec, self._device, is_alone=is_alone)
        if (kv_type, has_bias) not in self._sessions:
            self._sessions[kv_type, has_bias] = self._new_sessions(kv_type, has_bias)
        return self._sessions[kv_type, has_bias]

    def adapted(self, kv_type: KvType, has_bias: bool) -> DecoderSessions:
        """The sessions of the graph with inputs for adapters."""
        if (kv_type, has_bias) not in self._adapted:
            compiler = self._compiler(kv_type, has_bias).adapted()
            decoder = compiler.decoder(lambda share: None)
            self._adapted[kv_type, has_bias] = DecoderSessions(decoder, _bidirectional(compiler, decoder, self._device))
        return self._adapted[kv_type, has_bias]

    def _new_sessions(self, kv_type: KvType, has_bias: bool) -> Sessions:
        compiler = self._compiler(kv_type, has_bias)
        decoder = compiler.decoder(self._progress.pop() if self._progress else lambda share: None)
        rotator = compiler.editor(PLANES[:1]) if Kinds.of(self._spec).ropes else None
        bidirectional = _bidirectional(compiler, decoder, self._device)
        return Sessions(decoder, has_bias, bidirectional, compiler.editor(PLANES), rotator, compiler.transfer())

    def _compiler(self, kv_type: KvType, has_bias: bool) -> Compiler:
        graph_options = GraphOptions(
            self._device.provider.dtype,
            self._options.accuracy_level,
            kv_type,
            on_host=self._device.on_host,
            bias=has_bias,
            states=self.on_cpu_alone,
        )
        return Compiler(self._gguf, self._spec, graph_options, self._place, self._options.cache)


def _most_rows(device: Device, place: runtime.Place, options: LoadOptions) -> int | None:
    """The largest number of tokens for which attention on a device is right; None for any number.

    Raises:
        InvalidOption: batches would be padded to more tokens.
    """
    most_rows = None if device.is_cpu else attentioncheck.most_rows(uncaptured(place), device.provider.dtype)
    if options.buckets and most_rows is not None:
        raise InvalidOption(
            f"buckets=True pads batches, and attention on this device is right up to {most_rows} tokens"
        )
    return most_rows


def _vocab_meanwhile(gguf: GgufFile, spec: ModelSpec, work: Callable[[], object]) -> Vocab:
    """The vocabulary, read while ONNX Runtime does ``work`` without the GIL.

    Raises:
        InvalidModelFile: its size differs from the embedding's size.
    """
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(model_vocab, gguf, spec.n_vocab)
        work()
        vocab = reading.result()
    if vocab.size != spec.n_vocab:
        raise InvalidModelFile(
            f"{gguf.path}: {vocab.size} tokens in the vocabulary, but {spec.n_vocab} rows in the embedding"
        )
    return vocab


_CHANGED = """
attn_q attn_k attn_v attn_qkv attn_output ffn_gate ffn_up ffn_down ffn_gate_shexp ffn_up_shexp ffn_down_shexp
ffn_gate_inp output token_embd
"""
"""The matrices whose products have inputs for changes."""


def check_adapter(adapter: Adapter) -> None:
    """Raise ``UnsupportedModel`` if the graphs have no inputs for a change."""
    for name, change in adapter.changes.items():
        if name.removesuffix(".weight").rpartition(".")[2] not in _CHANGED.split() or change.a.ndim != 2:
            raise UnsupportedModel(f"adapters that change {name} are not implemented in this backend")


def _check_capture(options: LoadOptions) -> None:
    if not options.captures:
        return
    if not options.buckets:
        raise InvalidOption(f"{CAPTURE} captures runs in one shape each, and batches have many: use buckets=True")
    if not runtime.is_since(_RELEASES_CAPTURED):
        raise InvalidOption(
            f"{CAPTURE} needs ONNX Runtime {'.'.join(map(str, _RELEASES_CAPTURED))}, which releases captured runs when"
            f" their context is closed (this is {runtime.version()})"
        )


def _needs_bias(spec: ModelSpec, device: Device, *, is_alone: bool) -> bool:
    """Whether attention needs a bias on a device, for contexts of one sequence (``is_alone``) or of several.

    Raises:
        InvalidOption: it needs one, but this release of ONNX Runtime does not support it there.
    """
    since = device.provider.bias_since
    if since is None:
        return True
    if is_alone and spec.alibi_max_bias is None:
        return False
    if not runtime.is_since(since):
        remedy = "use n_seq_max=1" if spec.alibi_max_bias is None else "ALiBi is a bias"
        raise InvalidOption(
            f"attention on {device.label} takes a bias from ONNX Runtime {'.'.join(map(str, since))} on, this is"
            f" {runtime.version()}: {remedy}"
        )
    return True


def _bidirectional(compiler: Compiler, decoder: Any, device: Device) -> Callable[[], Any] | None:
    """A function that makes a decoder with the bias as the only attention mask; None if there is no such operator.

    It is not used for all batches: for long contexts this mode of ONNX Runtime's attention is slower.
    """
    if compiler.masks_by_bias:
        return lambda: decoder
    if not device.is_cpu or not runtime.can_mask_by_bias():
        return None
    new_decoder, lock = functools.cache(lambda: compiler.bidirectional().decoder(lambda share: None)), threading.Lock()

    def once() -> Any:
        with lock:  # contexts in several threads share it
            return new_decoder()

    return once
