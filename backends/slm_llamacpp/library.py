"""llama.cpp's shared library, loaded on first use."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import threading
from pathlib import Path
from typing import Any

from slm_core.errors import BackendUnavailable
from slm_llamacpp import INSTALL_HINT, logs

_DISTRIBUTION = "llama-cpp-python"
_GGML = re.compile(r"(lib)?ggml\b")
_FOR_CPUS = re.compile(r"(lib)?ggml(-base|-blas|-cpu|-cpu-\w+|-rpc)?\.")
_lock = threading.Lock()
_loaded: Any = None


def is_installed() -> bool:
    """Whether llama-cpp-python is installed; imports nothing."""
    return importlib.util.find_spec("llama_cpp") is not None


def has_gpu_build() -> bool:
    """Whether llama.cpp's folder may contain a library for GPUs, by file names; loads nothing."""
    spec = importlib.util.find_spec("llama_cpp")
    folders = [Path(where) / "lib" for where in (spec.submodule_search_locations or [] if spec else [])]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return any(_GGML.match(name) and not _FOR_CPUS.match(name) for name in names)


def version() -> str:
    """The version of llama-cpp-python.

    Raises:
        BackendUnavailable: it is not installed.
    """
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailable(f"{_DISTRIBUTION} is not installed (to get it: {INSTALL_HINT})") from error


def load() -> Any:
    """The module of low-level functions, after routing its log to ``logging`` and registering its backends.

    Raises:
        BackendUnavailable: it is not installed, or its shared library cannot be loaded.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            version()
            try:
                api = importlib.import_module("llama_cpp.llama_cpp")
            except (ImportError, OSError, RuntimeError, AttributeError) as error:
                raise BackendUnavailable(
                    f"{_DISTRIBUTION} cannot be loaded: {error} (to get it: {INSTALL_HINT})"
                ) from error
            logs.route(api)
            api.llama_backend_init()
            _loaded = api
    return _loaded


def return_memory() -> None:
    """Return freed memory to the system now: glibc would keep freed blocks of up to 32 MiB."""
    if sys.platform != "linux":
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library, which does not keep freed blocks
        return
    trim(ctypes.c_size_t(0))
