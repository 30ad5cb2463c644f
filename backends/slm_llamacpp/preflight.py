"""Files that llama.cpp does not survive: it checks much of a header with assertions, which end the process.

These checks cover what its loader asserts for every model, and what its graphs assert for models with plain rotary
attention, jamba and RWKV. Whatever else is wrong with a file, llama.cpp reports.
"""

from __future__ import annotations

import math

import numpy as np

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import OWN, GgmlType, GgufFile
from slm_core.gguf.cursor import shown

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")
_VECTOR_TYPES = (GgmlType.F32, GgmlType.F64, GgmlType.I8, GgmlType.I16, GgmlType.I32, GgmlType.I64)
_PLAIN_ROTARY_NAMES = """
apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 ernie4_5 ernie4_5-moe
exaone exaone-moe exaone4 falcon granite granite_swa graniteswitch grok grovemoe hunyuan-moe hunyuan_vl hy_v3
internlm2 jais2 llama llama4 maincoder mellum minimax-01 minimax-m2 mistral3 nemotron olmo olmo2 olmoe orion paddleocr
pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe seed_oss smallthinker smollm3 starcoder2
talkie xverse
"""
_PLAIN_ROTARY = frozenset(_PLAIN_ROTARY_NAMES.split())
_ROTATES_A_PART = frozenset({"nemotron"})

TOKENS_ALONE = frozenset({"glm4", "glm4moe", "graniteswitch"})
"""Architectures whose graphs end the process where a batch holds embedding rows (of glm4, all but files for images)."""


def check_survives(gguf: GgufFile) -> None:
    """Refuse a file that would end the process, or that says what llama.cpp does not read.

    Raises:
        UnsupportedModel: a value is beyond what llama.cpp can take; the message names the key or tensor.
        InvalidModelFile: the file contradicts itself.
    """
    architecture = gguf.require("general.architecture", str)
    for key in gguf.metadata:
        if key.startswith(OWN):
            raise UnsupportedModel(f"{gguf.path}: metadata {shown(key)} is no key of GGUF's, and llama.cpp ignores it")
    _check_tokens(gguf)
    _check_layers(gguf, architecture)
    _check_experts(gguf, architecture)
    _check_numbers(gguf, architecture)
    _check_states(gguf, architecture)
    if architecture in _PLAIN_ROTARY:
        _check_heads(gguf, architecture)
    for tensor in gguf.tensors.values():
        if len(tensor.shape) == 1 and tensor.ggml_type not in _VECTOR_TYPES:
            raise UnsupportedModel(
                f"{gguf.path}: tensor {tensor.name!r} is {tensor.ggml_type.name}: llama.cpp has vectors in F32"
            )


def _check_tokens(gguf: GgufFile) -> None:
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(gguf.require("tokenizer.ggml.tokens", list[str]))]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        again = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise InvalidModelFile(f"{gguf.path}: tokens {again} and {ids[tokens[again]]} are both {tokens[again][:80]!r}")


def _check_layers(gguf: GgufFile, architecture: str) -> None:
    n_layers = gguf.require(f"{architecture}.block_count", int)
    if not 1 <= n_layers <= _MAX_LAYERS:
        raise _wrong(gguf, f"{architecture}.block_count", n_layers, f"1 to {_MAX_LAYERS}")
    n_predicted = gguf.get(f"{architecture}.nextn_predict_layers", int, 0)
    if not 0 <= n_predicted <= n_layers:
        raise _wrong(gguf, f"{architecture}.nextn_predict_layers", n_predicted, f"0 to {n_layers}")


def _check_experts(gguf: GgufFile, architecture: str) -> None:
    n_experts, n_used, n_groups, n_groups_used = (
        _largest(gguf, f"{architecture}.{key}")
        for key in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")
    )
    if not 0 <= n_experts <= _MAX_EXPERTS:
        raise _wrong(gguf, f"{architecture}.expert_count", n_experts, f"0 to {_MAX_EXPERTS}")
    least = min(n_experts, 1)
    if not least <= n_used <= n_experts:
        raise _wrong(gguf, f"{architecture}.expert_used_count", n_used, f"{least} to {n_experts}")
    if n_groups and (n_groups >= n_experts or n_experts % n_groups):
        raise _wrong(gguf, f"{architecture}.expert_group_count", n_groups, f"a divisor of {n_experts}, and less")
    if n_groups > 1 and not 1 <= n_groups_used < n_groups:
        raise _wrong(gguf, f"{architecture}.expert_group_used_count", n_groups_used, f"1 to {n_groups - 1}")


def _check_numbers(gguf: GgufFile, architecture: str) -> None:
    scaling = gguf.get(f"{architecture}.rope.scaling.type", str, "none")
    if scaling not in _ROPE_SCALINGS:
        raise _wrong(gguf, f"{architecture}.rope.scaling.type", scaling[:80], ", ".join(_ROPE_SCALINGS))
    for name in _EPSILONS:
        epsilon = gguf.get(f"{architecture}.attention.{name}", float, 0.0)
        if not (epsilon >= 0 and math.isfinite(epsilon)):
            raise _wrong(gguf, f"{architecture}.attention.{name}", epsilon, "a finite number from 0 on")


def _check_states(gguf: GgufFile, architecture: str) -> None:
    """What its graphs of models with a state assert, and no tensor's shape gives away first."""
    if architecture == "jamba":
        key, wanted = f"{architecture}.ssm.inner_size", 2 * gguf.require(f"{architecture}.embedding_length", int)
    elif architecture in ("rwkv6", "rwkv7"):
        key, wanted = f"{architecture}.token_shift_count", 2
    else:
        return
    found = gguf.get(key, int, wanted)
    if found != wanted:
        raise _wrong(gguf, key, found, str(wanted))


def _check_heads(gguf: GgufFile, architecture: str) -> None:
    """Every head is rotated whole in most, and the projections have as many rows as the heads."""
    n_heads = gguf.metadata.get(f"{architecture}.attention.head_count")
    if not isinstance(n_heads, int) or n_heads == 0:
        return
    n_kv_heads = gguf.metadata.get(f"{architecture}.attention.head_count_kv", n_heads)
    width = gguf.require(f"{architecture}.embedding_length", int) // n_heads
    head_dim = gguf.get(f"{architecture}.attention.key_length", int, width)
    for key, default in (("attention.value_length", width), ("rope.dimension_count", head_dim)):
        if key.startswith("rope.") and architecture in _ROTATES_A_PART:
            continue
        found = gguf.get(f"{architecture}.{key}", int, default)
        if found != head_dim:
            raise _wrong(gguf, f"{architecture}.{key}", found, f"{head_dim}, the width of a head")
    for name, n in (("attn_q", n_heads), ("attn_k", n_kv_heads), ("attn_v", n_kv_heads)):
        tensor = gguf.tensors.get(f"blk.0.{name}.weight")
        if tensor is not None and isinstance(n, int) and tensor.shape[0] != n * head_dim:
            raise InvalidModelFile(
                f"{gguf.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, but {n} heads of {head_dim} are"
                f" {n * head_dim}"
            )


def _largest(gguf: GgufFile, key: str) -> int:
    """A number, or the largest of one for each layer; 0 where there is none."""
    value = gguf.metadata.get(key, 0)
    return value if isinstance(value, int) else int(max(gguf.require(key, np.ndarray), default=0))


def _wrong(gguf: GgufFile, key: str, value: object, accepted: str) -> UnsupportedModel:
    return UnsupportedModel(f"{gguf.path}: metadata {key!r} is {value!r} (accepted by llama.cpp: {accepted})")
