"""Fixtures for the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import typer.testing
from typer.main import get_command
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


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Typer's runner makes all commands anew for each call, which takes longer than most calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(get_command))
        yield


@pytest.fixture
def run() -> Callable[..., Outcome]:
    """Runs ``slm`` with arguments, in this process."""

    def invoke(*arguments: str, input: str | bytes = "") -> Outcome:  # noqa: A002  # the name in subprocess.run
        result = CliRunner().invoke(app, list(arguments), input=input, prog_name="slm")
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return invoke
