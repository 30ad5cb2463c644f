"""Writes ONNX graphs: named nodes, and weights outside the protobuf message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx import GraphProto, ModelProto, TensorProto, helper

MICROSOFT = "com.microsoft"
_EXTERNAL = "weights"  # the location of external weights; sessions get their values directly

# Versions that runtimes must support: IR 10 and opset 21 are older than the defaults of the onnx package.
_OPSETS = {21: 10, 24: 11}

ELEMENT_TYPES: Mapping[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}

Dim = int | str


class GraphWriter:
    """Collects nodes, inputs, outputs and weights.

    Args:
        name: name of the graph.
        opset: version of the ONNX operators, 21 or 24.

    Attributes:
        weights: the values of external weights, by name.
    """

    def __init__(self, name: str, opset: int) -> None:
        self._graph = GraphProto(name=name)
        self._opset = opset
        self.weights: dict[str, NDArray[Any]] = {}

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> str:
        """Declare an input; returns its name."""
        self._graph.input.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[Dim]) -> None:
        """Declare an output that a node computes."""
        self._graph.output.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], shape))

    def weight(self, name: str, values: NDArray[Any]) -> str:
        """Add an external weight, once per name; returns its name."""
        if name not in self.weights:
            array = np.ascontiguousarray(values)
            tensor = self._graph.initializer.add()
            tensor.name, tensor.data_type = name, ELEMENT_TYPES[array.dtype.name]
            tensor.dims.extend(array.shape)
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=_EXTERNAL)
            self.weights[name] = array
        return name

    def constant(self, name: str, values: Sequence[int]) -> str:
        """Add a small int64 vector to the model; returns its name."""
        if all(tensor.name != name for tensor in self._graph.initializer):
            self._graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def scalar(self, name: str, value: int) -> str:
        """Add an int64 scalar to the model; returns its name."""
        self._graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [], [value]))
        return name

    def number(self, value: float, dtype: str) -> str:
        """Add a scalar to the model, once per value; returns its name."""
        name = f"number.{dtype}.{value!r}"
        if all(tensor.name != name for tensor in self._graph.initializer):
            self._graph.initializer.append(helper.make_tensor(name, ELEMENT_TYPES[dtype], [], [value]))
        return name

    def node(
        self, operator: str, inputs: Sequence[str], outputs: str | Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node; returns the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        self._graph.node.append(helper.make_node(operator, inputs, names, name=names[0], domain=domain, **attributes))
        return names[0]

    def model(self) -> ModelProto:
        """The complete model."""
        opsets = [helper.make_opsetid("", self._opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(
            self._graph, opset_imports=opsets, ir_version=_OPSETS[self._opset], producer_name="slm-core"
        )
