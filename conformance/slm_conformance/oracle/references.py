"""Chooses the reference for a model."""

from __future__ import annotations

from slm_conformance.oracle.reference import Reference, Rounding
from slm_conformance.oracle.rwkv_reference import RwkvReference
from slm_conformance.oracle.state_reference import StateReference, StateWeights
from slm_conformance.oracle.weights import Weights


def reference_of(weights: Weights, **rounding: Rounding) -> Reference:
    """The reference for a model.

    Args:
        weights: the model.
        rounding: see ``Reference``.
    """
    if not isinstance(weights, StateWeights):
        return Reference(weights, **rounding)
    reference_type = RwkvReference if "blk.0.time_mix_key.weight" in weights.tensors else StateReference
    return reference_type(weights, **rounding)
