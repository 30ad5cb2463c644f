"""Runs a probe of an engine in a subprocess: this process imports nothing heavy, and survives a crash of the probe."""

from __future__ import annotations

import os
import subprocess
import sys

from slm_core.errors import BackendUnavailable

_TIMEOUT_S = 60.0


def run(engine: str, code: str, *arguments: str, patience_s: float = _TIMEOUT_S) -> str:
    """Run Python code in a subprocess with this process's import path; returns its standard output.

    Args:
        engine: the engine or the purpose, for messages.
        code: the Python code.
        arguments: ``sys.argv[1:]`` of the code.
        patience_s: timeout in seconds.

    Raises:
        BackendUnavailable: the subprocess fails, crashes or times out.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        result = subprocess.run(  # noqa: S603  (our own code, in our own interpreter)
            [sys.executable, "-P", "-X", "utf8", "-c", code, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"{engine} did not end within {patience_s:.0f} seconds") from error
    except OSError as error:
        raise BackendUnavailable(f"{engine} could not be started: {error}") from error
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendUnavailable(f"{engine} failed (exit code {result.returncode}): {last}")
    return result.stdout
