"""The llama.cpp backend: status, support, loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slm_core.cpu import chosen_threads
from slm_core.errors import BackendUnavailable, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import BackendStatus, ModelOptions, ModelSource, SourceKind, Support
from slm_llamacpp import BACKEND, INSTALL_HINT, devices, library, probe, status_probe
from slm_llamacpp.anonymous_file import AnonymousFile
from slm_llamacpp.model import LlamaCppModel
from slm_llamacpp.options import DESCRIPTIONS, LoadOptions, Settings
from slm_llamacpp.source import check_source

_RANK, _GPU_RANK = 50, 80


class LlamaCppBackend:
    """Runs GGUF models on llama.cpp, through llama-cpp-python."""

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
        """Every kind but directories."""
        return frozenset(SourceKind) - {SourceKind.DIRECTORY}

    def status(self) -> BackendStatus:
        """Whether llama.cpp is installed, its version and devices.

        The library is queried once, in a subprocess. Listing engines imports nothing, and a broken library does no
        harm.
        """
        try:
            return status_probe.status()
        except Exception as error:  # the status reports all problems of the installation
            return BackendStatus(BACKEND, installed=False, reason=_one_line(error), hint=INSTALL_HINT)

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether llama.cpp can run ``source`` on ``device``; reads headers only.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        try:
            with GgufFile.open(source) as gguf:
                check_source(gguf)
            if not library.is_installed():
                raise BackendUnavailable(f"llama-cpp-python is not installed (to get it: {INSTALL_HINT})")
            on_gpus = device != "cpu" and _has_gpus(device)
        except (UnsupportedModel, BackendUnavailable) as error:
            return Support(False, str(error))
        return Support(True, "an architecture that llama.cpp runs", _GPU_RANK if on_gpus else _RANK)

    def load(self, source: ModelSource, options: ModelOptions) -> LlamaCppModel:
        """Load a model; see ``protocols.Backend.load``."""
        load_options = LoadOptions.parse(options.backend_options)
        n_threads = chosen_threads(options.n_threads)
        with GgufFile.open(source) as gguf:
            check_source(gguf)
            library.version()  # raises before the probe, which would be inconclusive
            repack = probe.may_repack() if load_options.repack is None else load_options.repack
            api = library.load()
            choice = devices.choose(options.device, devices.all_devices())
            load_options.check_gpus(len(choice.gpus), api.llama_max_devices())
            settings, file = Settings(choice, n_threads, repack, load_options), _file(source, gguf)
            try:
                return LlamaCppModel(api, gguf, file, settings, options.progress)
            except BaseException:
                if isinstance(file, AnonymousFile):
                    file.close()
                raise


def _has_gpus(device: str) -> bool:
    """Whether GPUs would take layers; loads the library only if it may support GPUs."""
    if device == "auto" and not library.has_gpu_build():
        return False
    return bool(devices.choose(device, devices.all_devices()).gpus)


def _file(source: ModelSource, gguf: GgufFile) -> Path | AnonymousFile:
    """The file that llama.cpp reads: the source, or a copy of bytes or of a tensor source."""
    if isinstance(source, Path):
        return source
    try:
        return AnonymousFile(gguf.pieces())
    except OSError as error:
        raise BackendUnavailable(f"{gguf.size_bytes} bytes for llama.cpp cannot be put into a file: {error}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, BackendUnavailable) else f"{type(error).__name__}: {text}"
