"""Missing keys of configurations have the defaults of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from native.architectures.cases import CASES
from slm_core.checkpoints import family_names
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.reading import recipe_of
from slm_core.errors import InvalidModelFile, UnsupportedModel

CLASSES = {
    getattr(transformers, case.config).model_type: getattr(transformers, case.config)
    for case in CASES.values()
    if not isinstance(case, str)
}
KINDS = sorted(CLASSES.keys() & set(family_names()))
TEXTS = {"qwen3_vl": transformers.Qwen3VLTextConfig, "qwen3_vl_moe": transformers.Qwen3VLMoeTextConfig}
"""Text models of vision-language models; their configuration is part of another."""
CLASSES |= TEXTS


def parsed(config_keys: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that is derived from a configuration."""
    kind = next((name for name, each in TEXTS.items() if each.model_type == config_keys["model_type"]), None)
    whole = config_keys if kind is None else {"model_type": kind, "text_config": config_keys}
    recipe = recipe_of(Config(Path("config.json"), whole))
    tables = {name: table.tobytes() for name, table in recipe.tables.items()}
    return recipe.architecture, dict(recipe.metadata), recipe.model, list(recipe.blocks), tables, recipe.unused


def full_config(kind: str, **settings: Any) -> dict[str, Any]:
    """A configuration with all keys that its class knows."""
    size = {"num_hidden_layers": 5, "hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3}
    further = {"head_dim": 16, "query_pre_attn_scalar": 16, "norm_topk_prob": True, "intermediate_size": 96}
    further |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
    known = CLASSES[kind]().to_dict().keys() | CLASSES[kind].attribute_map.keys()
    further |= {"mamba_n_heads": 18, "mamba_d_head": 32, "mamba_d_ssm": 576, "num_heads": 18}
    if kind == "phimoe":
        further |= {"attention_bias": True, "lm_head_bias": True}
    if kind == "mamba2":
        further["head_dim"] = 32
    if kind.startswith("deepseek"):
        size["num_key_value_heads"] = 9
    if kind in ("deepseek_v2", "olmoe", "qwen2_moe"):
        further.pop("norm_topk_prob")
    chosen = {key: value for key, value in {**size, **further, **settings}.items() if key in known}
    return dict(CLASSES[kind](**chosen).to_dict())


@pytest.mark.parametrize("kind", [*KINDS, *TEXTS])
def test_missing_keys_have_the_default_of_the_class(kind):
    """Without any one key, the result equals that with its default, or an error asks for the key."""
    whole = full_config(kind)
    parsed(whole)
    compared = 0
    for key in whole:
        if key in ("model_type", "layer_types", "no_rope_layers"):  # the class derives them from other keys
            continue
        less = {name: value for name, value in whole.items() if name != key}
        try:
            explicit = CLASSES[kind](**{name: value for name, value in less.items() if name != "model_type"}).to_dict()
        except (StrictDataclassError, ValueError):  # the default size does not fit the other sizes
            continue
        try:
            actual = parsed(less)
        except (UnsupportedModel, InvalidModelFile) as error:
            actual = str(error)
        try:
            expected = parsed(explicit)
        except (UnsupportedModel, InvalidModelFile) as error:
            assert isinstance(actual, str), (
                f"accepted without {key!r}, but refused with the default of transformers: {error}"
            )
            continue
        if isinstance(actual, str):
            assert re.search(rf"'(text_config\.)?({key}|rope_\w+\.\w+)' is missing", actual), (
                f"without {key!r}: {actual}"
            )
            continue
        assert actual == expected, f"a missing {key!r} means something else here than in transformers"
        compared += 1
    assert compared > len(whole) // 2


@pytest.mark.parametrize("kind", [*KINDS, *TEXTS])
def test_every_key_of_the_class_is_read_or_refused(kind):
    """With all keys of the class none is unknown, so no key that transformers uses is ignored."""
    parsed(full_config(kind))
    with pytest.raises(UnsupportedModel, match=r"'(text_config\.)?abacus' is 3, which is unknown here"):
        parsed({**full_config(kind), "abacus": 3})


@pytest.mark.parametrize("kind", sorted({"llama", "qwen3", "granite", "smollm3"} & set(KINDS)))
def test_llama3_rope_frequencies_equal_transformers(kind):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = CLASSES[kind](**{**_sizes(), "rope_parameters": rope})
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    expected = compute(config, "cpu")[0].double().numpy()
    recipe = recipe_of(Config(Path("config.json"), config.to_dict()))
    plain = 5e5 ** -(np.arange(8) / 8)
    # transformers computes powers, a quotient and a product in float32: each errs by half of 2 ** -23.
    np.testing.assert_allclose(plain / recipe.tables["rope_freqs.weight"], expected, rtol=4 * 2**-23)


def _sizes() -> dict[str, int]:
    return {
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "num_hidden_layers": 4,
    }
