"""Quantization of model files: recipes, importance matrices, writing."""

from slm_core.quantizing.importance import Importance, read_importance
from slm_core.quantizing.in_memory import model_bytes
from slm_core.quantizing.plan import Plan, PlannedTensor, plan_quantization
from slm_core.quantizing.recipes import RECIPES, QuantizationRecipe, recipe_of
from slm_core.quantizing.run import quantize_model, write_plan

__all__ = [
    "RECIPES",
    "Importance",
    "Plan",
    "PlannedTensor",
    "QuantizationRecipe",
    "model_bytes",
    "plan_quantization",
    "quantize_model",
    "read_importance",
    "recipe_of",
    "write_plan",
]
