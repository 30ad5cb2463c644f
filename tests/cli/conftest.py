"""Fixtures for the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

import slm_core as slm
from slm_core.cli.app import app


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not slm.backends():
        pytest.skip("no backends are registered: slm-core is not installed here, only on the path")


@pytest.fixture
def run() -> Callable[..., Outcome]:
    """Runs ``slm`` with arguments, in this process."""

    def invoke(*arguments: str, input: str | bytes = "") -> Outcome:  # noqa: A002  # the name in subprocess.run
        result = CliRunner().invoke(app, list(arguments), input=input, prog_name="slm")
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return invoke
