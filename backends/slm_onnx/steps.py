"""Runs an exported decoder graph: tokens of one sequence after its cached tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import DecodeFailed, InvalidModelFile, UnsupportedModel
from slm_core.types import Logits
from slm_onnx import runtime
from slm_onnx.layouts import Layout, Ports, find_ports
from slm_onnx.providers import Device

_FLOATS: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}
_INTEGERS: dict[str, np.dtype[Any]] = {
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(bool),
}

Caches = Sequence[Any]
"""``OrtValue`` of keys and values of each layer, [1, K, S, D] each."""


class Step:
    """One open graph.

    Args:
        layout: the layout of its directory.
        graph: its file.
        place: its execution provider.
        device: its device.

    Attributes:
        ports: its inputs and outputs.
        dtype: dtype of its caches.
        cache_shape: heads K and width D.
        n_vocab: width of its logits; None if the graph does not state it.
        one_by_one: whether it accepts only one token at a time.
        metadata: the graph's metadata.

    Raises:
        InvalidModelFile: a name in the graph is not UTF-8.
        UnsupportedModel: ONNX Runtime refuses it, or its inputs and outputs match no known layout.
        BackendUnavailable: a provider cannot be used.
    """

    def __init__(self, layout: Layout, graph: Path, place: runtime.Place, device: Device) -> None:
        self._session = runtime.file_session(graph, place)
        self._device = device
        inputs, outputs, self.metadata = _described(self._session, graph)
        ranks = [{name: len(node.shape) for name, node in nodes.items()} for nodes in (inputs, outputs)]
        self.ports: Ports = find_ports(layout, graph, *ranks)
        caches = [*(inputs[name] for name in self.ports.past), *(outputs[name] for name in self.ports.present)]
        self.dtype = _single_dtype({node.type for node in caches}, _FLOATS, graph)
        self.cache_shape = _cache_shape([inputs[name].shape for name in self.ports.past], graph)
        self.one_by_one = inputs[self.ports.tokens].shape[1:] == [1]
        width = outputs[self.ports.logits].shape[-1]
        self.n_vocab: int | None = width if isinstance(width, int) else None
        names = (self.ports.tokens, self.ports.mask, self.ports.positions, self.ports.branch)
        self._types = {name: _single_dtype({inputs[name].type}, _INTEGERS, graph) for name in names if name is not None}

    def run(
        self, tokens: Sequence[int] | NDArray[np.int32], caches: Caches, n_held: int, *, in_place: bool, position: int
    ) -> tuple[Logits, Caches]:
        """Run tokens after ``n_held`` cached tokens.

        Args:
            tokens: the tokens [n].
            caches: caches of the earlier tokens; with room for the new ones if ``in_place``.
            n_held: number of earlier tokens.
            in_place: whether caches are written in place; then the same caches are returned.
            position: position of the first token.

        Returns:
            Logits float32 [n, V], and the caches after the run.

        Raises:
            DecodeFailed: the runtime reported a failure.
        """
        binding, ports = self._session.io_binding(), self.ports
        for name, array in self._inputs(tokens, n_held, position):
            binding.bind_cpu_input(name, array)
        for name, cache in zip(ports.past, caches if ports.past else (), strict=True):
            binding.bind_ortvalue_input(name, cache)
        binding.bind_output(ports.logits, "cpu")
        if in_place:
            for name, cache in zip(ports.present, caches, strict=True):
                binding.bind_ortvalue_output(name, cache)
        else:
            for name in ports.present:
                binding.bind_output(name, self._device.provider.memory or "cpu", self._device.device_id)
        runtime.run(self._session, binding)
        logits, *after = binding.get_outputs()
        rows = logits.numpy()[0]
        if len(rows) != len(tokens):
            raise DecodeFailed(f"the graph gave {len(rows)} rows of logits for {len(tokens)} tokens")
        return rows.astype(np.float32, copy=False), caches if in_place else after

    def _inputs(
        self, tokens: Sequence[int] | NDArray[np.int32], n_held: int, position: int
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        n = len(tokens)
        known: dict[str | None, Callable[[], NDArray[Any]]] = {
            self.ports.tokens: lambda: np.asarray(tokens)[None],
            self.ports.mask: lambda: np.ones((1, n_held + n)),
            self.ports.positions: lambda: np.arange(position, position + n)[None],
            self.ports.branch: lambda: np.array([n_held > 0]),
        }
        for name, dtype in self._types.items():
            yield name, known[name]().astype(dtype)


@dataclass(frozen=True, slots=True)
class _Node:
    """An input or output of a graph."""

    type: str
    shape: list[Any]


def _described(session: Any, graph: Path) -> tuple[dict[str, _Node], dict[str, _Node], dict[str, str]]:
    """Inputs and outputs by name, and the graph's metadata."""
    try:
        inputs, outputs = (
            {node.name: _Node(node.type, list(node.shape or ())) for node in nodes}
            for nodes in (session.get_inputs(), session.get_outputs())
        )
        return inputs, outputs, dict(session.get_modelmeta().custom_metadata_map)
    except UnicodeDecodeError as error:
        raise InvalidModelFile(f"{graph}: a name in it is not UTF-8") from error


def _single_dtype(dtypes: set[str], accepted: dict[str, np.dtype[Any]], graph: Path) -> np.dtype[Any]:
    kinds = sorted(dtypes)
    if len(kinds) != 1 or kinds[0] not in accepted:
        raise UnsupportedModel(f"{graph}: {' and '.join(kinds)} is not known here (accepted: {', '.join(accepted)})")
    return accepted[kinds[0]]


def _cache_shape(shapes: Sequence[Sequence[Any]], graph: Path) -> tuple[int, int] | None:
    """Heads and width of the caches; None if the graph has no cache inputs."""
    sizes = {(shape[1], shape[3]) for shape in shapes}
    if not sizes:
        return None
    heads, width = min(sizes, key=str)
    if len(sizes) > 1 or not all(isinstance(size, int) and size > 0 for size in (heads, width)):
        raise UnsupportedModel(f"{graph}: the caches of its layers have not one number of heads and one width")
    return heads, width
