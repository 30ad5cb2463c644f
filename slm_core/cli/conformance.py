"""``slm conformance``: the suite, on one engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from slm_core.cli import options as o
from slm_core.errors import BackendUnavailable, InvalidOption


def conformance(
    backend: Annotated[str, typer.Option("--backend", "-b", metavar="NAME", help="The engine to test.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="A GGUF file to test it on, instead of the suite's own.")
    ] = None,
    device: o.Device = "auto",
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Write what was found as .html, .json or .svg (a badge); repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look in a few seconds: one model, no scenario that takes long.")
    ] = False,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Play random programs on each model for so long.")
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the first random program.")] = 0,
    explain: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="Run nothing; print what a scenario proves, as a script that plays it."),
    ] = None,
) -> None:
    """Prove, clause by clause, that an engine keeps the contract."""
    suite = _suite()
    if explain is not None:
        of_a_run = {"--report": report, "--quick": quick, "--budget": budget, "--seed": seed}
        if given := [name for name, value in of_a_run.items() if value]:
            raise typer.BadParameter("a scenario that is explained is not run", param_hint=given[0])
        _explain(suite, explain, backend, model, device)
        return
    try:
        status = suite.run(
            backend, model=model, device=device, reports=report or (), quick=quick, budget=budget, seed=seed
        )
    except InvalidOption as error:
        raise typer.BadParameter(str(error), param_hint="--report") from error
    raise typer.Exit(status)


def _suite() -> Any:
    try:
        return importlib.import_module("slm_conformance")  # stands above slm_core, which does not import it
    except ImportError as error:
        raise BackendUnavailable(f"{error} (to get the suite: pip install 'slm-core[conformance]')") from error


def _explain(suite: Any, scenario: str, backend: str, model: Path | None, device: str) -> None:
    try:
        typer.echo(suite.explain(scenario, backend, model, device), nl=False)
    except InvalidOption as error:
        raise typer.BadParameter(str(error), param_hint="--explain") from error
