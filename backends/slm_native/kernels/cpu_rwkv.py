"""RWKV-7 in C++: its mixings, and whole blocks."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from slm_native.kernels.cpu_parameters import native_norm
from slm_native.kernels.cpu_weights import extension, native_linear, plain_handles
from slm_native.kernels.rwkv import SLOWEST, ChannelMix, Rwkv7, RwkvBlock

if TYPE_CHECKING:
    from slm_native import _native


def native_rwkv_block(block: RwkvBlock) -> _native.RwkvBlock | None:
    """A block in C++; None where there are no kernels for one of its matrices, or one is more than its product."""
    time, channel, output = (
        native_time_mix(block.time),
        native_channel_mix(block.channel),
        native_linear(block.time.output),
    )
    if time is None or channel is None or output is None:
        return None
    norms = native_norm(block.time_norm), native_norm(block.channel_norm)
    made: _native.RwkvBlock = extension().RwkvBlock(norms[0], time, output, norms[1], channel)
    return made


def native_time_mix(weights: Rwkv7) -> _native.TimeMix | None:
    """The weights of time mixing up to its output matrix in C++, likewise."""
    w, first = weights, weights.first_value
    pairs = [w.decay, w.rate, w.gate] if first is None else [w.decay, w.rate, w.gate, first]
    low_rank = chain.from_iterable((pair.down, pair.up) for pair in pairs)
    matrices = plain_handles(w.receptance, w.key, w.value, *low_rank)
    if matrices is None:
        return None
    rows = [w.decay.base, w.rate.base, w.key_removed, w.key_rate, w.bonus, w.head_norm.weight, w.head_norm.bias]
    if first is not None:
        rows.append(first.base)
    unit, eps = w.unit_norm.weight, (w.unit_norm.eps, w.head_norm.eps)
    made: _native.TimeMix = extension().TimeMix(
        w.shares, matrices, [row.reshape(-1) for row in rows], unit, *eps, SLOWEST
    )
    return made


def native_channel_mix(weights: ChannelMix) -> _native.ChannelMix | None:
    """The weights of channel mixing in C++, likewise."""
    matrices = plain_handles(weights.up, weights.down)
    if matrices is None:
        return None
    made: _native.ChannelMix = extension().ChannelMix(weights.share, *matrices)
    return made
