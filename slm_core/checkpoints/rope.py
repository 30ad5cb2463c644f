"""Converts position embeddings of old and new configurations to GGUF's keys and tables.

The formulas are from transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.config import Config
from slm_core.errors import UnsupportedModel
from slm_core.gguf import OWN, PlainValue


class Positions(NamedTuple):
    """GGUF's keys below the architecture's name, and tensors."""

    metadata: dict[str, PlainValue]
    tables: dict[str, NDArray[np.float32]]


class Stated(NamedTuple):
    """A configuration's RoPE settings: the section that holds them, and the kind of scaling."""

    where: Config
    kind: str
    freq_base: float


def stated_rope(config: Config, freq_base: float, layers: str = "", old_base: str = "rope_theta") -> Stated:
    """Find the RoPE settings: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``.

    Args:
        config: the configuration.
        freq_base: default of the base.
        layers: the kind of layers ("full_attention"), for models with several position embeddings.
        old_base: the base's key outside these settings.

    Raises:
        UnsupportedModel: there are both, and they differ.
    """
    if "rope_parameters" in config:
        where = config.part("rope_parameters").part(layers) if layers else config.part("rope_parameters")
        if not config.aside("rope_scaling").says_no_more_than(where):
            raise UnsupportedModel(
                f"{config.source}: 'rope_scaling' differs from 'rope_parameters', its new name (keep one of them)"
            )
    else:
        where = config.part("rope_scaling")
    base = where.number("rope_theta", config.number(old_base, freq_base))
    kind = where.text("rope_type", where.text("type", "default"))
    where.neutral("type", "rope_type")
    return Stated(where, kind, base)


def read_rope(
    config: Config,
    head_dim: int,
    n_ctx: int,
    freq_base: float = 10_000.0,
    *,
    partial: float | None = None,
    layers: str = "",
) -> Positions:
    """Read the position embedding.

    Args:
        config: the configuration.
        head_dim: D.
        n_ctx: longest context.
        freq_base: default of the base.
        partial: default of the rotated share of a head; None if the family always rotates whole heads.
        layers: see ``stated_rope``.

    Raises:
        UnsupportedModel: a kind of scaling, or a value, that is not implemented.
    """
    rope = stated_rope(config, freq_base, layers)
    share = rope.where.number("partial_rotary_factor", config.number("partial_rotary_factor", partial or 1.0))
    n_dims = int(head_dim * share)
    if not 0 < n_dims <= head_dim or (partial is None and share != 1):
        accepted = "1: its class in transformers ignores other values" if partial is None else "up to 1"
        raise UnsupportedModel(f"{config.source}: 'partial_rotary_factor' is {share} (accepted: {accepted})")
    keys: dict[str, PlainValue] = {"rope.dimension_count": n_dims, "rope.freq_base": rope.freq_base}
    if rope.kind == "default":
        return Positions(keys, {})
    if rope.kind == "linear":
        return Positions(keys | scaled("linear", factor=rope.where.number("factor")), {})
    if rope.kind == "yarn":
        return Positions(keys | _yarn(config, rope.where, n_ctx), {})
    if rope.kind == "llama3":
        return Positions(keys, {"rope_freqs.weight": _llama3(config, rope, n_dims, n_ctx)})
    if rope.kind in ("longrope", "su"):
        return _long(config, rope.where, keys, n_dims, n_ctx)
    raise UnsupportedModel(
        f"{config.source}: 'rope_type' is {rope.kind[:80]!r}, which is not implemented"
        " (accepted: default, linear, yarn, llama3, longrope)"
    )


def scaled(kind: str, **values: PlainValue) -> dict[str, PlainValue]:
    """GGUF's keys of a scaling."""
    return {f"rope.scaling.{key}": value for key, value in {"type": kind, **values}.items()}


def _original(config: Config, where: Config, n_ctx: int) -> int:
    """The context length before the extension; the outer key overrides the key in the RoPE settings."""
    inside = where.size("original_max_position_embeddings", n_ctx)
    return config.size("original_max_position_embeddings", inside)


def _yarn(config: Config, where: Config, n_ctx: int) -> dict[str, PlainValue]:
    """YaRN. GGUF's ``attn_factor`` is the magnitude of queries and keys, relative to the paper's."""
    where.neutral("max_position_embeddings", "finetuned")
    n_original = _original(config, where, n_ctx)
    factor = where.number("factor", n_ctx / n_original)
    mscale, mscale_all_dim = where.number("mscale", 0.0), where.number("mscale_all_dim", 0.0)
    if min(mscale, mscale_all_dim) < 0:
        raise UnsupportedModel(f"{config.source}: 'mscale' or 'mscale_all_dim' is below 0 (accepted: 0 or more)")
    keys = scaled(
        "yarn",
        factor=factor,
        original_context_length=n_original,
        yarn_beta_fast=where.number("beta_fast", 32.0),
        yarn_beta_slow=where.number("beta_slow", 1.0),
    )
    if not where.flag("truncate", True):
        keys[f"{OWN}rope.yarn_truncate"] = False
    if "attention_factor" not in where and mscale == 1 and mscale_all_dim:
        return keys | {"rope.scaling.yarn_log_multiplier": mscale_all_dim}
    paper = _magnitude(factor, 1.0)
    magnitude = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim) if mscale and mscale_all_dim else paper
    magnitude = where.number("attention_factor", magnitude)
    return keys if magnitude == paper else keys | {"rope.scaling.attn_factor": magnitude / paper}


def _magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1


def _llama3(config: Config, rope: Stated, n_dims: int, n_ctx: int) -> NDArray[np.float32]:
    """Divisors of the frequencies: the factor for low frequencies, 1 for high frequencies, a ramp in between."""
    where = rope.where
    factor, low, high = (where.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    n_original = _original(config, where, n_ctx)
    if not (factor > 0 and 0 < low < high and rope.freq_base > 0):
        raise UnsupportedModel(
            f"{where.source}: llama3 scaling by {factor} from {low} to {high} turns (accepted: positive, ascending)"
        )
    frequencies = rope.freq_base ** -(np.arange(0, n_dims, 2) / n_dims)
    n_turns = n_original * frequencies / (2 * math.pi)
    smooth = np.clip((n_turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _long(config: Config, where: Config, keys: dict[str, PlainValue], n_dims: int, n_ctx: int) -> Positions:
    """LongRoPE's two tables; the magnitude grows with the extension of the context."""
    n_original = _original(config, where, n_ctx)
    extended = max(1.0, where.number("factor", n_ctx / n_original))
    grown = math.sqrt(1 + math.log(extended) / math.log(n_original)) if n_original > 1 else 1.0
    tables = {}
    for kind in ("long", "short"):
        factors = where.items(f"{kind}_factor", float, n_dims // 2)
        if factors is None:
            raise UnsupportedModel(f"{config.source}: '{kind}_factor' of longrope is missing")
        tables[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return Positions(
        keys
        | {
            "rope.scaling.original_context_length": n_original,
            "rope.scaling.attn_factor": where.number("attention_factor", grown),
        },
        tables,
    )


def sliding_layers(config: Config, n_layers: int, otherwise: Callable[[int], bool]) -> list[bool]:
    """Whether each layer is a sliding-window layer, from ``layer_types``, or else from ``otherwise``.

    Raises:
        UnsupportedModel: there is an unknown kind of layers.
    """
    kinds = config.items("layer_types", str, n_layers)
    if kinds is None:
        return [otherwise(i) for i in range(n_layers)]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(
                f"{config.source}: 'layer_types' has {kind[:80]!r}, which is not implemented"
                " (accepted: full_attention, sliding_attention)"
            )
    return [kind == "sliding_attention" for kind in kinds]
