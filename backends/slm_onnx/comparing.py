"""The self-check: the same decodes and edits of a tiny model on a device and on the CPU, compared."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import OptionError, SlmError
from slm_core.gguf import GgufFile
from slm_core.protocols import Context
from slm_core.types import ContextOptions, Pos
from slm_onnx import providers, runtime
from slm_onnx.checkmodel import check_model
from slm_onnx.convert import convert
from slm_onnx.fromdirectory import directory_model
from slm_onnx.fromgguf import gguf_model
from slm_onnx.layouts import GENAI
from slm_onnx.model import OnnxModel
from slm_onnx.options import LoadOptions

_SIZES = ContextOptions(n_ctx=64, n_batch=16)
_PROMPT = (5, 80, 17, 130, 9, 201, 44)
_THREADS = runtime.Threads(1, spinning=False)


def answer(question: str) -> None:
    """Print as JSON the errors of a device's logits relative to the CPU, or why the device cannot compute them.

    Args:
        question: JSON of the device's name, the load options, and whether to run a directory.
    """
    label, options, of_directory = json.loads(question)
    try:
        device, asked = providers.find(label), LoadOptions(**options, cache=False)
        result: Mapping[str, Any] = {"errors": errors(device, asked, of_directory=of_directory)}
    except OptionError as error:
        result = {"option": str(error)}
    except SlmError as error:
        result = {"problem": runtime.one_line(error)}
    sys.stdout.write(f"\n{json.dumps(result)}\n")


def errors(device: providers.Device, options: LoadOptions, *, of_directory: bool = False) -> dict[str, float]:
    """The relative error (L2 norm) of the logits after each step, by the name of the step.

    The reference is the CPU provider with float products (``accuracy_level`` 0).

    Args:
        device: the device of the graphs.
        options: the load options.
        of_directory: whether to run the graphs of a directory, with caches written in place and with separate ones.

    Raises:
        BackendUnavailable, UnsupportedModel, ContextError: the device cannot run a graph.
    """
    with _gguf_model(providers.find("cpu"), LoadOptions(accuracy_level=0, cache=False)) as reference:
        expected = dict(_logits(reference, 2))
    errors_by_step: dict[str, float] = {}
    if not of_directory:
        with _gguf_model(device, options) as model:
            for n_seq_max in _numbers_of_sequences(device):
                errors_by_step.update(_errors(model, expected, n_seq_max))
        return errors_by_step
    for caches, in_place in (("written in place", True), ("passed on", False)):
        with _directory_model(device, options, in_place=in_place) as model:
            errors_by_step.update(
                {f"{step} (caches {caches})": error for step, error in _errors(model, expected, 2).items()}
            )
    return errors_by_step


def _numbers_of_sequences(device: providers.Device) -> Iterator[int]:
    """Numbers of sequences that cover all graphs of the device: contexts of one sequence may need no bias."""
    since = device.provider.bias_since
    if since is not None:
        yield 1
    if since is None or runtime.is_since(since):
        yield 2


def _errors(model: OnnxModel, expected: Mapping[str, NDArray[np.float32]], n_seq_max: int) -> dict[str, float]:
    where = " (in a context of one sequence)" if n_seq_max == 1 else ""
    return {f"{step}{where}": _error(row, expected[step]) for step, row in _logits(model, n_seq_max)}


def _error(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The relative error; infinite if a number is infinite or NaN."""
    error = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def _gguf_model(device: providers.Device, options: LoadOptions) -> OnnxModel:
    return gguf_model(GgufFile.open(check_model()), device, _THREADS, options, _ignored)


@contextmanager
def _directory_model(device: providers.Device, options: LoadOptions, *, in_place: bool) -> Iterator[OnnxModel]:
    with tempfile.TemporaryDirectory(prefix="slm-check-") as directory:
        file, folder = Path(directory) / "check.gguf", Path(directory) / "check"
        file.write_bytes(check_model())
        convert(file, folder, _ignored)
        if not in_place:
            (folder / GENAI).unlink()  # it declares caches that are written in place
        with directory_model(
            folder, device, device.session_place(options.provider_options, _THREADS), _ignored
        ) as model:
            yield model


def _ignored(share: float) -> None:
    """Ignore the progress of loading."""


def _logits(model: OnnxModel, n_seq_max: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Logits [V] after each step, for one and for two sequences; all steps but the first read the KV cache."""
    other = n_seq_max - 1
    with model.new_context(dataclasses.replace(_SIZES, n_seq_max=n_seq_max)) as context:
        yield "a prompt", _decode(context, 0, _PROMPT)
        yield "the token after it", _decode(context, 0, (61,))
        if other:
            context.fork(0, other, 5)
            yield "a fork", _decode(context, other, (72, 150))
        yield "one more token", _decode(context, 0, (33,))
        context.cut(Pos(0, 2), Pos(0, 5))
        yield "a cut", _decode(context, 0, (99,))
        context.restore(other, context.dump(0))
        yield "a restored dump", _decode(context, other, (11,))


def _decode(context: Context, seq_id: int, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="last")
    return np.array(context.decode(batch)[0])
