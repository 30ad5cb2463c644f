"""``slm list``, ``slm pull`` and ``slm rm``: the models in the cache of the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from slm_core import hub
from slm_core.cli import options as o
from slm_core.cli.terminal import note, out, print_json
from slm_core.display import number_of_bytes
from slm_core.errors import SlmError
from slm_core.hub_cache import CachedModel, cached_models, remove


def _references(incomplete: str) -> list[str]:
    try:
        return [each.reference for each in cached_models().models if each.reference.startswith(incomplete)]
    except (SlmError, OSError):
        return []


def list_models(as_json: o.AsJson = False) -> None:
    """List the models of the Hub that are on this machine."""
    cached = cached_models()
    if as_json:
        print_json([_as_json(model) for model in cached.models])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "type", "size", "last used"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=True)
    for model in cached.models:
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        table.add_row(*map(Text, (model.reference, model.kind, number_of_bytes(model.n_bytes), used)))
    if cached.models:
        out().print(table, soft_wrap=True)
    for problem in cached.unreadable:
        note(f"(left out: {problem})")
    total = number_of_bytes(sum(model.n_bytes for model in cached.models))
    note(f"{len(cached.models)} models, {total} in {cached.folder} (HF_HUB_CACHE names another folder)")


def pull(
    reference: Annotated[str, typer.Argument(metavar="REF", help="hf://user/repo:TYPE, or another model of the Hub.")],
) -> None:
    """Download a model of the Hub, with a progress bar, and print its path."""
    sys.stdout.write(f"{hub.fetch(reference)}\n")


def rm(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="A model that slm list shows.", autocompletion=_references)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model of the Hub from this machine."""
    model = cached_models().find(reference)
    files = "1 file" if len(model.files) == 1 else f"{len(model.files)} files"
    question = f"Remove {model.reference}, {files}, {number_of_bytes(model.n_bytes)}?"
    if not yes and not typer.confirm(question, err=True):
        note("(nothing removed)")
        raise typer.Exit(1)
    note(f"({model.reference} is removed, {number_of_bytes(remove(model))} freed)")


def _as_json(model: CachedModel) -> dict[str, object]:
    values = dataclasses.asdict(model)
    return {**values, "path": str(model.path), "files": [str(file) for file in model.files]}
