"""Models from GGUF files: a graph of our own, and cells that all sequences share."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slm_core.architectures import EMBEDDING, POSITIONS
from slm_core.errors import InvalidModelFile, InvalidOption
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.tokenization import build_vocab
from slm_core.types import KvType, Progress
from slm_onnx import BACKEND, runtime
from slm_onnx.compiled import Compiler
from slm_onnx.context import Engine, OnnxContext, Sessions
from slm_onnx.coverage import read_supported
from slm_onnx.model import OnnxModel
from slm_onnx.options import LoadOptions
from slm_onnx.ports import PLANES, Kinds
from slm_onnx.positions import Positions
from slm_onnx.products import GraphOptions
from slm_onnx.providers import Device
from slm_onnx.tensors import read_tensor, read_values


def gguf_model(
    gguf: GgufFile, device: Device, threads: runtime.Threads, options: LoadOptions, progress: Progress
) -> OnnxModel:
    """Load a file.

    Args:
        gguf: the open file; the model closes it.
        device: where it runs.
        threads: for what runs on the CPU.
        options: what the caller asked for.
        progress: called with the share that is done.

    Raises:
        InvalidOption: runs of all shapes are to be captured.
        InvalidModelFile, UnsupportedModel: see ``read_supported``; or the runtime refuses the graph.
    """
    if options.captures and not options.buckets:
        raise InvalidOption(
            "enable_cuda_graph captures runs in one shape each, and batches have many: use buckets=True"
        )
    spec, read_factors = read_supported(gguf, on_cpu=device.is_cpu), functools.partial(read_values, gguf)
    for n_ctx in (1, sys.maxsize):  # refuses bad factors now, of either table
        Positions(spec, n_ctx, read_factors)
    default, *_ = device.kv_types
    info = model_info(gguf, backend=f"{BACKEND} {runtime.version()}", device=device.label, kv_type=default)
    place = device.session_place(options.provider_options, threads)

    @functools.cache
    def sessions(kv_type: KvType) -> Sessions:
        graph_options = GraphOptions(device.provider.dtype, options.accuracy_level, kv_type)
        heard = progress if kv_type is default else lambda share: None  # loading is over where another is asked for
        compiler = Compiler(gguf, spec, graph_options, place, options.cache)
        decoder = compiler.decoder(heard)
        turner = compiler.editor(PLANES[:1]) if Kinds.of(spec).ropes else None
        return Sessions(decoder, _both_ways(compiler, decoder, device), compiler.editor(PLANES), turner)

    with ThreadPoolExecutor(1) as beside:  # the runtime works without holding up Python
        reading = beside.submit(build_vocab, gguf)
        sessions(default)
        vocab = reading.result()
    if vocab.size != spec.n_vocab:
        raise InvalidModelFile(
            f"{gguf.path}: {vocab.size} tokens in the vocabulary, but {spec.n_vocab} rows in the embedding"
        )
    progress(1.0)
    engine = Engine(
        spec,
        read_factors,
        read_tensor(gguf, EMBEDDING),
        read_tensor(gguf, POSITIONS) if POSITIONS in gguf.tensors else None,
        sessions,
        device.kv_types,
        device,
        info.fingerprint,
        options.buckets,
    )
    return OnnxModel(info, vocab, functools.partial(OnnxContext, engine), gguf.close)


def _both_ways(compiler: Compiler, decoder: Any, device: Device) -> Callable[[], Any] | None:
    """How to come by a decoder whose attention masks by the bias alone; None where there is no such operator.

    It is not the decoder of all batches: beside a long text ONNX Runtime attends more slowly so.
    """
    if compiler.masks_by_bias:
        return lambda: decoder
    if not device.is_cpu or not runtime.can_mask_by_bias():
        return None
    made, lock = functools.cache(lambda: compiler.both_ways().decoder(lambda share: None)), threading.Lock()

    def once() -> Any:
        with lock:  # contexts of several threads share it
            return made()

    return once
