"""The ONNX Runtime backend: status, support, loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slm_core.cpu import chosen_threads
from slm_core.errors import BackendUnavailable, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import BackendStatus, ModelOptions, ModelSource, Progress, SourceKind, Support
from slm_onnx import BACKEND, INSTALL_HINT, devices, runtime
from slm_onnx.coverage import read_supported
from slm_onnx.layouts import find_layout
from slm_onnx.options import DESCRIPTIONS, OF_BUILDING, LoadOptions
from slm_onnx.providers import Device

if TYPE_CHECKING:
    from slm_onnx.model import OnnxModel

_RANK = 40


class OnnxBackend:
    """Runs GGUF models, and directories of ONNX models, on ONNX Runtime."""

    @property
    def name(self) -> str:
        """The name users choose it by."""
        return BACKEND

    @property
    def load_options(self) -> Mapping[str, str]:
        """The options of ``ModelOptions.backend_options``."""
        return DESCRIPTIONS

    @property
    def source_kinds(self) -> frozenset[SourceKind]:
        """Every kind; a directory is one of ONNX models."""
        return frozenset(SourceKind)

    def status(self) -> BackendStatus:
        """Whether ONNX Runtime is installed, its version and its execution providers."""
        try:
            report = devices.report()
        except Exception as error:  # the status reports all problems of the installation
            return BackendStatus(BACKEND, installed=False, reason=runtime.one_line(error), hint=INSTALL_HINT)
        return BackendStatus(BACKEND, True, runtime.version(), report.devices, reason=report.auto)

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether the backend can run ``source`` on ``device``; reads headers only.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        try:
            what = _described(source)
            if (reason := runtime.missing()) is not None:
                raise BackendUnavailable(reason)
            if device not in ("auto", "cpu"):
                _described(source, on_cpu=devices.choose(device).is_cpu)
        except (UnsupportedModel, BackendUnavailable) as error:
            return Support(False, str(error))
        return Support(True, what, _RANK)

    def load(self, source: ModelSource, options: ModelOptions) -> OnnxModel:
        """Load a model; see ``protocols.Backend.load``."""
        load_options = LoadOptions.parse(options.backend_options)
        runtime.load()
        threads = runtime.Threads(chosen_threads(options.n_threads), load_options.spinning)
        is_directory = isinstance(source, Path) and source.is_dir()
        device = devices.choose(options.device, load_options, of_directory=is_directory)
        progress = options.progress or (lambda share: None)
        progress(0.0)
        if isinstance(source, Path) and source.is_dir():
            with device.provider.lock:
                return _load_directory(source, options.backend_options, device, threads, load_options, progress)
        from slm_onnx.fromgguf import gguf_model  # imports onnx

        gguf = GgufFile.open(source)
        try:
            with device.provider.lock:
                return gguf_model(gguf, device, threads, load_options, progress)
        except BaseException:
            gguf.close()
            raise


def _load_directory(
    source: Path,
    options: Mapping[str, object],
    device: Device,
    threads: runtime.Threads,
    load_options: LoadOptions,
    progress: Progress,
) -> OnnxModel:
    from slm_onnx.fromdirectory import directory_model

    for name in sorted(options.keys() & OF_BUILDING):
        raise InvalidOption(f"{name} is of building a graph from a GGUF file, and {source} holds its graph")
    place = device.session_place(load_options.provider_options, threads)
    return directory_model(source, device, place, progress, load_options.named(threads.n_threads, builds=False))


def _described(source: ModelSource, *, on_cpu: bool = True) -> str:
    """The kind of model in a source, by its headers."""
    if isinstance(source, Path) and source.is_dir():
        return f"a directory of ONNX models ({find_layout(source).name})"
    with GgufFile.open(source) as gguf:
        return f"a decoder of architecture {read_supported(gguf, on_cpu=on_cpu).architecture}"
