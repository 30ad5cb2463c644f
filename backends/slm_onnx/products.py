"""Products with a file's matrices, as nodes: quantized if ``MatMulNBits`` supports the type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slm_core.gguf import GgufFile
from slm_core.quant import dequantize
from slm_core.types import KvType
from slm_onnx.graphwriter import MICROSOFT, GraphWriter
from slm_onnx.nbits import PackedMatrix, pack
from slm_onnx.ports import LORA_A, LORA_B
from slm_onnx.tensors import read_tensor, read_values


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options of a graph, apart from the model.

    Attributes:
        dtype: dtype of activations, "float32" or "float16".
        accuracy_level: of MatMulNBits: 0 multiplies in float, 4 rounds activations to 8 bits.
        kv_type: KV type.
        causal: whether attention has a causal mask in addition to the bias.
        on_host: whether keys and values are in host memory.
        bias: whether there is an attention bias. Without one, cells are the positions of one sequence, and CUDA's
            attention is fused.
        adapters: whether the graph has inputs for low-rank changes of its matrices, and directions after its layers.
        states: whether hidden states are an output, and an input selects the states that become logits.
    """

    dtype: str = "float32"
    accuracy_level: int = 4
    kv_type: KvType = KvType.F32
    causal: bool = True
    on_host: bool = True
    bias: bool = True
    adapters: bool = False
    states: bool = False


class Products:
    """Writes products into a graph.

    Args:
        graph: the graph.
        gguf: a file that ``check_tensors`` has accepted.
        options: number formats.
    """

    def __init__(self, graph: GraphWriter, gguf: GgufFile, options: GraphOptions) -> None:
        self._graph = graph
        self._gguf = gguf
        self._options = options
        self._packed: dict[str, PackedMatrix | None] = {}
        self._block_sums: dict[tuple[str, int], str] = {}

    def packed(self, name: str) -> PackedMatrix | None:
        """A matrix for ``MatMulNBits``, packed once; None if its type is not supported."""
        if name not in self._packed:
            self._packed[name] = pack(read_tensor(self._gguf, f"{name}.weight"))
        return self._packed[name]

    def vector(self, name: str) -> str:
        """A tensor in the dtype of activations."""
        values = read_values(self._gguf, name)
        assert values is not None, f"{name} is there"
        return self._graph.weight(name, values.astype(self._options.dtype))

    def linear(self, x: str, name: str, output: str) -> str:
        """``x @ weight.T``, with the file's scale and bias, and the change of an adapter: [1, n, in] to [1, n, out]."""
        y = self._finished(self._product(x, name, output), name, output)
        return self._changed(x, y, name, output) if self._options.adapters else y

    def _changed(self, x: str, y: str, name: str, output: str) -> str:
        """``y + x @ A.T @ B.T``; A.T [in, r] and B.T [r, out] are inputs of the graph."""
        graph, (n_out, n_in) = self._graph, self._gguf.tensors[f"{name}.weight"].shape
        a = graph.input(f"{LORA_A}{name}", self._options.dtype, [n_in, f"r.{name}"])
        b = graph.input(f"{LORA_B}{name}", self._options.dtype, [f"r.{name}", n_out])
        low = graph.node("MatMul", [x, a], f"{output}.low")
        return graph.node("Add", [y, graph.node("MatMul", [low, b], f"{output}.change")], f"{output}.changed")

    def split(self, x: str, sizes: Sequence[int], outputs: Sequence[str]) -> list[str]:
        """Split along the last axis."""
        graph = self._graph
        parts = graph.constant("sizes." + ".".join(map(str, sizes)), sizes)
        graph.node("Split", [x, parts], list(outputs), axis=-1)
        return list(outputs)

    def _finished(self, y: str, name: str, output: str) -> str:
        for part, operator in (("scale", "Mul"), ("bias", "Add")):
            if f"{name}.{part}" in self._gguf.tensors:
                y = self._graph.node(operator, [y, self.vector(f"{name}.{part}")], f"{output}.with_{part}")
        return y

    def _product(self, x: str, name: str, output: str) -> str:
        tensor, packed = read_tensor(self._gguf, f"{name}.weight"), self.packed(name)
        if packed is not None:
            return self._packed_product(x, name, output, tensor.shape[1], packed)
        dense = dequantize(tensor.data, tensor.ggml_type, tensor.shape).T.astype(self._options.dtype)
        return self._graph.node("MatMul", [x, self._graph.weight(f"{name}.dense", dense)], output)

    def _packed_product(self, x: str, name: str, output: str, n_in: int, packed: PackedMatrix) -> str:
        graph, dtype = self._graph, self._options.dtype
        inputs = [x, graph.weight(f"{name}.codes", packed.codes)]
        inputs.append(graph.weight(f"{name}.scales", packed.scales.astype(dtype, copy=False)))
        y = graph.node(
            "MatMulNBits",
            inputs,
            output if packed.correction is None else f"{output}.product",
            domain=MICROSOFT,
            N=len(packed.codes),
            K=n_in,
            bits=packed.bits,
            block_size=packed.block,
            accuracy_level=self._options.accuracy_level,
        )
        if packed.correction is None:
            return y
        sums = self._sums(x, n_in, packed.block)
        correction = graph.weight(f"{name}.correction", packed.correction.astype(dtype))
        product = graph.node("MatMul", [sums, correction], f"{output}.correction")
        return graph.node("Add", [y, product], output)

    def _sums(self, x: str, n_in: int, block: int) -> str:
        """The sums of activations per block, [1, n, in / block]; computed once for all products of ``x``."""
        if (x, block) not in self._block_sums:
            graph = self._graph
            shape = graph.constant(f"blocks.{n_in}.{block}", [0, -1, n_in // block, block])
            blocks = graph.node("Reshape", [x, shape], f"{x}.blocks.{block}")
            axis = graph.constant("last_axis", [-1])
            self._block_sums[x, block] = graph.node("ReduceSum", [blocks, axis], f"{x}.sums.{block}", keepdims=0)
        return self._block_sums[x, block]
