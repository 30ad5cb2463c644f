"""The graph that edits a KV cache: it copies cells and turns keys."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto
from slm_core.architectures import ModelSpec, RopeStyle
from slm_onnx.graphwriter import Dim, GraphWriter
from slm_onnx.ports import PLANES, Kinds, past, present, rotation


def edit_graph(spec: ModelSpec, dtype: str, planes: Sequence[str] = PLANES) -> ModelProto:
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
            shape: list[Dim] = [1, spec.n_kv_heads, "c", spec.head_dim]
            cells, after = graph.input(past(index, plane), dtype, shape), present(index, plane)
            moved = graph.node("Gather", [cells, "source"], f"{cells}.moved", axis=2)
            if plane == "key" and layer.rope is not None:
                exact = graph.node("Cast", [moved], f"{moved}.float", to=1)
                rotated = graph.node(
                    "RotaryEmbedding",
                    [exact, *rotation(kinds.ropes.index(layer.rope))],
                    f"{moved}.rotated",
                    interleaved=int(layer.rope.style is RopeStyle.INTERLEAVED),
                    rotary_embedding_dim=0 if layer.rope.n_dims == spec.head_dim else layer.rope.n_dims,
                )
                moved = graph.node("CastLike", [rotated, cells], f"{moved}.stored")
            graph.node("TensorScatter", [cells, moved, "to"], after, axis=2)
            graph.output(after, dtype, shape)
    return graph.model()
