"""Tables of tensors, by name and shape, from which blocks are composed."""

from __future__ import annotations

from slm_core.architectures._keys import Keys
from slm_core.architectures._recurrent import Mamba2Spec, MambaSpec
from slm_core.architectures._sizes import Sizes
from slm_core.architectures._spec import TEXT_TYPES, TensorSpec

Table = dict[str, TensorSpec]


def linear(name: str, shape: tuple[int, ...], *, required: bool = True) -> Table:
    """A matrix. NVFP4 files add a scale of its products, and an unused scale for engines that quantize activations."""
    return {
        f"{name}.weight": TensorSpec(shape, required),
        f"{name}.scale": TensorSpec((1,), required=False),
        f"{name}.input_scale": TensorSpec((1,), required=False, used=False),
    }


def norms(shape: int | tuple[int, ...], *names: str, required: bool = True) -> Table:
    """Norms of one shape."""
    sizes = (shape,) if isinstance(shape, int) else shape
    return {f"{name}.weight": TensorSpec(sizes, required) for name in names}


def biases(table: Table, *names: str, required: bool = True) -> Table:
    """A bias for each named matrix or norm of ``table``; without names, for all of them."""
    weights = {key.removesuffix(".weight"): tensor for key, tensor in table.items() if key.endswith(".weight")}
    return {
        f"{name}.bias": TensorSpec(weights[name].shape[:1], required and weights[name].required)
        for name in names or weights
    }


def attention(sizes: Sizes) -> Table:
    """The matrices of an attention layer."""
    return {
        **linear("attn_q", (sizes.n_q, sizes.n_embd)),
        **linear("attn_k", (sizes.n_kv, sizes.n_embd)),
        **linear("attn_v", (sizes.n_kv, sizes.n_embd)),
        **linear("attn_output", (sizes.n_embd, sizes.n_q)),
    }


def fused_attention(keys: Keys, sizes: Sizes) -> Table:
    """Like ``attention``, with a fused matrix of queries, keys and values (in this order) unless the file has three."""
    if "blk.0.attn_q.weight" in keys.gguf.tensors:
        return attention(sizes)
    return {
        **linear("attn_qkv", (sizes.n_q + 2 * sizes.n_kv, sizes.n_embd)),
        **linear("attn_output", (sizes.n_embd, sizes.n_q)),
    }


def gated(sizes: Sizes) -> Table:
    """The matrices of a feed-forward layer with a gate."""
    return linear("ffn_gate", (sizes.n_ff, sizes.n_embd)) | ungated(sizes)


def ungated(sizes: Sizes) -> Table:
    """The matrices of a feed-forward layer without a gate."""
    return linear("ffn_up", (sizes.n_ff, sizes.n_embd)) | linear("ffn_down", (sizes.n_embd, sizes.n_ff))


def llama_block(sizes: Sizes) -> Table:
    """A block of llama: norms before its two layers, grouped-query attention, a gated feed-forward layer."""
    return norms(sizes.n_embd, "attn_norm", "ffn_norm") | attention(sizes) | gated(sizes)


def embedding_of_texts(keys: Keys, sizes: Sizes) -> Table:
    """Additional tensors of a bert's embedding: a norm, and a row for each token type (row 0: text)."""
    n_types = keys.gguf.get("tokenizer.ggml.token_type_count", int, 1)
    norm = norms(sizes.n_embd, "token_embd_norm")
    return norm | biases(norm) | {TEXT_TYPES: TensorSpec((n_types, sizes.n_embd), required=False)}


def rank_head(keys: Keys, sizes: Sizes) -> Table:
    """The head of a reranker, which scores pairs of texts. No forward pass reads it: see ``slm_core.ranking``."""
    keys.neutral("classifier.output_labels")
    labels = keys.gguf.get(f"{keys.architecture}.classifier.output_labels", list[str], [])
    n, n_embd = max(1, len(labels)), sizes.n_embd
    shapes = {
        "cls.weight": (n_embd, n_embd),
        "cls.bias": (n_embd,),
        "cls.norm.weight": (n_embd,),
        "cls.output.weight": (n, n_embd),
        "cls.output.bias": (n,),
    }
    return {name: TensorSpec(shape, required=False, used=False) for name, shape in shapes.items()}


def experts(sizes: Sizes, n_experts: int, n_ff: int) -> Table:
    """A router, and the matrices of all experts of a layer."""
    return {
        **linear("ffn_gate_inp", (n_experts, sizes.n_embd)),
        "ffn_gate_exps.weight": TensorSpec((n_experts, n_ff, sizes.n_embd)),
        "ffn_up_exps.weight": TensorSpec((n_experts, n_ff, sizes.n_embd)),
        "ffn_down_exps.weight": TensorSpec((n_experts, sizes.n_embd, n_ff)),
    }


def fused_experts(sizes: Sizes, n_experts: int, n_ff: int) -> Table:
    """Like ``experts``, with gate and up matrices in one tensor, and an optional scale for each expert's output."""
    return {
        "ffn_gate_inp.weight": TensorSpec((n_experts, sizes.n_embd)),
        "ffn_gate_up_exps.weight": TensorSpec((n_experts, 2 * n_ff, sizes.n_embd)),
        "ffn_down_exps.weight": TensorSpec((n_experts, sizes.n_embd, n_ff)),
        "ffn_down_exps.scale": TensorSpec((n_experts,), required=False),
    }


def shared_expert(sizes: Sizes, n_ff: int) -> Table:
    """The matrices of an expert that every token uses."""
    return {
        **linear("ffn_gate_shexp", (n_ff, sizes.n_embd)),
        **linear("ffn_up_shexp", (n_ff, sizes.n_embd)),
        **linear("ffn_down_shexp", (sizes.n_embd, n_ff)),
    }


def mamba(sizes: Sizes, spec: MambaSpec) -> Table:
    """The tensors of a selective state space layer."""
    steps = linear("ssm_dt", (spec.n_inner, spec.n_rank))
    return {
        **linear("ssm_in", (2 * spec.n_inner, sizes.n_embd)),
        "ssm_conv1d.weight": TensorSpec((spec.n_inner, spec.n_taps)),
        "ssm_conv1d.bias": TensorSpec((spec.n_inner,)),
        **linear("ssm_x", (spec.n_rank + 2 * spec.n_state, spec.n_inner)),
        **(steps | biases(steps)),
        "ssm_a": TensorSpec((spec.n_inner, spec.n_state)),
        "ssm_d": TensorSpec((spec.n_inner,)),
        **linear("ssm_out", (sizes.n_embd, spec.n_inner)),
    }


def mamba2(sizes: Sizes, spec: Mamba2Spec) -> Table:
    """The tensors of a selective state space layer with heads."""
    return {
        **linear("ssm_in", (spec.n_inner + spec.n_convolved + spec.n_heads, sizes.n_embd)),
        "ssm_conv1d.weight": TensorSpec((spec.n_convolved, spec.n_taps)),
        "ssm_conv1d.bias": TensorSpec((spec.n_convolved,)),
        "ssm_dt.bias": TensorSpec((spec.n_heads,)),
        "ssm_a": TensorSpec((spec.n_heads, 1)),
        "ssm_d": TensorSpec((spec.n_heads, 1)),
        **norms((spec.n_groups, spec.n_inner // spec.n_groups), "ssm_norm"),
        **linear("ssm_out", (sizes.n_embd, spec.n_inner)),
    }
