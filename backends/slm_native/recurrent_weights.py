"""The tensors of layers with a state: prepared for a kernel set."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from slm_core.architectures import MambaSpec, NormKind, RecurrentSpec, ShortConvSpec
from slm_native.kernels import KernelSet, Linear, Norm
from slm_native.kv import Array
from slm_native.recurrent import Mamba, Mamba2, Recurrent, ShortConv


class Tensors(NamedTuple):
    """How tensors are read, by name; of a matrix and a norm without ".weight".

    Attributes:
        linear: a matrix, its bias and its scale.
        vector: a tensor as float32, None where the file has none.
        norm: a norm, None where the file has none.
        kernels: who will use them.
    """

    linear: Callable[[str], Linear]
    vector: Callable[[str], Array | None]
    norm: Callable[[str], Norm | None]
    kernels: KernelSet


def read_recurrent(tensors: Tensors, prefix: str, spec: RecurrentSpec, eps: float) -> Recurrent:
    """Read a layer; ``eps`` is that of norms without weights."""
    if isinstance(spec, ShortConvSpec):
        return ShortConv(
            project=tensors.linear(f"{prefix}shortconv.in_proj"),
            taps=_taps(tensors, f"{prefix}shortconv.conv.weight"),
            output=tensors.linear(f"{prefix}shortconv.out_proj"),
        )
    if isinstance(spec, MambaSpec):
        return _mamba(tensors, prefix, spec, eps)
    return Mamba2(
        spec=spec,
        project=tensors.linear(f"{prefix}ssm_in"),
        taps=_taps(tensors, f"{prefix}ssm_conv1d.weight"),
        conv_bias=tensors.vector(f"{prefix}ssm_conv1d.bias"),
        step_bias=tensors.vector(f"{prefix}ssm_dt.bias"),
        a=tensors.vector(f"{prefix}ssm_a"),
        d=tensors.vector(f"{prefix}ssm_d"),
        norm=tensors.norm(f"{prefix}ssm_norm"),
        output=tensors.linear(f"{prefix}ssm_out"),
    )


def _mamba(tensors: Tensors, prefix: str, spec: MambaSpec, eps: float) -> Mamba:
    def norm(name: str, width: int) -> Norm | None:
        """One that the file holds, or one without weights."""
        if spec.normed:
            return Norm(tensors.kernels.from_host(np.ones(width, np.float32)), None, NormKind.RMS, eps)
        return tensors.norm(f"{prefix}ssm_{name}_norm")

    return Mamba(
        spec=spec,
        project=tensors.linear(f"{prefix}ssm_in"),
        taps=_taps(tensors, f"{prefix}ssm_conv1d.weight"),
        conv_bias=tensors.vector(f"{prefix}ssm_conv1d.bias"),
        select=tensors.linear(f"{prefix}ssm_x"),
        norms=[norm("dt", spec.n_rank), norm("b", spec.n_state), norm("c", spec.n_state)],
        steps=tensors.linear(f"{prefix}ssm_dt"),
        a=tensors.vector(f"{prefix}ssm_a"),
        d=tensors.vector(f"{prefix}ssm_d"),
        output=tensors.linear(f"{prefix}ssm_out"),
    )


def _taps(tensors: Tensors, name: str) -> list[Array]:
    """The columns of a convolution's weights [channels, W]."""
    weights = tensors.kernels.to_host(tensors.vector(name))
    return [tensors.kernels.from_host(np.ascontiguousarray(column)) for column in weights.T]
