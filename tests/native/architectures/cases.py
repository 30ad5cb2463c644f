"""Each family of the table as a transformers model: its class, its configuration, the conversion of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers

from native.architectures.conversion import (
    Array,
    Change,
    alternating,
    concatenated_experts,
    decays,
    flat,
    gemma4_experts,
    grouped,
    halved,
    interleaved,
    mamba2_heads,
    multiplied,
    norms_plus_one,
    renamed,
    shared_as_dense,
    squeezed,
    stacked_experts,
    transposed,
    up_projections,
    without,
)
from slm_conformance.oracle.factories import n_vocab
from slm_conformance.oracle.families import family_of
from slm_conformance.oracle.family_table import LAYER, N_CTX, RMS, Family

_ABSENT = object()
TIED = without(r"^lm_head\.weight")


@dataclass(frozen=True)
class Case:
    """A family in transformers.

    Attributes:
        model: name of the causal language model's class.
        config: name of the configuration class.
        settings: its keys besides the sizes.
        changes: the conversion of tensors to the file.
        llama_cpp: whether the bundled llama.cpp runs it.
        note: a remark for docs/architectures.md.
        prepare: sets parameters of the checkpoint that the file stores as metadata.
        extra: tensors of the file that the checkpoint has in another form.
    """

    model: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    llama_cpp: bool = True
    note: str = ""
    prepare: Callable[[Any, Family], None] = lambda model, family: None
    extra: Callable[[Any], dict[str, Array]] = lambda model: {}

    def make(self, family: str) -> Any:
        """The model with the initial weights of its class."""
        settings = {**_sizes(family), **self.settings}
        known = {key: value for key, value in settings.items() if value is not _ABSENT}
        config = getattr(transformers, self.config)(**known)
        config._attn_implementation = "eager"
        return getattr(transformers, self.model)(config).eval()


def _sizes(family: str) -> dict[str, Any]:
    """The sizes in a family's file, by the keys of most configurations."""
    about = family_of(family)
    keys = about.metadata
    eps = keys[RMS if RMS in keys else LAYER]
    # The number of KV heads of the attention layers; configurations without attention ignore it.
    n_kv_heads = max(np.atleast_1d(keys.get("attention.head_count_kv", 0)).tolist())
    older = {
        **dict.fromkeys(("n_embd", "d_model"), keys["embedding_length"]),
        **dict.fromkeys(("n_inner", "ffn_hidden_size"), keys["feed_forward_length"]),
        **dict.fromkeys(("n_layer", "n_layers"), keys["block_count"]),
        **dict.fromkeys(("n_head", "n_heads"), keys["attention.head_count"]),
        **dict.fromkeys(("n_positions", "max_seq_len"), N_CTX),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), eps),
        "num_kv_heads": n_kv_heads,
    }
    return older | {
        "vocab_size": n_vocab(),
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": n_kv_heads,
        "head_dim": keys.get("attention.key_length", 0),
        "max_position_embeddings": N_CTX,
        "tie_word_embeddings": about.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 1e4)},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


def _case(
    name: str,
    *changes: Change,
    note: str = "",
    llama_cpp: bool = True,
    config: str = "",
    model: str = "",
    **settings: Any,
) -> Case:
    return Case(model or f"{name}ForCausalLM", config or f"{name}Config", settings, changes, llama_cpp, note)


def _llama3_factors(model: Any) -> dict[str, Array]:
    """Llama 3's divisors of RoPE frequencies, as files store them."""
    rotary = model.model.rotary_emb
    plain = 1e4 ** -(np.arange(len(rotary.inv_freq)) / len(rotary.inv_freq))
    return {"rope_freqs.weight": (plain / rotary.inv_freq.double().numpy()).astype(np.float32)}


def _long_rope(n_ctx_original: int) -> dict[str, Any]:
    short, long = np.random.default_rng(0).uniform(1, 4, (2, 8)).tolist()
    scaling = _rope(
        "longrope", short_factor=short, long_factor=long, original_max_position_embeddings=n_ctx_original,
        factor=N_CTX / n_ctx_original,
    )  # fmt: skip
    return scaling | {"original_max_position_embeddings": n_ctx_original}


def _long_factors(model: Any) -> dict[str, Array]:
    rope = model.config.rope_parameters
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long")}


def _set_xielu(model: Any, family: Family) -> None:
    for name, values in family.plain.items():
        for layer, value in zip(model.model.layers, np.array(values), strict=True):
            getattr(layer.mlp.act_fn, name.removeprefix("xielu.")).data = torch.tensor([value], dtype=torch.float32)
            layer.mlp.act_fn._beta_scalar = float(layer.mlp.act_fn.beta)


def _scale_norms_down(model: Any, family: Family) -> None:
    """Scale norms down, so that 25 layers do not amplify float32 rounding a hundredfold."""
    for layer in model.model.layers:
        for norm in (
            layer.self_attn.q_norm,
            layer.post_attention_layernorm,
            layer.post_feedforward_layernorm,
            layer.post_per_layer_input_norm,
        ):
            norm.weight.data *= 0.25


def _prepare_gemma4(model: Any, family: Family) -> None:
    """Set output scales of layers, flatten attention (smaller query norms), and scale layer embeddings down."""
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.data.fill_(0.7 + 0.15 * index)
        layer.self_attn.q_norm.weight.data *= 0.25
        if model.config.hidden_size_per_layer_input:
            layer.post_per_layer_input_norm.weight.data *= 0.25


def _proportional(model: Any) -> dict[str, Array]:
    """RoPE divisors of full-attention layers, as files store them; 1e30 disables the rotation of most dimensions."""
    frequencies = model.model.rotary_emb.full_attention_inv_freq
    return {"rope_freqs.weight": np.where(frequencies.numpy() > 0, np.float32(1), np.float32(1e30))}


def _gemma4(family: str, **settings: Any) -> Case:
    slides = family_of(family).metadata["attention.sliding_window_pattern"]
    case = _case(
        "Gemma4",
        TIED,
        renamed(r"(layer_scalar)$", r"\1.weight"),
        gemma4_experts,
        config="Gemma4TextConfig",
        head_dim=16,
        global_head_dim=24,
        sliding_window=48,
        layer_types=["sliding_attention" if each else "full_attention" for each in slides],
        intermediate_size=160,
        vocab_size_per_layer_input=n_vocab(),
        final_logit_softcapping=30.0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        },
        **{"hidden_size_per_layer_input": 0, **settings},
    )
    return replace(case, extra=_proportional, prepare=_prepare_gemma4)


def _unread_keys(model: Any) -> dict[str, Array]:
    """Tensors that gemma3n files contain for layers with shared KV; no engine reads them."""
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if attention.is_kv_shared_layer:
            first = model.model.layers[0].self_attn
            for name, part in (("attn_k", first.k_proj), ("attn_v", first.v_proj), ("attn_k_norm", first.k_norm)):
                tensors[f"blk.{index}.{name}.weight"] = np.full(part.weight.shape, 7, np.float32)
    return tensors


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_SLIDING = [*["sliding_attention"] * 3, "full_attention"]
TEXT_ONLY = "text only, compared with the text model of transformers"
_WITHOUT_TRANSFORMERS = "transformers has no such class"

_ROUTER = renamed(r"(block_sparse_moe\.router)\.weight$", r"\1.layer.weight")
_EXPERTS = {"num_experts": 7, "num_local_experts": 7, "num_experts_per_tok": 3}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}


def _latent(name: str, n_heads: int, **settings: Any) -> Case:
    widths = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64}
    experts = {
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    }
    known = {"q_lora_rank": 96, "num_key_value_heads": n_heads, **widths, **experts, **settings}
    return _case(name, up_projections, halved, renamed(r"(e_score_correction)_bias$", r"\1.bias"), **known)


def _set_selection_bias(model: Any, family: Family) -> None:
    """Set a selection bias (a buffer) that is large enough to change the selected experts."""
    for layer in model.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.copy_(torch.linspace(-0.3, 0.3, len(bias)))


_STATES = (squeezed, decays)
_MAMBA = {"conv_kernel": 4, "expand": 2, "state_size": 12, "time_step_rank": 10, "intermediate_size": 288}
_MAMBA2 = {
    "conv_kernel": 4,
    "d_conv": 4,
    "expand": 2,
    "state_size": 16,
    "d_state": 16,
    "n_groups": 3,
    "n_heads": 18,
    "d_head": 16,
    "chunk_size": 32,
}
_HYBRID = {f"mamba_{key}": value for key, value in _MAMBA2.items()}
_MULTIPLIERS = {
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 1.3,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.9, 0.4],
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.7],
    "ssm_out_multiplier": 0.6,
}
_FALCON_H1 = {"mamba_d_ssm": 288, "mamba_norm_before_gate": False, **_HYBRID}
CASES: dict[str, Case | str] = {
    "llama": _case("Llama", interleaved),
    "llama_tied": _case("Llama", interleaved, TIED),
    "llama_biases": _case("Llama", interleaved, attention_bias=True),
    "llama_linear": _case("Llama", interleaved, **_rope("linear", factor=4.0)),
    "llama3": replace(_case("Llama", interleaved, **_LLAMA3), extra=_llama3_factors),
    "llama_yarn": _case("Llama", interleaved, **_YARN),
    "mistral": _case("Mistral", interleaved, sliding_window=None),
    "qwen2": _case("Qwen2"),
    "qwen3": _case("Qwen3"),
    "smollm3": _case("SmolLM3", interleaved, TIED),
    "granite": _case("Granite", interleaved, **_GRANITE),
    "olmo2": _case("Olmo2"),
    "olmo3": _case(
        "Olmo3",
        sliding_window=48,
        layer_types=(_SLIDING * 2)[:5],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": _YARN["rope_parameters"],
        },
    ),
    "stablelm": _case("StableLm", use_qkv_bias=False, **_rope("default", partial_rotary_factor=0.25)),
    "stablelm2": _case(
        "StableLm", use_parallel_residual=True, qk_layernorm=True, **_rope("default", partial_rotary_factor=0.25)
    ),
    "internlm2": _WITHOUT_TRANSFORMERS,
    "minicpm": _WITHOUT_TRANSFORMERS,
    "exaone4": _case("Exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4_hybrid": _case("Exaone4", sliding_window=48, layer_types=_SLIDING * 16),
    "ernie4_5": _case("Ernie4_5", TIED),
    "seed_oss": _case("SeedOss", attention_bias=True, attention_out_bias=False),
    "mistral3": _case(
        "Ministral3",
        interleaved,
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "apertus": replace(_case("Apertus", without(r"act_fn"), **_LLAMA3), extra=_llama3_factors, prepare=_set_xielu),
    "arcee": _case("Arcee", interleaved),
    "gemma": _case("Gemma", TIED, norms_plus_one),
    "gemma2": _case(
        "Gemma2",
        TIED,
        norms_plus_one,
        sliding_window=48,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3": _case(
        "Gemma3",
        TIED,
        norms_plus_one,
        config="Gemma3TextConfig",
        sliding_window=48,
        query_pre_attn_scalar=16,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    ),
    "phi2": _case("Phi", **_rope("default", partial_rotary_factor=0.375)),
    "phi3": _case("Phi3"),
    "phi3_window": _case("Phi3", llama_cpp=False, note="llama.cpp ignores the window", sliding_window=48),
    "phi3_long": replace(_case("Phi3", **_long_rope(64)), extra=_long_factors),
    "phi3_short": replace(_case("Phi3", **_long_rope(256)), extra=_long_factors),
    "gpt2": _case("GPT2", TIED, transposed(r"(c_attn|c_proj|c_fc)\.weight$"), model="GPT2LMHeadModel"),
    "gptneox": _case("GPTNeoX", grouped(1, 9), **_rope("default", partial_rotary_factor=0.25)),
    "gptneox_serial": _case(
        "GPTNeoX", grouped(1, 9), use_parallel_residual=False, **_rope("default", partial_rotary_factor=0.25)
    ),
    "starcoder2": _case("Starcoder2", TIED),
    "falcon": _case("Falcon", TIED, grouped(9, 1), multi_query=True, head_dim=_ABSENT),
    "falcon_two_norms": _case("Falcon", TIED, grouped(3, 3), new_decoder_architecture=True, head_dim=_ABSENT),
    "bloom": _case("Bloom", TIED, grouped(1, 9), renamed(r"^transformer\.", "")),
    "mpt": _case("Mpt", TIED, attn_config={"alibi": True, "alibi_bias_max": 8, "clip_qkv": 1.5}),
    "command_r": _case("Cohere", TIED, logit_scale=0.25),
    "command_r_plus": _case("Cohere", TIED, logit_scale=0.25, use_qk_norm=True),
    "cohere2": _case("Cohere2", TIED, logit_scale=0.25, sliding_window=48, layer_types=(_SLIDING * 2)[:5]),
    "mixtral": _case("Mixtral", interleaved, halved, **_EXPERTS),
    "qwen2moe": _case(
        "Qwen2Moe", halved, flat, **_EXPERTS, moe_intermediate_size=64, shared_expert_intermediate_size=224
    ),
    "qwen3moe": _case("Qwen3Moe", halved, **_EXPERTS, moe_intermediate_size=64, norm_topk_prob=True),
    "olmoe": _case("Olmoe", halved, **_EXPERTS),
    "granitemoe": _case("GraniteMoe", interleaved, halved, _ROUTER, **_EXPERTS, **_GRANITE),
    "granitemoe_shared": _case(
        "GraniteMoeShared", interleaved, halved, _ROUTER, **_EXPERTS, **_GRANITE, shared_intermediate_size=224
    ),
    "gpt_oss": _case(
        "GptOss",
        alternating,
        renamed(r"\.sinks$", ".sinks.weight"),
        **_EXPERTS,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=True),
        note="llama.cpp rounds the ends of YaRN's ramp; so does transformers in this test; published files do not",
    ),
    "dbrx": _case(
        "Dbrx",
        renamed(r"^transformer\.blocks\.(\d+)\.ffn\.router\.layer\.weight", r"blk.\1.ffn_gate_inp.weight"),
        concatenated_experts,
        squeezed,
        attn_config={"kv_n_heads": 3, "clip_qkv": 1.5, "rope_theta": 1e4},
        ffn_config={
            "hidden_size": 144,
            "ffn_hidden_size": 160,
            "moe_num_experts": 7,
            "moe_top_k": 3,
            "moe_normalize_expert_weights": 1.0,
        },
    ),
    "deepseek2_lite": _latent("DeepseekV2", 3, q_lora_rank=None, routed_scaling_factor=1.0),
    "deepseek2": _latent(
        "DeepseekV2",
        9,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek3": replace(
        _latent("DeepseekV3", 9, norm_topk_prob=True, n_group=1, topk_group=1), prepare=_set_selection_bias
    ),
    "deepseek3_groups": replace(
        _latent("DeepseekV3", 9, norm_topk_prob=True, n_group=4, topk_group=2, n_routed_experts=8),
        prepare=_set_selection_bias,
    ),
    "deepseek3_mtp": _WITHOUT_TRANSFORMERS,
    "glm4moe": replace(
        _case(
            "Glm4Moe",
            halved,
            renamed(r"(e_score_correction)_bias$", r"\1.bias"),
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=7,
            num_experts_per_tok=3,
            n_shared_experts=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            **_rope("default", partial_rotary_factor=0.5),
        ),
        prepare=_set_selection_bias,
    ),
    "glm4moe_mtp": _WITHOUT_TRANSFORMERS,
    "glm4": _case("Glm4", attention_bias=True, **_rope("default", partial_rotary_factor=0.5)),
    "nemotron": _case("Nemotron", norms_plus_one, norm_eps=1e-5, **_rope("default", partial_rotary_factor=0.5)),
    "exaone": _WITHOUT_TRANSFORMERS,
    "minicpm_long": _WITHOUT_TRANSFORMERS,
    "gemma3n": replace(
        _case(
            "Gemma3n",
            TIED,
            renamed(r"(correct_output_scale)$", r"\1.weight"),
            config="Gemma3nTextConfig",
            sliding_window=48,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 5,
            num_kv_shared_layers=5,
            intermediate_size=[160] * 25,
            activation_sparsity_pattern=[0.95] * 10 + [0.0] * 15,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=n_vocab(),
            laurel_rank=64,
            llama_cpp=False,
            note="llama.cpp computes the standard deviation of sparse gates with n - 1; equal otherwise",
            final_logit_softcapping=30.0,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        ),
        extra=_unread_keys,
        prepare=_scale_norms_down,
    ),
    "gemma4": _gemma4(
        "gemma4",
        hidden_size_per_layer_input=40,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gemma4_dense": _gemma4("gemma4_dense", attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4_experts": _gemma4(
        "gemma4_experts", enable_moe_block=True, num_experts=7, top_k_experts=3, moe_intermediate_size=64
    ),
    "phimoe": _case(
        "Phimoe",
        halved,
        **{**_EXPERTS, "num_experts_per_tok": 2},
        attention_bias=True,
        lm_head_bias=True,
        llama_cpp=False,
        note="llama.cpp reads the layer norms as RMS norms, and weights experts with another softmax",
    ),
    "llama4": replace(
        _case(
            "Llama4",
            stacked_experts,
            config="Llama4TextConfig",
            **_EXPERTS | {"num_experts_per_tok": 1},
            intermediate_size=64,
            intermediate_size_mlp=160,
            interleave_moe_layer_step=2,
            **_LLAMA3,
        ),
        extra=_llama3_factors,
    ),
    "refact": _WITHOUT_TRANSFORMERS,
    "qwen2vl": _case(
        "Qwen2",
        note=f"{TEXT_ONLY}; llama.cpp 0.3.36 ignores the epsilon of its norms, which is 0 here",
    ),
    "qwen3vl": _case("Qwen3", note=TEXT_ONLY),
    "qwen3vlmoe": _case("Qwen3Moe", halved, **_EXPERTS, moe_intermediate_size=64, norm_topk_prob=True, note=TEXT_ONLY),
    "mamba": _case("Mamba", TIED, *_STATES, **_MAMBA),
    "falcon_mamba": _case(
        "FalconMamba", *_STATES, **_MAMBA, mixer_rms_eps=1e-5, note="files have one epsilon for all norms"
    ),
    "mamba2": _case("Mamba2", squeezed, mamba2_heads, **_MAMBA2, num_heads=18, head_dim=16),
    "granitehybrid": _case(
        "GraniteMoeHybrid",
        interleaved,
        squeezed,
        mamba2_heads,
        shared_as_dense,
        **_GRANITE,
        **_HYBRID,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
        num_local_experts=0,
        shared_intermediate_size=160,
        position_embedding_type="nope",
    ),
    "granitehybrid_experts": _case(
        "GraniteMoeHybrid",
        interleaved,
        squeezed,
        mamba2_heads,
        halved,
        _ROUTER,
        **_GRANITE,
        **_EXPERTS,
        **_HYBRID,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        shared_intermediate_size=224,
        position_embedding_type="nope",
    ),
    "falcon_h1": _case(
        "FalconH1", squeezed, mamba2_heads, multiplied(_MULTIPLIERS), **_FALCON_H1, **_MULTIPLIERS, mamba_rms_norm=True
    ),
    "falcon_h1_plain": _case("FalconH1", TIED, squeezed, mamba2_heads, **_FALCON_H1, mamba_rms_norm=False),
    "jamba": _case(
        "Jamba",
        *_STATES,
        halved,
        **_EXPERTS,
        mamba_d_state=12,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=10,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "rwkv7": _WITHOUT_TRANSFORMERS,
    "lfm2": _case(
        "Lfm2",
        TIED,
        squeezed,
        renamed(r"(model\.embedding_norm)", "token_embd_norm"),
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    ),
}
"""By family; a text explains why transformers has no class."""
