"""What configurations leave out means what transformers takes it to mean."""

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
"""Those of models that see images, which lie in a configuration of the whole."""
CLASSES |= TEXTS


def told(stated: dict[str, Any]) -> tuple[Any, ...]:
    """All that is made of a configuration."""
    kind = next((name for name, each in TEXTS.items() if each.model_type == stated["model_type"]), None)
    whole = stated if kind is None else {"model_type": kind, "text_config": stated}
    recipe = recipe_of(Config(Path("config.json"), whole))
    tables = {name: table.tobytes() for name, table in recipe.tables.items()}
    return recipe.architecture, dict(recipe.metadata), recipe.model, list(recipe.blocks), tables, recipe.unused


def spelled_out(kind: str, **settings: Any) -> dict[str, Any]:
    """A configuration with every key that its class knows."""
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
def test_a_key_that_is_left_out_is_the_classs_default(kind):
    """Leave out each in turn: what is made of the rest is what is made of the default, or the key is asked for."""
    whole = spelled_out(kind)
    told(whole)
    compared = 0
    for key in whole:
        if key in ("model_type", "layer_types", "no_rope_layers"):  # made of other keys when the class was
            continue
        less = {name: value for name, value in whole.items() if name != key}
        try:
            explicit = CLASSES[kind](**{name: value for name, value in less.items() if name != "model_type"}).to_dict()
        except (StrictDataclassError, ValueError):  # a size that does not go with the rest
            continue
        try:
            found = told(less)
        except (UnsupportedModel, InvalidModelFile) as error:
            found = str(error)
        try:
            wanted = told(explicit)
        except (UnsupportedModel, InvalidModelFile) as error:
            assert isinstance(found, str), (
                f"without {key!r} it is read, but transformers takes what is refused: {error}"
            )
            continue
        if isinstance(found, str):
            assert re.search(rf"'(text_config\.)?({key}|rope_\w+\.\w+)' is missing", found), f"without {key!r}: {found}"
            continue
        assert found == wanted, f"{key!r} is taken for something else where it is missing"
        compared += 1
    assert compared > len(whole) // 2


@pytest.mark.parametrize("kind", [*KINDS, *TEXTS])
def test_every_key_of_the_class_is_read_or_refused(kind):
    """What transformers may act on is known here: with every key spelled out, nothing is unknown."""
    told(spelled_out(kind))
    with pytest.raises(UnsupportedModel, match=r"'(text_config\.)?abacus' is 3, which is unknown here"):
        told({**spelled_out(kind), "abacus": 3})


@pytest.mark.parametrize("kind", sorted({"llama", "qwen3", "granite", "smollm3"} & set(KINDS)))
def test_frequencies_of_llama_3_are_those_of_transformers(kind):
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
    wanted = compute(config, "cpu")[0].double().numpy()
    recipe = recipe_of(Config(Path("config.json"), config.to_dict()))
    plain = 5e5 ** -(np.arange(8) / 8)
    # transformers computes in float32: powers, a quotient and a product, each off by a half of 2 ** -23.
    np.testing.assert_allclose(plain / recipe.tables["rope_freqs.weight"], wanted, rtol=4 * 2**-23)


def _sizes() -> dict[str, int]:
    return {
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "num_hidden_layers": 4,
    }
