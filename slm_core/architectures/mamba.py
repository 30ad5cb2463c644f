"""mamba: Mamba, FalconMamba. Blocks of one selective state space layer, without attention and feed-forward layers."""

from __future__ import annotations

from slm_core.architectures._decoder import EPSILONS, decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes_without_attention
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind
from slm_core.architectures._states import read_mamba
from slm_core.architectures._tables import mamba, norms
from slm_core.gguf import OWN


def spec(keys: Keys) -> ModelSpec:
    """Read a mamba."""
    sizes = read_sizes_without_attention(keys)
    recurrent = read_mamba(keys, norm_eps=_norm_eps(keys) if keys.flag("ssm.dt_b_c_rms", False) else None)
    layer = LayerSpec(
        norms(sizes.n_embd, "attn_norm") | mamba(sizes, recurrent), rope=None, attends=False, recurrent=recurrent
    )
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)


def _norm_eps(keys: Keys) -> float:
    """GGUF has one epsilon for all norms; FalconMamba's configuration has two."""
    return keys.number(f"{OWN}ssm.norm_epsilon", keys.number(EPSILONS[NormKind.RMS], zero=True))
