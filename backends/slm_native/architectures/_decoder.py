"""What decoder-only architectures have in common, for their files to build on."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_native.kernels import RopeStyle
from slm_native.keys import Keys
from slm_native.spec import ModelSpec, RopeSpec, TensorSpec, YarnSpec

EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dimensions of a decoder; letters as in ``ModelSpec``."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """The matrices of a block and their shapes."""
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "attn_q": (n_q, self.n_embd),
            "attn_k": (n_kv, self.n_embd),
            "attn_v": (n_kv, self.n_embd),
            "attn_output": (self.n_embd, n_q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }


def read_sizes(keys: Keys) -> Sizes:
    """Read the dimensions. As GGUF defines it, K is H and D is E / H where the file does not say."""
    n_embd, n_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    n_kv_heads = keys.size("attention.head_count_kv", n_heads)
    head_dim = _head_dim(keys, n_embd, n_heads)
    if n_heads % n_kv_heads:
        raise InvalidModelFile(
            f"{keys.gguf.path}: {n_heads} query heads cannot share {n_kv_heads} key heads evenly"
            f" (metadata '{keys.architecture}.attention.head_count' and 'head_count_kv')"
        )
    return Sizes(
        n_layers=keys.size("block_count"),
        n_embd=n_embd,
        n_ff=keys.size("feed_forward_length"),
        n_vocab=_n_vocab(keys),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
    )


def read_rope(keys: Keys, head_dim: int, style: RopeStyle, default_freq_base: float | None = None) -> RopeSpec:
    """Read the position embedding: frequencies, linear scaling or YaRN."""
    n_dims = keys.size("rope.dimension_count", head_dim)
    if n_dims != head_dim or n_dims % 2:
        raise UnsupportedModel(
            f"{keys.gguf.path}: {n_dims} of a head's {head_dim} values are rotated"
            f" (metadata '{keys.architecture}.rope.dimension_count'; accepted: all, an even number)"
        )
    freq_base = keys.number("rope.freq_base", default_freq_base)
    if freq_base <= 1:
        raise InvalidModelFile(
            f"{keys.gguf.path}: metadata '{keys.architecture}.rope.freq_base' is {freq_base} (accepted: above 1)"
        )
    kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn"), "linear")
    # 0 stands for no scaling, as in llama.cpp; "scale_linear" is the key's name in old files.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0, zero=True), zero=True) or 1.0
    magnitude = keys.number("rope.scaling.attn_factor", 1.0)
    yarn = _read_yarn(keys) if kind == "yarn" else None
    keys.neutral("rope.scaling.original_context_length", "rope.scaling.finetuned")
    if yarn is not None:
        magnitude *= 1 + 0.1 * math.log(max(factor, 1.0))
    return RopeSpec(style, n_dims, freq_base, 1.0 if kind == "none" else factor, yarn, magnitude)


def decoder_spec(
    keys: Keys,
    sizes: Sizes,
    rope: RopeSpec,
    *,
    biases: Collection[str] = (),
    optional_biases: Collection[str] = (),
    query_key_norms: bool = False,
    rope_factors: bool = False,
) -> ModelSpec:
    """Declare a decoder; the output matrix is the embedding where the file has none.

    Args:
        keys: read further: the norms' epsilon, and what must not be there.
        sizes: the dimensions.
        rope: the position embedding.
        biases: matrices of a block that have a bias.
        optional_biases: those that may have one.
        query_key_norms: queries and keys are normalized, head by head, before they are rotated.
        rope_factors: the file may hold a divisor for each RoPE frequency (llama 3).
    """
    _refuse_what_would_matter(keys)
    return ModelSpec(
        architecture=keys.architecture,
        n_layers=sizes.n_layers,
        n_embd=sizes.n_embd,
        n_vocab=sizes.n_vocab,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", zero=True),
        rope=rope,
        model_tensors=_model_tensors(sizes, rope.n_dims if rope_factors else 0),
        block_tensors=_block_tensors(sizes, biases, optional_biases, query_key_norms),
    )


def _refuse_what_would_matter(keys: Keys) -> None:
    keys.neutral("context_length", "vocab_size", "pooling_type", "attention.layer_norm_epsilon")
    keys.only("attention.causal", True)
    keys.only("use_parallel_residual", False)
    for name in ("expert_count", "expert_used_count", "attention.sliding_window", "nextn_predict_layers"):
        keys.only(name, 0)


def _model_tensors(sizes: Sizes, n_dims_with_factors: int) -> dict[str, TensorSpec]:
    tensors = {EMBEDDING: TensorSpec((sizes.n_vocab, sizes.n_embd)), "output_norm.weight": TensorSpec((sizes.n_embd,))}
    if n_dims_with_factors:
        tensors["rope_freqs.weight"] = TensorSpec((n_dims_with_factors // 2,), required=False)
    return tensors | _linear("output", (sizes.n_vocab, sizes.n_embd), required=False)


def _block_tensors(
    sizes: Sizes, biases: Collection[str], optional_biases: Collection[str], query_key_norms: bool
) -> dict[str, TensorSpec]:
    tensors = {name: TensorSpec((sizes.n_embd,)) for name in ("attn_norm.weight", "ffn_norm.weight")}
    for name, shape in sizes.linears().items():
        tensors |= _linear(name, shape)
        if name in biases or name in optional_biases:
            tensors[f"{name}.bias"] = TensorSpec(shape[:1], required=name in biases)
    if query_key_norms:
        tensors |= {name: TensorSpec((sizes.head_dim,)) for name in ("attn_q_norm.weight", "attn_k_norm.weight")}
    return tensors


def _linear(name: str, shape: tuple[int, int], *, required: bool = True) -> dict[str, TensorSpec]:
    """A matrix; NVFP4 files scale its product by a number, and hold another for engines that pack activations."""
    return {
        f"{name}.weight": TensorSpec(shape, required),
        f"{name}.scale": TensorSpec((1,), required=False),
        f"{name}.input_scale": TensorSpec((1,), required=False, used=False),
    }


def _head_dim(keys: Keys, n_embd: int, n_heads: int) -> int:
    default = n_embd // n_heads or 1
    head_dim = keys.size("attention.key_length", default)
    value_dim = keys.size("attention.value_length", default)
    if value_dim != head_dim:
        raise UnsupportedModel(
            f"{keys.gguf.path}: metadata '{keys.architecture}.attention.value_length' is {value_dim}, which the native"
            f" engine does not do (accepted: the key_length, {head_dim})"
        )
    return head_dim


def _n_vocab(keys: Keys) -> int:
    if EMBEDDING not in keys.gguf.tensors:
        what = "it holds no weights, only a vocabulary" if not keys.gguf.tensors else f"tensor {EMBEDDING!r} is missing"
        raise UnsupportedModel(f"{keys.gguf.path}: {what}")
    return keys.gguf.tensors[EMBEDDING].shape[0]


def _read_yarn(keys: Keys) -> YarnSpec:
    keys.number("rope.scaling.factor")  # without it, YaRN says nothing
    return YarnSpec(
        n_ctx_original=keys.size("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),  # the paper's values for llama, and llama.cpp's
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )
