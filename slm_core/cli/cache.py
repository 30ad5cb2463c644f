"""``slm cache``: lists and clears the files that backends cache on disk."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from slm_core.cli import options as o
from slm_core.cli.terminal import note, out, print_json
from slm_core.diskcache import CACHE_VARIABLE, cache_root, entries, remove, sweep


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove the files; backends build them when needed.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """List the files that backends have built from models and cached on disk."""
    cached = entries()
    if clear:
        for entry in cached:
            remove(entry)
        sweep()
    if as_json:
        print_json([{**dataclasses.asdict(entry), "path": str(entry.path)} for entry in cached])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("backend", "megabytes", "of"):
        table.add_column(column, justify="right" if column == "megabytes" else "left", overflow="fold")
    for entry in cached:
        table.add_row(Text(entry.kind), Text(f"{entry.n_bytes / 1e6:,.1f}"), Text(entry.about))
    if cached:
        out().print(table)
    total = sum(entry.n_bytes for entry in cached) / 1e6
    what = "removed" if clear else "in"
    note(f"{len(cached)} entries, {total:,.1f} MB {what} {cache_root()} ({CACHE_VARIABLE} names another folder)")
