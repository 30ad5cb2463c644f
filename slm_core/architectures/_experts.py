"""Reading the settings of MoE layers, and the layers of DeepSeek's kind."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes
from slm_core.architectures._spec import ExpertsSpec, Gating, LayerSpec, TensorSpec
from slm_core.architectures._tables import experts, shared_expert
from slm_core.errors import InvalidModelFile

_CODES = {
    Gating.SOFTMAX: 1,
    Gating.SIGMOID: 2,
    Gating.SOFTMAX_OF_CHOSEN: 3,
    Gating.SPARSE_MIXER: 1,
}  # expert_gating_func in GGUF files


def read_experts(
    keys: Keys, *, normalized: bool, gating: Gating = Gating.SOFTMAX, grouped: bool = False
) -> ExpertsSpec:
    """Read the number of experts and the settings of the router.

    Args:
        keys: read for the numbers; values that contradict the arguments are refused.
        normalized: whether the architecture divides the weights of the chosen experts by their sum.
        gating: how router scores become weights.
        grouped: whether experts may be in groups; a token then uses a few of the groups.
    """
    n_experts, n_used = keys.size("expert_count"), keys.size("expert_used_count")
    if n_used > n_experts:
        raise InvalidModelFile(
            f"{keys.gguf.path}: a token uses {n_used} of {n_experts} experts"
            f" (metadata '{keys.architecture}.expert_used_count')"
        )
    keys.only("expert_weights_norm", normalized)
    keys.only("expert_gating_func", _CODES[gating])
    groups = _groups(keys, n_experts, n_used) if grouped else _no_groups(keys)
    scale = keys.number("expert_weights_scale", 1.0)
    return ExpertsSpec(n_experts, n_used, gating, normalized, scale, n_groups=groups[0], n_groups_used=groups[1])


def routed(keys: Keys, sizes: Sizes, layer: LayerSpec, gating: Gating) -> LayerSpec:
    """``layer`` with routed experts and a shared expert, as DeepSeek has them.

    Args:
        keys: read for the numbers and widths.
        sizes: the dimensions.
        layer: the layer without its experts.
        gating: how router scores become weights. Sigmoid routers choose among groups of experts. V2 ranks groups by
            their best expert only; its files have no key for this.
    """
    normalized, grouped = keys.flag("expert_weights_norm", False), gating is Gating.SIGMOID
    moe = read_experts(keys, normalized=normalized, gating=gating, grouped=grouped)
    n_ff = keys.size("expert_feed_forward_length")
    table = experts(sizes, moe.n_experts, n_ff) | shared_expert(sizes, n_ff * keys.size("expert_shared_count"))
    table["exp_probs_b.bias"] = TensorSpec((moe.n_experts,), required=False)
    return replace(layer, tensors={**layer.tensors, **table}, experts=moe)


def _no_groups(keys: Keys) -> tuple[int, int]:
    for name in ("expert_group_count", "expert_group_used_count"):
        keys.only(name, 0, 1)
    return 1, 1


def _groups(keys: Keys, n_experts: int, n_used: int) -> tuple[int, int]:
    """The number of groups, and the number that a token uses; (1, 1) without groups."""
    n_groups = max(1, keys.count("expert_group_count", 0))
    n_groups_used = max(1, keys.count("expert_group_used_count", 0))
    size = n_experts // n_groups
    if n_groups > 1 and (n_experts % n_groups or size < 2 or n_groups_used > n_groups or n_groups_used * size < n_used):
        raise InvalidModelFile(
            f"{keys.gguf.path}: {n_experts} experts in {n_groups} groups, of {n_groups_used} of which a token uses"
            f" {n_used} (metadata '{keys.architecture}.expert_group_count' and 'expert_group_used_count')"
        )
    return (n_groups, n_groups_used) if n_groups > 1 else (1, 1)
