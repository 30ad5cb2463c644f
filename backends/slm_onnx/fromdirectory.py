"""Models from directories: exported graphs, tokenizer and settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import numpy as np

from slm_core.errors import DecodeFailed, InvalidModelFile, UnsupportedModel
from slm_core.tokenization import directory_vocab
from slm_core.types import EditLevel, ModelInfo, Progress
from slm_onnx import BACKEND, attentioncheck, runtime
from slm_onnx.convert import FINGERPRINT, N_PARAMS, QUANTIZATION
from slm_onnx.layouts import Layout, find_layout
from slm_onnx.model import OnnxModel
from slm_onnx.providers import Device
from slm_onnx.rotation import FloatArray, Rotation, changes_with_length, measure
from slm_onnx.rows import RowsContext, RowsEngine
from slm_onnx.steps import Caches, Step

_SAMPLES, _SAMPLE_BYTES = 256, 4096
_HEXADECIMAL = re.compile("[0-9a-f]{64}")
_FAR = 256  # highest measured position if the graph counts cached tokens: the cache then has so many zeros
_NO_LIMIT = 1 << 20


def directory_model(
    folder: Path,
    device: Device,
    place: runtime.Place,
    progress: Progress,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> OnnxModel:
    """Load a directory.

    Args:
        folder: see ``layouts.find_layout``.
        device: its device.
        place: its execution provider.
        progress: called with the share that is done.
        settings: the settings in effect; see ``ModelInfo.settings``.

    Raises:
        InvalidModelFile: a file is missing or damaged.
        UnsupportedModel: the layout, a graph or the tokenizer is of an unknown kind.
        BackendUnavailable: a provider cannot be used.
    """
    layout = find_layout(folder)
    steps = []
    for graph in layout.graphs:
        steps.append(Step(layout, graph, place, device))
        progress(0.9 * len(steps) / len(layout.graphs))
    engine = _engine(layout, steps, device)
    if not device.is_cpu:
        engine = replace(engine, most_rows=attentioncheck.most_rows(place, engine.dtype.name))
    vocab = directory_vocab(folder, engine.n_vocab, layout.ends)
    info = replace(_info(layout, engine, device), settings=settings)
    progress(1.0)
    return OnnxModel(info, vocab, partial(RowsContext, engine), device.provider.lock)


def _engine(layout: Layout, steps: list[Step], device: Device) -> RowsEngine:
    first, further = steps[0], steps[-1]
    shape, n_planes = further.cache_shape, len(further.ports.past)
    if shape is None or len(first.ports.present) != n_planes or first.dtype != further.dtype:
        raise UnsupportedModel(f"{layout.folder}: its graphs do not pass keys and values on to each other")
    digest = _digest(layout)
    stated = further.metadata.get(FINGERPRINT, "")
    engine = RowsEngine(
        first=first,
        further=further,
        shape=(n_planes, *shape),
        n_vocab=further.n_vocab or _stated(layout, "vocab_size"),
        n_ctx=layout.n_ctx,
        in_place=layout.in_place,
        rotation=None,
        edit_level=EditLevel.TRUNCATE,
        device=device,
        fingerprint=stated if _HEXADECIMAL.fullmatch(stated) else digest,
        digest=digest,
    )
    return engine.with_edits(*_edits(layout, engine))


def _edits(layout: Layout, engine: RowsEngine) -> tuple[EditLevel, Rotation | None]:
    """The edit level: CUT if keys are rotated by RoPE, which is measured with the model."""
    try:
        if changes_with_length(layout.config):
            _keys_at(engine, 0)
            return EditLevel.REPLAY, None
        limit = min(layout.n_ctx or _NO_LIMIT, _NO_LIMIT if engine.first.ports.positions else _FAR)
        widths = [engine.shape[2] // part for part in (1, 2, 4)]  # some models rotate only a part of each head
        rotation = measure(lambda position: _keys_at(engine, position), limit, widths, engine.dtype)
    except DecodeFailed as error:
        raise UnsupportedModel(f"{layout.folder}: one token cannot be decoded: {error}") from error
    return (EditLevel.TRUNCATE if rotation is None else EditLevel.CUT), rotation


def _keys_at(engine: RowsEngine, position: int) -> FloatArray:
    """The keys [N, D] of token 0 at a position, without earlier tokens.

    A graph without an input for positions counts the cached tokens. Then the cache has zeros, and only keys of the
    first layer are returned, as they do not depend on the cache.
    """
    has_positions = engine.first.ports.positions is not None
    n_held = 0 if has_positions else position
    step = engine.further if n_held else engine.first
    caches: Caches = engine.empty(n_held + engine.in_place)
    _, after = step.run([0], caches, n_held, in_place=engine.in_place, position=position)
    keys = [after[i].numpy()[0, :, n_held] for i in range(0, len(after) if has_positions else 1, 2)]
    return np.concatenate(keys)


def _info(layout: Layout, engine: RowsEngine, device: Device) -> ModelInfo:
    architecture, stated = layout.config.get("model_type"), engine.further.metadata
    n_params = stated.get(N_PARAMS, "0")  # only graphs of this package have it
    n_bytes = sum(file.stat().st_size for file in _files(layout) if file.suffix not in (".json", ".jinja"))
    return ModelInfo(
        path=layout.folder,
        backend=f"{BACKEND} {runtime.version()} ({layout.name})",
        architecture=architecture if isinstance(architecture, str) else "",
        name=layout.folder.resolve().name,
        n_params=int(n_params) if n_params.isascii() and n_params.isdecimal() and len(n_params) < 20 else 0,
        n_layers=engine.shape[0] // 2,
        n_embd=_stated(layout, "hidden_size"),
        n_vocab=engine.n_vocab,
        n_ctx_train=layout.n_ctx or 0,
        quantization=stated.get(QUANTIZATION, "")[:20],
        n_bytes=n_bytes,
        fingerprint=engine.fingerprint,
        chat_template=None,
        device=device.label,
        state_bytes_per_token=math.prod(engine.shape) * engine.dtype.itemsize,
        state_bytes_per_sequence=0,
    )


def _stated(layout: Layout, key: str) -> int:
    value = layout.config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidModelFile(f"{layout.folder}: {key!r} of the model is {repr(value)[:80]} (accepted: a size)")
    return value


def _files(layout: Layout) -> Iterator[Path]:
    """The files of a model; files next to its graphs may have their weights."""
    folders = {layout.folder, *(graph.parent for graph in layout.graphs)}
    files = {file for folder in folders for file in folder.iterdir() if file.is_file()}
    others = {graph for graph in files if graph.suffix == ".onnx"} - set(layout.graphs)
    yield from sorted(files - others)


def _digest(layout: Layout) -> str:
    """A key for the content, from samples of every file: 64 hexadecimal digits."""
    digest = blake2b(digest_size=32)
    for file in _files(layout):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(layout.folder)} {size}\n".encode())
        with file.open("rb") as stream:
            for start in sorted({max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
