"""Commands of plugins."""

from __future__ import annotations

import types

import pytest
import typer
import typer.testing
from typer.main import get_command

from slm_core.hookspecs import Entry, hookimpl
from slm_core.plugins import Registry

greeting = typer.Typer(add_completion=False)
pair = typer.Typer(add_completion=False)


@greeting.command(epilog="Example: slm greet-all --name Ada")
def greet(name: str = "you") -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")


@pair.command()
def left() -> None:
    typer.echo("L")


@pair.command()
def right() -> None:
    raise OSError("nothing there")


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch):
    """Replaces the installed plugins by one plugin with these commands."""

    monkeypatch.setattr(typer.testing, "_get_command", get_command)  # no commands of earlier plugins

    def replace(*entries: Entry) -> None:
        module = types.ModuleType("p")
        module.slm_commands = hookimpl(specname="slm_commands")(lambda: entries)
        known = Registry({"p": module})
        monkeypatch.setattr("slm_core.cli.app.registry", lambda: known)

    return replace


def test_a_command_of_a_plugin_is_listed_and_runs(run, provide) -> None:
    provide(Entry("greet-all", greeting))
    assert "Greet somebody." in run("--help").out
    assert "Example: slm greet-all" in run("greet-all", "-h").out
    assert (run("greet-all", "--name", "Ada").out, run("greet-all", "--nosuch").code) == ("hello Ada\n", 2)
    assert "Did you mean 'greet-all'?" in run("greet-al").err


def test_an_app_of_several_commands_is_a_group(run, provide) -> None:
    provide(Entry("pair", pair))
    assert run("pair", "left").out == "L\n"
    failed = run("pair", "right")
    assert (failed.code, failed.err) == (1, "error: nothing there\n")


@pytest.mark.parametrize(
    ("target", "message"), [("no_such_package:app", "cannot be imported"), (print, "is not a typer.Typer")]
)
def test_a_broken_command_reports_its_error_and_leaves_the_others(run, provide, target, message: str) -> None:
    provide(Entry("broken", target), Entry("greet", greeting))
    assert "Not available" in run("--help").out
    failed = run("broken", "--any", "argument")
    assert failed.code == 1
    assert message in failed.err
    assert failed.err.count("\n") == 1
    assert run("greet").out == "hello you\n"


def test_a_command_cannot_replace_one_of_slm(run, provide) -> None:
    provide(Entry("cache", greeting))
    refused = run("--help")
    assert refused.code == 1
    assert refused.err == "error: a plugin provides the command 'cache', which slm has already\n"
    assert "hello" not in run("cache").out
