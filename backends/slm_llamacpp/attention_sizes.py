"""Checks sizes of attention heads before llama.cpp asserts them: it builds views and products of these sizes.

The lists of architectures follow llama.cpp's ``src/models``, which has most of these assertions, and
``llama_model_rope_type``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile

_WHOLE_HEAD_NAMES = """
apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 ernie4_5 ernie4_5-moe
exaone exaone-moe exaone4 falcon granite granite_swa graniteswitch grok grovemoe hunyuan-moe hunyuan_vl hy_v3
internlm2 jais2 llama llama4 maincoder mellum minimax-01 minimax-m2 mistral3 nemotron olmo olmo2 olmoe orion paddleocr
pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe seed_oss smallthinker smollm3 starcoder2
talkie xverse
"""
_ROTATES_WHOLE_HEADS = frozenset(_WHOLE_HEAD_NAMES.split()) - {"nemotron"}
_EQUAL_WIDTH_NAMES = """
afmoe bailingmoe2 bert bitnet bloom chatglm cohere2 command-r falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n
gemma4 glm4 glm4moe gpt-oss gpt2 gptneox granitehybrid granitemoe hunyuan-dense jais jamba laguna lfm2 lfm2moe minicpm
minimax-m3 modern-bert mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe nomic-bert openelm phi2 phi3 phimoe
plamo2 plamo3 qwen qwen35 qwen35moe qwen3next qwen4exp refact spark2_5 stablelm starcoder
"""
_EQUAL_WIDTHS = _ROTATES_WHOLE_HEADS | frozenset(_EQUAL_WIDTH_NAMES.split())
_NO_ROTATION_NAMES = """
arwkv7 bert bloom glm5-next gpt2 jais jamba kimi-k3 kimi-linear mamba mamba2 mpt nemotron_h nemotron_h_moe refact rwkv6
rwkv6qwen2 rwkv7
"""
_NO_ROTATION = frozenset(_NO_ROTATION_NAMES.split())


class _Heads(NamedTuple):
    """Sizes as llama.cpp reads them: widths of a head's key and value, and the rotated width of a key."""

    n_heads: int
    key: int
    value: int
    rotated: int


def check_heads(gguf: GgufFile, architecture: str) -> None:
    """Refuse sizes of heads that contradict one another or the tensors.

    Raises:
        UnsupportedModel: a value for which llama.cpp ends the process; the message names the key.
        InvalidModelFile: the rows of a projection do not match its heads.
    """
    heads = _read(gguf, architecture)
    if heads is None:
        return
    suffixes = ("", "_swa") if any(key.endswith("_swa") for key in gguf.metadata) else ("",)
    for suffix in suffixes:
        key = gguf.get(f"{architecture}.attention.key_length{suffix}", int, heads.key)
        value = gguf.get(f"{architecture}.attention.value_length{suffix}", int, heads.value)
        rotated = gguf.get(f"{architecture}.rope.dimension_count{suffix}", int, heads.rotated)
        _check_widths(gguf, architecture, heads._replace(key=key, value=value, rotated=rotated), suffix)
    if architecture in _ROTATES_WHOLE_HEADS | {"nemotron"}:
        _check_rows(gguf, architecture, heads)
    if architecture == "deepseek2":
        _check_latent(gguf, architecture, heads)


def _check_latent(gguf: GgufFile, architecture: str, heads: _Heads) -> None:
    """Check the sizes of latent attention (MLA): a cached value is the latent, a key has the rotated part, too."""
    rank = gguf.require(f"{architecture}.attention.kv_lora_rank", int)
    absorbed = gguf.get(f"{architecture}.attention.key_length_mla", int, 0)
    key = absorbed or heads.key
    if not heads.rotated < key:
        raise wrong(
            gguf, f"{architecture}.rope.dimension_count", heads.rotated, f"less than {key}, the width of a head"
        )
    if not absorbed:
        return
    for name, value, accepted in (
        ("head_count_kv", gguf.metadata.get(f"{architecture}.attention.head_count_kv"), 1),
        ("key_length", heads.key, rank + heads.rotated),
        ("value_length", heads.value, rank),
    ):
        if not np.all(np.asarray(value) == accepted):  # one number for each layer is allowed
            raise wrong(gguf, f"{architecture}.attention.{name}", value, str(accepted))


def _read(gguf: GgufFile, architecture: str) -> _Heads | None:
    n_heads = gguf.metadata.get(f"{architecture}.attention.head_count")
    if isinstance(n_heads, np.ndarray) and n_heads.dtype.kind in "iu" and len(n_heads):
        n_heads = int(n_heads[0])
    if not isinstance(n_heads, int) or n_heads == 0:
        return None
    width = gguf.require(f"{architecture}.embedding_length", int) // n_heads
    key = gguf.get(f"{architecture}.attention.key_length", int, width)
    value = gguf.get(f"{architecture}.attention.value_length", int, width)
    return _Heads(n_heads, key, value, gguf.get(f"{architecture}.rope.dimension_count", int, key))


def _check_widths(gguf: GgufFile, architecture: str, heads: _Heads, suffix: str) -> None:
    if heads.key < 1:
        raise wrong(gguf, f"{architecture}.attention.key_length{suffix}", heads.key, "a width from 1 on")
    if heads.value != heads.key if architecture in _EQUAL_WIDTHS else heads.value < 1:
        accepted = f"{heads.key}, the width of a head" if architecture in _EQUAL_WIDTHS else "a width from 1 on"
        raise wrong(gguf, f"{architecture}.attention.value_length{suffix}", heads.value, accepted)
    if architecture in _ROTATES_WHOLE_HEADS and heads.rotated != heads.key:
        accepted = f"{heads.key}, the width of a head"
        raise wrong(gguf, f"{architecture}.rope.dimension_count{suffix}", heads.rotated, accepted)
    is_even_part = 2 <= heads.rotated <= heads.key and heads.rotated % 2 == 0
    if architecture not in _NO_ROTATION and not is_even_part:
        accepted = f"an even number from 2 to {heads.key}, the width of a head"
        raise wrong(gguf, f"{architecture}.rope.dimension_count{suffix}", heads.rotated, accepted)


def _check_rows(gguf: GgufFile, architecture: str, heads: _Heads) -> None:
    n_kv_heads = gguf.metadata.get(f"{architecture}.attention.head_count_kv", heads.n_heads)
    for name, n in (("attn_q", heads.n_heads), ("attn_k", n_kv_heads), ("attn_v", n_kv_heads)):
        tensor = gguf.tensors.get(f"blk.0.{name}.weight")
        if tensor is not None and isinstance(n, int) and tensor.shape[0] != n * heads.key:
            raise InvalidModelFile(
                f"{gguf.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, but {n} heads of {heads.key} are"
                f" {n * heads.key}"
            )


def wrong(gguf: GgufFile, key: str, value: object, accepted: str) -> UnsupportedModel:
    """An error about a key whose value would end the process."""
    shown = " ".join(repr(value).split())[:80]  # an array has several lines
    return UnsupportedModel(f"{gguf.path}: metadata {key!r} is {shown} (accepted by llama.cpp: {accepted})")
