"""File types have the numbers of llama.cpp."""

from __future__ import annotations

import pytest

from slm_core.gguf import GgmlType
from slm_core.gguf.file_types import file_type, main_type
from slm_core.quantizing.recipes import RECIPES

llama_cpp = pytest.importorskip("llama_cpp")
NUMBERS = {
    name.removeprefix("LLAMA_FTYPE_").removeprefix("ALL_").removeprefix("MOSTLY_").removesuffix("_MOE"): number
    for name, number in vars(llama_cpp).items()
    if name.startswith("LLAMA_FTYPE_")
}
KINDS = [kind for kind in GgmlType if {kind.name, f"{kind.name}_S"} & NUMBERS.keys()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_of_the_type_of_most_weights(kind: GgmlType) -> None:
    expected = {NUMBERS[name] for name in (kind.name, f"{kind.name}_S") if name in NUMBERS}
    assert file_type(kind) in expected
    assert main_type([(GgmlType.F64, 3), (kind, 2), (kind, 2)]) is kind


@pytest.mark.parametrize("name", list(RECIPES))
def test_of_a_recipe(name: str) -> None:
    assert RECIPES[name].file_type == NUMBERS[name]
