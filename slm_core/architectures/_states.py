"""Reading the sizes of selective state space layers."""

from __future__ import annotations

from slm_core.architectures._keys import Keys
from slm_core.architectures._recurrent import Mamba2Spec, MambaSpec
from slm_core.errors import InvalidModelFile


def read_mamba(keys: Keys, *, norm_eps: float | None = None) -> MambaSpec:
    """The sizes of Mamba layers: one step size per channel."""
    keys.only("ssm.group_count", 0, 1)
    return MambaSpec(
        n_inner=keys.size("ssm.inner_size"),
        n_state=keys.size("ssm.state_size"),
        n_taps=keys.size("ssm.conv_kernel"),
        n_rank=keys.size("ssm.time_step_rank"),
        norm_eps=norm_eps,
    )


def read_mamba2(keys: Keys) -> Mamba2Spec:
    """The sizes of Mamba 2 layers: one step size per head. Files store the number of heads as "time_step_rank"."""
    spec = Mamba2Spec(
        n_inner=keys.size("ssm.inner_size"),
        n_state=keys.size("ssm.state_size"),
        n_taps=keys.size("ssm.conv_kernel"),
        n_heads=keys.size("ssm.time_step_rank"),
        n_groups=keys.size("ssm.group_count"),
    )
    if spec.n_inner % spec.n_heads or spec.n_heads % spec.n_groups:
        raise InvalidModelFile(
            f"{keys.gguf.path}: {spec.n_inner} channels cannot make {spec.n_heads} heads, or those {spec.n_groups}"
            f" groups (metadata '{keys.architecture}.ssm.inner_size', 'ssm.time_step_rank' and 'ssm.group_count')"
        )
    return spec
