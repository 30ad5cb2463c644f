"""Sessions of a model's graphs; built graphs are cached on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx import ModelProto
from slm_core.architectures import ModelSpec
from slm_core.cpu import processor
from slm_core.diskcache import DiskCache
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import KvType
from slm_onnx import BACKEND, plugins, runtime
from slm_onnx.bytecache import ByteCacheGraph
from slm_onnx.celltransfer import TransferSessions
from slm_onnx.decoder import DecoderGraph
from slm_onnx.editor import clear_graph, edit_graph, read_graph, write_graph
from slm_onnx.options import CAPTURE
from slm_onnx.products import GraphOptions

BUILDER_VERSION = 10
"""Increased with every change of the graph."""

_NUMBERS = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
}
_FILE, _PACKED = "decoder.onnx", "packed.onnx"
_CPU = "CPUExecutionProvider"
_WORTH_KEEPING = 64 << 20  # bytes of weights; "auto" caches the graphs of models from this size on
_BUILT = 0.5  # the share of the loading time that building the graph takes; ONNX Runtime takes the rest


def uncaptured(place: runtime.Place) -> runtime.Place:
    """A place whose runs are not captured, for graphs with inputs of any shape."""
    providers = [
        (name, {key: value for key, value in options.items() if key != CAPTURE}) for name, options in place.providers
    ]
    return dataclasses.replace(place, providers=providers)


class Compiler:
    """Creates the sessions of one model.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: the model's architecture and sizes.
        options: number formats.
        place: the execution provider of the sessions.
        cache: whether to cache built graphs; None to cache models of at least ``_WORTH_KEEPING`` bytes.

    Attributes:
        spec: the model's architecture and sizes.
    """

    def __init__(
        self, gguf: GgufFile, spec: ModelSpec, options: GraphOptions, place: runtime.Place, cache: bool | None
    ) -> None:
        self._gguf = gguf
        self.spec = spec
        self._options = options
        self._place = place
        n_bytes = sum(tensor.n_bytes for tensor in gguf.tensors.values())
        self._keeps = n_bytes >= _WORTH_KEEPING if cache is None else cache

    @property
    def masks_by_bias(self) -> bool:
        """Whether the bias is the only attention mask, as for quantized caches and non-causal attention."""
        return self._options.kv_type is KvType.Q8_0 or not self._options.causal

    def bidirectional(self) -> Compiler:
        """A compiler of the same graph with the bias as the only attention mask."""
        options = dataclasses.replace(self._options, causal=False)
        return Compiler(self._gguf, self.spec, options, self._place, self._keeps)

    def adapted(self) -> Compiler:
        """A compiler of the same graph with inputs for adapters: low-rank changes, and directions."""
        options = dataclasses.replace(self._options, adapters=True)
        return Compiler(self._gguf, self.spec, options, self._place, self._keeps)

    def editor(self, planes: Sequence[str]) -> Any:
        """The session that moves keys, or keys and values, of cells."""
        options = self._options
        return self._small(edit_graph(self.spec, options.kv_type, planes, on_host=options.on_host))

    def transfer(self) -> TransferSessions | None:
        """The sessions for a cache in device memory; None for a cache in host memory."""
        if self._options.on_host:
            return None
        graphs = clear_graph, read_graph, write_graph
        return TransferSessions(*(self._small(graph(self.spec, self._options.kv_type)) for graph in graphs))

    def _small(self, model: ModelProto) -> Any:
        """The session of a graph without weights; it is not cached, and its runs are never captured."""
        return runtime.session(model.SerializeToString(), runtime.NO_WEIGHTS, uncaptured(self._place))

    def decoder(self, progress: Callable[[float], None]) -> Any:
        """The session of the decoder graph; ``progress`` is called with the share that is done.

        Raises:
            UnsupportedModel: ONNX Runtime refuses the graph.
        """
        if not self._keeps:
            return self._build(progress)
        cache, key = DiskCache(BACKEND), self._key()
        folder = cache.get(key)
        if folder is not None:
            try:
                return self._open_saved(folder)
            except UnsupportedModel:
                pass  # from another build with the same version: build the graph again
        about = f"{self._gguf.path.name} for {self._place.providers[0][0]}, {self._options.dtype}"
        folder = cache.put(key, about, lambda empty: self._save(empty, progress))
        return self._build(progress) if folder is None else self._open_saved(folder)

    def _build(self, progress: Callable[[float], None], save_to: Path | None = None) -> Any:
        kind = ByteCacheGraph if self._options.kv_type is KvType.Q8_0 else DecoderGraph
        graph = kind(self._gguf, self.spec, self._options).build(lambda share: progress(_BUILT * share))
        return runtime.session(graph.model().SerializeToString(), graph.weights, self._place, save_to)

    def _save(self, folder: Path, progress: Callable[[float], None]) -> None:
        try:
            built = self._build(progress, folder / _FILE)
            if self._place.providers[0][0] == _CPU:
                self._pack(built, folder)
        except UnsupportedModel as error:  # perhaps the disk is full: the caller tries again without saving
            raise OSError(str(error)) from error

    def _pack(self, built: Any, folder: Path) -> None:
        """Also cache weights in the packed layout of the CPU, if this gives bit-identical logits.

        ONNX Runtime 1.31 writes some packed weights (8 bits, few columns) as zeros.
        """
        runtime.save_packed(folder / _FILE, folder / _PACKED, self._place)
        packed = runtime.saved_session(folder / _PACKED, self._place)
        is_equal = np.array_equal(self._sample(built), self._sample(packed))
        for unneeded in folder.glob(f"{_FILE if is_equal else _PACKED}*"):
            unneeded.unlink()

    def _sample(self, session: Any) -> NDArray[np.float32]:
        """Logits of two random tokens."""
        n, rng = 2, np.random.default_rng(0)
        values_of: dict[str, NDArray[Any]] = {
            "inputs_embeds": rng.standard_normal((1, n, self.spec.n_embd)),
            "rows": np.arange(n)[None],
            "logits_rows": np.arange(n),
            "product_rows": np.arange(n),
            "seqlens_k": np.array([n - 1]),
            "total_sequence_length": np.array(n),
            "n_cells": np.array([n]),
        }
        inputs = {}
        for port in session.get_inputs():  # the other inputs select rows, or are empty caches
            shape = [size if isinstance(size, int) else n for size in port.shape]
            fill = 1 if port.name.startswith(("cos", "temperature")) else 0
            values = values_of.get(port.name, np.full(shape, fill))
            inputs[port.name] = values.astype(_NUMBERS[port.type])
        (logits,) = session.run(["logits"], inputs)
        rows: NDArray[np.float32] = logits
        return rows

    def _open_saved(self, folder: Path) -> Any:
        packed = folder / _PACKED
        return runtime.saved_session(packed if packed.exists() else folder / _FILE, self._place)

    def _key(self) -> str:
        """A cache key for everything that the session depends on."""
        parts = [
            *(self._gguf.fingerprint(), BUILDER_VERSION, runtime.version(), plugins.versions(), processor()),
            *(self._options.dtype, self._options.accuracy_level, self._options.kv_type, self._options.causal),
            *(self._options.bias, self._options.adapters, self._options.states),
            [[name, sorted(options.items())] for name, options in self._place.providers],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
