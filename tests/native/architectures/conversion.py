"""Converts a transformers model to the tensors of a GGUF file; the gguf package maps the names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]
Change: TypeAlias = Callable[[str, Array, Mapping[str, Any]], Iterator[tuple[str, Array]] | None]
"""Converts a tensor of the checkpoint to tensors of the file; returns None if the rule does not apply."""


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Set random weights that make every part count: peaked attention, norms that are not 1, biases that are not 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            is_scale = name.endswith("weight")  # of a norm
            parameter.data = parameter.data + (0.2 if is_scale else 0.5) * values
        elif name.endswith("norm.weight"):
            parameter.data = 1 + 0.2 * values
        else:
            is_attention = re.search(r"[qk]_proj|query_key_value|qkv", name) is not None
            is_embedding = re.search(r"embed|wte|lm_head", name) is not None
            parameter.data = values * (
                (2.5 if is_embedding else 1.6 if is_attention else 1.0) / parameter.shape[-1] ** 0.5
            )


def converted_tensors(
    model: torch.nn.Module, architecture: str, n_layers: int, metadata: Mapping[str, Any], changes: tuple[Change, ...]
) -> dict[str, Array]:
    """The tensors of the GGUF file of ``model``."""
    names = gguf.get_tensor_name_map(_arch(architecture), n_layers)
    tensors: dict[str, Array] = {}
    for hf_name, array in _stacked(model.state_dict()).items():
        for converted_name, values in _changed(hf_name, array, metadata, changes):
            name = names.get_name(converted_name, try_suffixes=(".weight", ".bias"))
            tensors[converted_name if name is None else name] = np.ascontiguousarray(values)
    return tensors


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """The tensors of the checkpoint; norms of single heads are stacked to [heads, D], matrices of AltUp, too."""
    stacked: dict[str, Array] = {}
    for name, tensor in tensors.items():
        array, stacked_name = tensor.float().numpy(), re.sub(r"\.norms\.\d+\.|(?<=_projections)\.\d+\.", ".", name)
        if stacked_name != name:
            array = np.concatenate([stacked.get(stacked_name, array[None][:0]), array[None]])
        stacked[stacked_name] = array
    return stacked


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, gguf_name in gguf.MODEL_ARCH_NAMES.items() if gguf_name == name)


def _changed(
    name: str, values: Array, metadata: Mapping[str, Any], changes: tuple[Change, ...]
) -> Iterator[tuple[str, Array]]:
    for change in changes:
        converted = change(name, values, metadata)
        if converted is not None:
            yield from converted
            return
    yield name, values


def interleaved(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Reorder the rows of queries and keys for interleaved RoPE pairs."""
    match = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
    if match is None:
        return None
    n_heads = metadata["attention.head_count" if match[1] == "q" else "attention.head_count_kv"]
    halves = values.reshape(int(np.max(n_heads)), 2, -1, *values.shape[1:])
    return iter([(name, halves.swapaxes(1, 2).reshape(values.shape))])


def grouped(n_queries: int, n_groups: int) -> Change:
    """Split a fused matrix; each group has its query heads, then its key head and its value head."""

    def change(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
        if "query_key_value" not in name:
            return None
        rows = values.reshape(n_groups, n_queries + 2, -1, *values.shape[1:])
        parts = (rows[:, :n_queries], rows[:, n_queries], rows[:, n_queries + 1])
        return iter([(name, np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts]))])

    return change


def transposed(pattern: str) -> Change:
    """Transpose matrices that the checkpoint stores as (in, out)."""
    return lambda name, values, metadata: iter([(name, values.T)]) if re.search(pattern, name) else None


def norms_plus_one(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Add 1 to norms that the checkpoint stores minus 1."""
    return iter([(name, values + 1)]) if name.endswith("norm.weight") else None


def without(pattern: str) -> Change:
    """Drop tensors that the file does not contain."""
    return lambda name, values, metadata: iter(()) if re.search(pattern, name) else None


def renamed(pattern: str, replacement: str) -> Change:
    """Rename tensors whose names the gguf package does not know."""

    def change(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
        return iter([(re.sub(pattern, replacement, name), values)]) if re.search(pattern, name) else None

    return change


def squeezed(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Squeeze the weights of depthwise convolutions, [C, 1, W], to [C, W]."""
    return iter([(name, values[:, 0])]) if re.search(r"conv(1d)?\.weight$", name) else None


def decays(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Convert logarithms of decay rates to the (negative) rates of the file."""
    return iter([(name, -np.exp(values))]) if name.endswith("A_log") else None


def mamba2_heads(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Convert the per-head parameters of Mamba-2: scalars become columns, the norm gets one row per group."""
    if re.search(r"\.(mixer|mamba)\.D$", name):
        return iter([(name, values[:, None])])
    if name.endswith("A_log"):
        return iter([(name, -np.exp(values)[:, None])])
    if name.endswith("dt_bias"):
        return iter([(name.replace("dt_bias", "dt_proj.bias"), values)])
    if re.search(r"\.(mixer|mamba)\.norm\.weight$", name):
        return iter([(name, values.reshape(metadata["ssm.group_count"], -1))])
    return None


def multiplied(factors: Mapping[str, Any]) -> Change:
    """Multiply weights by Falcon-H1's multipliers, as files store them."""
    factor_of = {
        "gate_proj": factors["mlp_multipliers"][0],
        "down_proj": factors["mlp_multipliers"][1],
        "k_proj": factors["key_multiplier"] * factors["attention_in_multiplier"],
        "q_proj": factors["attention_in_multiplier"],
        "v_proj": factors["attention_in_multiplier"],
        "o_proj": factors["attention_out_multiplier"],
        "mamba.out_proj": factors["ssm_out_multiplier"],
        "lm_head": factors["lm_head_multiplier"],
        "embed_tokens": factors["embedding_multiplier"],
    }

    def change(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
        if "mamba.in_proj" in name:
            inner, n_selected = metadata["ssm.inner_size"], metadata["ssm.group_count"] * metadata["ssm.state_size"]
            counts = (inner, inner, n_selected, n_selected, metadata["ssm.time_step_rank"])
            rows = np.repeat(np.array(factors["ssm_multipliers"], np.float32), counts)
            return iter([(name, values * rows[:, None] * np.float32(factors["ssm_in_multiplier"]))])
        matching = [factor for part, factor in factor_of.items() if f"{part}.weight" in name]
        return iter([(name, values * np.float32(matching[0]))]) if matching else None

    return change


def shared_as_dense(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Convert the shared expert of a model without other experts to a dense feed-forward layer."""
    if "shared_mlp.input_linear" in name:
        gate, up = np.split(values, 2, axis=0)
        return iter([(_expert_name(name, "ffn_gate"), gate), (_expert_name(name, "ffn_up"), up)])
    if "shared_mlp.output_linear" in name:
        return iter([(_expert_name(name, "ffn_down"), values)])
    return None


def halved(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Split the gate and up matrices of all experts, [X, 2F, E], into two tensors."""
    if "gate_up_proj" in name:
        gates, ups = np.split(values, 2, axis=1)
        return iter([(_expert_name(name, "ffn_gate_exps"), gates), (_expert_name(name, "ffn_up_exps"), ups)])
    if ".experts.down_proj" in name:
        return iter([(_expert_name(name, "ffn_down_exps"), values)])
    if "shared_mlp.input_linear" in name:
        gate, up = np.split(values, 2, axis=0)
        return iter([(_expert_name(name, "ffn_gate_shexp"), gate), (_expert_name(name, "ffn_up_shexp"), up)])
    return None


def flat(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Convert a matrix of one row to the vector of the file."""
    return iter([(name, values[0])]) if "shared_expert_gate" in name else None


def alternating(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Gates and what goes up in alternating columns of all experts, [X, E, 2F], and their biases [X, 2F]."""
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = values if kind == "bias" or values.ndim < 3 else values.swapaxes(1, 2)
    if "gate_up_proj" in name:
        return iter(
            [(_expert_name(name, f"ffn_{part}_exps", kind), rows[:, i::2]) for i, part in enumerate(("gate", "up"))]
        )
    if "experts.down_proj" in name:
        return iter([(_expert_name(name, "ffn_down_exps", kind), rows)])
    return None


def gemma4_experts(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Rename gemma4's experts (gate and up in one tensor), and the scales of the router and of the experts."""
    parts = {
        "router.scale": ("ffn_gate_inp", "scale"),
        "router.per_expert_scale": ("ffn_down_exps", "scale"),
        "experts.gate_up_proj": ("ffn_gate_up_exps", "weight"),
        "experts.down_proj": ("ffn_down_exps", "weight"),
    }
    targets = [part for end, part in parts.items() if name.endswith(end)]
    return iter([(_expert_name(name, *targets[0]), values)]) if targets else None


def stacked_experts(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Convert the gate, up and down matrices of all experts from (in, out)."""
    if ".experts." not in name:
        return None
    return halved(name, values.swapaxes(1, 2), metadata)


def up_projections(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Split kv_b_proj of latent attention per head; the key part is transposed, because queries absorb it."""
    if "kv_b_proj" not in name:
        return None
    n_nope = metadata["attention.key_length_mla"] - metadata["rope.dimension_count"]
    heads = values.reshape(metadata["attention.head_count"], -1, values.shape[1])
    keys, rest = heads[:, :n_nope].swapaxes(1, 2), heads[:, n_nope:]
    return iter([(name.replace("kv_b_proj", "k_b_proj"), keys), (name.replace("kv_b_proj", "v_b_proj"), rest)])


def concatenated_experts(name: str, values: Array, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Array]] | None:
    """Split concatenated experts, [X*F, E]; the down matrices are transposed in the file."""
    match = re.search(r"blocks\.(\d+)\.ffn\.experts\.mlp\.(w1|v1|w2)", name)
    if match is None:
        return None
    each = values.reshape(metadata["expert_count"], -1, values.shape[1])
    part = {"w1": "gate", "v1": "up", "w2": "down"}[match[2]]
    return iter([(f"blk.{match[1]}.ffn_{part}_exps.weight", each.swapaxes(1, 2) if part == "down" else each)])


def _expert_name(name: str, part: str, kind: str = "weight") -> str:
    layer = re.search(r"layers\.(\d+)\.", name)
    assert layer is not None, name
    return f"blk.{layer[1]}.{part}.{kind}"
