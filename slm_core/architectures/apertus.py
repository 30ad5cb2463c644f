"""apertus: per-head norms, and a feed-forward layer without a gate, with a trained activation (xIELU)."""

from __future__ import annotations

import math

from slm_core.architectures._decoder import decoder_spec, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle, Xielu
from slm_core.architectures._tables import Table, attention, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read an apertus; files store its alphas before the softplus that makes them positive."""
    sizes, outside = read_sizes(keys), Table()
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), outside)
    block = attention(sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    block |= norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    numbers = [keys.numbers(f"xielu.{name}", sizes.n_layers) for name in ("alpha_n", "alpha_p", "beta", "eps")]
    layers = [
        LayerSpec(block, rope, activation=Xielu(beta + _softplus(alpha_n), _softplus(alpha_p), beta, eps))
        for alpha_n, alpha_p, beta, eps in zip(*numbers, strict=True)
    ]
    return decoder_spec(keys, sizes, layers, outside)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
