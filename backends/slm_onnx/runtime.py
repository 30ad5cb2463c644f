"""ONNX Runtime, imported on first use; its sessions and its log."""

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
from slm_onnx.options import CAPTURE

_NOT_CAPTURED = -1  # ONNX Runtime's id for runs without CUDA graphs
_CAUSAL_SINCE = 1, 30  # first version whose GroupQueryAttention can be non-causal
_CODED_EXPERTS_SINCE = 1, 31  # first version whose QMoE has accuracy_level and bits per matrix
_SILENT = 4  # log level: only fatal errors; all other errors are raised
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU settings of a session.

    Attributes:
        n_threads: threads of one operator.
        spinning: whether waiting threads keep their core busy: faster alone, slower next to other work.
    """

    n_threads: int
    spinning: bool


def missing() -> str | None:
    """A message about a missing or too old package; None if there is no problem. Imports nothing."""
    return build.problem()


def version() -> str:
    """The version of ONNX Runtime, of any build; "" if none is installed."""
    installed = build.find_build()
    return installed.version if installed else ""


def is_since(release: tuple[int, int]) -> bool:
    """Whether ONNX Runtime has at least this version."""
    installed = build.numbers(version())
    return installed is not None and installed >= release


def can_mask_by_bias() -> bool:
    """Whether attention supports the bias as its only mask."""
    return is_since(_CAUSAL_SINCE)


def has_coded_experts() -> bool:
    """Whether QMoE supports experts with codes of 4 or 8 bits."""
    return is_since(_CODED_EXPERTS_SINCE)


def is_loaded() -> bool:
    """Whether ONNX Runtime is imported."""
    return "onnxruntime" in sys.modules


def load() -> Any:
    """The module ``onnxruntime``, after a check of the installed packages, which takes a millisecond.

    Raises:
        BackendUnavailable: it is not installed, or its shared library cannot be loaded.
    """
    if (reason := missing()) is not None:
        raise BackendUnavailable(reason)
    return module()


@functools.cache
def module() -> Any:
    """The module ``onnxruntime``, imported and configured once; ``load`` has checked the packages.

    Raises:
        BackendUnavailable: its shared library cannot be loaded.
    """
    try:
        ort = importlib.import_module("onnxruntime")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"onnxruntime cannot be loaded: {error} (to get it: {INSTALL_HINT})") from error
    ort.set_default_logger_severity(_SILENT)
    ort.disable_telemetry_events()  # some builds enable telemetry by default
    plugins.register(ort)
    return ort


@dataclass(frozen=True, slots=True)
class Place:
    """Execution providers and settings of sessions.

    Attributes:
        providers: execution providers with their options, best first.
        threads: settings of operators on the CPU.
        config: entries of the session configuration.
        preloads_cuda: whether CUDA's libraries are loaded before the first session.
    """

    providers: Sequence[tuple[str, Mapping[str, str]]]
    threads: Threads
    config: Mapping[str, str] = field(default_factory=dict)
    preloads_cuda: bool = False


def session(model: bytes, weights: Mapping[str, NDArray[Any]], place: Place, save_to: Path | None = None) -> Any:
    """Create an ``InferenceSession``.

    Args:
        model: the serialized model.
        weights: the values of external weights; copied if ONNX Runtime needs another layout.
        place: the execution provider.
        save_to: a file to which the optimized model is written, with its weights next to it.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    options = _options(place)
    if weights:
        values = [module().OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    if save_to is not None:
        _save_to(options, save_to)
    return _open(model, options, place)


def save_packed(file: Path, save_to: Path, place: Place) -> None:
    """Write a model that ``session`` has saved again, with weights packed for this CPU.

    Packed weights stay in the mapped file when it is opened, instead of being copied.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    options = _options(place)
    options.graph_optimization_level = module().GraphOptimizationLevel.ORT_DISABLE_ALL  # already optimized
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
    options.graph_optimization_level = module().GraphOptimizationLevel.ORT_DISABLE_ALL  # already optimized
    return _open(str(file), options, place)


def file_session(file: Path, place: Place) -> Any:
    """The session of an exported model; its weights may be in files next to it.

    Raises:
        UnsupportedModel: ONNX Runtime refuses the model.
        BackendUnavailable: a provider cannot be used.
    """
    return _open(str(file), _options(place), place)


def _options(place: Place) -> Any:
    options = module().SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = place.threads.n_threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # the arena would keep the peak memory of a long prompt
    # ONNX Runtime keeps a plan of memory for each shape of inputs for ever, and nearly every batch has a new shape.
    # Captured runs have few shapes.
    options.enable_mem_pattern = any(CAPTURE in provider_options for _, provider_options in place.providers)
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
        session = module().InferenceSession(model, options, providers=providers)
    except Exception as error:  # ONNX Runtime raises its own classes, RuntimeError and ValueError
        raise UnsupportedModel(f"ONNX Runtime refuses the model: {one_line(error)}") from error
    provider, used = place.providers[0][0], session.get_providers()
    if provider not in used:
        raise BackendUnavailable(f"ONNX Runtime cannot use {provider} here and fell back to {', '.join(used)}")
    return session


@functools.cache
def _preload_cuda() -> None:
    """Load the libraries of CUDA and cuDNN that pip has installed; the system's loader does not find them.

    ONNX Runtime prints libraries that it cannot load. A missing library may not be needed: the session decides.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module().preload_dlls()
    if text := printed.getvalue().strip():
        _log.info("%s", text)


def run(session: Any, binding: Any, number: int = _NOT_CAPTURED) -> None:
    """Run a session with bound inputs and outputs.

    Args:
        session: the session.
        binding: its inputs and outputs.
        number: number of the captured run: the same number means the same shapes and memory.

    Raises:
        DecodeFailed: the runtime reported a failure.
    """
    options = module().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:
        raise DecodeFailed(f"ONNX Runtime failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The text of an error in one line."""
    return " ".join(str(error).split())[:500]


NO_WEIGHTS: Mapping[str, NDArray[Any]] = MappingProxyType({})
