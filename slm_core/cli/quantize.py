"""``slm quantize``: writes a model file with other number formats."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from slm_core.cli import options as o
from slm_core.cli.terminal import note, out, print_json, progress_of
from slm_core.errors import InvalidOption
from slm_core.exporting import open_gguf
from slm_core.gguf.cursor import shown
from slm_core.quantizing import RECIPES, Plan, plan_quantization, write_plan
from slm_core.user_paths import expanded


def _type_names(incomplete: str) -> list[str]:
    return [name for name in RECIPES if name.startswith(incomplete.upper())]


def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A GGUF file, any shard of one, a directory of a model, or hf://user/repo:TYPE."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The new file; it appears when it is complete.")],
    type_name: Annotated[
        str,
        typer.Option(
            "--type", metavar="T", help=f"One of {', '.join(RECIPES)}, in any case.", autocompletion=_type_names
        ),
    ],
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=T",
            help="The type of matrices whose names match the expression; may be repeated, the first match counts.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An importance matrix, in the format of llama.cpp's imatrix.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="The same type for every matrix.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and write nothing.")] = False,
    threads: o.Threads = None,
    as_json: o.AsJson = False,
) -> None:
    """Make a model file smaller, with fewer bits per weight. Types and recipes are the same as in llama.cpp."""
    target = expanded(target)
    with open_gguf(source) as file:
        plan = plan_quantization(file, type_name, overrides=_overrides(override or []), imatrix=imatrix, pure=pure)
        for line in plan.notes:
            note(line)
        begin = time.perf_counter()
        if not dry_run:
            with progress_of(f"Quantizing to {plan.recipe.name}") as progress:
                write_plan(plan, target, force=force, n_threads=threads, progress=progress)
        took = "nothing written" if dry_run else f"{time.perf_counter() - begin:,.1f} s"
        n_bytes = plan.writer().size_bytes
    if as_json:
        print_json(_facts(plan, target, n_bytes, written=not dry_run))
        return
    out().print(_summary(plan))
    if plan.fallbacks:
        out().print(_fallbacks(plan))
    sizes = f"{plan.file.size_bytes / 1e6:,.1f} MB to {n_bytes / 1e6:,.1f} MB, {_bits(plan):.2f} bits a weight"
    out().print(Text(f"{target}: {sizes} ({took})"), soft_wrap=True)


def _overrides(texts: list[str]) -> dict[str, str]:
    overrides: dict[str, str] = {}
    for text in texts:
        expression, equals, type_name = text.rpartition("=")
        if not (equals and expression and type_name):
            raise InvalidOption(f"--override {text!r} (accepted: REGEX=TYPE)")
        if expression in overrides:
            raise InvalidOption(f"--override {expression!r} is given twice")
        overrides[expression] = type_name
    return overrides


def _bits(plan: Plan) -> float:
    return 8 * sum(tensor.n_bytes for tensor in plan.tensors) / sum(t.source.n_elements for t in plan.tensors)


def _summary(plan: Plan) -> Table:
    """The number of tensors per type."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("type", "from", "tensors", "weights", "megabytes"):
        table.add_column(column, justify="left" if column in ("type", "from") else "right")
    counts: Counter[tuple[str, str]] = Counter()
    weights, n_bytes = counts.copy(), counts.copy()
    for tensor in plan.tensors:
        key = (tensor.ggml_type.name, tensor.source.ggml_type.name)
        counts[key] += 1
        weights[key] += tensor.source.n_elements
        n_bytes[key] += tensor.n_bytes
    for key in sorted(counts, key=lambda key: -n_bytes[key]):
        table.add_row(*key, str(counts[key]), f"{weights[key]:,}", f"{n_bytes[key] / 1e6:,.1f}")
    return table


def _fallbacks(plan: Plan) -> Table:
    """The tensors that get another type, because their rows are not a multiple of the requested type's blocks."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="Fallback types", title_justify="left")
    for column in ("tensor", "row", "requested", "blocks of", "got"):
        table.add_column(column, justify="right" if column in ("row", "blocks of") else "left")
    for tensor in plan.fallbacks:
        name = Text(shown(tensor.source.name).strip("'"))
        requested, actual = tensor.requested_type, tensor.ggml_type
        table.add_row(name, str(tensor.source.shape[-1]), requested.name, str(requested.block_size), actual.name)
    return table


def _facts(plan: Plan, target: Path, n_bytes: int, *, written: bool) -> dict[str, object]:
    tensors = [
        {
            "name": tensor.source.name,
            "shape": tensor.source.shape,
            "from": tensor.source.ggml_type.name,
            "requested_type": tensor.requested_type.name,
            "type": tensor.ggml_type.name,
            "importance": tensor.importance is not None,
            "bytes": tensor.n_bytes,
        }
        for tensor in plan.tensors
    ]
    return {
        "file": str(target),
        "written": written,
        "type": plan.recipe.name,
        "bytes": n_bytes,
        "bits_per_weight": _bits(plan),
        "notes": plan.notes,
        "tensors": tensors,
    }
