"""Checks that a device computes attention correctly: some kernels of ONNX Runtime assume properties of a GPU.

WebGPU's kernel for 32 tokens and more reads 8 keys at a time from the registers of a subgroup. If subgroups have 4
lanes (software devices, some mobile GPUs), its results are silently wrong. The kernel for fewer tokens is correct
there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import BackendUnavailable
from slm_onnx import runtime
from slm_onnx.graphwriter import MICROSOFT, GraphWriter

_FEW, _MANY = 31, 64  # tokens: the largest number for one kernel, and a number for the other kernel
_WIDTH = 8
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2}  # relative; the error of a wrong kernel is above 0.1


def most_rows(place: runtime.Place, dtype: str) -> int | None:
    """The largest number of tokens per run with correct attention on a device; None for any number.

    Raises:
        BackendUnavailable: attention is wrong for any number of tokens.
    """
    session = runtime.session(_graph(dtype), runtime.NO_WEIGHTS, place)
    if _is_right(session, _MANY, dtype):
        return None
    if _is_right(session, _FEW, dtype):
        return _FEW
    raise BackendUnavailable(f"{place.providers[0][0]} computes attention wrong on this device")


def _graph(dtype: str) -> bytes:
    """A graph of attention with one head and an empty cache."""
    graph = GraphWriter("attention", opset=21)
    names = [graph.input(name, dtype, [1, "n", _WIDTH]) for name in ("q", "k", "v")]
    names += [graph.input(f"past.{name}", dtype, [1, 1, "c", _WIDTH]) for name in ("k", "v")]
    names += [graph.input("seqlens_k", "int32", [1]), graph.input("total_sequence_length", "int32", [])]
    outputs = ["mixed", "present.k", "present.v"]
    graph.node("GroupQueryAttention", names, outputs, domain=MICROSOFT, num_heads=1, kv_num_heads=1)
    graph.output("mixed", dtype, [1, "n", _WIDTH])
    for name in outputs[1:]:
        graph.output(name, dtype, [1, 1, "c", _WIDTH])
    model: bytes = graph.model().SerializeToString()
    return model


def _is_right(session: Any, n: int, dtype: str) -> bool:
    """Compare causal attention of ``n`` tokens with the formula."""
    q, k, v = np.random.default_rng(n).standard_normal((3, n, _WIDTH)).astype(dtype)
    empty = np.zeros((1, 1, n, _WIDTH), dtype)
    feed = {"q": q[None], "k": k[None], "v": v[None], "past.k": empty, "past.v": empty}
    feed |= {"seqlens_k": np.array([n - 1], np.int32), "total_sequence_length": np.array(n, np.int32)}
    (mixed,) = session.run(["mixed"], feed)
    expected = _attention(*(x.astype(np.float64) for x in (q, k, v)))
    error = np.linalg.norm(mixed[0] - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return bool((error <= _TOLERANCE[dtype]).all())  # False for NaN


def _attention(q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
    scores = np.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True) @ v
    return mixed
