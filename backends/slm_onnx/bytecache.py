"""A KV cache in 8 bits: codes, and a scale per cell and head.

A scale is the largest magnitude of a cell's values in a head, divided by 127. Codes are not dequantized for products:
scales of keys multiply scores, and scales of values multiply the weights after softmax.
"""

from __future__ import annotations

import math

from slm_core.architectures import LayerSpec
from slm_core.types import KvType
from slm_onnx.decoder import DecoderGraph
from slm_onnx.graphwriter import MICROSOFT, Dim, GraphWriter
from slm_onnx.ports import PLANES, parts, past, present

_FLOAT, _INT8 = 1, 3  # ONNX's numbers for these types
_LARGEST = 127
_LEAST = 1e-30  # the scale if all values are 0


def quantized(graph: GraphWriter, x: str) -> tuple[str, str]:
    """Values [1, K, n, D] as int8 codes of the same shape, and scales [1, K, n, 1]."""
    last = graph.constant("last_axis", [-1])
    largest = graph.node("ReduceMax", [graph.node("Abs", [x], f"{x}.size"), last], f"{x}.largest", keepdims=1)
    divisor, least = graph.number(_LARGEST, "float32"), graph.number(_LEAST, "float32")
    scales = graph.node("Max", [graph.node("Div", [largest, divisor], f"{x}.step"), least], f"{x}.scales")
    whole = graph.node("Round", [graph.node("Div", [x, scales], f"{x}.scaled")], f"{x}.whole")
    return graph.node("Cast", [whole], f"{x}.codes", to=_INT8), scales


def expanded(graph: GraphWriter, codes: str, scales: str) -> str:
    """The dequantized values."""
    return graph.node("Mul", [graph.node("Cast", [codes], f"{codes}.float", to=_FLOAT), scales], f"{codes}.values")


class ByteCacheGraph(DecoderGraph):
    """Builds the graph of a decoder with an 8-bit cache; everything else is float32.

    Instead of ``seqlens_k`` and ``total_sequence_length`` it has the inputs ``to`` int64 [1] (the first cell that is
    written) and ``n_cells`` int64 [1] (the number of cells that attention reads).
    """

    opset = 24

    def _lengths(self) -> None:
        self._graph.input("to", "int64", [1])
        self._graph.input("n_cells", "int64", [1])

    def _caches(self) -> None:
        for layer in range(self._spec.n_layers):
            for plane in PLANES:
                for part in parts(KvType.Q8_0, self._spec.head_dim):
                    shape: list[Dim] = [1, self._spec.n_kv_heads, "c", part.width]
                    self._graph.input(past(layer, plane) + part.suffix, part.dtype, shape)
                    self._graph.output(present(layer, plane) + part.suffix, part.dtype, shape)

    def _mixed(self, index: int, q: str, k: str, v: str) -> str:
        """Attention as single operations: q [1, n, H*D] to [1, n, H*D]."""
        graph, spec, prefix = self._graph, self._spec, f"blk.{index}."
        n_groups, width = spec.n_heads // spec.n_kv_heads, spec.head_dim
        keys, key_scales = self._stored(index, "key", k)
        values, value_scales = self._stored(index, "value", v)
        grouped = graph.constant("in_groups", [0, -1, spec.n_kv_heads, n_groups, width])
        queries = graph.node(
            "Transpose", [graph.node("Reshape", [q, grouped], f"{q}.grouped")], f"{q}.transposed", perm=[0, 2, 3, 1, 4]
        )
        by_head = graph.constant("by_kv_head", [0, spec.n_kv_heads, -1, width])
        queries = graph.node("Reshape", [queries, by_head], f"{q}.by_head")  # [1, K, G*n, D]
        scale = spec.attention_scale if spec.attention_scale is not None else 1 / math.sqrt(width)
        scores = graph.node("FusedMatMul", [queries, keys], f"{prefix}scores", domain=MICROSOFT, transB=1, alpha=scale)
        weights = self._weights(
            prefix, spec.layers[index], graph.node("Mul", [scores, key_scales], f"{prefix}scores.scaled")
        )
        heads = graph.node(
            "MatMul", [graph.node("Mul", [weights, value_scales], f"{prefix}weights.scaled"), values], f"{prefix}heads"
        )
        ungrouped = graph.constant("of_groups", [0, spec.n_kv_heads, n_groups, -1, width])
        heads = graph.node("Reshape", [heads, ungrouped], f"{prefix}heads.grouped")
        heads = graph.node("Transpose", [heads], f"{prefix}heads.transposed", perm=[0, 3, 1, 2, 4])
        return graph.node(
            "Reshape", [heads, graph.constant("flat_heads", [0, -1, spec.n_heads * width])], f"{prefix}mixed"
        )

    def _weights(self, prefix: str, layer: LayerSpec, scores: str) -> str:
        """Scores [1, K, G*n, t] to attention weights, after bias, sinks and softmax."""
        graph, spec = self._graph, self._spec
        shaped = graph.node(
            "Reshape", [scores, graph.constant("by_query_head", [0, spec.n_heads, -1, 0])], f"{prefix}scores.by_head"
        )
        if spec.attention_softcap is not None:
            cap = graph.number(spec.attention_softcap, "float32")
            small = graph.node(
                "Tanh", [graph.node("Div", [shaped, cap], f"{prefix}scores.divided")], f"{prefix}scores.tanh"
            )
            shaped = graph.node("Mul", [small, cap], f"{prefix}scores.capped")
        masked = graph.node("Add", [shaped, self._mask_inputs(layer)[-1]], f"{prefix}scores.masked")
        weights = graph.node("Softmax", [masked], f"{prefix}weights", axis=-1)
        return graph.node(
            "Reshape",
            [weights, graph.constant("by_key_head", [0, spec.n_kv_heads, -1, 0])],
            f"{prefix}weights.by_kv_head",
        )

    def _stored(self, index: int, plane: str, x: str) -> tuple[str, str]:
        """Store keys or values [1, n, K*D]; returns all codes as floats [1, K, t, D], and their scales [1, K, 1, t]."""
        graph, spec = self._graph, self._spec
        in_heads = graph.constant("kv_heads", [0, -1, spec.n_kv_heads, spec.head_dim])
        heads = graph.node(
            "Transpose", [graph.node("Reshape", [x, in_heads], f"{x}.in_heads")], f"{x}.by_cell", perm=[0, 2, 1, 3]
        )
        slices = []
        for part, new in zip(parts(KvType.Q8_0, spec.head_dim), quantized(graph, heads), strict=True):
            after = present(index, plane) + part.suffix
            graph.node("TensorScatter", [past(index, plane) + part.suffix, new, "to"], after, axis=2)
            first, axis = graph.constant("first_cell", [0]), graph.constant("cell_axis", [2])
            slices.append(graph.node("Slice", [after, first, "n_cells", axis], f"{after}.used"))
        codes, scales = slices
        floats = graph.node("Cast", [codes], f"{codes}.float", to=_FLOAT)
        return floats, graph.node("Transpose", [scales], f"{scales}.row", perm=[0, 1, 3, 2])
