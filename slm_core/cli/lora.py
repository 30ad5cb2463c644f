"""``slm lora``: checks, converts, merges and makes adapters (LoRA, control vectors)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from slm_core.adapters import BaseModel, merge, read_adapter, write_adapter, write_control_vector
from slm_core.atomic_write import check_new_file
from slm_core.checkpoints import Checkpoint, open_model
from slm_core.cli import options as o
from slm_core.cli.adapters import Lora, read_lora
from slm_core.cli.files import read_text
from slm_core.cli.terminal import note, out, print_json, progress_of
from slm_core.errors import InvalidOption
from slm_core.gguf import GgufFile
from slm_core.paths import local, model_file
from slm_core.steering import SteeringMethod
from slm_core.user_paths import expanded

app = typer.Typer(no_args_is_help=True, add_completion=False, epilog="Example: slm lora info model.gguf adapter")

_Model = Annotated[Path, typer.Argument(metavar="MODEL", help=o.A_MODEL, autocompletion=o.model_files)]
_Adapter = Annotated[
    Path, typer.Argument(metavar="ADAPTER", help="A GGUF file, or a directory of PEFT.", autocompletion=o.model_files)
]
_Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


@app.command(epilog="Example: slm lora info model.gguf adapter")
def info(model: _Model, adapter: _Adapter, as_json: o.AsJson = False) -> None:
    """Check that an adapter fits a model, and show the changed tensors."""
    with open_model(local(model)) as source:
        details = read_adapter(model_file(adapter), BaseModel.of(source)).info
    if as_json:
        facts = {name: getattr(details, name) for name in ("name", "path", "fingerprint", "rank", "n_params")}
        print_json({**facts, "tensors": list(details.tensors), "layers": list(details.layers)})
        return
    size = f"{details.n_params:,} parameters, fingerprint {details.fingerprint[:12]}"
    if details.layers:
        out().print(f"{details.name}: control vector, {size}")
        out().print(f"adds directions after {len(details.layers)} layers: {_ranges(details.layers)}")
        return
    kinds = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in details.tensors})
    out().print(f"{details.name}: rank {details.rank}, {size}")
    out().print(f"changes {len(details.tensors)} tensors: {', '.join(kinds)}")


@app.command(epilog="Example: slm lora convert model.gguf adapter adapter.gguf")
def convert(model: _Model, adapter: _Adapter, target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The new GGUF file.")], force: _Force = False) -> None:  # fmt: skip
    """Write an adapter of PEFT as a GGUF file, which llama.cpp reads, too."""
    target = expanded(target)
    with open_model(local(model)) as source:
        base = BaseModel.of(source)
        read = read_adapter(model_file(adapter), base)
        _check_target(target, [*_files(source), model_file(adapter)], force=force)
        if read.directions:
            raise InvalidOption(f"{adapter}: a control vector is a GGUF file already")
        write_adapter(read, base.architecture, target)
    note(f"{target}: {target.stat().st_size / 1e6:,.1f} MB")


@app.command("merge", epilog="Example: slm lora merge model-F16.gguf merged.gguf --lora adapter:0.8")
def merge_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", autocompletion=o.model_files)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The new GGUF file; it appears when it is complete.")],
    lora: Lora,
    type_name: Annotated[
        str | None,
        typer.Option("--type", metavar="T", help="The number format of changed matrices (default: their own)."),
    ] = None,
    force: _Force = False,
) -> None:
    """Write a model with the changes of adapters added to its weights.

    Changes are often smaller than the steps of a format with few bits: merge into F16, and quantize the result.
    """
    adapters = [(model_file(path), scale) for path, scale in map(read_lora, lora or ())]
    target = expanded(target)
    with progress_of(f"Merging into {model.name}") as progress:
        n_changed = merge(local(model), adapters, target, ggml_type=type_name, force=force, progress=progress)
    note(f"{target}: {n_changed} tensors changed, {target.stat().st_size / 1e6:,.1f} MB")


@app.command(epilog="Example: slm lora vector model.gguf happy.gguf happy.txt sad.txt --method pca")
@o.expand_groups
def vector(
    *,
    path: Annotated[Path, typer.Argument(metavar="MODEL", help=f"{o.A_MODEL}.", autocompletion=o.model_files)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The new GGUF file.")],
    positive: Annotated[Path, typer.Argument(metavar="POSITIVE", help="A file of texts, one a line.")],
    negative: Annotated[Path, typer.Argument(metavar="NEGATIVE", help="A file of their opposites, one a line.")],
    engine: o.EngineOptions,
    layer_range: Annotated[
        tuple[int, int] | None,
        typer.Option("--layers", metavar="FIRST LAST", help="The layers to steer (default: all)."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help='How differences of pairs become a direction: "mean", or "pca" (principal component).',
            autocompletion=lambda: list(get_args(SteeringMethod)),
        ),
    ] = "mean",
    force: _Force = False,
) -> None:
    """Make a control vector that steers from one kind of text to another.

    Texts are prompts, or beginnings of answers; control tokens in them are parsed. Their last tokens are compared.
    """
    target = expanded(target)
    texts = [read_text(file).splitlines() for file in (positive, negative)]
    with open_model(local(path)) as source:
        _check_target(target, [*_files(source), expanded(positive), expanded(negative)], force=force)
    layers = None if layer_range is None else range(layer_range[0], layer_range[1] + 1)
    with engine.load(path) as model, progress_of("Reading the texts") as progress:
        directions = model.control_vector(
            *texts, layers=layers, method=cast("SteeringMethod", method), progress=progress
        )
        write_control_vector(directions, target, model.info.architecture)
    note(f"{target}: directions after {len(directions)} layers: {_ranges([*directions])}")


def _files(model: GgufFile | Checkpoint) -> Sequence[Path]:
    return model.shard_paths if isinstance(model, GgufFile) else ()


def _check_target(target: Path, sources: Sequence[Path], *, force: bool) -> None:
    if target.is_file() and not force:
        raise InvalidOption(f"{target}: there is a file already (to replace it: --force)")
    check_new_file(target, sources, force=force)


def _ranges(layers: Sequence[int]) -> str:
    """Sorted numbers, with neighbours as ranges: "1-3, 7"."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
