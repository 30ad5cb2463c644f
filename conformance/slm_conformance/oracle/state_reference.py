"""The float64 oracle of recurrent models: lfm2 and mamba2, and the base of rwkv7's oracle.

The logits of a sequence are computed from all its embedding rows each time, so an edit is an edit of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.factories import ModelShape
from slm_conformance.oracle.reference import Array, Offset, Reference, Rounding, empty_cache, exact
from slm_conformance.oracle.weights import Weights, tensor_values
from slm_core.gguf import GgufFile


@dataclass(frozen=True, slots=True, eq=False)
class StateWeights(Weights):
    """The weights of a model with recurrent layers."""

    def kv_bytes(self, n_tokens: int, bytes_per_number: float) -> int:
        """See ``Weights``; states are float32."""
        n_attention_layers = sum(name.endswith("attn_k.weight") for name in self.tensors)
        numbers = n_tokens * n_attention_layers * 2 * self.shape.n_kv_heads * self.shape.head_dim
        return int(numbers * bytes_per_number) + 4 * sum(map(self._n_state, range(self.shape.n_layers)))

    def _n_state(self, layer: int) -> int:
        """The number of values in the state of a layer: of its convolution and of its heads."""
        block = f"blk.{layer}."
        if (taps := self.tensors.get(f"{block}shortconv.conv.weight")) is not None:
            return _n_conv_state(taps)
        if f"{block}time_mix_key.weight" in self.tensors:
            return self.shape.n_embd * (2 + self.shape.head_dim)
        if (taps := self.tensors.get(f"{block}ssm_conv1d.weight")) is None:
            return 0
        n_inner: int = self.tensors[f"{block}ssm_out.weight"].shape[1]
        n_groups = len(self.tensors[f"{block}ssm_norm.weight"])
        return _n_conv_state(taps) + n_inner * (len(taps) - n_inner) // (2 * n_groups)


def read_states(path: Path) -> StateWeights:
    """The weights of a file in F32."""
    with GgufFile.open(path) as file:
        tensors = {name: tensor_values(file, info) for name, info in file.tensors.items()}
        arch = file.require("general.architecture", str)
        heads = [len(values) for name, values in tensors.items() if name.endswith("attn_q_norm.weight")]
        head_dim = heads[0] if heads else file.get(f"{arch}.wkv.head_size", int, 1)
        norm = "layer_norm" if f"{arch}.attention.layer_norm_epsilon" in file.metadata else "layer_norm_rms"
        n_heads, n_kv_heads = (
            next((len(v) // head_dim for n, v in tensors.items() if n.endswith(f"attn_{x}.weight")), 0) for x in "qk"
        )
        shape = ModelShape(
            architecture=arch,  # type: ignore[arg-type]
            n_layers=file.require(f"{arch}.block_count", int),
            n_embd=file.require(f"{arch}.embedding_length", int),
            n_ff=file.require(f"{arch}.feed_forward_length", int),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            rope_freq_base=file.get(f"{arch}.rope.freq_base", float, 1e4),
            norm_eps=file.require(f"{arch}.attention.{norm}_epsilon", float),
            tied="output.weight" not in file.tensors,
        )
        return StateWeights(shape, tensors, "f32")


class StateReference(Reference):
    """See ``Reference``; recurrent models have no ``cut``."""

    def __init__(
        self,
        weights: Weights,
        round_inputs: Rounding = exact,
        round_kv: Rounding = exact,
        round_queries: Rounding = exact,
        round_attention: Rounding = exact,
    ) -> None:
        super().__init__(weights, round_inputs, round_kv, round_queries, round_attention)
        self._rows: dict[int, Array] = {}

    def length(self, seq_id: int = 0) -> int:
        """The number of tokens of a sequence."""
        return len(self._rows_of(seq_id))

    def embed_rows(
        self,
        x: Array,
        seq_id: int = 0,
        *,
        bidirectional: bool = False,
        offsets: Sequence[Offset] | None = None,
        bias: Array | None = None,
    ) -> Array:
        """See ``Reference``; a token attends to earlier tokens only."""
        assert not bidirectional, "a recurrent layer sees no later tokens"
        assert offsets is None, "a recurrent layer has no positions"
        assert bias is None, "a recurrent layer has no attention scores"
        self._rows[seq_id] = np.concatenate([self._rows_of(seq_id), x])
        states = self._entered(self._rows[seq_id])
        for layer in range(self._shape.n_layers):
            states = self._steered(layer, self._block(layer, states))
        name = "output_norm" if "output_norm.weight" in self._tensors else "token_embd_norm"
        return self._norm(name, states)[-len(x) :]

    def fork(self, src: int, dst: int, end: int | None = None) -> None:
        """Make ``dst`` a copy of ``src[:end]``."""
        self._rows[dst] = self._rows_of(src)[:end]

    def truncate(self, length: int, seq_id: int = 0) -> None:
        """Forget the tokens from position ``length`` on."""
        self._rows[seq_id] = self._rows_of(seq_id)[:length]

    def cut(self, start: int, end: int, seq_id: int = 0) -> None:
        """Raise: the states of later tokens depend on the tokens that a cut removes."""
        raise NotImplementedError("a recurrent model declares no cut")

    def drop(self, seq_id: int = 0) -> None:
        """Forget a sequence."""
        self._rows.pop(seq_id, None)

    def _rows_of(self, seq_id: int) -> Array:
        return self._rows.get(seq_id, np.empty((0, self._shape.n_embd)))

    def _entered(self, rows: Array) -> Array:
        """The inputs of the first block."""
        return rows

    def _block(self, layer: int, x: Array) -> Array:
        normed = self._norm(f"blk.{layer}.attn_norm", x)
        if f"blk.{layer}.ssm_in.weight" in self._tensors:
            return x + self._scanned(layer, normed)
        if f"blk.{layer}.shortconv.in_proj.weight" in self._tensors:
            x = x + self._convolved(layer, normed)
        else:
            rotations = self._rotations(np.arange(len(x), dtype=np.float64)[:, None].repeat(3, axis=1))
            x = x + self._attention(layer, normed, empty_cache(self._shape), rotations, False)
        return x + self._feed_forward(layer, self._norm(f"blk.{layer}.ffn_norm", x))

    def _convolved(self, layer: int, x: Array) -> Array:
        """LFM2: a short convolution between two gates."""
        b, c, inner = np.split(self._linear(f"blk.{layer}.shortconv.in_proj", x), 3, axis=1)
        mixed = c * _causal(b * inner, self._tensors[f"blk.{layer}.shortconv.conv.weight"])
        return self._linear(f"blk.{layer}.shortconv.out_proj", mixed)

    def _scanned(self, layer: int, x: Array) -> Array:
        """Mamba 2: the state of each head decays, and the input of the token is added."""
        block = f"blk.{layer}."
        n_inner = self._tensors[f"{block}ssm_out.weight"].shape[1]
        rates, skip, scale = (self._tensors[f"{block}ssm_{name}"] for name in ("a", "d", "norm.weight"))
        n_heads, n_groups = len(rates), len(scale)
        z, convolved, dt = np.split(self._linear(f"{block}ssm_in", x), [n_inner, -n_heads], axis=1)
        taps, bias = (self._tensors[f"{block}ssm_conv1d.{name}"] for name in ("weight", "bias"))
        convolved = _silu(_causal(convolved, taps) + bias)
        dt = np.logaddexp(0, dt + self._tensors[f"{block}ssm_dt.bias"])  # [T, H]
        inner, b, c = np.split(convolved, [n_inner, (n_inner + convolved.shape[1]) // 2], axis=1)
        inner = inner.reshape(len(x), n_heads, -1)  # [T, H, P]
        b, c = (part.reshape(len(x), n_groups, -1).repeat(n_heads // n_groups, axis=1) for part in (b, c))  # [T, H, N]
        state, outputs = np.zeros((*inner.shape[1:], b.shape[2])), []
        for t in range(len(x)):
            decay = np.exp(dt[t, :, None, None] * rates[:, :, None])
            state = decay * state + (dt[t, :, None] * inner[t])[:, :, None] * b[t, :, None, :]
            outputs.append(np.einsum("hpn,hn->hp", state, c[t]) + skip * inner[t])
        gated = (np.array(outputs).reshape(len(x), -1) * _silu(z)).reshape(len(x), n_groups, -1)
        sizes = np.sqrt(np.mean(gated * gated, axis=-1, keepdims=True) + self._shape.norm_eps)
        return self._linear(f"{block}ssm_out", (gated / sizes * scale).reshape(len(x), -1))


def _n_conv_state(taps: NDArray[np.floating]) -> int:
    n_channels, n_taps = taps.shape
    return int(n_channels * (n_taps - 1))


def _causal(x: Array, taps: NDArray[np.floating]) -> Array:
    """A causal depthwise convolution: x [T, C], taps [C, W]; the last tap is for the token itself."""
    n_taps = taps.shape[1]
    padded = np.concatenate([np.zeros((n_taps - 1, x.shape[1])), x])
    convolved = np.zeros_like(x)
    for i in range(n_taps):
        convolved += padded[i : i + len(x)] * taps[:, i]
    return convolved


def _silu(x: Array) -> Array:
    activated: Array = x / (1 + np.exp(-x))
    return activated
