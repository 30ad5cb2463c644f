"""Graphs that edit a KV cache: copy cells, rotate keys, and copy cells between the device and the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import ModelProto
from slm_core.architectures import ModelSpec, RopeSpec, RopeStyle
from slm_core.types import KvType
from slm_onnx.bytecache import expanded, quantized
from slm_onnx.graphwriter import Dim, GraphWriter
from slm_onnx.ports import PLANES, Kinds, Part, parts, past, present, rotation, rows_of


def edit_graph(spec: ModelSpec, kv_type: KvType, planes: Sequence[str] = PLANES, *, on_host: bool = True) -> ModelProto:
    """The graph that moves cells: ``cache[to + i] = rotate(cache[source[i]], angle[i])`` in every layer, in place.

    If ``planes`` has only keys, the graph has only the layers with RoPE, and rotates cells in place.

    Inputs besides the cache: ``source`` int64 [n]; for each rotation (``ports.Kinds``) cosines and sines float32
    [1, n, R/2]; the target, which is ``to`` int64 [1], or ``places`` (see ``write_graph``) if not ``on_host``.
    """
    graph, kinds = GraphWriter("edit", opset=24), Kinds.of(spec)
    graph.input("source", "int64", ["n"])
    _input_target(graph, spec, on_host=on_host)
    for kind, rope in enumerate(kinds.ropes):
        for name in rotation(kind):
            graph.input(name, "float32", [1, "n", rope.n_dims // 2])
    for index, layer in enumerate(spec.layers):
        if layer.rope is None and planes == PLANES[:1]:
            continue
        for plane in planes:
            _move(graph, spec, kv_type, index, plane, on_host=on_host)
    return graph.model()


def read_graph(spec: ModelSpec, kv_type: KvType) -> ModelProto:
    """The graph that reads cells ``source`` int64 [n] of every layer: ``ports.rows_of``, [1, K, n, width] each."""
    graph = GraphWriter("read", opset=21)
    graph.input("source", "int64", ["n"])
    for index, plane, part in _tensors(spec, kv_type):
        cells = graph.input(past(index, plane) + part.suffix, part.dtype, _shape(spec, part, "c"))
        rows = rows_of(index, plane) + part.suffix
        graph.node("Gather", [cells, "source"], rows, axis=2)
        graph.output(rows, part.dtype, _shape(spec, part, "n"))
    return graph.model()


def write_graph(spec: ModelSpec, kv_type: KvType) -> ModelProto:
    """The graph that writes ``ports.rows_of`` [1, K, n, width] into every layer, in place.

    ``places`` int64 [1, K, n, 3] is the index of each row in a cache: (0, head, cell).
    """
    graph = GraphWriter("write", opset=21)
    _input_target(graph, spec, on_host=False)
    for index, plane, part in _tensors(spec, kv_type):
        rows = graph.input(rows_of(index, plane) + part.suffix, part.dtype, _shape(spec, part, "n"))
        graph.input(past(index, plane) + part.suffix, part.dtype, _shape(spec, part, "c"))
        graph.output(present(index, plane) + part.suffix, part.dtype, _shape(spec, part, "c"))
        _write(graph, index, plane, part, rows, on_host=False)
    return graph.model()


def clear_graph(spec: ModelSpec, kv_type: KvType) -> ModelProto:
    """The graph that fills every cache with zeros; ``shape`` int64 [4] is the shape of each."""
    (part,) = parts(kv_type, spec.head_dim)
    graph = GraphWriter("clear", opset=21)
    graph.input("shape", "int64", [4])
    zero = graph.number(0, part.dtype)
    for index, plane, _ in _tensors(spec, kv_type):
        graph.node("Expand", [zero, "shape"], present(index, plane))
        graph.output(present(index, plane), part.dtype, _shape(spec, part, "c"))
    return graph.model()


def _tensors(spec: ModelSpec, kv_type: KvType) -> Iterator[tuple[int, str, Part]]:
    for index in range(spec.n_layers):
        for plane in PLANES:
            for part in parts(kv_type, spec.head_dim):
                yield index, plane, part


def _shape(spec: ModelSpec, part: Part, cells: Dim) -> list[Dim]:
    return [1, spec.n_kv_heads, cells, part.width]


def _input_target(graph: GraphWriter, spec: ModelSpec, *, on_host: bool) -> None:
    """Declare the input with the cells to write."""
    if on_host:
        graph.input("to", "int64", [1])
    else:
        graph.input("places", "int64", [1, spec.n_kv_heads, "n", 3])


def _write(graph: GraphWriter, index: int, plane: str, part: Part, rows: str, *, on_host: bool) -> None:
    """Write rows into a cache, in place.

    TensorScatter is faster on the CPU. Providers of GPUs have ScatterND, but not all of them have TensorScatter.
    """
    before, after = past(index, plane) + part.suffix, present(index, plane) + part.suffix
    if on_host:
        graph.node("TensorScatter", [before, rows, "to"], after, axis=2)
    else:
        graph.node("ScatterND", [before, "places", rows], after)


def _move(graph: GraphWriter, spec: ModelSpec, kv_type: KvType, index: int, plane: str, *, on_host: bool) -> None:
    """Move a layer's keys, with rotation, or its values."""
    kv_parts, rope = parts(kv_type, spec.head_dim), spec.layers[index].rope
    cells, moved = [], []
    for part in kv_parts:
        cells.append(graph.input(past(index, plane) + part.suffix, part.dtype, _shape(spec, part, "c")))
        graph.output(present(index, plane) + part.suffix, part.dtype, _shape(spec, part, "c"))
        moved.append(graph.node("Gather", [cells[-1], "source"], f"{cells[-1]}.moved", axis=2))
    if plane == "key" and rope is not None:
        exact = expanded(graph, *moved) if len(kv_parts) > 1 else graph.node("Cast", moved, f"{moved[0]}.float", to=1)
        rotated = _rotated(graph, spec, rope, exact)
        moved = (
            list(quantized(graph, rotated))
            if len(kv_parts) > 1
            else [graph.node("CastLike", [rotated, cells[0]], f"{rotated}.stored")]
        )
    for part, values in zip(kv_parts, moved, strict=True):
        _write(graph, index, plane, part, values, on_host=on_host)


def _rotated(graph: GraphWriter, spec: ModelSpec, rope: RopeSpec, keys: str) -> str:
    return graph.node(
        "RotaryEmbedding",
        [keys, *rotation(Kinds.of(spec).ropes.index(rope))],
        f"{keys}.rotated",
        interleaved=int(rope.style is RopeStyle.INTERLEAVED),
        rotary_embedding_dim=0 if rope.n_dims == spec.head_dim else rope.n_dims,
    )
