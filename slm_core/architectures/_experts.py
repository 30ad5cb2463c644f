"""Reading what a file says about its experts."""

from __future__ import annotations

from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ExpertsSpec, Gating
from slm_core.errors import InvalidModelFile

_CODES = {
    Gating.SOFTMAX: 1,
    Gating.SIGMOID: 2,
    Gating.SOFTMAX_OF_CHOSEN: 3,
    Gating.SPARSE_MIXER: 1,
}  # as files spell them


def read_experts(keys: Keys, *, normalized: bool, gating: Gating = Gating.SOFTMAX) -> ExpertsSpec:
    """How many experts there are, and how a token chooses.

    Args:
        keys: read for the numbers; what contradicts the rest is refused.
        normalized: whether the architecture divides the weights of the chosen by their sum.
        gating: how it makes weights.
    """
    n_experts, n_used = keys.size("expert_count"), keys.size("expert_used_count")
    if n_used > n_experts:
        raise InvalidModelFile(
            f"{keys.gguf.path}: a token uses {n_used} of {n_experts} experts"
            f" (metadata '{keys.architecture}.expert_used_count')"
        )
    keys.only("expert_weights_norm", normalized)
    keys.only("expert_gating_func", _CODES[gating])
    for name in ("expert_group_count", "expert_group_used_count"):
        keys.only(name, 0, 1)
    return ExpertsSpec(n_experts, n_used, gating, normalized, keys.number("expert_weights_scale", 1.0))
