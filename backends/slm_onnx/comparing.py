"""The self-check's own work: the same decodes and edits of a tiny model on a device and on the CPU, compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import SlmError
from slm_core.gguf import GgufFile
from slm_core.protocols import Context
from slm_core.types import ContextOptions, Pos
from slm_onnx import providers, runtime
from slm_onnx.checkmodel import check_model
from slm_onnx.fromgguf import gguf_model
from slm_onnx.options import LoadOptions

_SIZES = ContextOptions(n_ctx=64, n_batch=16, n_seq_max=2)
_PROMPT = (5, 80, 17, 130, 9, 201, 44)
_THREADS = runtime.Threads(1, spinning=False)


def answer(question: str) -> None:
    """Print, as JSON, how far a device's logits are from the CPU's, or why the device cannot compute them.

    Args:
        question: JSON of the device's name and of what ``LoadOptions`` takes.
    """
    device, options = json.loads(question)
    try:
        found: Mapping[str, Any] = {"errors": errors(providers.find(device), LoadOptions(**options, cache=False))}
    except SlmError as error:
        found = {"problem": runtime.one_line(error)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def errors(device: providers.Device, options: LoadOptions) -> dict[str, float]:
    """The relative error (L2 norm) of the logits after each step, by the step's name.

    The reference is the CPU provider with products in float (``accuracy_level`` 0).

    Raises:
        BackendUnavailable, UnsupportedModel, ContextError: the device cannot run a graph.
    """
    expected = dict(_logits(providers.find("cpu"), LoadOptions(accuracy_level=0, cache=False)))
    found = dict(_logits(device, options))
    return {step: _error(found[step], row) for step, row in expected.items()}


def _error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Infinite where a number is infinite or none."""
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def _logits(device: providers.Device, options: LoadOptions) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Logits [V] after each step; what is in the KV cache matters in all but the first."""
    gguf = GgufFile.open(check_model())
    with gguf_model(gguf, device, _THREADS, options, lambda share: None) as model, model.new_context(_SIZES) as context:
        yield "a prompt", _decode(context, 0, _PROMPT)
        yield "the token after it", _decode(context, 0, (61,))
        context.fork(0, 1, 5)
        yield "a fork", _decode(context, 1, (72, 150))
        yield "the sequence that was forked", _decode(context, 0, (33,))
        context.cut(Pos(0, 2), Pos(0, 5))
        yield "a cut", _decode(context, 0, (99,))
        context.restore(1, context.dump(0))
        yield "a restored dump", _decode(context, 1, (11,))


def _decode(context: Context, seq_id: int, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="last")
    return np.array(context.decode(batch)[0])
