"""Asking an engine about itself in a process of its own: nothing heavy is imported, and a crash hurts nobody."""

from __future__ import annotations

import os
import subprocess
import sys

from slm_core.errors import BackendUnavailable

_PATIENCE_S = 60.0


def ask(engine: str, code: str, *arguments: str, patience_s: float = _PATIENCE_S) -> str:
    """What Python code prints in a process that imports what this one can.

    Args:
        engine: whose library it asks, or what it does, for messages.
        code: to run.
        arguments: its ``sys.argv[1:]``.
        patience_s: seconds that it may take.

    Raises:
        BackendUnavailable: it fails, crashes, or does not end.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(  # noqa: S603  (our own code, in our own interpreter)
            [sys.executable, "-P", "-c", code, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"{engine} did not end within {patience_s:.0f} seconds") from error
    except OSError as error:
        raise BackendUnavailable(f"{engine} could not be started: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendUnavailable(f"{engine} failed (exit code {done.returncode}): {last}")
    return done.stdout
