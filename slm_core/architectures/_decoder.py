"""Shared readers of decoder architectures: RoPE, windows, and the ``ModelSpec`` itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypedDict, Unpack

from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes
from slm_core.architectures._spec import (
    EMBEDDING,
    LayerSpec,
    LongRopeSpec,
    ModelSpec,
    NormKind,
    RopeSpec,
    RopeStyle,
    TensorSpec,
    YarnSpec,
)
from slm_core.architectures._tables import linear, norms
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import OWN, RANK_EOS_TWICE, RANK_POOLING

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
EPSILONS = {NormKind.RMS: "attention.layer_norm_rms_epsilon", NormKind.LAYER: "attention.layer_norm_epsilon"}


class Features(TypedDict, total=False):
    """Settings that can differ from llama; see ``ModelSpec``."""

    norm: NormKind
    parallel: bool
    embedding_scale: float
    scales_rows: bool
    residual_scale: float
    attention_scale: float | None
    attention_softcap: float | None
    alibi_max_bias: float | None
    qkv_limit: float | None
    logit_scale: float
    logit_softcap: float | None
    output_norm: str
    active_stream: int | None
    layer_embedding_width: int | None
    mtp_layers: tuple[LayerSpec, ...]
    causal: bool


def read_rope(keys: Keys, head_dim: int, style: RopeStyle, default_freq_base: float | None = None) -> RopeSpec:
    """Read the position embedding: frequencies, linear scaling, YaRN or LongRoPE."""
    n_dims = keys.size("rope.dimension_count", head_dim)
    if n_dims > head_dim or n_dims % 2:
        raise UnsupportedModel(
            f"{keys.gguf.path}: {n_dims} of a head's {head_dim} values are rotated"
            f" (metadata '{keys.architecture}.rope.dimension_count'; accepted: an even number, at most all)"
        )
    freq_base = keys.number("rope.freq_base", default_freq_base)
    if freq_base <= 1:
        raise InvalidModelFile(
            f"{keys.gguf.path}: metadata '{keys.architecture}.rope.freq_base' is {freq_base} (accepted: above 1)"
        )
    kind = keys.choice("rope.scaling.type", _scalings(keys), "linear")
    # 0 stands for no scaling, as in llama.cpp; "scale_linear" is the key's name in old files.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0, zero=True), zero=True) or 1.0
    magnitude = keys.number("rope.scaling.attn_factor", 1.0)
    yarn = _read_yarn(keys) if kind == "yarn" else None
    keys.neutral("rope.scaling.original_context_length", "rope.scaling.finetuned")
    for name in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        keys.only(name, 1.0)
    if yarn is not None:
        multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True)
        magnitude *= _yarn_magnitude(factor, 1.0) / _yarn_magnitude(factor, multiplier)
    return RopeSpec(style, n_dims, freq_base, 1.0 if kind == "none" else factor, yarn, magnitude)


def rope_factors(rope: RopeSpec, tensors: dict[str, TensorSpec]) -> RopeSpec:
    """``rope`` with an optional divisor for each frequency; the optional tensor is added to ``tensors``."""
    tensors[ROPE_FACTORS] = TensorSpec((rope.n_dims // 2,), required=False)
    return replace(rope, factors=ROPE_FACTORS)


def long_rope(keys: Keys, rope: RopeSpec, tensors: dict[str, TensorSpec]) -> RopeSpec:
    """``rope`` with LongRoPE's two tables if the file has them; they are added to ``tensors``."""
    if LONG_FACTORS not in keys.gguf.tensors:
        return rope
    n_ctx_original = keys.size("rope.scaling.original_context_length")
    for name in (LONG_FACTORS, SHORT_FACTORS):
        tensors[name] = TensorSpec((rope.n_dims // 2,))
    return replace(rope, long=LongRopeSpec(n_ctx_original, short=SHORT_FACTORS, long=LONG_FACTORS))


def read_windows(
    keys: Keys, n_layers: int, period: int, default: int | None = None, *, first: bool = False
) -> list[int | None]:
    """The window of each layer. In each group of ``period`` layers, the last one has full attention.

    Args:
        keys: read for the window, and for the pattern, if the file has one.
        n_layers: layers L.
        period: the period if the file has no pattern.
        default: the window if the file has none; None for full attention in all layers.
        first: whether the first layer of each group has full attention, instead of the last.
    """
    window = keys.count("attention.sliding_window", default or 0)
    slides = keys.flags("attention.sliding_window_pattern", n_layers)
    if isinstance(slides, int):
        period, slides = slides, None
    if slides is None:
        slides = [period == 0 or (i + (not first)) % period != 0 for i in range(n_layers)]
    return [window if window and sliding else None for sliding in slides]


def decoder_spec(
    keys: Keys,
    sizes: Sizes,
    layers: Iterable[LayerSpec],
    model_tensors: Mapping[str, TensorSpec] | None = None,
    **features: Unpack[Features],
) -> ModelSpec:
    """Declare a decoder. If the file has no output matrix, the output uses the embedding.

    Args:
        keys: read for the norms' epsilon; keys that a decoder cannot have are refused.
        sizes: the dimensions.
        layers: the blocks.
        model_tensors: tensors outside the blocks, in addition to embedding, output and output norm.
        features: see ``ModelSpec``.
    """
    causal = features.get("causal", True)
    _refuse_other_features(keys, causal=causal)
    norm = features.get("norm", NormKind.RMS)
    tensors = {EMBEDDING: TensorSpec((sizes.n_vocab, sizes.n_embd))}
    if output_norm := features.get("output_norm", "output_norm"):
        tensors |= norms(sizes.n_embd, output_norm)
    if causal:
        tensors |= linear("output", (sizes.n_vocab, sizes.n_embd), required=False)
    return ModelSpec(
        architecture=keys.architecture,
        n_layers=sizes.n_layers,
        n_embd=sizes.n_embd,
        n_vocab=sizes.n_vocab,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=keys.number(EPSILONS[norm], zero=True),
        model_tensors=tensors | dict(model_tensors or {}),
        layers=tuple(layers),
        **features,
    )


def encoder_spec(
    keys: Keys,
    sizes: Sizes,
    layers: Iterable[LayerSpec],
    model_tensors: Mapping[str, TensorSpec] | None = None,
    **features: Unpack[Features],
) -> ModelSpec:
    """Declare an encoder: a model without an output matrix; see ``decoder_spec``."""
    features["causal"] = False
    return decoder_spec(keys, sizes, layers, model_tensors, **features)


def _refuse_other_features(keys: Keys, *, causal: bool) -> None:
    keys.neutral("context_length", "vocab_size", "pooling_type", RANK_POOLING, RANK_EOS_TWICE, *EPSILONS.values())
    keys.only("attention.causal", causal)
    keys.only("use_parallel_residual", False)
    for name in ("expert_count", "expert_used_count", "attention.sliding_window", "nextn_predict_layers"):
        keys.only(name, 0)


def _scalings(keys: Keys) -> tuple[str, ...]:
    """The scaling types that can be read: LongRoPE only with its tables."""
    return ("none", "linear", "yarn", "longrope") if LONG_FACTORS in keys.gguf.tensors else ("none", "linear", "yarn")


def _yarn_magnitude(factor: float, multiplier: float) -> float:
    """The paper's temperature (eq. 22). DeepSeek uses the ratio of two temperatures."""
    return 1 + 0.1 * multiplier * math.log(max(factor, 1.0))


def _read_yarn(keys: Keys) -> YarnSpec:
    keys.number("rope.scaling.factor")  # YaRN requires it
    return YarnSpec(
        n_ctx_original=keys.size("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),  # defaults of the paper and of llama.cpp
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        truncated=keys.flag(f"{OWN}rope.yarn_truncate", True),  # no GGUF key: llama.cpp always rounds
    )
