"""Model files made smaller: which tensor gets which type, importance matrices, and the writing."""

from slm_core.quantizing.importance import Importance, read_importance
from slm_core.quantizing.mixtures import MIXTURES, Mixture, mixture
from slm_core.quantizing.plan import Plan, PlannedTensor, plan_quantization
from slm_core.quantizing.run import quantize_model, write_plan

__all__ = [
    "MIXTURES",
    "Importance",
    "Mixture",
    "Plan",
    "PlannedTensor",
    "mixture",
    "plan_quantization",
    "quantize_model",
    "read_importance",
    "write_plan",
]
