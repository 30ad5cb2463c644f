"""The graph that edits a KV cache: it copies cells and turns keys."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto
from slm_core.architectures import ModelSpec, RopeSpec, RopeStyle
from slm_core.types import KvType
from slm_onnx.bytecache import expanded, quantized
from slm_onnx.graphwriter import Dim, GraphWriter
from slm_onnx.ports import PLANES, Kinds, parts, past, present, rotation


def edit_graph(spec: ModelSpec, kv_type: KvType, planes: Sequence[str] = PLANES) -> ModelProto:
    """The graph that moves cells: ``cache[to + i] = rotate(cache[source[i]], angle[i])`` in every layer, in place.

    Of keys alone where ``planes`` says so, and then of the layers that rotate them: for cells that turn where they lie.

    Its inputs, besides the cache: ``source`` int64 [n], ``to`` int64 [1], and for each rotation (``ports.Kinds``)
    cosines and sines float32 [1, n, R/2].
    """
    graph, kinds = GraphWriter("edit", opset=24), Kinds.of(spec)
    graph.input("source", "int64", ["n"])
    graph.input("to", "int64", [1])
    for kind, rope in enumerate(kinds.ropes):
        for name in rotation(kind):
            graph.input(name, "float32", [1, "n", rope.n_dims // 2])
    for index, layer in enumerate(spec.layers):
        if layer.rope is None and planes == PLANES[:1]:
            continue
        for plane in planes:
            _move(graph, spec, kv_type, index, plane)
    return graph.model()


def _move(graph: GraphWriter, spec: ModelSpec, kv_type: KvType, index: int, plane: str) -> None:
    """Move a layer's keys, turned, or its values."""
    kept, rope = parts(kv_type, spec.head_dim), spec.layers[index].rope
    cells, moved = [], []
    for part in kept:
        shape: list[Dim] = [1, spec.n_kv_heads, "c", part.width]
        cells.append(graph.input(past(index, plane) + part.suffix, part.dtype, shape))
        graph.output(present(index, plane) + part.suffix, part.dtype, shape)
        moved.append(graph.node("Gather", [cells[-1], "source"], f"{cells[-1]}.moved", axis=2))
    if plane == "key" and rope is not None:
        exact = expanded(graph, *moved) if len(kept) > 1 else graph.node("Cast", moved, f"{moved[0]}.float", to=1)
        turned = _turned(graph, spec, rope, exact)
        moved = (
            list(quantized(graph, turned))
            if len(kept) > 1
            else [graph.node("CastLike", [turned, cells[0]], f"{turned}.stored")]
        )
    for part, values in zip(kept, moved, strict=True):
        names = past(index, plane) + part.suffix, present(index, plane) + part.suffix
        graph.node("TensorScatter", [names[0], values, "to"], names[1], axis=2)


def _turned(graph: GraphWriter, spec: ModelSpec, rope: RopeSpec, keys: str) -> str:
    return graph.node(
        "RotaryEmbedding",
        [keys, *rotation(Kinds.of(spec).ropes.index(rope))],
        f"{keys}.rotated",
        interleaved=int(rope.style is RopeStyle.INTERLEAVED),
        rotary_embedding_dim=0 if rope.n_dims == spec.head_dim else rope.n_dims,
    )
