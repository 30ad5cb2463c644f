"""Preflight checks: llama.cpp checks much of a header with assertions, which end the process.

They cover the loader's assertions for every model, widths of heads, shapes of tensors for architectures that this
package declares, and assertions in the graphs of jamba and RWKV. llama.cpp reports all other errors of a file, as far
as fuzzing has shown (``tests/hostile``).
"""

from __future__ import annotations

import math

import numpy as np

from slm_core.architectures import read_spec
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import OWN, RANK_EOS_TWICE, RANK_POOLING, GgmlType, GgufFile
from slm_core.gguf.cursor import shown
from slm_core.tokenization import has_vocab
from slm_llamacpp.attention_sizes import check_heads, wrong
from slm_llamacpp.positions import check_windows

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")
_NO_MATRIX_TYPES = frozenset((GgmlType.F64, GgmlType.I8, GgmlType.I16, GgmlType.I32, GgmlType.I64))
_EXPERT_TABLE = "tid2eid"  # a table of the experts of each token
_ALIGNMENT = 32  # bytes, of tensors in memory
_DENSE = ("dense_2_feat_in", "dense_3_feat_out")  # of gemma-embedding; both as wide as the model

TOKENS_ALONE = frozenset({"glm4", "glm4moe", "graniteswitch"})
"""Architectures whose graphs end the process for embedding rows (glm4: except files for images)."""


def check_survives(gguf: GgufFile) -> None:
    """Refuse a file that would end the process, or whose metadata llama.cpp cannot read.

    Raises:
        UnsupportedModel: a value is too large for llama.cpp; the message names the key or tensor.
        InvalidModelFile: the file contradicts itself.
    """
    architecture = gguf.require("general.architecture", str)
    for key in gguf.metadata:
        if key.startswith(OWN) and key not in (RANK_POOLING, RANK_EOS_TWICE):  # slm_core.ranking reads these two
            raise UnsupportedModel(f"{gguf.path}: metadata {shown(key)} is not a key of GGUF, and llama.cpp ignores it")
    if has_vocab(gguf):
        _check_tokens(gguf)
    _check_layers(gguf, architecture)
    _check_experts(gguf, architecture)
    _check_numbers(gguf, architecture)
    _check_states(gguf, architecture)
    _check_dense(gguf, architecture)
    check_windows(gguf, architecture)
    check_heads(gguf, architecture)
    _check_shapes(gguf)
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1 and tensor.ggml_type in _NO_MATRIX_TYPES and _EXPERT_TABLE not in tensor.name:
            raise UnsupportedModel(
                f"{gguf.path}: tensor {tensor.name!r} is {tensor.ggml_type.name}:"
                " llama.cpp cannot multiply matrices of this type"
            )
        if len(tensor.shape) == 1 and tensor.ggml_type is not GgmlType.F32:
            raise UnsupportedModel(
                f"{gguf.path}: tensor {tensor.name!r} is {tensor.ggml_type.name}: llama.cpp has vectors in F32"
            )


def _check_tokens(gguf: GgufFile) -> None:
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(gguf.require("tokenizer.ggml.tokens", list[str]))]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        duplicate = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise InvalidModelFile(
            f"{gguf.path}: tokens {duplicate} and {ids[tokens[duplicate]]} are both {tokens[duplicate][:80]!r}"
        )


def _check_layers(gguf: GgufFile, architecture: str) -> None:
    n_layers = gguf.require(f"{architecture}.block_count", int)
    if not 1 <= n_layers <= _MAX_LAYERS:
        raise wrong(gguf, f"{architecture}.block_count", n_layers, f"1 to {_MAX_LAYERS}")
    alignment = gguf.get("general.alignment", int, _ALIGNMENT)
    if alignment % _ALIGNMENT:
        raise wrong(gguf, "general.alignment", alignment, f"multiples of {_ALIGNMENT}")
    n_predicted = gguf.get(f"{architecture}.nextn_predict_layers", int, 0)
    if not 0 <= n_predicted <= n_layers:
        raise wrong(gguf, f"{architecture}.nextn_predict_layers", n_predicted, f"0 to {n_layers}")


_GATINGS = range(4)  # none, softmax, sigmoid, softmax of the chosen experts


def _check_experts(gguf: GgufFile, architecture: str) -> None:
    n_experts, n_used, n_groups, n_groups_used = (
        _largest(gguf, f"{architecture}.{key}")
        for key in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")
    )
    if not 0 <= n_experts <= _MAX_EXPERTS:
        raise wrong(gguf, f"{architecture}.expert_count", n_experts, f"0 to {_MAX_EXPERTS}")
    least = min(n_experts, 1)
    if not least <= n_used <= n_experts:
        raise wrong(gguf, f"{architecture}.expert_used_count", n_used, f"{least} to {n_experts}")
    if n_groups and (n_groups >= n_experts or n_experts % n_groups):
        raise wrong(gguf, f"{architecture}.expert_group_count", n_groups, f"a divisor of {n_experts}, and less")
    if n_groups > 1 and not 1 <= n_groups_used < n_groups:
        raise wrong(gguf, f"{architecture}.expert_group_used_count", n_groups_used, f"1 to {n_groups - 1}")
    gating = gguf.get(f"{architecture}.expert_gating_func", int, 0)
    if gating not in _GATINGS:
        raise wrong(gguf, f"{architecture}.expert_gating_func", gating, "0 to 3")


def _check_numbers(gguf: GgufFile, architecture: str) -> None:
    scaling = gguf.get(f"{architecture}.rope.scaling.type", str, "none")
    if scaling not in _ROPE_SCALINGS:
        raise wrong(gguf, f"{architecture}.rope.scaling.type", scaling[:80], ", ".join(_ROPE_SCALINGS))
    for name in _EPSILONS:
        epsilon = gguf.get(f"{architecture}.attention.{name}", float, 0.0)
        if not (epsilon >= 0 and math.isfinite(epsilon)):
            raise wrong(gguf, f"{architecture}.attention.{name}", epsilon, "a finite number from 0 on")


def _check_states(gguf: GgufFile, architecture: str) -> None:
    """Check the assertions of recurrent models' graphs that no tensor's shape implies."""
    if architecture == "jamba":
        key, expected = f"{architecture}.ssm.inner_size", 2 * gguf.require(f"{architecture}.embedding_length", int)
    elif architecture in ("rwkv6", "rwkv7"):
        key, expected = f"{architecture}.token_shift_count", 2
    else:
        return
    _check_equal(gguf, key, expected)


def _check_dense(gguf: GgufFile, architecture: str) -> None:
    n_embd = gguf.require(f"{architecture}.embedding_length", int)
    for name in _DENSE:
        if gguf.metadata.get(f"{architecture}.{name}", 0) != 0:
            _check_equal(gguf, f"{architecture}.{name}", n_embd)


def _check_equal(gguf: GgufFile, key: str, expected: int) -> None:
    value = gguf.get(key, int, expected)
    if value != expected:
        raise wrong(gguf, key, value, str(expected))


def _check_shapes(gguf: GgufFile) -> None:
    """Compare tensors with the declaration of their architecture, if slm_core has one.

    llama.cpp compares most tensors, too. But it derives some shapes from tensors and others from keys, and asserts a
    match.
    """
    try:
        spec = read_spec(gguf, strict=False)
    except UnsupportedModel:  # llama.cpp may run models that slm_core does not declare
        return
    for name, declared in spec.tensors():
        tensor = gguf.tensors.get(name)
        if tensor is not None and tensor.shape != declared.shape:
            raise InvalidModelFile(f"{gguf.path}: tensor {name!r} has the shape {tensor.shape}, not {declared.shape}")


def _largest(gguf: GgufFile, key: str) -> int:
    """A number, or the largest of a list per layer; 0 if the key is missing."""
    value = gguf.metadata.get(key, 0)
    if isinstance(value, int):
        return value
    values = gguf.require(key, np.ndarray)
    if values.dtype.kind not in "iu":
        raise InvalidModelFile(f"{gguf.path}: metadata {key!r} holds {values.dtype}, not integers")
    return int(max(values, default=0))
