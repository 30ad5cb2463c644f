"""``slm conformance``: the suite, on one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import slm_conformance
from slm_core.cli import options as o
from slm_core.errors import InvalidOption

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: slm conformance --backend native", rich_help_panel="Measure and prove")
def conformance(
    backend: Annotated[str, typer.Option("--backend", "-b", metavar="NAME", help="The engine to test.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="A GGUF file to test it on, instead of the suite's own.")
    ] = None,
    device: o.Device = "auto",
    isolated: o.Isolated = False,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Write what was found as .html, .json or .svg (a badge); repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: one model, no scenario that takes long.")
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
    if explain is not None:
        run_options = {"--isolated": isolated, "--report": report, "--quick": quick, "--budget": budget, "--seed": seed}
        if named := [name for name, value in run_options.items() if value]:
            raise typer.BadParameter("a scenario that is explained is not run", param_hint=named[0])
        _explain(explain, backend, model, device)
        return
    try:
        status = slm_conformance.run(
            backend,
            model=model,
            device=device,
            reports=report or (),
            isolated=isolated,
            quick=quick,
            budget=budget,
            seed=seed,
        )
    except InvalidOption as error:
        raise typer.BadParameter(str(error), param_hint="--report") from error
    raise typer.Exit(status)


def _explain(scenario: str, backend: str, model: Path | None, device: str) -> None:
    try:
        typer.echo(slm_conformance.explain(scenario, backend, model, device), nl=False)
    except InvalidOption as error:
        raise typer.BadParameter(str(error), param_hint="--explain") from error
