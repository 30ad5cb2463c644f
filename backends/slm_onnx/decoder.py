"""The graph of a decoder, built from a model's specification; and the graph that edits its KV cache.

Shapes: n tokens of a batch, m rows of logits wanted, t cells that attention looks at, c cells of the cache, E embedding
width, H query heads, K key and value heads, D head width, V vocabulary.

All sequences' tokens are in one row of the batch; which token sees which cell is in ``attention_bias``. Keys lie in the
cache after RoPE. The embedding is not in the graph: the host expands the rows it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnx import ModelProto
from slm_core.architectures import ModelSpec, Rope, RopeStyle
from slm_core.gguf import GgufFile
from slm_core.quant import QuantizedTensor, dequantize
from slm_onnx.coverage import rope_of
from slm_onnx.graphwriter import MICROSOFT, Dim, GraphWriter
from slm_onnx.nbits import PackedMatrix, pack

PLANES = ("key", "value")


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """What a graph depends on besides the model.

    Attributes:
        dtype: of activations and of the KV cache, "float32" or "float16".
        accuracy_level: of MatMulNBits: 0 multiplies in float, 4 rounds activations to 8 bits.
    """

    dtype: str = "float32"
    accuracy_level: int = 4


def past(layer: int | str, plane: str) -> str:
    """Name of the graphs' input that holds a layer's keys or values, [1, K, c, D]."""
    return f"past_key_values.{layer}.{plane}"


def present(layer: int | str, plane: str) -> str:
    """Name of the output that holds them afterwards; bound to the same memory."""
    return f"present.{layer}.{plane}"


def read_tensor(gguf: GgufFile, name: str) -> QuantizedTensor:
    """A tensor of a file, as it lies there."""
    info = gguf.tensors[name]
    return QuantizedTensor(name, info.shape, info.ggml_type, gguf.tensor_data(name))


def read_rope(gguf: GgufFile, spec: ModelSpec) -> Rope:
    """The position embedding of a file that ``check_tensors`` has accepted."""
    if "rope_freqs.weight" not in gguf.tensors:
        return Rope(rope_of(spec), None)
    tensor = read_tensor(gguf, "rope_freqs.weight")
    return Rope(rope_of(spec), dequantize(tensor.data, tensor.ggml_type, tensor.shape))


class DecoderGraph:
    """Builds the graph of one model.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: what it holds.
        options: number formats.

    Attributes:
        batch: rows of the batch.
        cells: length of the caches, before and after.
        rotation: inputs of RoPE: positions, and the tables that they are rows of.
        sight: further inputs of attention, which say what tokens see.
    """

    batch: ClassVar[Dim] = 1
    cells: ClassVar[tuple[Dim, Dim]] = ("c", "c")
    rotation: ClassVar[tuple[str, str, str]] = ("rows", "cos", "sin")
    sight: ClassVar[tuple[str, ...]] = ("", "", "", "attention_bias")

    def __init__(self, gguf: GgufFile, spec: ModelSpec, options: GraphOptions) -> None:
        self._gguf = gguf
        self._spec = spec
        self._options = options
        self._graph = GraphWriter("decoder", opset=21)
        self._block_sums: dict[tuple[str, int], str] = {}

    def build(self, progress: Callable[[float], None]) -> GraphWriter:
        """Write the graph; ``progress`` hears the share of layers done."""
        graph, spec = self._graph, self._spec
        x = self._inputs()
        self._caches()
        branch = ""
        for layer in range(spec.n_layers):
            x, normed = self._add_and_norm(x, branch, f"blk.{layer}.attn_norm")
            x, normed = self._add_and_norm(x, self._attend(layer, normed), f"blk.{layer}.ffn_norm")
            branch = self._feed_forward(layer, normed)
            progress((layer + 1) / spec.n_layers)
        wanted = self._wanted(graph.node("Add", [x, branch], "last_hidden"))
        normed = self._norm(wanted, "output_norm", "wanted.normed")
        tied = "output.weight" not in self._gguf.tensors
        rows = self._linear(normed, "token_embd" if tied else "output", "output.product")
        graph.node("Cast", [rows], "logits", to=1)
        graph.output("logits", "float32", [self.batch, "m", spec.n_vocab])
        return graph

    def _inputs(self) -> str:
        graph, spec, dtype = self._graph, self._spec, self._options.dtype
        half = rope_of(spec).n_dims // 2
        embeddings = graph.input("inputs_embeds", dtype, [1, "n", spec.n_embd])
        graph.input("cos", dtype, ["n", half])
        graph.input("sin", dtype, ["n", half])
        graph.input("rows", "int64", [1, "n"])
        graph.input("attention_bias", dtype, [1, 1, "n", "t"])
        graph.input("seqlens_k", "int32", [1])
        graph.input("total_sequence_length", "int32", [])
        graph.input("logits_rows", "int64", ["m"])
        return embeddings

    def _caches(self) -> None:
        for layer in range(self._spec.n_layers):
            for plane in PLANES:
                names = past(layer, plane), present(layer, plane)
                for declare, name, length in zip(
                    (self._graph.input, self._graph.output), names, self.cells, strict=True
                ):
                    shape: list[Dim] = [self.batch, self._spec.n_kv_heads, length, self._spec.head_dim]
                    declare(name, self._options.dtype, shape)

    def _wanted(self, hidden: str) -> str:
        """The rows of hidden states that logits are made of."""
        return self._graph.node("Gather", [hidden, "logits_rows"], "wanted", axis=1)

    def _attend(self, layer: int, x: str) -> str:
        """X [1, n, E] to [1, n, E]."""
        graph, spec, prefix = self._graph, self._spec, f"blk.{layer}."
        q, k, v = (self._linear(x, f"{prefix}attn_{name}", f"{prefix}{name}") for name in ("q", "k", "v"))
        q = self._rotate(self._head_norm(q, f"{prefix}attn_q_norm", spec.n_heads), f"{prefix}q.rotated")
        k = self._rotate(self._head_norm(k, f"{prefix}attn_k_norm", spec.n_kv_heads), f"{prefix}k.rotated")
        mixed = graph.node(
            "GroupQueryAttention",
            [
                *(q, k, v, past(layer, "key"), past(layer, "value"), "seqlens_k", "total_sequence_length"),
                *self.sight,
            ],
            [f"{prefix}mixed", present(layer, "key"), present(layer, "value")],
            domain=MICROSOFT,
            num_heads=spec.n_heads,
            kv_num_heads=spec.n_kv_heads,
        )
        return self._linear(mixed, f"{prefix}attn_output", f"{prefix}attended")

    def _head_norm(self, x: str, name: str, n_heads: int) -> str:
        """The RMS norm of each head, where the model has one: x [1, n, heads * D]."""
        if f"{name}.weight" not in self._gguf.tensors:
            return x
        graph, width = self._graph, self._spec.head_dim
        heads = graph.node("Reshape", [x, graph.constant(f"heads.{n_heads}", [0, -1, n_heads, width])], f"{x}.heads")
        normed = self._norm(heads, name, f"{heads}.normed")
        return graph.node("Reshape", [normed, graph.constant(f"flat.{n_heads}", [0, -1, n_heads * width])], f"{x}.flat")

    def _rotate(self, x: str, name: str) -> str:
        interleaved = int(rope_of(self._spec).style is RopeStyle.INTERLEAVED)
        return self._graph.node("RotaryEmbedding", [x, *self.rotation], name, domain=MICROSOFT, interleaved=interleaved)

    def _feed_forward(self, layer: int, x: str) -> str:
        graph, prefix = self._graph, f"blk.{layer}."
        gate = self._linear(x, f"{prefix}ffn_gate", f"{prefix}gate")
        up = self._linear(x, f"{prefix}ffn_up", f"{prefix}up")
        sigmoid = graph.node("Sigmoid", [gate], f"{gate}.sigmoid")
        silu = graph.node("Mul", [gate, sigmoid], f"{gate}.silu")
        return self._linear(graph.node("Mul", [silu, up], f"{prefix}gated"), f"{prefix}ffn_down", f"{prefix}fed")

    def _add_and_norm(self, x: str, branch: str, name: str) -> tuple[str, str]:
        """``x + branch`` and its norm; ``branch`` may be "" for nothing."""
        if not branch:
            return x, self._norm(x, name, f"{name}.normed")
        inputs = [x, branch, self._vector(f"{name}.weight")]
        outputs = [f"{name}.normed", "", "", f"{name}.sum"]
        self._graph.node(
            "SkipSimplifiedLayerNormalization", inputs, outputs, domain=MICROSOFT, epsilon=self._spec.norm_eps
        )
        return outputs[3], outputs[0]

    def _norm(self, x: str, name: str, output: str) -> str:
        weight = self._vector(f"{name}.weight")
        return self._graph.node(
            "SimplifiedLayerNormalization", [x, weight], output, axis=-1, epsilon=self._spec.norm_eps, stash_type=1
        )

    def _vector(self, name: str) -> str:
        tensor = read_tensor(self._gguf, name)
        values = dequantize(tensor.data, tensor.ggml_type, tensor.shape)
        return self._graph.weight(name, values.astype(self._options.dtype))

    def _linear(self, x: str, name: str, output: str) -> str:
        """``x @ weight.T``, with the factor and the bias that the file has for it: [1, n, in] to [1, n, out]."""
        y = self._product(x, name, output)
        if f"{name}.scale" in self._gguf.tensors:
            y = self._graph.node("Mul", [y, self._vector(f"{name}.scale")], f"{output}.scaled")
        if f"{name}.bias" in self._gguf.tensors:
            y = self._graph.node("Add", [y, self._vector(f"{name}.bias")], f"{output}.shifted")
        return y

    def _product(self, x: str, name: str, output: str) -> str:
        tensor = read_tensor(self._gguf, f"{name}.weight")
        packed = self._pack(name)
        if packed is None:
            dense = dequantize(tensor.data, tensor.ggml_type, tensor.shape).T.astype(self._options.dtype)
            return self._graph.node("MatMul", [x, self._graph.weight(f"{name}.dense", dense)], output)
        return self._packed_product(x, name, output, tensor.shape, packed)

    def _pack(self, name: str) -> PackedMatrix | None:
        return pack(read_tensor(self._gguf, f"{name}.weight"))

    def _packed_product(self, x: str, name: str, output: str, shape: tuple[int, ...], packed: PackedMatrix) -> str:
        graph, dtype = self._graph, self._options.dtype
        inputs = [x, graph.weight(f"{name}.codes", packed.codes)]
        inputs.append(graph.weight(f"{name}.scales", packed.scales.astype(dtype, copy=False)))
        y = graph.node(
            "MatMulNBits",
            inputs,
            output,
            domain=MICROSOFT,
            N=shape[0],
            K=shape[1],
            bits=packed.bits,
            block_size=packed.block,
            accuracy_level=self._options.accuracy_level,
        )
        if packed.correction is None:
            return y
        sums = self._sums(x, shape[1], packed.block)
        correction = graph.weight(f"{name}.correction", packed.correction.astype(dtype))
        product = graph.node("MatMul", [sums, correction], f"{output}.correction")
        return graph.node("Add", [y, product], f"{output}.corrected")

    def _sums(self, x: str, n_in: int, block: int) -> str:
        """Sums of activations block by block, [1, n, in / block]; made once for all products of ``x``."""
        if (x, block) not in self._block_sums:
            graph = self._graph
            shape = graph.constant(f"blocks.{n_in}.{block}", [0, -1, n_in // block, block])
            blocks = graph.node("Reshape", [x, shape], f"{x}.blocks.{block}")
            axis = graph.constant("last_axis", [-1])
            self._block_sums[x, block] = graph.node("ReduceSum", [blocks, axis], f"{x}.sums.{block}", keepdims=0)
        return self._block_sums[x, block]


def edit_graph(spec: ModelSpec, dtype: str, planes: Sequence[str] = PLANES) -> ModelProto:
    """The graph that moves cells: ``cache[to + i] = rotate(cache[source[i]], angle[i])`` in every layer, in place.

    Of keys alone where ``planes`` says so: for cells that turn where they lie.

    Its inputs, besides the cache: ``source`` int64 [n], ``to`` int64 [1], ``cos`` and ``sin`` float32 [1, n, D/2].
    """
    graph = GraphWriter("edit", opset=24)
    half = rope_of(spec).n_dims // 2
    graph.input("source", "int64", ["n"])
    graph.input("to", "int64", [1])
    graph.input("cos", "float32", [1, "n", half])
    graph.input("sin", "float32", [1, "n", half])
    interleaved = int(rope_of(spec).style is RopeStyle.INTERLEAVED)
    for layer in range(spec.n_layers):
        for plane in planes:
            shape: list[Dim] = [1, spec.n_kv_heads, "c", spec.head_dim]
            cells, after = graph.input(past(layer, plane), dtype, shape), present(layer, plane)
            moved = graph.node("Gather", [cells, "source"], f"{cells}.moved", axis=2)
            if plane == "key":
                exact = graph.node("Cast", [moved], f"{moved}.float", to=1)
                rotated = graph.node(
                    "RotaryEmbedding", [exact, "cos", "sin"], f"{moved}.rotated", interleaved=interleaved
                )
                moved = graph.node("CastLike", [rotated, cells], f"{moved}.stored")
            graph.node("TensorScatter", [cells, moved, "to"], after, axis=2)
            graph.output(after, dtype, shape)
    return graph.model()
