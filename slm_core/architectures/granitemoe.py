"""granitemoe: a granite with routed experts, and in some models a shared expert."""

from __future__ import annotations

from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import ModelSpec
from slm_core.architectures._tables import experts, shared_expert
from slm_core.architectures.granite import granite_spec


def spec(keys: Keys) -> ModelSpec:
    """Read a granitemoe."""
    sizes, moe = read_sizes(keys), read_experts(keys, normalized=True)
    feed_forward = experts(sizes, moe.n_experts, sizes.n_ff)
    if n_shared := keys.count("expert_shared_feed_forward_length", 0):
        feed_forward |= shared_expert(sizes, n_shared)
    return granite_spec(keys, sizes, feed_forward, moe)
