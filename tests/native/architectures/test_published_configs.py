"""Configurations as they were published, by transformers 4: they mean what transformers 5 converts them to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from native.architectures.test_checkpoint_configs import CLASSES, parsed
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.reading import answer_ends, recipe_of
from slm_core.errors import UnsupportedModel

SIZES = {
    "hidden_size": 288,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "rope_theta": 54321.0,
}
LINEAR, YARN = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "yarn", "factor": 4.0}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        **SIZES,
        "model_type": "gemma3_text",
        "head_dim": 256,
        "rope_local_base_freq": 12345,
        "rope_scaling": LINEAR,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
    },
    "gemma-3n": {
        **SIZES,
        "model_type": "gemma3n_text",
        "altup_lr_multiplier": 1.0,
        "num_kv_shared_layers": 2,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 12345.0,
        "rope_scaling": None,
    },
    "phi-4-mini": {
        **SIZES,
        "model_type": "phi3",
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.75,
        "pad_token_id": 0,
        "rope_scaling": None,
        "sliding_window": 262144,
    },
    "command-r7b": {
        **SIZES,
        "model_type": "cohere2",
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "command-r": {**SIZES, "model_type": "cohere", "model_max_length": 131072},
    "starcoder2": {
        **SIZES,
        "model_type": "starcoder2",
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
    "stablelm": {**SIZES, "model_type": "stablelm", "rotary_scaling_factor": 1.0, "partial_rotary_factor": 0.5},
    "falcon": {"model_type": "falcon", "hidden_size": 288, "apply_residual_connection_post_layernorm": False},
    "llama-1": {**SIZES, "model_type": "llama", "max_sequence_length": 2048, "pad_token_id": -1},
    "llama-2": {**SIZES, "model_type": "llama", "max_length": 4096, "temperature": 0.9, "top_p": 0.6},
    "scaling with a base": {**SIZES, "model_type": "llama", "rope_scaling": {**LINEAR, "rope_theta": 500.0}},
    "parameters without a base": {**SIZES, "model_type": "qwen3", "rope_parameters": {"rope_type": "default"}},
    "both, equal": {
        **SIZES,
        "model_type": "qwen3",
        "rope_parameters": {**YARN, "rope_theta": 54321.0, "original_max_position_embeddings": 1024},
        "rope_scaling": {**YARN, "original_max_position_embeddings": 1024},
    },
}
"""The keys of published models that their classes in transformers 5 do not save; and mixed forms."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_what_transformers_converts_them_to(name):
    stated = PUBLISHED[name]
    config_class = CLASSES[stated["model_type"]]
    keys = copy.deepcopy({key: value for key, value in stated.items() if key != "model_type"})  # the class changes them
    converted = config_class(**keys).to_dict()
    converted.pop("rope_local_base_freq", None)
    assert parsed(stated) == parsed(converted)


@pytest.mark.parametrize("outside", [{}, {"eos_token_id": 9}])
def test_the_end_of_answers_may_be_in_the_section_of_the_text_model(tmp_path, outside):
    config = transformers.Qwen3VLConfig(text_config={"eos_token_id": 7}, **outside)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert answer_ends(tmp_path) == (transformers.GenerationConfig.from_model_config(config).eos_token_id,)


def test_two_different_rope_settings_are_refused():
    """Transformers takes the old key, and with it the default base; other engines take the new key."""
    both = {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(UnsupportedModel, match="'rope_scaling' differs from 'rope_parameters'"):
        parsed({**SIZES, "model_type": "qwen3", **both})


def test_a_rotated_share_that_the_class_ignores_is_refused():
    config = transformers.LlamaConfig(**SIZES, partial_rotary_factor=0.5)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert len(rotary.inv_freq) == SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2, "all of a head"
    with pytest.raises(UnsupportedModel, match=r"'partial_rotary_factor' is 0\.5 \(accepted: 1"):
        parsed({**SIZES, "model_type": "llama", "partial_rotary_factor": 0.5})
    assert parsed({**SIZES, "model_type": "llama", "partial_rotary_factor": 1.0})


def test_a_rotated_share_that_gemma4_ignores_is_refused():
    def stated(kind):
        rope = {"rope_type": kind, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        local = {"rope_type": "default", "rope_theta": 1e4}
        return {
            **SIZES,
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention"] * 6 + ["full_attention"],
            "rope_parameters": {"sliding_attention": local, "full_attention": rope},
        }

    for kind, n_turned in (("proportional", 8), ("default", 16)):
        config = transformers.Gemma4TextConfig(**stated(kind))
        rotary = transformers.models.gemma4.modeling_gemma4.Gemma4TextRotaryEmbedding(config)
        assert torch.count_nonzero(rotary.full_attention_inv_freq) == n_turned
    assert parsed({**stated("proportional"), "model_type": "gemma4_text"})
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor' is 0\.5.*accepted: 1\.0"):
        parsed({**stated("default"), "model_type": "gemma4_text"})


def test_a_window_without_a_layer_of_exaone_4_is_refused():
    """Its class then rotates no keys: other engines rotate all."""
    stated = {**SIZES, "num_hidden_layers": 1, "layer_types": ["full_attention"], "head_dim": 32, "vocab_size": 9}
    config = transformers.Exaone4Config(**{**stated, "sliding_window": 512, "pad_token_id": None})
    body = transformers.Exaone4Model(config).eval()
    with torch.inference_mode():
        rows = [body(torch.tensor([each])).last_hidden_state[0, -1] for each in ([3, 5, 7], [5, 3, 7])]
    torch.testing.assert_close(*rows)  # the order of earlier tokens does not matter
    with pytest.raises(UnsupportedModel, match="'sliding_window' without a sliding-window layer"):
        parsed({**stated, "sliding_window": 512, "model_type": "exaone4"})
    assert parsed({**stated, "sliding_window": None, "model_type": "exaone4"})


def test_the_magnitude_of_phi_3_5_moe():
    """Its configuration states another magnitude than LongRoPE's formula, for long and for short contexts."""
    magnitude, factors = 1.243163121016122, [1.0] * 16
    rope = {"type": "longrope", "long_factor": factors, "short_factor": factors, "original_max_position_embeddings": 32}
    rope |= {"long_mscale": magnitude, "short_mscale": magnitude}
    stated = {**SIZES, "rope_scaling": rope, "attention_bias": True, "lm_head_bias": True, "input_jitter_noise": 0.01}
    rotary = PhimoeRotaryEmbedding(transformers.PhimoeConfig(**stated))
    cosines, _ = rotary(torch.zeros(1), torch.arange(2)[None])
    actual = recipe_of(Config(Path("config.json"), {**stated, "model_type": "phimoe"})).metadata
    assert actual["rope.scaling.attn_factor"] == pytest.approx(float(cosines[0, 0, 0]))  # the cosine of 0 is 1
    rope["long_mscale"] = 1.5
    with pytest.raises(UnsupportedModel, match="'long_mscale' differs from 'short_mscale'"):
        recipe_of(Config(Path("config.json"), {**stated, "model_type": "phimoe"}))
