"""The parts of a specification that the decoder graph implements; all others are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace

from slm_core.architectures import (
    EMBEDDING,
    POSITIONS,
    Activation,
    Gating,
    LayerSpec,
    ModelSpec,
    NormKind,
    Xielu,
    check_tensors,
    read_spec,
)
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile
from slm_onnx import BACKEND, runtime
from slm_onnx.activations import ACTIVATIONS

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = tuple(f"ffn_{name}_{kind}" for name in ("gate", "up", "down") for kind in ("exps", "shexp"))
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "exp_probs_b.bias")
_FLOATS = ("F32", "F16", "BF16")
_EXPERT_TYPES = {
    *_FLOATS,
    *("Q4_0", "Q8_0", "Q5_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ2_0"),
}
"""QMoE takes codes and scales only, without the correction term of affine types."""
_NORMS = ("attn_norm", "attn_norm_2", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_output_norm")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_OUTSIDE_NORMS = ("token_embd_norm", "output_norm")
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_HANDLED = {
    "norm", "parallel", "embedding_scale", "residual_scale", "attention_scale", "attention_softcap", "alibi_max_bias",
    "qkv_limit", "logit_scale", "logit_softcap", "window", "temperature", "activation", "ffn_norm", "scales_rows",
    "experts",
}  # fmt: skip
_WORDS = {
    "latent": "attention to a latent",
    "chunk": "attention in chunks",
    "attends": "a layer without attention",
    "recurrent": "a layer with a state",
    "causal": "attention to both sides",
}
_HEAD_WIDTHS = 8  # GroupQueryAttention needs a multiple of it as the head width


def read_supported(gguf: GgufFile, *, on_cpu: bool = True) -> ModelSpec:
    """Read and check a file whose model the graph supports.

    Args:
        gguf: the file.
        on_cpu: whether it is for the CPU, which has operators that other providers lack.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``read_spec`` and ``check_tensors``; or the graph does not implement a
            part of the model.
    """
    spec = read_spec(gguf)
    check_tensors(gguf, spec)
    spec = replace(spec, mtp_layers=())  # contexts do not declare multi-token prediction
    for need in _lacking(spec):
        raise UnsupportedModel(f"{gguf.path}: this {spec.architecture} model needs {need}, which {BACKEND} lacks")
    if not on_cpu and any(layer.experts for layer in spec.layers):
        raise UnsupportedModel(f'{gguf.path}: {BACKEND} runs experts on the CPU alone: use device="cpu"')
    known = set(_known(spec))
    for name in gguf.tensors:
        inside = name.split(".", 2)[2] if name.startswith("blk.") else name
        if inside not in known and _is_used(name, spec):
            raise UnsupportedModel(f"{gguf.path}: {BACKEND} does not implement what tensor {name!r} is for")
        if inside.endswith("_exps.weight") and gguf.tensors[name].ggml_type.name not in _EXPERT_TYPES:
            raise UnsupportedModel(
                f"{gguf.path}: {BACKEND} has no experts in {gguf.tensors[name].ggml_type.name}"
                f" (accepted: {', '.join(sorted(_EXPERT_TYPES))})"
            )
        if inside.endswith("_exps.weight") and not _is_float(gguf, name) and not runtime.has_coded_experts():
            raise UnsupportedModel(
                f"{gguf.path}: experts in {gguf.tensors[name].ggml_type.name} need ONNX Runtime 1.31 or later"
                f" (installed: {runtime.version()})"
            )
    return spec


def _is_float(gguf: GgufFile, name: str) -> bool:
    return gguf.tensors[name].ggml_type.name in _FLOATS


def _lacking(spec: ModelSpec) -> Iterator[str]:
    """The parts of a model that the graph does not implement."""
    parts: tuple[ModelSpec | LayerSpec, ...] = (spec, *spec.layers)
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if field.default is not MISSING and value != field.default and field.name not in _HANDLED:
                yield _WORDS.get(field.name, f"{field.name} {value}")
    for layer in spec.layers:
        yield from _lacking_of_experts(layer)
        if not isinstance(layer.activation, Xielu) and layer.activation not in ACTIVATIONS:
            yield f"the activation {layer.activation.value}"
    if spec.head_dim % _HEAD_WIDTHS:
        yield f"heads of {spec.head_dim} values (accepted: multiples of {_HEAD_WIDTHS})"


def _lacking_of_experts(layer: LayerSpec) -> Iterator[str]:
    if layer.experts is None:
        return
    if layer.experts.gating is Gating.SPARSE_MIXER:
        yield f"experts chosen by {layer.experts.gating.value}"
    if layer.experts.n_groups > 1:
        yield f"experts in {layer.experts.n_groups} groups"
    if layer.experts.scales_input:
        yield "experts whose input is scaled"
    if layer.activation is not Activation.SILU:
        yield f"experts with {layer.activation}"
    if not all(f"ffn_{name}_exps.weight" in layer.tensors for name in ("gate", "up", "down")):
        yield "experts whose matrices are fused"


def _known(spec: ModelSpec) -> Iterator[str]:
    """The tensors that the graph uses; tensors of blocks without "blk.N."."""
    yield from (EMBEDDING, POSITIONS, *_FACTORS)
    yield from _ROUTERS
    yield from (f"{name}.weight" for name in _EXPERTS)
    for name in (*_MATRICES, "output"):
        yield from (f"{name}.{part}" for part in ("weight", "bias", "scale"))
    for name in (*_NORMS, *_OUTSIDE_NORMS):
        yield f"{name}.weight"
        if spec.norm is NormKind.LAYER:
            yield f"{name}.bias"
    yield from (f"{name}.weight" for name in _HEAD_NORMS)


def _is_used(name: str, spec: ModelSpec) -> bool:
    if not name.startswith("blk."):
        return spec.model_tensors[name].used
    _, layer, inside = name.split(".", 2)
    if int(layer) >= spec.n_layers:  # of a layer for multi-token prediction, which the graph leaves out
        return False
    return spec.layers[int(layer)].tensors[inside].used
