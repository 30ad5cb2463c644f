"""Reads the tensors of a model and prepares them for a kernel set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import DENSE, TEXT_TYPES, ExpertsSpec, LayerSpec, ModelSpec, alibi_slopes
from slm_core.gguf import GgmlType, WeightSource
from slm_core.quant import QuantizedTensor, check_size, check_tensor
from slm_native.altup_weights import (
    Streams,
    read_altup,
    read_laurel,
    read_layer_embedding,
    read_layer_embeddings,
    read_streams,
)
from slm_native.altup_weights import (
    Tensors as StreamTensors,
)
from slm_native.kernels import (
    AltUp,
    Attention,
    ChannelMix,
    Experts,
    FeedForward,
    KernelSet,
    LatentAttention,
    Laurel,
    LayerEmbedding,
    Linear,
    MoeLayer,
    Norm,
    Scoring,
    Weight,
    WeightBytes,
)
from slm_native.kv import Array
from slm_native.mtp import MtpWeights
from slm_native.recurrent_weights import Recurrent, Tensors, read_channel_mix, read_recurrent
from slm_native.steps import LayerEmbeddingTable


@dataclass(frozen=True, slots=True, eq=False)
class DenseAndMoe:
    """The weights of a dense feed-forward layer parallel to experts with the same input."""

    dense: FeedForward
    dense_norm: Norm | None  # [E], of the dense layer's output
    experts: MoeLayer
    router_norm: Norm  # [E]
    experts_norm: Norm | None  # [E]
    mixed_norm: Norm | None  # [E], of the experts' output


AnyFeedForward: TypeAlias = FeedForward | MoeLayer | DenseAndMoe | ChannelMix


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The weights of one block."""

    attn_norm: Norm | None  # [E]
    attention: Attention | LatentAttention | None
    recurrent: Recurrent | None
    attn_post_norm: Norm | None  # [E], of attention's output
    attn_sum_norm: Norm | None  # [E], of attention's output plus the block's input
    ffn_norm: Norm | None  # [E]
    feed_forward: AnyFeedForward | None
    ffn_post_norm: Norm | None  # [E]
    ffn_sum_norm: Norm | None  # [E]
    scoring: Scoring
    altup: AltUp | None = None
    laurel: Laurel | None = None
    embedding: LayerEmbedding | None = None
    output_scale: Array | None = None  # [1], factor on the block's output


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights outside the blocks."""

    token_embd: Weight  # (V, E)
    position_embd: Weight | None  # (positions, E)
    embd_norm: Norm | None  # [E]
    token_type: Array | None  # [E], the row of token type 0 (text)
    output_norm: Norm | None  # [E]
    output: Linear  # (V, E)
    streams: Streams | None
    layer_embeddings: LayerEmbeddingTable | None
    dense: Sequence[Linear]  # after the last norm of an encoder


class WeightReader:
    """Prepares the weights of a file that ``check_tensors`` has accepted.

    Args:
        gguf: the file.
        spec: the model's architecture and sizes.
        kernels: the kernel set that uses the weights.
        in_memory: copy tensors of mapped files into memory now.
    """

    def __init__(self, gguf: WeightSource, spec: ModelSpec, kernels: KernelSet, *, in_memory: bool = False) -> None:
        self._gguf = gguf
        self._spec = spec
        self._kernels = kernels
        self._in_memory = in_memory
        self._rope_factors: dict[str, Array | None] = {}  # cached: every new context reads them

    def model(self) -> Weights:
        """The weights outside the blocks."""
        token_embd = self._kernels.prepare(self._tensor("token_embd.weight"))
        positions = "position_embd.weight"
        return Weights(
            token_embd=token_embd,
            position_embd=self._kernels.prepare(self._tensor(positions)) if self._has(positions) else None,
            embd_norm=self._norm("token_embd_norm") if self._spec.output_norm != "token_embd_norm" else None,
            token_type=self._first_row(TEXT_TYPES) if self._has(TEXT_TYPES) else None,
            output_norm=self._norm(self._spec.output_norm),
            output=self._linear("output") if self._has("output.weight") else self._tied_output(token_embd),
            streams=None if self._spec.active_stream is None else read_streams(self._stream_tensors),
            layer_embeddings=read_layer_embeddings(self._stream_tensors),
            dense=[self._linear(name) for name in DENSE if self._has(f"{name}.weight")],
        )

    def block(self, index: int) -> Block:
        """The weights of a block; thread-safe."""
        layer, prefix = self._spec.layers[index], f"blk.{index}."
        attn_norm, ffn_norm = self._norm(f"{prefix}attn_norm"), self._norm(f"{prefix}{layer.ffn_norm}")
        post_norm, sum_norm = "post_attention_norm", "attn_output_norm"
        if self._spec.parallel and ffn_norm is None:
            ffn_norm = attn_norm
        attention = self._any_attention(prefix, layer)
        return Block(
            attn_norm=(self._norm(f"{prefix}attn_norm_2") if layer.ffn_norm != "attn_norm_2" else None) or attn_norm,
            attention=attention,
            recurrent=self._recurrent(prefix, layer),
            attn_post_norm=self._norm(f"{prefix}{post_norm}") if layer.ffn_norm != post_norm else None,
            attn_sum_norm=self._norm(f"{prefix}{sum_norm}") if layer.ffn_norm != sum_norm else None,
            ffn_norm=ffn_norm,
            feed_forward=self._any_feed_forward(prefix, layer),
            ffn_post_norm=self._norm(f"{prefix}post_ffw_norm"),
            ffn_sum_norm=self._norm(f"{prefix}layer_output_norm"),
            scoring=Scoring(
                layer.window, self._spec.attention_softcap, self._slopes(prefix), attention and attention.sinks
            ),
            altup=read_altup(self._stream_tensors, prefix),
            laurel=read_laurel(self._stream_tensors, prefix),
            embedding=read_layer_embedding(self._stream_tensors, prefix),
            output_scale=self._vector(f"{prefix}layer_output_scale.weight"),
        )

    def mtp(self, weights: Weights) -> MtpWeights:
        """The weights of the MTP layer, outside its block.

        Args:
            weights: the weights outside the blocks. The layer uses them where the file has no separate ones for it.
        """
        prefix = f"blk.{self._spec.n_layers}.nextn."
        embeddings, head = f"{prefix}embed_tokens.weight", f"{prefix}shared_head_head"
        return MtpWeights(
            embedding_norm=self._norm(f"{prefix}enorm"),
            state_norm=self._norm(f"{prefix}hnorm"),
            projection=self._linear(f"{prefix}eh_proj"),
            output_norm=self._norm(f"{prefix}shared_head_norm") or weights.output_norm,
            output=self._linear(head) if self._has(f"{head}.weight") else weights.output,
            token_embd=self._prepared(embeddings) if self._has(embeddings) else None,
        )

    def sizes(self) -> WeightBytes:
        """Bytes of the tensors before, in and after the blocks, without blocks that are not layers of the model."""
        embedding, output, blocks = 0, 0, [0] * len(self._spec.layers)
        for name, info in self._gguf.tensors.items():
            if name.startswith("blk."):
                if (index := int(name.split(".")[1])) < len(blocks):
                    blocks[index] += info.n_bytes
            elif name.startswith("output"):
                output += info.n_bytes
            else:
                embedding += info.n_bytes
        return WeightBytes(embedding, blocks, output, tied=not self._has("output.weight"))

    def check_blocks(self) -> None:
        """Check the types and sizes of the tensors of all blocks, so that preparing them later cannot fail.

        No tensor is read, because reading may be slow.

        Raises:
            UnsupportedModel, InvalidModelFile: see ``slm_core.quant.check_size``.
        """
        for name, info in self._gguf.tensors.items():
            if name.startswith("blk."):
                check_size(info.n_bytes, info.ggml_type, info.shape)

    def rope_factors(self, name: str) -> Array | None:
        """A table of RoPE divisors [R/2], in host memory."""
        if name not in self._rope_factors:
            values = self._vector(name)
            self._rope_factors[name] = None if values is None else self._kernels.to_host(values)
        return self._rope_factors[name]

    @property
    def _stream_tensors(self) -> StreamTensors:
        return StreamTensors(self._linear, self._each, self._prepared, self._vector, self._norm, self._has)

    def _prepared(self, name: str) -> Weight:
        return self._kernels.prepare(self._tensor(name))

    def _slopes(self, prefix: str) -> Array | None:
        """The slopes of ALiBi [H]; None without ALiBi."""
        if self._spec.alibi_max_bias is None:
            return None
        return self._computed(f"{prefix}attn_slopes", alibi_slopes(self._spec.n_heads, self._spec.alibi_max_bias))

    def _any_attention(self, prefix: str, layer: LayerSpec) -> Attention | LatentAttention | None:
        if not layer.attends:
            return None
        return self._latent_attention(prefix) if layer.latent else self._attention(prefix, layer)

    def _any_feed_forward(self, prefix: str, layer: LayerSpec) -> AnyFeedForward | None:
        if self._has(f"{prefix}pre_ffw_norm_2.weight"):
            return self._dense_and_moe(prefix, layer)
        if layer.experts is not None:
            return self._experts(prefix, layer, layer.experts)
        if self._has(f"{prefix}channel_mix_key.weight"):
            return read_channel_mix(self._tensors(), prefix)
        return self._feed_forward(prefix) if self._has(f"{prefix}ffn_up.weight") else None

    def _recurrent(self, prefix: str, layer: LayerSpec) -> Recurrent | None:
        if layer.recurrent is None:
            return None
        return read_recurrent(self._tensors(), prefix, layer.recurrent)

    def _tensors(self) -> Tensors:
        return Tensors(self._linear, self._vector, self._norm, self._kernels)

    def _attention(self, prefix: str, layer: LayerSpec) -> Attention:
        q, k, v = self._qkv(prefix, layer)
        return Attention(
            *(q, k, v),
            q_norm=self._head_norm(prefix, "attn_q_norm", layer),
            k_norm=self._head_norm(prefix, "attn_k_norm", layer),
            v_norm=self._head_norm(prefix, "attn_v_norm", layer),
            output=self._linear(f"{prefix}attn_output"),
            sinks=self._vector(f"{prefix}attn_sinks.weight"),
        )

    def _latent_attention(self, prefix: str) -> LatentAttention:
        compressed = self._has(f"{prefix}attn_q_a.weight")
        return LatentAttention(
            q_down=self._linear(f"{prefix}attn_q_a") if compressed else None,
            q_norm=self._norm(f"{prefix}attn_q_a_norm"),
            q=self._linear(f"{prefix}attn_q_b" if compressed else f"{prefix}attn_q"),
            kv_down=self._linear(f"{prefix}attn_kv_a_mqa"),
            kv_norm=self._norm(f"{prefix}attn_kv_a_norm"),
            k_up=self._kernels.per_head(self._each(f"{prefix}attn_k_b")),
            v_up=self._kernels.per_head(self._each(f"{prefix}attn_v_b")),
            output=self._linear(f"{prefix}attn_output"),
        )

    def _qkv(self, prefix: str, layer: LayerSpec) -> tuple[Linear, Linear | None, Linear | None]:
        if layer.kv_layer is not None:
            return self._linear(f"{prefix}attn_q"), None, None
        if not self._has(f"{prefix}attn_qkv.weight"):
            q, k, v = (f"{prefix}attn_{name}" for name in "qkv")
            return self._linear(q), self._linear(k), self._linear(v) if self._has(f"{v}.weight") else None
        shape = self._spec.kv_shape(layer)
        n_q, n_kv = self._spec.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        fused_q, fused_k, fused_v = self._split(f"{prefix}attn_qkv", n_q, n_kv, n_kv)
        return fused_q, fused_k, fused_v

    def _feed_forward(self, prefix: str, suffix: str = "") -> FeedForward:
        """The feed-forward layer. The gate is a separate matrix, or the upper half of ``up``."""
        gate, up, down = (f"{prefix}ffn_{name}{suffix}" for name in ("gate", "up", "down"))
        n_ff = self._gguf.tensors[f"{down}.weight"].shape[1]
        if self._gguf.tensors[f"{up}.weight"].shape[0] == 2 * n_ff:
            upper, lower = self._split(up, n_ff, n_ff)
            return FeedForward(upper, lower, self._linear(down))
        return FeedForward(
            self._linear(gate) if self._has(f"{gate}.weight") else None, self._linear(up), self._linear(down)
        )

    def _experts(self, prefix: str, layer: LayerSpec, spec: ExpertsSpec) -> MoeLayer:
        shared_gate = f"{prefix}ffn_gate_inp_shexp"
        gates, ups, downs = (self._each(f"{prefix}ffn_{name}_exps") for name in ("gate", "up", "down"))
        experts = Experts(
            spec,
            router=self._linear(f"{prefix}ffn_gate_inp"),
            selection_bias=self._vector(f"{prefix}exp_probs_b.bias"),
            experts=[FeedForward(*matrices) for matrices in zip(gates, ups, downs, strict=True)],
            activation=layer.activation,
            shared=self._feed_forward(prefix, "_shexp") if self._has(f"{prefix}ffn_up_shexp.weight") else None,
            shared_gate=self._row(shared_gate) if self._has(f"{shared_gate}.weight") else None,
        )
        return self._kernels.moe(experts)

    def _dense_and_moe(self, prefix: str, layer: LayerSpec) -> DenseAndMoe:
        scale = self._vector(f"{prefix}ffn_gate_inp.scale")
        assert scale is not None and layer.experts is not None, "the architecture declares them"
        gates, ups = self._halves(f"{prefix}ffn_gate_up_exps")
        downs = self._each(f"{prefix}ffn_down_exps")
        experts = [FeedForward(*matrices) for matrices in zip(gates, ups, downs, strict=True)]
        router = Linear(self._prepared(f"{prefix}ffn_gate_inp.weight"))
        return DenseAndMoe(
            dense=self._feed_forward(prefix),
            dense_norm=self._norm(f"{prefix}post_ffw_norm_1"),
            experts=self._kernels.moe(Experts(layer.experts, router, None, experts, layer.activation)),
            router_norm=Norm(scale * self._spec.n_embd**-0.5, None, self._spec.norm, self._spec.norm_eps),
            experts_norm=self._norm(f"{prefix}pre_ffw_norm_2"),
            mixed_norm=self._norm(f"{prefix}post_ffw_norm_2"),
        )

    def _halves(self, name: str) -> tuple[list[Linear], list[Linear]]:
        """The upper and the lower halves of the matrices of a tensor (X, 2 * out, in)."""
        whole = self._checked(f"{name}.weight")
        n_experts, n_rows, n_in = whole.shape
        parts = whole.data.reshape(n_experts, 2, -1)
        upper, lower = (
            [
                Linear(
                    self._kernels.prepare(
                        QuantizedTensor(
                            f"{whole.name}[{i}][{half}]", (n_rows // 2, n_in), whole.ggml_type, parts[i, half]
                        )
                    )
                )
                for i in range(n_experts)
            ]
            for half in (0, 1)
        )
        return upper, lower

    def _each(self, name: str) -> list[Linear]:
        """The matrices of a tensor (X, out, in), with their scales (X,) and biases (X, out)."""
        whole = self._checked(f"{name}.weight")
        n_experts, *shape = whole.shape
        parts = whole.data.reshape(n_experts, -1)
        bias, scale = self._vector(f"{name}.bias"), self._vector(f"{name}.scale")
        weights = [
            self._kernels.prepare(QuantizedTensor(f"{whole.name}[{i}]", tuple(shape), whole.ggml_type, parts[i]))
            for i in range(n_experts)
        ]
        return [
            Linear(weight, None if scale is None else scale[i : i + 1], None if bias is None else bias[i])
            for i, weight in enumerate(weights)
        ]

    def _row(self, name: str) -> Linear:
        """A matrix (1, in) that the file stores as a vector."""
        tensor = self._tensor(f"{name}.weight")
        matrix = QuantizedTensor(tensor.name, (1, *tensor.shape[-1:]), tensor.ggml_type, tensor.data)
        return Linear(self._kernels.prepare(matrix))

    def _split(self, name: str, *n_rows: int) -> list[Linear]:
        """Split the rows of a matrix, and of its bias, into several matrices."""
        whole, scale = self._checked(f"{name}.weight"), self._vector(f"{name}.scale")
        bias, rows = self._vector(f"{name}.bias"), whole.data.reshape(whole.shape[0], -1)
        parts, start = [], 0
        for n in n_rows:
            stop = start + n
            shape, data = (n, whole.shape[1]), rows[start:stop].reshape(-1)
            part = QuantizedTensor(f"{whole.name}[{start}:{stop}]", shape, whole.ggml_type, data)
            parts.append(Linear(self._kernels.prepare(part), scale, None if bias is None else bias[start:stop]))
            start = stop
        return parts

    def _tied_output(self, token_embd: Weight) -> Linear:
        return Linear(token_embd, bias=self._vector("output.bias"))

    def _linear(self, name: str) -> Linear:
        weight = self._kernels.prepare(self._tensor(f"{name}.weight"))
        return Linear(weight, self._vector(f"{name}.scale"), self._vector(f"{name}.bias"))

    def _head_norm(self, prefix: str, name: str, layer: LayerSpec) -> Norm | None:
        if name not in layer.plain_norms:
            return self._norm(f"{prefix}{name}")
        ones = self._computed(f"{prefix}{name}", np.ones(self._spec.width_of(layer), np.float32))
        return Norm(ones, None, self._spec.norm, self._spec.norm_eps)

    def _computed(self, name: str, values: NDArray[np.float32]) -> Array:
        """An array that is computed, not read from the file, on the device of the layer in its name."""
        return self._kernels.vector(QuantizedTensor(name, values.shape, GgmlType.F32, values.view(np.uint8)))

    def _norm(self, name: str) -> Norm | None:
        weight = self._vector(f"{name}.weight" if self._has(f"{name}.weight") else name)
        if weight is None:
            return None
        return Norm(weight, self._vector(f"{name}.bias"), self._spec.norm, self._spec.norm_eps)

    def _first_row(self, name: str) -> Array:
        whole = self._checked(name)
        row = whole.data.reshape(whole.shape[0], -1)[0]
        return self._kernels.vector(QuantizedTensor(f"{name}[0]", whole.shape[1:], whole.ggml_type, row))

    def _vector(self, name: str) -> Array | None:
        return self._kernels.vector(self._tensor(name)) if self._has(name) else None

    def _checked(self, name: str) -> QuantizedTensor:
        """A tensor whose rows consist of whole quantization blocks."""
        tensor = self._tensor(name)
        check_tensor(tensor.data, tensor.ggml_type, tensor.shape)
        return tensor

    def _tensor(self, name: str) -> QuantizedTensor:
        info, data = self._gguf.tensors[name], self._gguf.tensor_data(name)
        return QuantizedTensor(name, info.shape, info.ggml_type, np.array(data) if self._in_memory else data)

    def _has(self, name: str) -> bool:
        return name in self._gguf.tensors
