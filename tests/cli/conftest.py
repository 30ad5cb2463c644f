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
    """What a command did."""

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

    def invoke(*arguments: str, input: str = "") -> Outcome:  # noqa: A002  # as subprocess.run has it
        result = CliRunner().invoke(app, list(arguments), input=input, prog_name="slm")
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return invoke
