"""Reads the weights of recurrent layers and prepares them for a kernel set."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from slm_core.architectures import MambaSpec, NormKind, RecurrentSpec, Rwkv7Spec, ShortConvSpec
from slm_native.kernels import (
    ChannelMix,
    KernelSet,
    Linear,
    LowRank,
    Mamba,
    Mamba2,
    Norm,
    RecurrentWeights,
    Rwkv7,
    ShortConv,
)
from slm_native.kv import Array

Recurrent: TypeAlias = RecurrentWeights | Rwkv7
_HEAD_EPS = 64e-5  # epsilon of RWKV-7's norm per head, independent of its other norms
_NO_LENGTH = 1e-24  # epsilon of a key's mean square: keys of about this length, 1e-12, are not scaled to length 1


class Tensors(NamedTuple):
    """Functions that read tensors by name. Names of matrices and norms have no ".weight".

    Attributes:
        linear: reads a matrix with its bias and its scale.
        vector: reads a tensor as float32; None if the file has none.
        norm: reads a norm; None if the file has none.
        kernels: the kernel set that uses the weights.
    """

    linear: Callable[[str], Linear]
    vector: Callable[[str], Array | None]
    norm: Callable[[str], Norm | None]
    kernels: KernelSet


def read_recurrent(tensors: Tensors, prefix: str, spec: RecurrentSpec) -> Recurrent:
    """Read the weights of a recurrent layer."""
    if isinstance(spec, ShortConvSpec):
        return ShortConv(
            project=tensors.linear(f"{prefix}shortconv.in_proj"),
            taps=_taps(tensors, f"{prefix}shortconv.conv.weight"),
            output=tensors.linear(f"{prefix}shortconv.out_proj"),
        )
    if isinstance(spec, Rwkv7Spec):
        return _rwkv7(tensors, prefix, spec)
    if isinstance(spec, MambaSpec):
        return _mamba(tensors, prefix, spec)
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


def _mamba(tensors: Tensors, prefix: str, spec: MambaSpec) -> Mamba:
    def norm(name: str, width: int) -> Norm | None:
        """A norm of the file, or one without weights."""
        if spec.norm_eps is not None:
            return Norm(tensors.kernels.from_host(np.ones(width, np.float32)), None, NormKind.RMS, spec.norm_eps)
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


def read_channel_mix(tensors: Tensors, prefix: str) -> ChannelMix:
    """Read the weights of RWKV's channel mixing."""
    share = tensors.vector(f"{prefix}channel_mix_lerp_k.weight")
    assert share is not None, "every such layer has one"
    up, down = (tensors.linear(f"{prefix}channel_mix_{name}") for name in ("key", "value"))
    return ChannelMix(share, up, down)


def _rwkv7(tensors: Tensors, prefix: str, spec: Rwkv7Spec) -> Rwkv7:
    def vector(name: str, *shape: int) -> Array:
        vector = tensors.vector(f"{prefix}time_mix_{name}")
        return vector if vector is None else vector.reshape(*shape)

    def linear(name: str) -> Linear:
        return tensors.linear(f"{prefix}time_mix_{name}")

    def low_rank(name: str) -> LowRank:
        return LowRank(linear(f"{name}1"), linear(f"{name}2"), vector(f"{name}0.weight", -1))

    heads = (spec.n_embd // spec.head_dim, spec.head_dim)
    to_unit = tensors.kernels.from_host(np.full(spec.head_dim, spec.head_dim**-0.5, np.float32))
    return Rwkv7(
        spec=spec,
        shares=vector("lerp_fused.weight", 6, -1),
        receptance=linear("receptance"),
        key=linear("key"),
        value=linear("value"),
        decay=low_rank("w"),
        rate=low_rank("a"),
        first_value=None if spec.is_first else low_rank("v"),
        gate=LowRank(linear("g1"), linear("g2"), None),
        key_removed=vector("k_k.weight", -1),
        key_rate=vector("k_a.weight", -1),
        bonus=vector("r_k.weight", *heads),
        unit_norm=Norm(to_unit, None, NormKind.RMS, _NO_LENGTH),
        head_norm=Norm(vector("ln.weight", *heads), vector("ln.bias", *heads), NormKind.LAYER, _HEAD_EPS),
        output=linear("output"),
    )


def _taps(tensors: Tensors, name: str) -> Array:
    """A convolution's weights [channels, W], transposed: [W, channels]."""
    weights = tensors.kernels.to_host(tensors.vector(name))
    return tensors.kernels.from_host(np.ascontiguousarray(weights.T))
