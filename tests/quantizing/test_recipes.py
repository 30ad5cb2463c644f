"""The type of each tensor in each recipe, against llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ggml_library import llama_quantize
from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType, GgufFile
from slm_core.quantizing import RECIPES, plan_quantization, recipe_of

# Names that llama.cpp's quantizer treats specially, and some that it does not.
ODD_NAMES = (
    *(f"blk.0.time_mix_{part}.weight" for part in ("first", "lerp_fused", "decay_w1", "decay_w2", "g1", "g2", "key")),
    *(f"blk.0.time_mix_{letter}{i}.weight" for letter in "wva" for i in range(4)),
    *(f"blk.0.{name}.weight" for name in ("ffn_gate_tid2eid", "altup_proj", "laurel_l", "ssm_conv1d", "ssm_in")),
    *(
        f"blk.0.{name}.weight"
        for name in ("shortconv.conv", "shortconv.in_proj", "attn_rel_b", "attn_kv_b", "attn_q_b")
    ),
    *(f"blk.0.indexer.{name}.weight" for name in ("k_proj", "q_proj", "v_proj")),
    *("position_embd.weight", "token_types.weight", "per_layer_token_embd.weight", "per_layer_model_proj.weight"),
    *(
        "v.position_embd.weight",
        "sam.pos_embd.weight",
        "sam.neck.0.weight",
        "sam.net_2.weight",
        "v.blk.0.rel_pos.weight",
    ),
    *("v.patch_embd.weight", "mm.patch_merger.weight", "a.rvq.codebook.weight", "mm.a.code_embd.weight", "mm.0.weight"),
    *("cls.weight", "blk.1.attn_q_norm.weight", "blk.0.other.scale", "output_b.weight", "blk.1.ffn_down_shexp.weight"),
)
ODD = {"n_layers": 9, "n_cols": 160, "n_down": 96, "n_heads": 5, "n_kv_heads": 1}
MODELS = {
    "three layers": {},
    "thirty-three layers": {"n_layers": 33},
    "tied": {"n_layers": 9, "tied": True},
    "fused attention": {"n_layers": 17, "fused": True},
    "eight experts": {"n_layers": 16, "n_experts": 8},
    "sixty-four experts": {"n_layers": 16, "n_experts": 64, "architecture": "qwen3moe"},
    "eighty layers": {"n_layers": 80},
    "eighty layers without grouped heads": {"n_layers": 80, "n_kv_heads": 8},
    "falcon": {"n_layers": 32, "architecture": "falcon", "fused": True},
    "qwen3": {"n_layers": 28, "architecture": "qwen3", "tied": True},
    "rows of odd blocks": ODD,
    "rows of odd blocks, tied": ODD | {"tied": True},
    "what is kept": {"extra": dict.fromkeys(ODD_NAMES, (4, 256)) | {"blk.0.row.weight": (1, 256)}},
}
QUANTIZED = [name for name in RECIPES if RECIPES[name].main_type not in (GgmlType.F32, GgmlType.F16, GgmlType.BF16)]


def types_in(path: Path) -> dict[str, str]:
    with GgufFile.open(path) as file:
        return {name: tensor.ggml_type.name for name, tensor in file.tensors.items()}


def planned_types(path: Path, *arguments, **options) -> dict[str, str]:
    with GgufFile.open(path) as file:
        return {t.source.name: t.ggml_type.name for t in plan_quantization(file, *arguments, **options).tensors}


@pytest.mark.parametrize("model", MODELS)
def test_every_recipe_equals_llama_cpp(toy, tmp_path, model) -> None:
    path = toy(**MODELS[model])
    for name in RECIPES:
        if model.startswith("rows of odd blocks") and name == "Q1_0":
            continue  # llama.cpp refuses it: see below
        theirs = types_in(llama_quantize(path, tmp_path / f"{name}.gguf", RECIPES[name].file_type))
        assert planned_types(path, name) == theirs, name


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q4_K_M", "Q8_0"])
def test_importance_changes_recipes_as_in_llama_cpp(toy, tmp_path, imatrix_of, name) -> None:
    path = toy(n_layers=24)
    importance, file = imatrix_of(path)
    theirs = types_in(llama_quantize(path, tmp_path / "theirs.gguf", RECIPES[name].file_type, imatrix=importance))
    assert planned_types(path, name, imatrix=file) == theirs
    assert (planned_types(path, name) == theirs) == (name in ("Q4_K_M", "Q8_0"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_overrides_and_pure_recipes_equal_llama_cpp(toy, tmp_path, name) -> None:
    path = toy(n_layers=9)
    overrides = {r"ffn_up|blk\.1\.": "Q8_0", r"blk\.[0-4]\.attn_v": "Q5_1", "output": "Q4_1"}
    types = {expression: GgmlType[type_name] for expression, type_name in overrides.items()}
    number = RECIPES[name].file_type
    theirs = types_in(llama_quantize(path, tmp_path / "overridden.gguf", number, overrides=types))
    assert planned_types(path, name, overrides=overrides) == theirs
    assert planned_types(path, name, pure=True) == types_in(
        llama_quantize(path, tmp_path / "p.gguf", number, pure=True)
    )


def test_rows_that_llama_cpp_refuses_get_a_type_that_fits(toy) -> None:
    """Rows that are no multiples of 32, for types without super-blocks, or of 128."""
    path = toy(n_cols=80, n_down=96)
    assert planned_types(path, "Q4_0")["blk.0.attn_q.weight"] == "F16"
    assert planned_types(path, "Q1_0")["blk.0.attn_q.weight"] == "F16"
    assert planned_types(path, "Q1_0")["blk.0.ffn_down.weight"] == "Q4_0"
    assert planned_types(path, "Q8_0")["output.weight"] == "F16"


def test_fallbacks_are_listed(toy) -> None:
    with GgufFile.open(toy(n_cols=160)) as file:
        plan = plan_quantization(file, "Q6_K")
        fallbacks = {(t.source.name, t.requested_type.name, t.ggml_type.name) for t in plan.fallbacks}
    assert ("blk.0.attn_q.weight", "Q6_K", "Q8_0") in fallbacks
    assert not any("ffn_down" in name or "norm" in name for name, _, _ in fallbacks)


def test_names_of_recipes() -> None:
    assert recipe_of("q4_k_m") is recipe_of("Q4_K") is RECIPES["Q4_K_M"]
    assert recipe_of("q5_k") is RECIPES["Q5_K_M"]
    with pytest.raises(InvalidOption, match=r"unknown type 'Q3_K_M' \(accepted: F32, F16, BF16, Q8_0, Q6_K, Q5_K_M,"):
        recipe_of("Q3_K_M")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attn_v": "Q9"}, r"unknown type 'Q9' for 'attn_v' \(accepted: F32, F16, Q4_0,"),
        ({"attn_(": "Q8_0"}, r"'attn_\(' is not a regular expression: missing \)"),
        ({"attn_w": "Q8_0"}, r"'attn_w' matches no name of a matrix that may be quantized"),
        ({"_norm": "Q8_0"}, r"'_norm' matches no name of a matrix that may be quantized"),
    ],
)
def test_wrong_overrides(toy, overrides, message) -> None:
    with pytest.raises(InvalidOption, match=message):
        planned_types(toy(), "Q8_0", overrides=overrides)


def test_overrides_may_widen_single_matrices(toy) -> None:
    types = planned_types(toy(dtype=np.float16), "Q4_0", overrides={"^output": "F32", "attn_k": "f16"})
    assert (types["output.weight"], types["blk.1.attn_k.weight"], types["blk.1.attn_v.weight"]) == (
        "F32",
        "F16",
        "Q4_0",
    )
