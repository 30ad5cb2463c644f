"""Reading what a file says about its selective state space layers."""

from __future__ import annotations

from slm_core.architectures._keys import Keys
from slm_core.architectures._recurrent import Mamba2Spec, MambaSpec
from slm_core.errors import InvalidModelFile


def read_mamba(keys: Keys, *, norm_eps: float | None = None) -> MambaSpec:
    """The sizes of layers whose channels have step sizes of their own."""
    keys.only("ssm.group_count", 0, 1)
    return MambaSpec(
        n_inner=keys.size("ssm.inner_size"),
        n_state=keys.size("ssm.state_size"),
        n_taps=keys.size("ssm.conv_kernel"),
        n_rank=keys.size("ssm.time_step_rank"),
        norm_eps=norm_eps,
    )


def read_mamba2(keys: Keys) -> Mamba2Spec:
    """The sizes of layers with heads; files have their number under the name of another."""
    found = Mamba2Spec(
        n_inner=keys.size("ssm.inner_size"),
        n_state=keys.size("ssm.state_size"),
        n_taps=keys.size("ssm.conv_kernel"),
        n_heads=keys.size("ssm.time_step_rank"),
        n_groups=keys.size("ssm.group_count"),
    )
    if found.n_inner % found.n_heads or found.n_heads % found.n_groups:
        raise InvalidModelFile(
            f"{keys.gguf.path}: {found.n_inner} channels cannot make {found.n_heads} heads, or those {found.n_groups}"
            f" groups (metadata '{keys.architecture}.ssm.inner_size', 'ssm.time_step_rank' and 'ssm.group_count')"
        )
    return found
