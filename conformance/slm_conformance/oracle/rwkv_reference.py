"""The oracle of RWKV-7 (Peng et al. 2025, https://arxiv.org/abs/2503.14456) in float64: section 4, token by token."""

from __future__ import annotations

import numpy as np

from slm_conformance.oracle.reference import Array
from slm_conformance.oracle.state_reference import StateReference

_HEAD_EPS = 64e-5  # a constant of the reference implementation; files do not contain it


class RwkvReference(StateReference):
    """See ``StateReference``. Later blocks mix in the values of the first block."""

    _first_values: Array

    def _entered(self, rows: Array) -> Array:
        return self._norm("token_embd_norm", rows)

    def _norm(self, name: str, x: Array) -> Array:
        return self._standardized(x, self._shape.norm_eps) * self._vector(name, "weight") + self._vector(name, "bias")

    def _block(self, layer: int, x: Array) -> Array:
        x = x + self._time_mixed(layer, self._norm(f"blk.{layer}.attn_norm", x))
        return x + self._channel_mixed(layer, self._norm(f"blk.{layer}.attn_norm_2", x))

    def _time_mixed(self, layer: int, x: Array) -> Array:
        """The state of each head decays, and the value of a key is replaced by a new one (the delta rule)."""
        block = f"blk.{layer}.time_mix_"
        shares = self._vector(f"{block}lerp_fused", "weight").reshape(6, -1)
        for_r, for_w, for_k, for_v, for_a, for_g = (_mixed(x, share) for share in shares)
        inputs = {"receptance": for_r, "key": for_k, "value": for_v}
        r, k, v = (self._linear(block + name, share) for name, share in inputs.items())
        decay = np.exp(-np.exp(-0.5) * _sigmoid(self._low_rank(f"{block}w", for_w, tanh=True)))
        rate = _sigmoid(self._low_rank(f"{block}a", for_a))
        gate = self._linear(f"{block}g2", _sigmoid(self._linear(f"{block}g1", for_g)))
        if layer == 0:
            self._first_values = v
        else:
            v = v + (self._first_values - v) * _sigmoid(self._low_rank(f"{block}v", for_v))
        removed = self._heads_of(k * self._vector(f"{block}k_k", "weight"))
        removed = removed / np.linalg.norm(removed, axis=-1, keepdims=True)
        k = k * (1 + (rate - 1) * self._vector(f"{block}k_a", "weight"))
        r, decay, k, v, rate = map(self._heads_of, (r, decay, k, v, rate))  # [T, H, P]
        outputs = _delta_rule(r, decay, k, v, removed, removed * rate)
        normed = self._standardized(outputs, _HEAD_EPS) * self._heads_of(self._vector(f"{block}ln", "weight"))
        normed = normed + self._heads_of(self._vector(f"{block}ln", "bias"))
        bonus = (r * k * self._heads_of(self._vector(f"{block}r_k", "weight"))).sum(-1, keepdims=True)
        return self._linear(f"{block}output", (normed + bonus * v).reshape(len(x), -1) * gate)

    def _channel_mixed(self, layer: int, x: Array) -> Array:
        block = f"blk.{layer}.channel_mix_"
        hidden = self._linear(f"{block}key", _mixed(x, self._vector(f"{block}lerp_k", "weight")))
        return self._linear(f"{block}value", np.maximum(hidden, 0) ** 2)

    def _low_rank(self, name: str, x: Array, *, tanh: bool = False) -> Array:
        hidden = self._linear(f"{name}1", x)
        hidden = np.tanh(hidden) if tanh else hidden
        return self._linear(f"{name}2", hidden) + self._vector(f"{name}0", "weight")

    def _heads_of(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, self._shape.head_dim)

    def _vector(self, name: str, kind: str) -> Array:
        vector: Array = self._tensors[f"{name}.{kind}"].astype(np.float64)
        return vector

    @staticmethod
    def _standardized(x: Array, eps: float) -> Array:
        standardized: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return standardized


def _delta_rule(r: Array, decay: Array, k: Array, v: Array, removed: Array, replaced: Array) -> Array:
    """The outputs of the states [H, P values, P keys] for each token, all [T, H, P]: equations 17 and 18."""
    state, outputs = np.zeros((*v.shape[1:], k.shape[2])), []
    for t in range(len(r)):
        forgotten = np.einsum("hvk,hk->hv", state, removed[t])
        state = state * decay[t, :, None, :] - forgotten[:, :, None] * replaced[t, :, None, :]
        state = state + v[t, :, :, None] * k[t, :, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, r[t]))
    return np.array(outputs)


def _mixed(x: Array, share: Array) -> Array:
    """Mix each token with a share of the token before it, x [T, E]. The first token is mixed with zeros."""
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    return x + (before - x) * share


def _sigmoid(x: Array) -> Array:
    activated: Array = 1 / (1 + np.exp(-x))
    return activated
