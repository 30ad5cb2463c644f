"""ONNX Runtime, imported on first use; sessions, and the log that it would write to stderr."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from slm_core.errors import BackendUnavailable, DecodeFailed, UnsupportedModel
from slm_onnx import INSTALL_HINT, build, plugins

_NOT_CAPTURED = -1  # ONNX Runtime's id for runs without CUDA graphs
_CAUSAL_SINCE = 1, 30  # the version that GroupQueryAttention has an attribute from which turns its own mask off
_CODED_EXPERTS_SINCE = 1, 31  # the version that QMoE takes accuracy_level and the bits of each matrix from
_SILENT = 4  # only what ends the process is logged: everything else is raised, too
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Threads:
    """How a session computes on the CPU.

    Attributes:
        n_threads: threads of one operator.
        spinning: whether threads that wait for work keep their core busy: faster alone, slower beside other work.
    """

    n_threads: int
    spinning: bool


def missing() -> str | None:
    """A missing or too old package; None if there is none. Imports nothing."""
    return build.problem()


def version() -> str:
    """The version of ONNX Runtime, of any build; "" if none is installed."""
    installed = build.find_build()
    return installed.version if installed else ""


def is_since(release: tuple[int, int]) -> bool:
    """Whether ONNX Runtime is of a release or of a later one."""
    installed = build.numbers(version())
    return installed is not None and installed >= release


def can_mask_by_bias() -> bool:
    """Whether attention can mask by a bias only."""
    return is_since(_CAUSAL_SINCE)


def has_coded_experts() -> bool:
    """Whether experts can stay in codes of 4 or 8 bits."""
    return is_since(_CODED_EXPERTS_SINCE)


def is_loaded() -> bool:
    """Whether it has been imported."""
    return "onnxruntime" in sys.modules


def load() -> Any:
    """The module ``onnxruntime``.

    Raises:
        BackendUnavailable: it is not installed, or its shared library cannot be loaded.
    """
    if (reason := missing()) is not None:
        raise BackendUnavailable(reason)
    try:
        module = importlib.import_module("onnxruntime")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"onnxruntime cannot be loaded: {error} (to get it: {INSTALL_HINT})") from error
    module.set_default_logger_severity(_SILENT)
    module.disable_telemetry_events()  # some builds have it on, and nobody was asked
    plugins.register(module)
    return module


@dataclass(frozen=True, slots=True)
class Place:
    """Where sessions run.

    Attributes:
        providers: execution providers with their options, best first.
        threads: for operators on the CPU.
        config: entries of the session's configuration.
        preloads_cuda: whether CUDA's libraries are loaded before the first session.
    """

    providers: Sequence[tuple[str, Mapping[str, str]]]
    threads: Threads
    config: Mapping[str, str] = field(default_factory=dict)
    preloads_cuda: bool = False


def session(model: bytes, weights: Mapping[str, NDArray[Any]], place: Place, save_to: Path | None = None) -> Any:
    """An ``InferenceSession``.

    Args:
        model: the serialized model.
        weights: values of what it keeps outside; copied where the runtime needs another layout.
        place: its execution provider.
        save_to: a file to write the optimized model to, its weights beside it.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    options = _options(place)
    if weights:
        values = [load().OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    if save_to is not None:
        _save_to(options, save_to)
    return _open(model, options, place)


def save_packed(file: Path, save_to: Path, place: Place) -> None:
    """Write a model that ``session`` has saved once more, with its weights also as this processor multiplies them.

    Such weights stay in the mapped file when it is opened, instead of being copied.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    options = _options(place)
    options.graph_optimization_level = load().GraphOptimizationLevel.ORT_DISABLE_ALL  # that is done
    _save_to(options, save_to)
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    _open(str(file), options, place)


def saved_session(file: Path, place: Place) -> Any:
    """The session of a model that ``session`` has saved; its weights stay in the mapped file.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    options = _options(place)
    options.graph_optimization_level = load().GraphOptimizationLevel.ORT_DISABLE_ALL  # that is done
    return _open(str(file), options, place)


def file_session(file: Path, place: Place) -> Any:
    """The session of an exported model; its weights may be in files next to it.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    return _open(str(file), _options(place), place)


def _options(place: Place) -> Any:
    options = load().SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = place.threads.n_threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # it would keep what a long prompt once needed
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(place.threads.spinning)))
    for key, value in place.config.items():
        options.add_session_config_entry(key, value)
    return options


def _save_to(options: Any, file: Path) -> None:
    prefix = "session.optimized_model_external_initializers"
    options.optimized_model_filepath = str(file)
    options.add_session_config_entry(f"{prefix}_file_name", f"{file.name}.weights")
    options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")


def _open(model: bytes | str, options: Any, place: Place) -> Any:
    providers = [(name, dict(provider_options)) for name, provider_options in place.providers]
    if place.preloads_cuda:
        _preload_cuda()
    try:
        session = load().InferenceSession(model, options, providers=providers)
    except Exception as error:  # the runtime raises classes of its own, RuntimeError and ValueError
        raise UnsupportedModel(f"ONNX Runtime refuses the model: {one_line(error)}") from error
    wanted, used = place.providers[0][0], session.get_providers()
    if wanted not in used:
        raise BackendUnavailable(f"ONNX Runtime cannot use {wanted} here and fell back to {', '.join(used)}")
    return session


@functools.cache
def _preload_cuda() -> None:
    """Load the libraries of CUDA and cuDNN that pip has installed, which the system's loader does not find.

    ONNX Runtime prints what it cannot load. A library may be missing and not needed, so the session is what tells.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load().preload_dlls()
    if text := printed.getvalue().strip():
        _log.info("%s", text)


def run(session: Any, binding: Any, number: int = _NOT_CAPTURED) -> None:
    """Run a session with everything bound.

    Args:
        session: the session.
        binding: of its inputs and outputs.
        number: of the run, for a provider that captures runs: the same number means the same shapes and memory.

    Raises:
        DecodeFailed: the runtime reported a failure.
    """
    options = load().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:
        raise DecodeFailed(f"ONNX Runtime failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split())[:500]


NO_WEIGHTS: Mapping[str, NDArray[Any]] = MappingProxyType({})
