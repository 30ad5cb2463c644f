"""Quantization recipes: the choice of a type for each tensor.

The choices are the same as in llama.cpp (``llama-quant.cpp``): a recipe's name means the same types in both programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slm_core.gguf import WeightSource

T = GgmlType


@dataclass(frozen=True, slots=True)
class QuantizationRecipe:
    """The number formats of a file, by a name such as Q4_K_M.

    Attributes:
        name: in capitals.
        file_type: its number in ``general.file_type``.
        main_type: the type of most matrices.
    """

    name: str
    file_type: int
    main_type: GgmlType


RECIPES = {
    recipe.name: recipe
    for recipe in (
        QuantizationRecipe("F32", 0, T.F32),
        QuantizationRecipe("F16", 1, T.F16),
        QuantizationRecipe("BF16", 32, T.BF16),
        QuantizationRecipe("Q8_0", 7, T.Q8_0),
        QuantizationRecipe("Q6_K", 18, T.Q6_K),
        QuantizationRecipe("Q5_K_M", 17, T.Q5_K),
        QuantizationRecipe("Q5_K_S", 16, T.Q5_K),
        QuantizationRecipe("Q5_1", 9, T.Q5_1),
        QuantizationRecipe("Q5_0", 8, T.Q5_0),
        QuantizationRecipe("Q4_K_M", 15, T.Q4_K),
        QuantizationRecipe("Q4_K_S", 14, T.Q4_K),
        QuantizationRecipe("Q4_1", 3, T.Q4_1),
        QuantizationRecipe("Q4_0", 2, T.Q4_0),
        QuantizationRecipe("TQ2_0", 37, T.TQ2_0),
        QuantizationRecipe("Q1_0", 40, T.Q1_0),
    )
}
"""Every recipe, from most to fewest bits."""

_ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def recipe_of(name: str) -> QuantizationRecipe:
    """The recipe with a name, in upper or lower case.

    Raises:
        InvalidOption: there is no such recipe; the message lists the recipes.
    """
    upper = name.upper()
    recipe = RECIPES.get(_ALIASES.get(upper, upper))
    if recipe is None:
        raise InvalidOption(f"unknown type {name!r} (accepted: {', '.join(RECIPES)}, {', '.join(_ALIASES)})")
    return recipe


class Role(Enum):
    """The roles of matrices that recipes distinguish."""

    OUTPUT = auto()
    EMBEDDING = auto()
    VALUES = auto()
    KEYS = auto()
    ATTENTION_OUTPUT = auto()
    FFN_DOWN = auto()
    OTHER = auto()


_ROLES_BY_PART = {
    "attn_qkv.weight": Role.VALUES,
    "attn_kv_b.weight": Role.VALUES,
    "attn_v.weight": Role.VALUES,
    "attn_k.weight": Role.KEYS,
    "attn_output.weight": Role.ATTENTION_OUTPUT,
    "ffn_down": Role.FFN_DOWN,
}


def role_of(name: str) -> Role:
    """The role of a tensor, by its name."""
    if name == "output.weight":
        return Role.OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return Role.EMBEDDING
    return next((role for part, role in _ROLES_BY_PART.items() if part in name), Role.OTHER)


class Chooser:
    """Chooses types for the matrices of a model; call it in the order of ``in_order``.

    Args:
        file: the model.
        recipe: the recipe.
        has_importance: whether an importance matrix is used; it changes two recipes.
    """

    def __init__(self, file: WeightSource, recipe: QuantizationRecipe, *, has_importance: bool) -> None:
        names = list(file.tensors)
        architecture = file.get("general.architecture", str, "")
        self._name = recipe.name
        self._main = recipe.main_type
        self._has_importance = has_importance
        self._is_falcon = architecture == "falcon"
        self._tied = "output.weight" not in names
        self._n_experts = file.get(f"{architecture}.expert_count", int, 0)
        self._n_layers = file.get(f"{architecture}.block_count", int, 1 + max(map(layer_of, names), default=0))
        self._n_values = sum(role_of(name) is Role.VALUES for name in names)
        self._shares_many_heads = self._n_layers == 80 and _has_grouped_heads(file, architecture)
        self._i_values = self._i_down = 0

    def choose(self, name: str, n_cols: int) -> GgmlType:
        """The type of the next matrix, regardless of the length of its rows."""
        role = role_of(name)
        if role is Role.OUTPUT or (self._tied and role is Role.EMBEDDING):
            return self._output(n_cols)
        if role is Role.EMBEDDING:
            return T.Q4_K if self._name == "TQ2_0" else self._main
        if role is Role.VALUES:
            return self._values()
        if role is Role.KEYS:
            return T.Q8_0 if self._n_experts == 8 else self._main
        if role is Role.FFN_DOWN:
            return self._down(name)
        if role is Role.ATTENTION_OUTPUT and self._n_experts == 8 and not self._is_falcon and self._main is T.Q4_K:
            return T.Q5_K
        return self._main

    def _output(self, n_cols: int) -> GgmlType:
        """The type of the output matrix: at least six bits, because it affects every logit."""
        if self._is_falcon or n_cols % self._main.block_size or self._main is T.Q8_0:
            return T.Q8_0
        return T.Q6_K

    def _values(self) -> GgmlType:
        i, self._i_values = self._i_values, self._i_values + 1
        chosen = self._main
        if self._name in ("Q4_K_M", "Q5_K_M") and _gets_more_bits(i, self._n_values):
            chosen = T.Q6_K
        elif self._name == "Q4_K_S" and i < 4:
            chosen = T.Q5_K
        if self._shares_many_heads and chosen is T.Q4_K:  # a matrix this small costs almost nothing
            chosen = T.Q5_K
        return T.Q8_0 if self._n_experts == 8 else chosen

    def _down(self, name: str) -> GgmlType:
        i, self._i_down = self._i_down, self._i_down + 1
        layer = layer_of(name) if self._n_experts > 1 else i
        more_bits, first = _gets_more_bits(layer, self._n_layers), layer < self._n_layers // 8
        if self._name == "Q4_K_M" and self._is_falcon:
            return T.Q6_K if layer < self._n_layers // 16 else T.Q5_K if more_bits else T.Q4_K
        if self._name in ("Q4_K_M", "Q5_K_M") and more_bits:
            return T.Q6_K
        if self._name == "Q4_K_S" and first and not self._is_falcon:
            return T.Q5_K
        if self._name in ("Q4_0", "Q5_0") and first and self._has_importance:
            return T.Q4_1 if self._name == "Q4_0" else T.Q5_1
        return self._main


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted by layer (tensors outside of layers first), then by name: llama.cpp counts in this order."""
    return sorted(names, key=lambda name: (layer_of(name), name.encode()))


def layer_of(name: str) -> int:
    """The layer of a tensor; -1 for none."""
    match = re.match(r"blk\.([0-9]{1,9})\.", name)
    return int(match[1]) if match else -1


def fallback_type(requested_type: GgmlType, n_cols: int) -> GgmlType:
    """The type for rows that are not a multiple of ``requested_type``'s blocks: more bits, smaller blocks."""
    for ggml_type in (requested_type, _FALLBACKS.get(requested_type, T.F16)):
        if n_cols % ggml_type.block_size == 0:
            return ggml_type
    return T.F16


_FALLBACKS = {T.TQ2_0: T.Q4_0, T.Q1_0: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}


def _gets_more_bits(i: int, n: int) -> bool:
    """Whether a layer is in the first or last eighth, or is every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _has_grouped_heads(file: WeightSource, architecture: str) -> bool:
    heads = (file.metadata.get(f"{architecture}.attention.{key}") for key in ("head_count", "head_count_kv"))
    n_heads, n_kv_heads = heads
    return n_kv_heads is not None and bool(n_heads != n_kv_heads)
