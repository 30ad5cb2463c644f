"""minicpm: MiniCPM 1 and 2. A llama with multipliers on embeddings, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures import llama
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec


def spec(keys: Keys) -> ModelSpec:
    """Read a minicpm; the defaults of the multipliers are from MiniCPM-2B."""
    whole = llama.spec(keys)
    return replace(
        whole,
        embedding_scale=keys.number("embedding_scale", 12.0),
        residual_scale=keys.number("residual_scale", 1.4 * whole.n_layers**-0.5),
        logit_scale=1 / keys.number("logit_scale", whole.n_embd / 256),
    )
