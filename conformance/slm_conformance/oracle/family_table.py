"""The metadata in the files of tiny models, one entry per architecture or variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slm_conformance.oracle.gguf_writer import Value

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
N_CTX = 512
"""The context length in the metadata of the tiny models."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model file.

    Attributes:
        architecture: its name in files.
        metadata: keys that begin with this name, without it.
        optional: optional tensors of the architecture that this file has: full names, or names after "blk.N.".
        tied: whether the output matrix is the token embeddings.
        plain: keys that do not begin with the name of the architecture.
        quiet: norms that are a quarter as large as in other families, so that many layers do not amplify rounding
            errors a hundredfold.
    """

    architecture: str
    metadata: Mapping[str, Value]
    optional: tuple[str, ...] = ()
    tied: bool = False
    plain: Mapping[str, Value] = field(default_factory=dict)
    quiet: tuple[str, ...] = ()


def _sizes(
    norm: str = RMS,
    *,
    layers: int = 3,
    embd: int = 288,
    ff: int = 160,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 16,
) -> dict[str, Value]:
    return {
        "block_count": layers,
        "context_length": N_CTX,
        "embedding_length": embd,
        "feed_forward_length": ff,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        norm: 1e-5,
        "rope.dimension_count": dim,
        "rope.freq_base": 1e4,
    }


def _scaled(kind: str, factor: float, **further: Value) -> dict[str, Value]:
    keys = {"type": kind, "factor": factor, **further}
    return {f"rope.scaling.{key}": value for key, value in keys.items()}


def _without_rope(sizes: dict[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in sizes.items() if not key.startswith("rope.")}


def _gemma4(slides: list[bool]) -> dict[str, Value]:
    return _sizes(layers=len(slides), embd=144, dim=24) | {
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count_swa": 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "attention.sliding_window": 48,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,  # the default of llama.cpp
    }


_QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_LONG = ("rope_factors_long.weight", "rope_factors_short.weight")
_GEMMA2: dict[str, Value] = {
    "attention.sliding_window": 48,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}
_EXPERTS: dict[str, Value] = {"expert_count": 7, "expert_used_count": 3}
_MROPE: dict[str, Value] = {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 0}
_GRANITE: dict[str, Value] = {
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_scale": 2.0,
    "attention.scale": 0.3,
}
_LATENT: dict[str, Value] = _EXPERTS | {
    "attention.head_count_kv": 1,
    "attention.key_length": 64 + 16,
    "attention.value_length": 64,
    "attention.key_length_mla": 24 + 16,
    "attention.value_length_mla": 32,
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 2,
}
_MTP: dict[str, Value] = {
    "attention.q_lora_rank": 96,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "nextn_predict_layers": 1,
}
_GLM_EXPERTS: dict[str, Value] = _EXPERTS | {
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_MAMBA: dict[str, Value] = {
    "block_count": 3,
    "context_length": N_CTX,
    "embedding_length": 144,
    "feed_forward_length": 0,
    "attention.head_count": 0,
    RMS: 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 288,  # llama.cpp accepts twice the width of the embeddings only
    "ssm.state_size": 12,
    "ssm.time_step_rank": 10,
}
_MAMBA2: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 288,
    "ssm.state_size": 16,  # llama.cpp's scan needs a whole number of registers
    "ssm.time_step_rank": 18,  # heads
    "ssm.group_count": 3,
}
_WITHOUT_POSITIONS: dict[str, Value] = {"rope.scaling.finetuned": False}
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _sizes()),
    "llama_tied": Family("llama", _sizes(), tied=True),
    "llama_biases": Family("llama", _sizes(), tuple(f"attn_{name}.bias" for name in ("q", "k", "v", "output"))),
    "llama_linear": Family("llama", _sizes() | _scaled("linear", 4.0)),
    "llama3": Family("llama", _sizes(), ("rope_freqs.weight",)),
    "llama_yarn": Family("llama", _sizes() | _scaled("yarn", 4.0, original_context_length=64)),
    "mistral": Family("llama", _sizes()),
    "qwen2": Family("qwen2", _sizes(embd=144)),
    "qwen3": Family("qwen3", _sizes()),
    "smollm3": Family("smollm3", _sizes(layers=5), tied=True),
    "granite": Family("granite", _sizes() | _GRANITE),
    "olmo2": Family("olmo2", _sizes(embd=144)),
    "olmo3": Family(
        "olmo2",
        _sizes(embd=144, layers=5)
        | {"attention.sliding_window": 48}
        | _scaled("yarn", 4.0, original_context_length=64),
    ),
    "stablelm": Family("stablelm", _sizes(LAYER, embd=144) | {"rope.dimension_count": 4}, ("ffn_norm.weight",)),
    "stablelm2": Family(
        "stablelm",
        _sizes(LAYER, embd=144) | {"rope.dimension_count": 4, "use_parallel_residual": True},
        ("attn_q_norm.weight", "attn_k_norm.weight"),
    ),
    "internlm2": Family("internlm2", _sizes(embd=144)),
    "minicpm": Family(
        "minicpm", _sizes(embd=144) | {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 0.7}
    ),
    "exaone4": Family("exaone4", _sizes(embd=144)),
    # llama.cpp recognizes the hybrid by its 64 layers.
    "exaone4_hybrid": Family(
        "exaone4", _sizes(layers=64, embd=48, ff=80, heads=3, kv_heads=1) | {"attention.sliding_window": 48}
    ),
    "ernie4_5": Family("ernie4_5", _sizes(), tied=True),
    "seed_oss": Family("seed_oss", _sizes(), _QKV_BIASES),
    "mistral3": Family(
        "mistral3",
        _sizes()
        | _scaled("yarn", 4.0, original_context_length=64, yarn_log_multiplier=1.0)
        | {"attention.temperature_scale": 0.3},
    ),
    "apertus": Family(
        "apertus",
        _sizes(ff=224),
        ("rope_freqs.weight",),
        plain={
            "xielu.alpha_n": [0.4, 0.9, -0.6],
            "xielu.alpha_p": [0.7, 0.5, -1.1],
            "xielu.beta": [0.5, 0.4, 0.6],
            "xielu.eps": [-1e-6, -1e-6, -1e-6],
        },
    ),
    "arcee": Family("arcee", _sizes()),
    "gemma": Family("gemma", _sizes(), tied=True),
    "gemma2": Family("gemma2", _sizes(layers=3) | _GEMMA2, tied=True),
    "gemma3": Family(
        "gemma3",
        _sizes(layers=7) | {"attention.sliding_window": 48, "rope.freq_base": 1e6} | _scaled("linear", 8.0),
        tied=True,
    ),
    "phi2": Family("phi2", _sizes(LAYER, embd=144) | {"rope.dimension_count": 6}, ("attn_q.weight",)),
    "phi3": Family("phi3", _sizes(embd=144)),
    "phi3_window": Family("phi3", _sizes(embd=144) | {"attention.sliding_window": 48}),
    "phi3_long": Family(  # more positions than the original context: the long table applies
        "phi3",
        _sizes(embd=144) | {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.5**0.5},
        _LONG,
    ),
    "phi3_short": Family(
        "phi3",
        _sizes(embd=144) | {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.125**0.5},
        _LONG,
    ),
    "gpt2": Family("gpt2", _without_rope(_sizes(LAYER, embd=144, kv_heads=9)), tied=True),
    "gptneox": Family(
        "gptneox",
        _sizes(LAYER, embd=144, kv_heads=9) | {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "gptneox_serial": Family(
        "gptneox",
        _sizes(LAYER, embd=144, kv_heads=9) | {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "starcoder2": Family("starcoder2", _sizes(LAYER, embd=144), tied=True),
    "falcon": Family("falcon", _sizes(LAYER, embd=144, kv_heads=1), tied=True),
    "falcon_two_norms": Family("falcon", _sizes(LAYER, embd=144), ("attn_norm_2.weight",), tied=True),
    "bloom": Family("bloom", _without_rope(_sizes(LAYER, embd=144, ff=576, kv_heads=9)), tied=True),
    "mpt": Family(
        "mpt",
        _without_rope(_sizes(LAYER, embd=144, ff=576, kv_heads=9))
        | {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.5},
        tied=True,
    ),
    "command_r": Family("command-r", _sizes(LAYER, embd=144) | {"logit_scale": 0.25}, tied=True),
    # llama.cpp recognizes it by its 64 layers.
    "command_r_plus": Family(
        "command-r",
        _sizes(LAYER, layers=64, embd=48, ff=80, heads=3, kv_heads=1) | {"logit_scale": 0.25},
        ("attn_q_norm.weight", "attn_k_norm.weight"),
        tied=True,
    ),
    "cohere2": Family(
        "cohere2", _sizes(LAYER, embd=144, layers=5) | {"logit_scale": 0.25, "attention.sliding_window": 48}, tied=True
    ),
    "mixtral": Family("llama", _sizes() | _EXPERTS),
    "qwen2moe": Family(
        "qwen2moe",
        _sizes(embd=144) | _EXPERTS | {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 224},
    ),
    "qwen3moe": Family("qwen3moe", _sizes() | _EXPERTS | {"expert_feed_forward_length": 64}),
    "olmoe": Family("olmoe", _sizes(embd=144, kv_heads=9) | _EXPERTS),
    "granitemoe": Family("granitemoe", _sizes() | _EXPERTS | _GRANITE),
    "granitemoe_shared": Family(
        "granitemoe", _sizes() | _EXPERTS | _GRANITE | {"expert_shared_feed_forward_length": 224}
    ),
    "gpt_oss": Family(
        "gpt-oss",
        _sizes(layers=4)
        | _EXPERTS
        | _scaled("yarn", 4.0, original_context_length=64)
        | {"expert_feed_forward_length": 160, "attention.sliding_window": 48},
    ),
    "dbrx": Family("dbrx", _sizes(LAYER, embd=144) | _EXPERTS | {"attention.clamp_kqv": 1.5}),
    # llama.cpp recognizes the lite models, which do not compress queries, by their 27 layers.
    "deepseek2_lite": Family(
        "deepseek2",
        _sizes(layers=27, embd=96, ff=80, heads=3) | _LATENT | {"expert_weights_scale": 1.0},
    ),
    "deepseek2": Family(
        "deepseek2",
        _sizes()
        | _LATENT
        | {"attention.q_lora_rank": 96, "expert_weights_scale": 2.5}
        | _scaled("yarn", 4.0, original_context_length=64, yarn_log_multiplier=0.0707),
    ),
    "deepseek3": Family(
        "deepseek2",
        _sizes()
        | _LATENT
        | {
            "attention.q_lora_rank": 96,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        ("exp_probs_b.bias",),
    ),
    "deepseek3_groups": Family(
        "deepseek2",
        _sizes()
        | _LATENT
        | {
            "attention.q_lora_rank": 96,
            "expert_count": 8,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        ("exp_probs_b.bias",),
    ),
    "deepseek3_mtp": Family(
        "deepseek2",
        _sizes(layers=4) | _LATENT | _MTP,
        ("exp_probs_b.bias", "blk.3.nextn.eh_proj.weight", "nextn.shared_head_norm.weight"),
    ),
    "glm4moe": Family(
        "glm4moe",
        _sizes() | _GLM_EXPERTS,
        ("exp_probs_b.bias", "attn_q_norm.weight", "attn_k_norm.weight", *_QKV_BIASES),
    ),
    "glm4moe_mtp": Family(
        "glm4moe",
        _sizes(layers=4) | _GLM_EXPERTS | {"nextn_predict_layers": 1},
        ("exp_probs_b.bias", "blk.3.nextn.eh_proj.weight", "nextn.shared_head_norm.weight", *_QKV_BIASES),
    ),
    "glm4": Family("glm4", _sizes() | {"rope.dimension_count": 8}, _QKV_BIASES),
    "nemotron": Family("nemotron", _sizes(LAYER, embd=144) | {"rope.dimension_count": 8}),
    "exaone": Family("exaone", _sizes(embd=144), ("rope_freqs.weight",)),
    "minicpm_long": Family(
        "minicpm",
        _sizes(embd=144)
        | {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 0.7}
        | {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64},
        _LONG,
    ),
    # Constants of llama.cpp, which files do not contain: 20 layers with own keys, 10 with sparse gates, these widths.
    "gemma3n": Family(
        "gemma3n",
        _sizes(layers=25, embd=96, heads=3, kv_heads=1)
        | {
            "attention.sliding_window": 48,
            "attention.sliding_window_pattern": [i % 5 < 4 for i in range(25)],
            "attention.shared_kv_layers": 5,
            "altup.num_inputs": 4,
            "altup.active_idx": 0,
            "embedding_length_per_layer_input": 256,
            "activation_sparsity_scale": [1.6448536] * 10 + [float("-inf")] * 15,
            "final_logit_softcapping": 30.0,
            "rope.freq_base": 1e6,
        },
        ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
        tied=True,
        quiet=("attn_q_norm", "post_attention_norm", "post_ffw_norm", "post_norm"),
    ),
    "gemma4": Family(
        "gemma4",
        _gemma4([True, True, False, True, False, True, False])
        | {
            "feed_forward_length": [160] * 5 + [320] * 2,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 40,
        },
        ("blk.2.attn_v.weight", "blk.4.attn_v.weight", "layer_output_scale.weight"),
        tied=True,
        quiet=("attn_q_norm", "post_norm"),
    ),
    "gemma4_dense": Family(
        "gemma4",
        _gemma4([True, False, True, True, False]) | {"attention.head_count_kv": [3, 1, 3, 3, 1]},
        ("layer_output_scale.weight",),
        tied=True,
        quiet=("attn_q_norm",),
    ),
    "gemma4_experts": Family(
        "gemma4",
        _gemma4([True, True, False]) | _EXPERTS | {"expert_feed_forward_length": 64},
        ("attn_v.weight", "layer_output_scale.weight", "ffn_down_exps.scale"),
        tied=True,
        quiet=("attn_q_norm",),
    ),
    "phimoe": Family(
        "phimoe",
        _sizes(embd=144) | {"expert_count": 7, "expert_used_count": 2},
    ),
    "llama4": Family(
        "llama4",
        _sizes(layers=5)
        | {
            "expert_count": 7,
            "expert_used_count": 1,
            "expert_feed_forward_length": 64,
            "interleave_moe_layer_step": 2,
        },
        ("rope_freqs.weight",),
    ),
    "refact": Family("refact", _without_rope(_sizes(embd=144, kv_heads=1))),
    # llama.cpp ignores the epsilon in files of qwen2vl.
    "qwen2vl": Family("qwen2vl", _sizes(embd=144) | {RMS: 0.0, "rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen3vl": Family("qwen3vl", _sizes() | _MROPE),
    "qwen3vlmoe": Family("qwen3vlmoe", _sizes() | _MROPE | _EXPERTS | {"expert_feed_forward_length": 64}),
    "mamba": Family("mamba", _MAMBA, tied=True),
    "falcon_mamba": Family("mamba", _MAMBA | {"ssm.dt_b_c_rms": True}),
    "mamba2": Family("mamba2", _MAMBA | _MAMBA2),
    "granitehybrid": Family(
        "granitehybrid",
        _sizes(layers=5, embd=144)
        | _GRANITE
        | _MAMBA2
        | _WITHOUT_POSITIONS
        | {"attention.head_count_kv": [0, 3, 0, 0, 3], "expert_count": 0, "expert_shared_feed_forward_length": 160},
    ),
    "granitehybrid_experts": Family(
        "granitehybrid",
        _sizes(layers=3, embd=144)
        | _GRANITE
        | _EXPERTS
        | _MAMBA2
        | _WITHOUT_POSITIONS
        | {"attention.head_count_kv": [0, 3, 0], "expert_shared_feed_forward_length": 224},
    ),
    "falcon_h1": Family("falcon-h1", _sizes(embd=144) | _MAMBA2, ("ssm_norm.weight", "ssm_conv1d.bias")),
    "falcon_h1_plain": Family("falcon-h1", _sizes(embd=144) | _MAMBA2, ("ssm_conv1d.bias",), tied=True),
    "jamba": Family(
        "jamba",
        _without_rope(_sizes(layers=4, embd=144))
        | _EXPERTS
        | {key: value for key, value in _MAMBA.items() if key.startswith("ssm.")}
        | {"attention.head_count_kv": [0, 0, 3, 0]},
        ("blk.1.ffn_gate_inp.weight", "blk.3.ffn_gate_inp.weight"),
    ),
    "rwkv7": Family(
        "rwkv7",
        {
            "block_count": 3,
            "context_length": N_CTX,
            "embedding_length": 192,  # llama.cpp's kernel requires heads of 64
            "feed_forward_length": 160,
            "attention.head_count": 0,
            LAYER: 1e-5,
            "wkv.head_size": 64,
            "attention.decay_lora_rank": 32,
            "attention.iclr_lora_rank": 24,
            "attention.value_residual_mix_lora_rank": 16,
            "attention.gate_lora_rank": 40,
        },
        tuple(f"time_mix_v{i}.weight" for i in range(3)),
    ),
    "lfm2": Family(
        "lfm2",
        _sizes(layers=5, embd=144) | {"attention.head_count_kv": [0, 3, 0, 0, 3], "shortconv.l_cache": 3},
        tied=True,
    ),
}
"""By name: most architectures once, some in several variants."""


_TYPES: dict[str, Value] = {"tokenizer.ggml.token_type_count": 2}
ENCODERS: dict[str, Family] = {
    "bert": Family(
        "bert",
        _without_rope(_sizes(LAYER, embd=144, kv_heads=9)) | {"attention.causal": False, "pooling_type": 2},
        ("token_types.weight",),
        plain=_TYPES,
    ),
    "nomic_bert": Family(
        "nomic-bert",
        _sizes(LAYER, embd=144, kv_heads=9) | {"attention.causal": False, "pooling_type": 1, "rope.freq_base": 1e3},
        ("token_types.weight",),
        plain=_TYPES,
    ),
    "modern_bert": Family(
        "modern-bert",
        _sizes(LAYER, layers=5, embd=144, kv_heads=9)
        | {"attention.causal": False, "attention.sliding_window": 48, "rope.freq_base": 1.6e5},
    ),
    "gemma_embedding": Family(
        "gemma-embedding",
        _sizes(layers=7)
        | {"attention.sliding_window": 48, "rope.freq_base": 1e6, "pooling_type": 1}
        | {"dense_2_feat_in": 288, "dense_2_feat_out": 352, "dense_3_feat_in": 352, "dense_3_feat_out": 288},
        ("dense_2.weight", "dense_3.weight"),
        tied=True,
    ),
}
"""The same, for encoders: models without logits."""
SMALL: dict[str, Family] = {
    "small_lfm2": Family(
        "lfm2",
        _sizes(layers=3, embd=96, ff=80, heads=3, kv_heads=1, dim=32)
        | {"attention.head_count_kv": [0, 1, 0], "shortconv.l_cache": 3},
        tied=True,
    ),
    "small_mamba2": Family(
        "mamba2",
        _MAMBA
        | _MAMBA2
        | {"block_count": 2, "embedding_length": 48, "ssm.inner_size": 96, "ssm.state_size": 8}
        | {"ssm.time_step_rank": 6},
    ),
    "small_rwkv7": Family(
        "rwkv7",
        {
            "block_count": 3,
            "context_length": N_CTX,
            "embedding_length": 128,  # llama.cpp's kernel requires heads of 64
            "feed_forward_length": 80,
            "attention.head_count": 0,
            LAYER: 1e-5,
            "wkv.head_size": 64,
            "attention.decay_lora_rank": 10,
            "attention.iclr_lora_rank": 8,
            "attention.value_residual_mix_lora_rank": 6,
            "attention.gate_lora_rank": 14,
        },
        tuple(f"time_mix_v{i}.weight" for i in range(3)),
    ),
    "small_window": Family(
        "olmo2",
        _sizes(layers=5, embd=48, ff=80, heads=3, dim=16)
        | {"attention.sliding_window": 9}
        | _scaled("yarn", 4.0, original_context_length=64),
    ),
    "small_mla": Family(
        "deepseek2",
        _sizes(layers=2, embd=96, ff=80, heads=3)
        | _LATENT
        | {"attention.q_lora_rank": 48, "expert_weights_scale": 2.5},
    ),
    "small_mtp": Family(
        "deepseek2",
        _sizes(layers=3, embd=96, ff=80, heads=3) | _LATENT | _MTP | {"attention.q_lora_rank": 48},
        ("exp_probs_b.bias", "blk.2.nextn.eh_proj.weight", "nextn.shared_head_norm.weight"),
    ),
}
"""The same, small enough for the whole suite: recurrent layers, windows, latent attention, multi-token prediction."""
STATES = ("small_lfm2", "small_mamba2", "small_rwkv7")
"""Small models with recurrent layers. The float64 reference runs them."""
