"""The graph of a decoder with tokens as its only input: the layout of onnxruntime-genai and optimum.

It contains the embedding and RoPE's tables, and returns the logits of all tokens. Each row of the batch is a sequence.
Its keys and values are the inputs ``past_key_values`` and the outputs ``present``, with or without spare room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from slm_core.architectures import LayerSpec, ModelSpec, Rope, RopeSpec
from slm_core.gguf import GgufFile
from slm_core.quant import dequantize
from slm_onnx.decoder import DecoderGraph
from slm_onnx.graphwriter import MICROSOFT, Dim, GraphWriter
from slm_onnx.nbits import PackedMatrix
from slm_onnx.products import GraphOptions
from slm_onnx.tensors import read_tensor

_EMBEDDING = "token_embd"
_TABLES = ("cos_cache", "sin_cache")


class StandaloneGraph(DecoderGraph):
    """Builds the graph of one model.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: the model's architecture and sizes.
        options: number formats.
        rope: the model's RoPE.
        n_ctx: positions in RoPE's tables.
    """

    batch: ClassVar[Dim] = "batch"
    cells: ClassVar[tuple[Dim, Dim]] = ("past", "total")

    def __init__(self, gguf: GgufFile, spec: ModelSpec, options: GraphOptions, rope: Rope, n_ctx: int) -> None:
        super().__init__(gguf, spec, options)
        self._rope = rope
        self._n_ctx = n_ctx

    def build(self, progress: Callable[[float], None]) -> GraphWriter:
        """Write the graph; ``progress`` is called with the share of layers that are done."""
        tables = self._rope.tables(np.arange(self._n_ctx, dtype=np.int32))
        for name, table in zip(_TABLES, tables, strict=True):
            self._graph.weight(name, table.astype(self._dtype))
        return super().build(progress)

    def _inputs(self) -> str:
        graph = self._graph
        for name, length in (("input_ids", "n"), ("attention_mask", "total"), ("position_ids", "n")):
            graph.input(name, "int64", [self.batch, length])
        one = graph.constant("one", [1])
        held = graph.node("ReduceSum", ["attention_mask", one], "held", keepdims=0)
        graph.node("Cast", [graph.node("Sub", [held, one], "last")], "seqlens_k", to=6)
        shape = graph.node("Shape", ["attention_mask"], "mask_shape")
        total = graph.node("Gather", [shape, graph.scalar("axis_1", 1)], "n_total", axis=0)
        graph.node("Cast", [total], "total_sequence_length", to=6)
        return self._embed()

    def _output_rows(self, x: str) -> str:
        return x

    def _rotation(self, rope: RopeSpec) -> Sequence[str]:
        return "position_ids", *_TABLES

    def _mask_inputs(self, layer: LayerSpec) -> Sequence[str]:
        return ()

    def _embed(self) -> str:
        """The embedding of input_ids, [batch, n] to [batch, n, E]; in the file's number format."""
        graph, packed = self._graph, self._products.packed(_EMBEDDING)
        if packed is None:
            tensor = read_tensor(self._gguf, f"{_EMBEDDING}.weight")
            table = dequantize(tensor.data, tensor.ggml_type, tensor.shape)
            half = tensor.ggml_type.name == "F16"
            rows = graph.weight(f"{_EMBEDDING}.rows", table.astype("float16" if half else "float32"))
            return self._to_dtype(graph.node("Gather", [rows, "input_ids"], "embedded", axis=0))
        codes = graph.weight(f"{_EMBEDDING}.codes.rows", packed.codes.reshape(len(packed.codes), -1))
        scales = graph.weight(f"{_EMBEDDING}.scales", packed.scales.astype(self._dtype, copy=False))
        rows = graph.node(
            "GatherBlockQuantized",
            [codes, "input_ids", scales],
            "embedded",
            domain=MICROSOFT,
            bits=packed.bits,
            block_size=packed.block,
            gather_axis=0,
            quantize_axis=1,
        )
        return rows if packed.correction is None else self._correct(rows, packed)

    def _correct(self, rows: str, packed: PackedMatrix) -> str:
        """Add the offset of each block of a row, for affine types."""
        assert packed.correction is not None
        graph, n_blocks = self._graph, len(packed.correction)
        table = graph.weight(f"{_EMBEDDING}.minimums", packed.correction.T.astype(self._dtype))
        added = graph.node("Gather", [table, "input_ids"], "embedded.minimums", axis=0)
        shape = graph.constant("embedded.blocks", [0, 0, n_blocks, packed.block])
        blocks = graph.node("Reshape", [rows, shape], "embedded.in_blocks")
        wide = graph.node("Unsqueeze", [added, graph.constant("last_axis", [-1])], "embedded.minimums.wide")
        summed = graph.node("Add", [blocks, wide], "embedded.sum")
        return graph.node("Reshape", [summed, graph.constant("flat", [0, 0, n_blocks * packed.block])], "embedded.flat")

    def _to_dtype(self, x: str) -> str:
        return self._graph.node("Cast", [x], f"{x}.cast", to={"float32": 1, "float16": 10}[self._dtype])
