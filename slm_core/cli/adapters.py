"""The flags of commands that compute with adapters: ``--lora`` and ``--control-vector``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from slm_core.errors import InvalidOption
from slm_core.model import Model

_PANEL = "Adapters"
Lora: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="PATH[:SCALE]",
        help="An adapter (LoRA): a GGUF file, a directory of PEFT; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """The flags that choose adapters."""

    lora: Lora = None
    control_vector: Annotated[
        list[str] | None,
        typer.Option(
            "--control-vector",
            metavar="PATH[:SCALE]",
            help="A control vector: a GGUF file; may be repeated.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    control_vector_layer_range: Annotated[
        tuple[int, int] | None,
        typer.Option(
            "--control-vector-layer-range",
            metavar="START END",
            help="The layers of control vectors, both included, counted from 0 (default: all that have a direction).",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def load(self, model: Model) -> dict[str, float]:
        """Load the adapters; returns their scales by name.

        Raises:
            InvalidOption: two adapters have the same name; a file of ``--control-vector`` is another adapter; a range
                of layers without control vectors, or without a direction in one of them.
            InvalidModelFile, UnsupportedModel, UnsupportedInput: see ``protocols.Adapters``.
        """
        layers, vectors = self.control_vector_layer_range, self.control_vector or ()
        if layers is not None and not vectors:
            raise InvalidOption("--control-vector-layer-range goes with --control-vector")
        scales = {model.adapters.load(path).name: scale for path, scale in map(read_lora, self.lora or ())}
        for path, scale in map(read_lora, vectors):
            info = model.adapters.load(path, layers=layers)
            if not info.layers:
                raise InvalidOption(f"--control-vector {path}: it is an adapter of another kind (use --lora)")
            scales[info.name] = scale
        return scales


def read_lora(text: str) -> tuple[Path, float]:
    """Parse ``PATH[:SCALE]``; without a scale, it is 1."""
    path, colon, number = text.rpartition(":")
    try:
        scale = float(number) if colon else 1.0
    except ValueError:  # the colon belongs to the path
        return Path(text), 1.0
    return (Path(path), scale) if colon else (Path(text), 1.0)
