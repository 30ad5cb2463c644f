"""Feed-forward layers as nodes: dense layers and MoE layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, ExpertsSpec, Gating, ModelSpec
from slm_core.gguf import GgufFile
from slm_core.quant import QuantizedTensor, dequantize
from slm_onnx.activations import activated
from slm_onnx.graphwriter import MICROSOFT, GraphWriter
from slm_onnx.nbits import PackedMatrix, finer, pack
from slm_onnx.products import GraphOptions, Products
from slm_onnx.tensors import read_tensor

_NOT_CHOSEN = -1e30  # the router logit of experts that are not selected
_FLOATS = ("F32", "F16", "BF16")


class Routes(NamedTuple):
    """The selected experts of tokens, out of X; names of values in the graph.

    Attributes:
        ranks: scores for selection [n, X]; the largest are selected.
        weights: weights of all experts [n, X]; only the weights of selected experts are used.
        least: the smallest selected rank [n, 1].
        total: the sum of the selected weights [n, 1].
    """

    ranks: str
    weights: str
    least: str
    total: str


class ExpertMatrices(NamedTuple):
    """The matrices [N, K] of X experts in the format of QMoE.

    Attributes:
        codes: uint8 [X, N, K * bits / 8].
        scales: float32 [X, N, K / block].
        bits: bits of a code.
        block: weights that share a scale.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    block: int


class FeedForward:
    """Writes the feed-forward layers of a model into a graph.

    Args:
        graph: the graph.
        gguf: a file that ``check_tensors`` has accepted.
        spec: the model's architecture and sizes.
        options: number formats.
        products: writes products with the file's matrices.
    """

    def __init__(
        self, graph: GraphWriter, gguf: GgufFile, spec: ModelSpec, options: GraphOptions, products: Products
    ) -> None:
        self._graph = graph
        self._gguf = gguf
        self._spec = spec
        self._options = options
        self._products = products

    def layer(self, index: int, x: str) -> str:
        """The output of the layer of a block for x [1, n, E]."""
        layer, prefix = self._spec.layers[index], f"blk.{index}."
        if layer.experts is None:
            return self._dense(prefix, x, "ffn_{}", layer.activation)
        routed = self._moe(prefix, x, layer.experts)
        if f"{prefix}ffn_up_shexp.weight" not in self._gguf.tensors:
            return routed
        shared = self._dense(f"{prefix}", x, "ffn_{}_shexp", layer.activation)
        if f"{prefix}ffn_gate_inp_shexp.weight" in self._gguf.tensors:
            weight = self._graph.weight(
                f"{prefix}shared.gate", self._values(f"{prefix}ffn_gate_inp_shexp.weight").reshape(-1, 1)
            )
            gate = self._graph.node("MatMul", [x, weight], f"{prefix}shared.score")
            gate = self._graph.node("Sigmoid", [gate], f"{prefix}shared.share")
            shared = self._graph.node("Mul", [shared, gate], f"{prefix}shared.gated")
        return self._graph.node("Add", [routed, shared], f"{prefix}fed.all")

    def _dense(self, prefix: str, x: str, names: str, activation: AnyActivation) -> str:
        """A dense layer; gate and up are two matrices, or the halves of one matrix."""
        gate, up, down = (prefix + names.format(name) for name in ("gate", "up", "down"))
        outputs, n_ff = [f"{gate}.product", f"{up}.product"], self._gguf.tensors[f"{down}.weight"].shape[1]
        if self._gguf.tensors[f"{up}.weight"].shape[0] == 2 * n_ff:
            gates = self._products.split(self._products.linear(x, up, f"{up}.both"), [n_ff, n_ff], outputs)
        elif f"{gate}.weight" in self._gguf.tensors:
            gates = [self._products.linear(x, gate, outputs[0]), self._products.linear(x, up, outputs[1])]
        else:
            gates = [self._products.linear(x, up, outputs[1])]
        inner = activated(self._graph, gates[0], activation, self._options.dtype)
        if len(gates) > 1:
            inner = self._graph.node("Mul", [inner, gates[1]], f"{up}.gated")
        return self._products.linear(inner, down, f"{down}.product")

    def _moe(self, prefix: str, x: str, experts: ExpertsSpec) -> str:
        """An MoE layer. QMoE and MoE (in float) read only the matrices of selected experts."""
        routes = self._routes(prefix, x, experts)
        gate, up, down = (self._tensor(f"{prefix}ffn_{name}_exps.weight") for name in ("gate", "up", "down"))
        quantized = self._packed(gate, up, down)
        if quantized is None:
            return self._in_float(prefix, x, experts, routes, (gate, up, down))
        inner, outer = quantized
        inputs = [x, routes.ranks]
        for which, packed in (("in", inner), ("out", outer)):
            name = f"{prefix}experts.{which}"
            inputs += [
                self._graph.weight(f"{name}.codes", packed.codes),
                self._graph.weight(f"{name}.scales", packed.scales),
                "",
            ]
        return self._graph.node(
            "QMoE",
            [*inputs, *[""] * 6, routes.weights],
            f"{prefix}fed",
            **_swiglu(experts),
            fc1_expert_weight_bits=inner.bits,
            fc2_expert_weight_bits=outer.bits,
            expert_weight_bits=inner.bits,
            block_size=inner.block,
            accuracy_level=self._options.accuracy_level,
            weights_prepacked=0,
            normalize_routing_weights=0,
        )

    def _routes(self, prefix: str, x: str, experts: ExpertsSpec) -> Routes:
        """Select experts as ``slm_native.kernels.moe.route`` does."""
        graph, n = self._graph, experts.n_experts
        scores = self._products.linear(x, f"{prefix}ffn_gate_inp", f"{prefix}router")
        scores = graph.node("Reshape", [scores, graph.constant(f"experts.{n}", [-1, n])], f"{prefix}scores.router")
        shares = ranks = self._shares(prefix, scores, experts.gating)
        if f"{prefix}exp_probs_b.bias" in self._gguf.tensors:
            ranks = graph.node("Add", [shares, self._products.vector(f"{prefix}exp_probs_b.bias")], f"{prefix}ranks")
        top, chosen = f"{prefix}chosen.ranks", f"{prefix}chosen"
        graph.node("TopK", [ranks, graph.constant(f"used.{experts.n_used}", [experts.n_used])], [top, chosen], axis=-1)
        last = graph.constant("last_axis", [-1])
        least = graph.node("ReduceMin", [top, last], f"{prefix}chosen.least", keepdims=1)
        if experts.gating is Gating.SOFTMAX_OF_CHOSEN:
            largest = graph.node("ReduceMax", [scores, last], f"{prefix}scores.largest", keepdims=1)
            shares = graph.node(
                "Exp", [graph.node("Sub", [scores, largest], f"{prefix}scores.below")], f"{prefix}powers"
            )
        if experts.normalized or experts.gating is Gating.SOFTMAX_OF_CHOSEN:
            shares = graph.node("Div", [shares, self._sum_of_chosen(shares, chosen)], f"{shares}.normalized")
        if experts.scale != 1:
            shares = graph.node("Mul", [shares, graph.number(experts.scale, "float32")], f"{shares}.scaled")
        return Routes(ranks, shares, least, self._sum_of_chosen(shares, chosen))

    def _shares(self, prefix: str, scores: str, gating: Gating) -> str:
        if gating is Gating.SOFTMAX:
            return self._graph.node("Softmax", [scores], f"{prefix}shares", axis=-1)
        if gating is Gating.SIGMOID:
            return self._graph.node("Sigmoid", [scores], f"{prefix}shares")
        return scores

    def _sum_of_chosen(self, weights: str, chosen: str) -> str:
        graph = self._graph
        picked = graph.node("GatherElements", [weights, chosen], f"{weights}.chosen", axis=1)
        return graph.node("ReduceSum", [picked, graph.constant("last_axis", [-1])], f"{weights}.total", keepdims=1)

    def _in_float(
        self, prefix: str, x: str, experts: ExpertsSpec, routes: Routes, tensors: Sequence[QuantizedTensor]
    ) -> str:
        """An MoE layer in float. MoE applies softmax, so its input is the logarithm of the weights."""
        graph, (gate, up, down) = self._graph, (dequantize(t.data, t.ggml_type, t.shape) for t in tensors)
        is_chosen = graph.node("GreaterOrEqual", [routes.ranks, routes.least], f"{prefix}is_chosen")
        logarithms = graph.node("Log", [routes.weights], f"{prefix}logarithms")
        none = graph.number(_NOT_CHOSEN, "float32")
        scores = graph.node("Where", [is_chosen, logarithms, none], f"{prefix}router_scores")
        inputs = [
            *(x, scores, graph.weight(f"{prefix}experts.in", _interleaved(gate, up)), ""),
            graph.weight(f"{prefix}experts.out", down),
        ]
        mixed = graph.node("MoE", inputs, f"{prefix}experts", **_swiglu(experts), normalize_routing_weights=1)
        total = graph.node("Reshape", [routes.total, graph.constant("rows_last", [1, -1, 1])], f"{prefix}total")
        return graph.node("Mul", [mixed, total], f"{prefix}fed")

    def _packed(
        self, gate: QuantizedTensor, up: QuantizedTensor, down: QuantizedTensor
    ) -> tuple[ExpertMatrices, ExpertMatrices] | None:
        """Both matrices of QMoE; None if the layer is computed in float."""
        if gate.ggml_type.name in _FLOATS or up.ggml_type.name in _FLOATS or down.ggml_type.name in _FLOATS:
            return None
        matrices = [pack(_flat(tensor)) for tensor in (gate, up, down)]
        present = [matrix for matrix in matrices if matrix is not None]
        assert len(present) == len(matrices), "coverage lets other types not pass"
        if self._options.accuracy_level == 0 and any(matrix.bits == 8 for matrix in present):
            return None  # QMoE would round activations to 8 bits for these weights
        block, bits = min(matrix.block for matrix in present), max(matrix.bits for matrix in present[:2])
        gates, ups = (_by_expert(finer(matrix, bits, block), gate.shape[0]) for matrix in present[:2])
        codes, scales = _interleaved(gates.codes, ups.codes), _interleaved(gates.scales, ups.scales)
        expert_downs = _by_expert(finer(present[2], present[2].bits, block), gate.shape[0])
        return ExpertMatrices(codes, scales, bits, block), expert_downs

    def _tensor(self, name: str) -> QuantizedTensor:
        return read_tensor(self._gguf, name)

    def _values(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensor(name)
        return dequantize(tensor.data, tensor.ggml_type, tensor.shape)


def _swiglu(experts: ExpertsSpec) -> dict[str, Any]:
    """Attributes of both operators: ``g * sigmoid(g) * u``, with interleaved rows of g and u."""
    return {
        "domain": MICROSOFT,
        "k": experts.n_used,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }


def _flat(tensor: QuantizedTensor) -> QuantizedTensor:
    """The matrices [X, N, K] of experts as one matrix [X * N, K]."""
    return QuantizedTensor(
        tensor.name, (tensor.shape[0] * tensor.shape[1], tensor.shape[2]), tensor.ggml_type, tensor.data
    )


def _by_expert(matrix: PackedMatrix, n_experts: int) -> ExpertMatrices:
    codes = matrix.codes.reshape(n_experts, len(matrix.codes) // n_experts, -1)
    return ExpertMatrices(codes, matrix.scales.reshape(*codes.shape[:2], -1), matrix.bits, matrix.block)


def _interleaved(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Interleaved rows of two [X, N, K]: [X, 2 * N, K]."""
    return np.stack([first, second], axis=2).reshape(len(first), 2 * first.shape[1], -1)
