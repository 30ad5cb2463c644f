"""Shared parts of the recipes of models with recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slm_core.checkpoints.changes import Decays, Shaped, Squeezed
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import RMS, SILU, outside
from slm_core.checkpoints.recipe import Part, Parts, Recipe, weights
from slm_core.gguf import PlainValue

_N_CTX = 2**20  # configurations have no key for it, and the models have no limit

_NEUTRAL = """
chunk_size d_inner d_model fused_add_norm intermediate_size n_layer num_heads pad_vocab_size_multiple
rescale_prenorm_residual residual_in_fp32 ssm_cfg time_step_floor time_step_init_scheme time_step_max time_step_min
time_step_scale use_associative_scan use_mambapy
"""
"""Keys for training, and keys that repeat other sizes."""


def convolution(theirs: str) -> dict[str, Part]:
    """The short convolution before a recurrent state."""
    return {
        "ssm_conv1d.weight": Part(f"{theirs}.conv1d.weight", Squeezed()),
        "ssm_conv1d.bias": Part(f"{theirs}.conv1d.bias"),
    }


def channels_state(theirs: str) -> dict[str, Part]:
    """The tensors of a Mamba layer: one step size per channel."""
    names = {"ssm_in": "in_proj", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
    return {
        **weights({name: f"{theirs}.{each}" for name, each in names.items()}),
        **convolution(theirs),
        "ssm_dt.bias": Part(f"{theirs}.dt_proj.bias"),
        "ssm_a": Part(f"{theirs}.A_log", Decays()),
        "ssm_d": Part(f"{theirs}.D"),
    }


def channels_keys(config: Config) -> dict[str, PlainValue]:
    """The sizes of a Mamba layer."""
    n_embd = config.size("hidden_size", 768)
    n_rank = math.ceil(n_embd / 16)
    if config.is_null("time_step_rank"):
        config.neutral("time_step_rank")
    elif "time_step_rank" in config:
        n_rank = config.size("time_step_rank")
    expanded = config.size("expand", 2) * n_embd
    return {
        "ssm.conv_kernel": config.size("conv_kernel", 4),
        "ssm.inner_size": config.size("intermediate_size", expanded),
        "ssm.state_size": config.size("state_size", 16),
        "ssm.time_step_rank": n_rank,
    }


def heads_state(theirs: str, n_groups: int) -> dict[str, Part]:
    """The tensors of a Mamba 2 layer: one step size per head."""
    return {
        **weights({"ssm_in": f"{theirs}.in_proj", "ssm_out": f"{theirs}.out_proj"}),
        **convolution(theirs),
        "ssm_dt.bias": Part(f"{theirs}.dt_bias"),
        "ssm_a": Part(f"{theirs}.A_log", Decays(as_column=True)),
        "ssm_d": Part(f"{theirs}.D", Shaped()),
        "ssm_norm.weight": Part(f"{theirs}.norm.weight", Shaped(n_groups)),
    }


def heads_keys(config: Config, prefix: str, n_inner: int) -> dict[str, PlainValue]:
    """The sizes of a Mamba 2 layer; the configuration's keys begin with ``prefix``."""
    config.only("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    names = ("n_heads", "d_state", "d_conv", "n_groups") if prefix else (
        "num_heads", "state_size", "conv_kernel", "n_groups"
    )  # fmt: skip
    n_heads, n_state, n_taps, n_groups = (config.size(prefix + name, None, MAX_PARTS) for name in names)
    config.only(f"{prefix}d_head" if prefix else "head_dim", n_inner // n_heads, "auto")
    return {
        "ssm.conv_kernel": n_taps,
        "ssm.inner_size": n_inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_heads,
        "ssm.group_count": n_groups,
    }


def of_states_alone(
    config: Config, architecture: str, block: Parts, keys: Mapping[str, PlainValue], *, tied: bool
) -> Recipe:
    """A model with only recurrent layers, each after a norm."""
    config.only("hidden_act", *SILU)
    config.only("use_bias", False)
    config.only("use_conv_bias", True)
    config.only("rms_norm", True)
    config.neutral(*_NEUTRAL.split())
    names = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
    model = outside(config, tied=tied) | weights(names)
    n_layers = config.size("num_hidden_layers", largest=MAX_PARTS)
    metadata: dict[str, PlainValue] = {
        "block_count": n_layers,
        "context_length": _N_CTX,
        "embedding_length": config.size("hidden_size"),
        "feed_forward_length": 0,
        "attention.head_count": 0,
        RMS: config.number("layer_norm_epsilon", 1e-5),
    }
    blocks = [weights({"attn_norm": "norm"}) | dict(block)] * n_layers
    return Recipe(
        architecture,
        {**metadata, **keys},
        model,
        blocks,
        prefix="backbone.layers.{i}.",
        unused="^lm_head" if "output.weight" not in model else "^$",
        renamed={r"^backbone\.embedding\.": "backbone.embeddings."},
    )
