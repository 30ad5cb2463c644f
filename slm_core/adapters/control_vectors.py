"""Control vectors: a direction for each layer that is added to the residual stream after the layer.

The idea is representation engineering (Zou et al., arXiv:2310.01405). The files are llama.cpp's and repeng's: GGUF with
the architecture "controlvector", and a tensor ``direction.N`` [E] in F32 for each layer N with a direction. Layers are
counted from 0, and layer 0 has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters.adapter import Direction
from slm_core.adapters.base_model import BaseModel
from slm_core.errors import InvalidModelFile, InvalidOption
from slm_core.gguf import GgmlType, GgufFile, GgufWriter, NewTensor, PlainValue
from slm_core.gguf.cursor import shown
from slm_core.gguf.writer import stored
from slm_core.quant import dequantize
from slm_core.user_paths import expanded

ARCHITECTURE = "controlvector"
_KIND, _HINT, _COUNT = "general.architecture", f"{ARCHITECTURE}.model_hint", f"{ARCHITECTURE}.layer_count"
_NAME = re.compile(r"direction\.([1-9][0-9]{0,5})", re.ASCII)
_ALIGNMENT = 32


def is_control_vector(file: GgufFile) -> bool:
    """Whether a GGUF file is a control vector."""
    return file.get(_KIND, str, "") == ARCHITECTURE


def read_directions(file: GgufFile, base: BaseModel, layers: tuple[int, int] | None = None) -> dict[int, Direction]:
    """The directions in an open control vector, by layer.

    Args:
        file: the file.
        base: the model.
        layers: the first and the last layer that get their directions; None for all layers.

    Raises:
        InvalidModelFile: the file is damaged, or does not fit the model.
        InvalidOption: no layer of ``layers`` has a direction.
    """
    hint = file.get(_HINT, str, "")
    directions = {_layer(file, name, base): _direction(file, name, base, hint) for name in file.tensors}
    if not directions:
        raise InvalidModelFile(f"{file.path}: the control vector has no direction")
    first, last = (0, base.n_layers) if layers is None else layers
    selected = {layer: directions[layer] for layer in sorted(directions) if first <= layer <= last}
    if not selected:
        raise InvalidOption(
            f"layers={layers}: {file.path} has no direction for them (it has: {min(directions)} to {max(directions)})"
        )
    return selected


def check_layer_range(layers: object) -> tuple[int, int] | None:
    """A range of layers, checked.

    Raises:
        InvalidOption: it is not two numbers, 1 or more, in order.
    """
    match layers:
        case None:
            return None
        case (int() as first, int() as last) if 1 <= first <= last and bool not in map(type, (first, last)):
            return first, last
    raise InvalidOption(f"layers={repr(layers)[:80]} (accepted: the first and the last layer, from 1 on)")


def write_control_vector(directions: Mapping[int, NDArray[np.float32]], path: Path | str, model_hint: str = "") -> None:
    """Write a control vector as a GGUF file, which llama.cpp reads, too.

    Args:
        directions: the direction of each layer, float32 [E], by the number of the layer, from 1 on.
        path: the new file.
        model_hint: the architecture of the model, for readers of the file.

    Raises:
        InvalidOption: no directions, a layer below 1, or directions that are not finite rows of one width.
        OSError: the file cannot be written.
    """
    arrays = {layer: np.ascontiguousarray(directions[layer], np.float32) for layer in sorted(directions)}
    if len({array.shape for array in arrays.values()}) != 1 or any(array.ndim != 1 for array in arrays.values()):
        raise InvalidOption("directions of a control vector are float32 [E], of one width E, for at least one layer")
    for layer, array in arrays.items():
        if not 1 <= layer < 10**6 or not np.isfinite(array).all():
            raise InvalidOption(f"direction of layer {layer} (accepted: finite numbers, for layers from 1 on)")
    metadata: dict[str, PlainValue] = {_KIND: ARCHITECTURE, _HINT: model_hint, _COUNT: len(arrays)}
    names = {f"direction.{layer}": array for layer, array in arrays.items()}
    tensors = [NewTensor(name, array.shape, GgmlType.F32, array.nbytes) for name, array in names.items()]
    writer = GgufWriter({key: stored(value) for key, value in metadata.items()}, tensors, _ALIGNMENT)
    with writer.open(expanded(path)) as sink:
        for array in names.values():
            sink.write(array.view(np.uint8))


def directions_fingerprint(directions: Mapping[int, Direction]) -> str:
    """A digest of the numbers, which does not depend on the file: 64 hexadecimal digits."""
    digest = blake2b(b"control vector\n", digest_size=32)
    for layer in sorted(directions):
        digest.update(f"{layer} {directions[layer].shape}\n".encode())
        digest.update(directions[layer].tobytes())
    return digest.hexdigest()


def _layer(file: GgufFile, name: str, base: BaseModel) -> int:
    """The layer of a tensor."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 <= (layer := int(match[1])) < base.n_layers:
        raise InvalidModelFile(
            f"{file.path}: tensor {shown(name)} is not a direction for this model"
            f" (accepted: direction.1 to direction.{base.n_layers - 1})"
        )
    return layer


def _direction(file: GgufFile, name: str, base: BaseModel, hint: str) -> Direction:
    info = file.tensors[name]
    if info.ggml_type is not GgmlType.F32:
        raise InvalidModelFile(f"{file.path}: {name} is {info.ggml_type.name} (accepted: F32)")
    if info.shape != (base.n_embd,):
        raise InvalidModelFile(
            f"{file.path}: {name} has the shape {info.shape}, and this model's residual stream is {base.n_embd} wide:"
            " it is a control vector of another model" + (f" ({hint!r:.80})" if hint else "")
        )
    direction = dequantize(file.tensor_data(name), info.ggml_type, info.shape)
    if not np.isfinite(direction).all():
        raise InvalidModelFile(f"{file.path}: {name}: a number is not finite")
    return np.array(direction)
