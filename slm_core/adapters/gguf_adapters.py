"""Adapters as GGUF files, as llama.cpp's ``convert_lora_to_gguf.py`` writes them.

``T.lora_a`` and ``T.lora_b`` belong to the tensor T of the model. For ``token_embd.weight``, A is [V, r] and B is
[E, r]: a token's row of A is multiplied by B. Other tensors have A [r, in] and B [out, r].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters.adapter import EMBEDDING, Adapter, LowRank
from slm_core.adapters.base_model import BaseModel
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType, GgufFile, GgufWriter, NewTensor, PlainValue
from slm_core.gguf.cursor import shown
from slm_core.gguf.writer import stored
from slm_core.quant import dequantize
from slm_core.user_paths import expanded

TYPE, KIND, ALPHA = "general.type", "adapter.type", "adapter.lora.alpha"
_PARTS = (".lora_a", ".lora_b")
_INVOCATION = "adapter.alora.invocation_tokens"
_ALIGNMENT = 32


def read_gguf(file: GgufFile, base: BaseModel) -> dict[str, LowRank]:
    """The changes in an open GGUF file.

    Raises:
        InvalidModelFile: the file is damaged, is not an adapter, or is for another architecture.
        UnsupportedModel: an adapter of another kind.
    """
    _check_kind(file, base)
    alpha = file.get(ALPHA, float, 0.0)
    changes = {}
    for name in {_target(file.path, name) for name in file.tensors}:
        a, b = (_numbers(file, f"{name}{part}") for part in _PARTS)
        if name == EMBEDDING and b.ndim == 2:
            a, b = b.T, a
        changes[name] = LowRank(a, b, alpha / max(1, b.shape[-1]) if alpha else 1.0)
    return changes


def write_adapter(adapter: Adapter, architecture: str, path: Path) -> None:
    """Write an adapter as a GGUF file, in float32.

    Raises:
        OSError: the file cannot be written.
    """
    alpha = _common_alpha(adapter)
    metadata: dict[str, PlainValue] = {
        TYPE: "adapter",
        "general.architecture": architecture,
        "general.name": adapter.info.name,
        KIND: "lora",
        ALPHA: alpha,
    }
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, (a, b, scale) in adapter.changes.items():
        b = b if alpha else b * np.float32(scale)
        pair = (b, a.T) if name == EMBEDDING else (a, b)
        arrays |= {f"{name}{part}": np.ascontiguousarray(array) for part, array in zip(_PARTS, pair, strict=True)}
    tensors = [NewTensor(name, array.shape, GgmlType.F32, array.nbytes) for name, array in arrays.items()]
    writer = GgufWriter({key: stored(value) for key, value in metadata.items()}, tensors, _ALIGNMENT)
    with writer.open(expanded(path)) as sink:
        for array in arrays.values():
            sink.write(array.reshape(-1).view(np.uint8))


def is_adapter(file: GgufFile) -> bool:
    """Whether a GGUF file is an adapter, not a model."""
    return file.get(TYPE, str, "model") == "adapter"


def _common_alpha(adapter: Adapter) -> float:
    """The alpha that gives exactly the scale of each change; 0 if there is none: then the scales are in ``b``."""
    changes = list(adapter.changes.values())
    with np.errstate(over="ignore"):  # infinity differs from each scale
        alpha = float(np.float32(changes[0].scale * changes[0].rank))
    return alpha if all(alpha / change.rank == change.scale for change in changes) else 0.0


def _check_kind(file: GgufFile, base: BaseModel) -> None:
    if not is_adapter(file):
        raise InvalidModelFile(f"{file.path}: not an adapter: its {TYPE} is {file.get(TYPE, str, 'model')!r:.80}")
    if (kind := file.require(KIND, str)) != "lora":
        raise UnsupportedModel(f"{file.path}: {KIND} is {kind!r:.80} (accepted: lora)")
    if _INVOCATION in file.metadata:
        raise UnsupportedModel(f"{file.path}: adapters that begin at certain tokens (aLoRA) are not implemented")
    if (architecture := file.require("general.architecture", str)) != base.architecture:
        raise InvalidModelFile(
            f"{file.path}: an adapter of {architecture!r:.80} models, and this model is a {base.architecture!r:.80}"
        )


def _target(path: Path, name: str) -> str:
    for part in _PARTS:
        if name.endswith(part):
            return name.removesuffix(part)
    raise UnsupportedModel(
        f"{path}: tensor {shown(name)} does not belong to a low-rank change (accepted: T.lora_a, T.lora_b)"
    )


def _numbers(file: GgufFile, name: str) -> NDArray[np.float32]:
    if name not in file.tensors:
        raise InvalidModelFile(f"{file.path}: tensor {shown(name)} is missing")
    info = file.tensors[name]
    return dequantize(file.tensor_data(name), info.ggml_type, info.shape)
