"""The graph of a decoder, built from a model's specification.

Shapes: n tokens of a batch, m rows of hidden states, p rows of logits (m, if states are not an output), t cells that
attention reads, c cells of the cache, E embedding width, H query heads, K key and value heads, D head width, V
vocabulary.

The tokens of all sequences are in one row of the batch. ``attention_bias`` determines the cells to which a token
attends; there is one for each window size. Keys in the cache are rotated. The embedding is not in the graph: the host
dequantizes the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from slm_core.architectures import LayerSpec, ModelSpec, NormKind, RopeSpec, RopeStyle, alibi_slopes
from slm_core.gguf import GgufFile
from slm_onnx.feedforward import FeedForward
from slm_onnx.graphwriter import ELEMENT_TYPES, MICROSOFT, Dim, GraphWriter
from slm_onnx.ports import DIRECTION, PLANES, Kinds, attention_bias, past, present, rotation, temperature
from slm_onnx.products import GraphOptions, Products

_EMBEDDING_NORM = "token_embd_norm"
_POST_NORM = "post_attention_norm"


class DecoderGraph:
    """Builds the graph of one model.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: the model's architecture and sizes.
        options: number formats.

    Attributes:
        opset: version of the ONNX operators.
        batch: number of rows of the batch.
        cells: length of the caches.
    """

    opset: ClassVar[int] = 21
    batch: ClassVar[Dim] = 1
    cells: ClassVar[tuple[Dim, Dim]] = ("c", "c")

    def __init__(self, gguf: GgufFile, spec: ModelSpec, options: GraphOptions) -> None:
        self._gguf = gguf
        self._spec = spec
        self._kinds = Kinds.of(spec)
        self._dtype = options.dtype
        self._has_bias = options.bias
        self._has_states = options.states
        self._has_directions = options.adapters
        self._graph = GraphWriter("decoder", opset=self.opset)
        self._products = Products(self._graph, gguf, options)
        self._feed_forward = FeedForward(self._graph, gguf, spec, options, self._products)
        self._scoring: dict[str, Any] = {}
        if spec.attention_scale is not None:
            self._scoring["scale"] = spec.attention_scale
        if spec.attention_softcap is not None:
            self._scoring["softcap"] = spec.attention_softcap
        if not options.causal:
            self._scoring["causal"] = 0

    def build(self, progress: Callable[[float], None]) -> GraphWriter:
        """Write the graph; ``progress`` is called with the share of layers that are done."""
        graph, spec = self._graph, self._spec
        x = self._inputs()
        self._caches()
        if self._has(f"{_EMBEDDING_NORM}.weight"):
            x = self._norm(x, _EMBEDDING_NORM, "embedded.normed")
        branch = ""
        for layer in range(spec.n_layers):
            x, branch = self._block(layer, x, branch)
            if self._has_directions and layer > 0:
                branch = self._steered(layer, branch)
            progress((layer + 1) / spec.n_layers)
        _, normed = self._add_and_norm(x, branch, "output_norm")
        if self._has_states:
            normed = self._states(normed)
        output = "output" if self._has("output.weight") else "token_embd"
        rows = self._products.linear(normed, output, "output.product")
        if output != "output" and self._has("output.bias"):
            rows = graph.node("Add", [rows, self._products.vector("output.bias")], "output.with_bias")
        self._logits(rows)
        graph.output("logits", "float32", [self.batch, "p" if self._has_states else "m", spec.n_vocab])
        return graph

    def _states(self, normed: str) -> str:
        """Hidden states [1, m, E] as an output; returns the rows [1, p, E] that become logits."""
        graph = self._graph
        graph.node("Cast", [normed], "states", to=ELEMENT_TYPES["float32"])
        graph.output("states", "float32", [self.batch, "m", self._spec.n_embd])
        return graph.node("Gather", [normed, graph.input("product_rows", "int64", ["p"])], f"{normed}.product", axis=1)

    def _inputs(self) -> str:
        graph, spec, dtype = self._graph, self._spec, self._dtype
        embeddings = graph.input("inputs_embeds", dtype, [1, "n", spec.n_embd])
        graph.input("rows", "int64", [1, "n"])
        for kind, rope in enumerate(self._kinds.ropes):
            for name in rotation(kind):
                graph.input(name, dtype, ["n", rope.n_dims // 2])
        for kind in range(len(self._kinds.windows) if self._has_bias else 0):
            graph.input(attention_bias(kind), dtype, [1, 1, "n", "t"])
        for kind in range(len(self._kinds.temperatures)):
            graph.input(temperature(kind), dtype, [1, "n", 1])
        if spec.alibi_max_bias is not None:
            self._slope(graph.input("distances", dtype, [1, 1, "n", "t"]), spec.alibi_max_bias)
        self._lengths()
        graph.input("logits_rows", "int64", ["m"])
        return embeddings

    def _lengths(self) -> None:
        self._graph.input("seqlens_k", "int32", [1])
        self._graph.input("total_sequence_length", "int32", [])

    def _slope(self, distances: str, max_bias: float) -> None:
        """Add ALiBi: a separate bias for each head."""
        graph = self._graph
        slopes = -alibi_slopes(self._spec.n_heads, max_bias).reshape(1, -1, 1, 1).astype(self._dtype)
        sloped = graph.node("Mul", [distances, graph.weight("slopes", slopes)], "sloped")
        for kind in range(len(self._kinds.windows)):
            graph.node("Add", [attention_bias(kind), sloped], f"sloped.{attention_bias(kind)}")

    def _caches(self) -> None:
        for layer in range(self._spec.n_layers):
            for plane in PLANES:
                names = past(layer, plane), present(layer, plane)
                for declare, name, length in zip(
                    (self._graph.input, self._graph.output), names, self.cells, strict=True
                ):
                    shape: list[Dim] = [self.batch, self._spec.n_kv_heads, length, self._spec.head_dim]
                    declare(name, self._dtype, shape)

    def _output_rows(self, x: str) -> str:
        """The rows of the tokens with logits."""
        return self._graph.node("Gather", [x, "logits_rows"], f"{x}.output_rows", axis=1)

    def _block(self, layer: int, x: str, branch: str) -> tuple[str, str]:
        """One block. Its input is the sum ``x + branch``; its result is such a pair, too.

        After the last attention, tokens are independent, so only the rows of tokens with logits are computed.
        """
        spec, prefix = self._spec, f"blk.{layer}."
        is_last, ffn_norm = layer == spec.n_layers - 1, f"{prefix}{spec.layers[layer].ffn_norm}"
        x, normed = self._add_and_norm(x, branch, f"{prefix}attn_norm")
        attn_norm_2 = f"{prefix}attn_norm_2"
        mixed = self._attend(
            layer, self._norm(x, attn_norm_2, f"{attn_norm_2}.normed") if self._has_norm(attn_norm_2) else normed
        )
        if is_last:
            mixed, x = self._output_rows(mixed), self._output_rows(x)
        attended = self._products.linear(mixed, f"{prefix}attn_output", f"{prefix}attended")
        post_norm = "" if spec.layers[layer].ffn_norm == _POST_NORM else f"{prefix}{_POST_NORM}"
        attended = self._residual_term(attended, post_norm)
        if not spec.parallel:
            x, normed = self._add_and_norm(x, attended, ffn_norm)
            return x, self._feed_forward_term(layer, normed)
        if self._has_norm(ffn_norm):
            normed = self._norm(x, ffn_norm, f"{ffn_norm}.normed")
        elif is_last:
            normed = self._output_rows(normed)
        both = self._graph.node("Add", [attended, self._feed_forward_term(layer, normed)], f"{prefix}branches")
        return x, both

    def _steered(self, layer: int, branch: str) -> str:
        """Add the direction of a control vector, an input of the graph [E], to the last term of a layer's output."""
        direction = self._graph.input(f"{DIRECTION}{layer}", self._dtype, [self._spec.n_embd])
        return self._graph.node("Add", [branch, direction], f"blk.{layer}.steered")

    def _feed_forward_term(self, layer: int, x: str) -> str:
        return self._residual_term(self._feed_forward.layer(layer, x), f"blk.{layer}.post_ffw_norm")

    def _residual_term(self, output: str, post_norm: str) -> str:
        """The term that a layer adds to the residual stream."""
        if self._has_norm(post_norm):
            output = self._norm(output, post_norm, f"{post_norm}.normed")
        if self._spec.residual_scale == 1:
            return output
        factor = self._graph.number(self._spec.residual_scale, self._dtype)
        return self._graph.node("Mul", [output, factor], f"{output}.scaled")

    def _attend(self, index: int, x: str) -> str:
        """From x [1, n, E] to the outputs of the heads, side by side [1, n, H*D]."""
        graph, spec, layer, prefix = self._graph, self._spec, self._spec.layers[index], f"blk.{index}."
        q, k, v = self._queries_keys_values(prefix, x)
        q = self._head_norm(q, f"{prefix}attn_q_norm", spec.n_heads)
        k = self._head_norm(k, f"{prefix}attn_k_norm", spec.n_kv_heads)
        if layer.rope is not None:
            q = self._rotate(q, layer.rope, spec.n_heads)
            k = self._rotate(k, layer.rope, spec.n_kv_heads)
        if layer.temperature is not None:
            kind = self._kinds.temperatures.index(layer.temperature)
            q = graph.node("Mul", [q, temperature(kind)], f"{q}.sharpened")
        return self._mixed(index, q, k, v)

    def _mixed(self, index: int, q: str, k: str, v: str) -> str:
        """Store keys and values [1, n, K*D], and attend with queries [1, n, H*D] to the cache."""
        spec = self._spec
        return self._graph.node(
            "GroupQueryAttention",
            [
                *(q, k, v, past(index, "key"), past(index, "value"), "seqlens_k", "total_sequence_length"),
                *self._mask_inputs(spec.layers[index]),
            ],
            [f"blk.{index}.mixed", present(index, "key"), present(index, "value")],
            domain=MICROSOFT,
            num_heads=spec.n_heads,
            kv_num_heads=spec.n_kv_heads,
            **self._scoring,
            **self._window(spec.layers[index]),
        )

    def _queries_keys_values(self, prefix: str, x: str) -> Sequence[str]:
        spec, outputs = self._spec, [f"{prefix}{name}" for name in "qkv"]
        if self._has(f"{prefix}attn_qkv.weight"):
            sizes = [spec.head_dim * n for n in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)]
            fused = self._products.linear(x, f"{prefix}attn_qkv", f"{prefix}qkv")
            flat = self._products.split(fused, sizes, outputs)
        else:
            flat = [self._products.linear(x, f"{prefix}attn_{name}", f"{prefix}{name}") for name in "qkv"]
        if spec.qkv_limit is None:
            return flat
        limits = [self._graph.number(limit, self._dtype) for limit in (-spec.qkv_limit, spec.qkv_limit)]
        return [self._graph.node("Clip", [part, *limits], f"{part}.clipped") for part in flat]

    def _mask_inputs(self, layer: LayerSpec) -> Sequence[str]:
        """The mask inputs of attention."""
        if not self._has_bias:
            return ()
        name = attention_bias(self._kinds.windows.index(layer.window))
        return "", "", "", name if self._spec.alibi_max_bias is None else f"sloped.{name}"

    def _window(self, layer: LayerSpec) -> dict[str, int]:
        """The window attributes of attention, if there is no bias."""
        return {} if self._has_bias or layer.window is None else {"local_window_size": layer.window}

    def _head_norm(self, x: str, name: str, n_heads: int) -> str:
        """The norm of heads, if the model has one, for x [1, n, heads * D].

        Its weight is for all heads [D], for each head [heads, D], or for all heads as one row [heads * D].
        """
        if not self._has_norm(name):
            return x
        graph, width = self._graph, self._spec.head_dim
        shape = self._gguf.tensors[f"{name}.weight"].shape
        if shape == (n_heads * width,) and n_heads > 1:
            return self._norm(x, name, f"{name}.normed")
        heads = graph.node("Reshape", [x, graph.constant(f"heads.{n_heads}", [0, -1, n_heads, width])], f"{x}.heads")
        if len(shape) == 1:
            normed = self._norm(heads, name, f"{heads}.normed")
        else:
            ones = graph.weight(f"ones.{width}", np.ones(width, self._dtype))
            same = self._normalized(heads, ones, f"{heads}.normed")
            normed = graph.node("Mul", [same, self._products.vector(f"{name}.weight")], f"{heads}.weighted")
        return graph.node("Reshape", [normed, graph.constant(f"flat.{n_heads}", [0, -1, n_heads * width])], f"{x}.flat")

    def _rotate(self, x: str, rope: RopeSpec, n_heads: int) -> str:
        return self._graph.node(
            "RotaryEmbedding",
            [x, *self._rotation(rope)],
            f"{x}.rotated",
            domain=MICROSOFT,
            interleaved=int(rope.style is RopeStyle.INTERLEAVED),
            num_heads=n_heads,
            rotary_embedding_dim=0 if rope.n_dims == self._spec.head_dim else rope.n_dims,
        )

    def _rotation(self, rope: RopeSpec) -> Sequence[str]:
        """Inputs of RoPE: positions, and tables indexed by them."""
        return "rows", *rotation(self._kinds.ropes.index(rope))

    def _logits(self, rows: str) -> None:
        """The logits in float32, with factor and soft cap."""
        graph, spec, dtype = self._graph, self._spec, "float32"
        steps: list[tuple[str, list[str], dict[str, Any]]] = [("Cast", [], {"to": ELEMENT_TYPES[dtype]})]
        if spec.logit_scale != 1:
            steps.append(("Mul", [graph.number(spec.logit_scale, dtype)], {}))
        if spec.logit_softcap is not None:
            cap = graph.number(spec.logit_softcap, dtype)
            steps += [("Div", [cap], {}), ("Tanh", [], {}), ("Mul", [cap], {})]
        for i, (operator, further, attributes) in enumerate(steps, 1):
            output = "logits" if i == len(steps) else f"logits.{i}"
            rows = graph.node(operator, [rows, *further], output, **attributes)

    def _add_and_norm(self, x: str, branch: str, name: str) -> tuple[str, str]:
        """``x + branch`` and its norm, if the model has one; "" as ``branch`` means 0."""
        if not branch:
            return x, self._norm(x, name, f"{name}.normed") if self._has_norm(name) else x
        if not self._has_norm(name):
            both = self._graph.node("Add", [x, branch], f"{name}.sum")
            return both, both
        operator = {
            NormKind.RMS: "SkipSimplifiedLayerNormalization",
            NormKind.LAYER: "SkipLayerNormalization",
        }[self._spec.norm]
        outputs = [f"{name}.normed", "", "", f"{name}.sum"]
        bias = [self._products.vector(f"{name}.bias")] if self._has(f"{name}.bias") else []
        inputs = [x, branch, self._products.vector(f"{name}.weight"), *bias]
        self._graph.node(operator, inputs, outputs, domain=MICROSOFT, epsilon=self._spec.norm_eps)
        return outputs[3], outputs[0]

    def _norm(self, x: str, name: str, output: str) -> str:
        bias = f"{name}.bias" if self._has(f"{name}.bias") else ""
        return self._normalized(x, self._products.vector(f"{name}.weight"), output, bias)

    def _normalized(self, x: str, weight: str, output: str, bias: str = "") -> str:
        operator = {NormKind.RMS: "SimplifiedLayerNormalization", NormKind.LAYER: "LayerNormalization"}[self._spec.norm]
        inputs = [x, weight, *([self._products.vector(bias)] if bias else [])]
        return self._graph.node(operator, inputs, output, axis=-1, epsilon=self._spec.norm_eps, stash_type=1)

    def _has_norm(self, name: str) -> bool:
        return self._has(f"{name}.weight")

    def _has(self, name: str) -> bool:
        return name in self._gguf.tensors
