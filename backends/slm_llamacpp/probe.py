"""Whether this build of llama.cpp crashes on this CPU: probed once in a subprocess, and cached.

Some builds crash at the first matrix product: gcc 12 leaves out the tile configuration when it compiles for AMX.
Weights that are not repacked never reach this code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from slm_core.diskcache import cache_root
from slm_core.errors import BackendUnavailable

_TIMEOUT = 120.0
_CRASHES = frozenset(
    getattr(signal, name) for name in ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT") if name in signal.__dict__
)
_WINDOWS_CRASH = 0xC0000000  # NTSTATUS codes of severity "error" begin here
_log = logging.getLogger("slm_llamacpp")


class Outcome(Enum):
    """The result of a probe."""

    PASSED = "passed"
    CRASHED = "crashed"
    INCONCLUSIVE = "inconclusive"


Probe: TypeAlias = Callable[[bool], Outcome]
"""Runs llama.cpp on a small quantized model, with or without repacking of weights."""


@functools.cache
def may_repack() -> bool:
    """Whether weights may be repacked without a crash.

    Raises:
        BackendUnavailable: llama.cpp crashes on this CPU with and without repacking.
    """
    return remembered(cache_root() / f"llamacpp-probe-{build_key()}.json", run)


def remembered(verdict_file: Path, probe: Probe) -> bool:
    """The verdict in ``verdict_file``; if it is missing, the verdict of ``probe``, which is written to the file.

    A damaged file is written again. If the file cannot be written, the verdict is not cached.

    Raises:
        BackendUnavailable: see ``may_repack``.
    """
    verdict = _read(verdict_file)
    if verdict is None:
        verdict, certain = decide(probe)
        if certain:
            _write(verdict_file, verdict)
    return verdict


def decide(probe: Probe) -> tuple[bool, bool]:
    """Whether weights may be repacked, and whether that is certain enough to be cached.

    Raises:
        BackendUnavailable: see ``may_repack``.
    """
    first = probe(True)
    if first is not Outcome.CRASHED:
        if first is Outcome.INCONCLUSIVE:
            _log.warning("could not probe whether llama.cpp survives on this CPU; trusting that it does")
        return True, first is Outcome.PASSED
    second = probe(False)
    if second is Outcome.CRASHED:
        raise BackendUnavailable(
            "this build of llama.cpp crashes on this CPU, even on a tiny model:"
            " install llama-cpp-python anew, compiled on this machine"
        )
    _log.warning(
        "this build of llama.cpp crashes on this CPU when it repacks weights (gcc 12 and AMX are known to);"
        " weights are not repacked, which is slower: build llama-cpp-python with a newer compiler, or without AMX"
    )
    return False, second is Outcome.PASSED


def run(repack: bool) -> Outcome:
    """Probe in a subprocess; takes less than two seconds."""
    if not sys.executable or "frozen" in sys.__dict__:
        return Outcome.INCONCLUSIVE  # no interpreter to start
    with tempfile.TemporaryDirectory(prefix="slm-probe-") as folder:
        command = [sys.executable, "-P", str(Path(__file__).with_name("probe_worker.py")), folder, str(int(repack))]
        return outcome_of(command)


def outcome_of(command: list[str]) -> Outcome:
    """Run a probe and classify how it ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        completed = subprocess.run(  # noqa: S603  (our own script, in our own interpreter)
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("the probe of llama.cpp did not run: %s", error)
        return Outcome.INCONCLUSIVE
    if completed.returncode == 0:
        return Outcome.PASSED
    if -completed.returncode in _CRASHES or completed.returncode >= _WINDOWS_CRASH:
        return Outcome.CRASHED
    _log.warning("the probe of llama.cpp failed: %s", completed.stderr.decode("utf-8", "replace").strip()[-500:])
    return Outcome.INCONCLUSIVE


def build_key() -> str:
    """A cache key for this build of llama.cpp and this kind of CPU."""
    digest = hashlib.blake2b(_cpu().encode(), digest_size=12)
    for file in sorted(_library_files()):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _library_files() -> list[Path]:
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if folder is None:
        spec = importlib.util.find_spec("llama_cpp")
        folder = str(Path(spec.origin).parent / "lib") if spec and spec.origin else ""
    return [file for file in Path(folder).glob("*") if file.is_file()]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    described = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join(sorted(described)) or f"{platform.machine()} {platform.processor()}"


def _read(verdict_file: Path) -> bool | None:
    try:
        verdict = json.loads(verdict_file.read_text(encoding="utf-8"))["repack"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if isinstance(verdict, bool) else None


def _write(verdict_file: Path, verdict: bool) -> None:
    part = verdict_file.with_name(f"{verdict_file.name}.{uuid.uuid4().hex}")
    try:
        verdict_file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"repack": verdict}), encoding="utf-8")
        part.replace(verdict_file)
    except OSError as error:
        _log.info("the verdict of the probe cannot be kept in %s: %s", verdict_file.parent, error)
