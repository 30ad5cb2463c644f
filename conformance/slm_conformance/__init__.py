"""The conformance suite: scenarios that test a backend against the contract, clause by clause.

Adopt it with ``slm_conformance.fixtures.BackendFixtures``, or ``run`` it without a file of your own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["explain", "run"]


def run(
    backend: str,
    model: str | os.PathLike[str] | None = None,
    device: str = "auto",
    extra_args: Sequence[str] = (),
    reports: Sequence[str | os.PathLike[str]] = (),
    *,
    isolated: bool = False,
    quick: bool = False,
    budget: float = 0,
    seed: int = 0,
) -> int:
    """Run all scenarios on a backend, in a pytest process of its own; the results go to standard output.

    Args:
        backend: a registered backend, or "package.module:attribute" for one that is not.
        model: the model file to test on; None for the suite's tiny random models and the demo model.
        device: passed to ``load``.
        extra_args: further arguments of pytest, as in ``["-k", "TestCut", "-x"]``.
        reports: files for the results: .html, .json or .svg.
        isolated: load each model in a process of its own.
        quick: a first look: one model, few random programs, no slow scenario.
        budget: additional seconds of random programs for each model.
        seed: seed of the first random program; each further one has the next seed.

    Returns:
        0 if everything that the backend declares holds; otherwise pytest's exit status.

    Raises:
        BackendUnavailable: pytest, or the backend, is not installed.
        UnknownBackend: no plugin provides it.
        InvalidOption: a report that cannot be written, or ``isolated`` and a backend that a process cannot import.
    """
    from slm_conformance.suite.spec import make_backend
    from slm_core.errors import BackendUnavailable

    _check_pytest()
    from slm_conformance.report import check_paths

    paths = check_paths(reports)
    status = make_backend(backend).status()
    if not status.installed:
        hint = f" (to get it: {status.hint})" if status.hint else ""
        raise BackendUnavailable(f"backend {backend!r} cannot run here: {status.reason}{hint}")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-c", str(here / "pytest.ini"), "--rootdir", str(here)]
    command += [] if _is_registered() else ["-p", "slm_conformance.pytest_plugin"]
    command += [f"--slm-backend={backend}", f"--slm-device={device}"]
    command += [] if model is None else [f"--slm-model={Path(model).resolve()}"]
    command += [f"--slm-report={path}" for path in paths]
    command += [f"--slm-budget={budget}", f"--slm-seed={seed}"]
    command += [flag for flag, is_set in (("--slm-isolated", isolated), ("--slm-quick", quick)) if is_set]
    return subprocess.call([*command, *extra_args, str(here / "adopted.py")])  # noqa: S603  (this interpreter)


def explain(scenario: str, backend: str, model: str | os.PathLike[str] | None = None, device: str = "auto") -> str:
    """A scenario as a Python script that runs it on a backend; comments say what it proves.

    Args:
        scenario: its name, as pytest prints it: "TestCut::test_of_a_fork", or "TestCut::test_of_a_fork[demo]".
        backend: a registered backend, or "package.module:attribute" for one that is not.
        model: the model file to run it on; None for the model in the name, or for the first that the backend runs.
        device: passed to ``load``.

    Raises:
        BackendUnavailable: pytest is not installed.
        UnknownBackend: no plugin provides it.
        InvalidOption: there is no such scenario; the message has similar names.
    """
    _check_pytest()
    from slm_conformance.suite.explained import script

    return script(scenario, backend, model, device)


def _check_pytest() -> None:
    from slm_core.errors import BackendUnavailable

    if importlib.util.find_spec("pytest") is None:
        raise BackendUnavailable("the suite needs pytest (to get it: pip install 'slm-core[conformance]')")


def _is_registered() -> bool:
    """Whether pytest has found the plugin."""
    return any(point.name == "slm_conformance" for point in importlib.metadata.entry_points(group="pytest11"))
