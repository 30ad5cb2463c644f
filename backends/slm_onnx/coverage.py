"""What of a specification the decoder graph implements; everything else is refused by name."""

from __future__ import annotations

from dataclasses import MISSING, fields

from slm_core.architectures import EMBEDDING, LayerSpec, ModelSpec, RopeSpec, check_tensors, read_spec
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile
from slm_onnx import BACKEND

_OUTSIDE = frozenset({EMBEDDING, "output_norm.weight", "output.weight", "output.scale", "rope_freqs.weight"})
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_INSIDE = frozenset(
    {f"{name}.{part}" for name in _MATRICES for part in ("weight", "bias", "scale")}
    | {f"{name}.weight" for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")}
)


def read_supported(gguf: GgufFile) -> ModelSpec:
    """Read and check a file whose model the graph can compute.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``read_spec`` and ``check_tensors``; or the graph has no place for what
            the model needs.
    """
    spec = read_spec(gguf)
    check_tensors(gguf, spec)
    for need in _unusual(spec):
        raise UnsupportedModel(f"{gguf.path}: this {spec.architecture} model needs {need}, which {BACKEND} lacks")
    for name in gguf.tensors:
        if not _is_known(name, spec):
            raise UnsupportedModel(f"{gguf.path}: {BACKEND} does not implement what tensor {name!r} is for")
    return spec


def rope_of(spec: ModelSpec) -> RopeSpec:
    """The position embedding, the same in every layer of a model that ``read_supported`` gave."""
    rope = spec.layers[0].rope
    assert rope is not None, "checked when it was read"
    return rope


def _unusual(spec: ModelSpec) -> list[str]:
    """What a model has besides what every decoder has."""
    first = spec.layers[0]
    parts: tuple[ModelSpec | LayerSpec, ...] = (spec, *spec.layers)
    found = [
        f"{field.name} {getattr(part, field.name)}"
        for part in parts
        for field in fields(part)
        if field.default is not MISSING and getattr(part, field.name) != field.default
    ]
    if any(layer.rope is None or layer.rope != first.rope for layer in spec.layers):
        found.append("a position embedding that changes from layer to layer")
    elif first.rope is not None and (first.rope.long is not None or first.rope.n_dims != spec.head_dim):
        found.append("a position embedding of its own")
    tensors = first.tensors
    if "attn_norm.weight" not in tensors or "ffn_norm.weight" not in tensors or "ffn_gate.weight" not in tensors:
        found.append("another kind of block")
    if tensors.keys() & {"attn_q_norm.weight"} and tensors["attn_q_norm.weight"].shape != (spec.head_dim,):
        found.append("a norm of several heads at once")
    return found


def _is_known(name: str, spec: ModelSpec) -> bool:
    if not name.startswith("blk."):
        return name in _OUTSIDE or not spec.model_tensors[name].used
    _, layer, rest = name.split(".", 2)
    return rest in _INSIDE or not spec.layers[int(layer)].tensors[rest].used
