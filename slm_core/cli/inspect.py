"""``slm info``, ``slm backends`` and ``slm tokenize``: inspects models and backends without running a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from slm_core.backend_choice import ranked
from slm_core.checkpoints import INDEX, SINGLE, open_model, vocabulary_of
from slm_core.cli import options as o
from slm_core.cli.files import read_stdin
from slm_core.cli.terminal import out, print_json, write
from slm_core.loading import backends as list_backends
from slm_core.loading import demo_model_path
from slm_core.modelinfo import model_info
from slm_core.paths import local
from slm_core.plugins import registry
from slm_core.types import BackendStatus, DeviceStatus, KvType, Support
from slm_core.vocabularies import load_vocab


def info(model: o.ModelPath = None, as_json: o.AsJson = False) -> None:
    """Show the properties of a model file, and the backends that can run it; reads only its header."""
    path = demo_model_path() if model is None else local(model)
    facts = _file_facts(path)
    answers = ranked(registry(), path)
    refusals = {name: _refusal(name, answers[name]) for name in registry().backends}
    if as_json:
        print_json({**facts, "backends": refusals})
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")  # paths are shown whole
    for name, value in facts.items():
        table.add_row(Text(name.replace("_", " "), style="dim"), Text(_value_text(value)))
    for name, refusal in refusals.items():
        answer = Text("yes", style="green") if refusal is None else Text(f"no: {refusal}")
        table.add_row(Text(f"runs on {name}", style="dim"), answer)
    out().print(table)


def backends(
    devices: Annotated[
        bool, typer.Option("--devices", help="List the devices of each backend, and whether they can be used.")
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """List the backends: installed or not, versions, devices, and how to install missing packages."""
    statuses = list_backends()
    if as_json:
        print_json([dataclasses.asdict(status) for status in statuses])
        return
    if devices:
        out().print(_device_table(statuses))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("backend", "installed", "version", "devices", "remarks"):
        table.add_column(column)
    for status in statuses:
        table.add_row(*_row(status))
    out().print(table)


def tokenize(
    text: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL] TEXT", help='The default is the demo model; "-" reads standard input.'),
    ],
    special: Annotated[
        bool, typer.Option("--special", help="Parse the spelling of control tokens as control tokens.")
    ] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Add the model's BOS and EOS tokens.")] = False,
    ids_only: Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show the tokens of a text; works with vocabulary-only files, too."""
    if len(text) > 2:
        raise typer.BadParameter("give one text, in quotes if it has spaces", param_hint="TEXT")
    vocab = load_vocab(Path(text[0]) if len(text) == 2 else demo_model_path())
    content = read_stdin() if text[-1] == "-" else text[-1]
    ids = vocab.encode(content, add_special=bos, parse_special=special)
    pieces = [vocab.token_bytes(token, special=True) for token in ids]
    if as_json:
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        print_json({"ids": ids, "pieces": texts, "bytes": [piece.hex() for piece in pieces]})
    elif ids_only:
        write(out(), " ".join(map(str, ids)) + "\n")
    else:
        lines = (f"{token:>8}  {_quoted(piece)}\n" for token, piece in zip(ids, pieces, strict=True))
        write(out(), "".join(lines))


def _quoted(piece: bytes) -> str:
    """The text of a token in quotes; its bytes if it is an incomplete character."""
    try:
        return json.dumps(piece.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        return repr(piece)


def _file_facts(path: Path) -> dict[str, object]:
    """The metadata of a model file or directory; for a directory without safetensors, only the vocabulary."""
    has_weights = (path / SINGLE).exists() or (path / INDEX).exists()
    if path.is_dir() and not has_weights and vocabulary_of(path).is_file():
        return {"directory": str(path), "vocabulary": load_vocab(path).size}
    with open_model(path) as file:
        full, windowed = (
            model_info(file, backend="", device="", kv_type=KvType.F16, swa_full=swa_full) for swa_full in (True, False)
        )
    template, has_windows = full.chat_template, windowed.state_bytes_per_token != full.state_bytes_per_token
    return {
        "file": str(full.path),
        "architecture": full.architecture,
        "name": full.name,
        "parameters": full.n_params,
        "layers": full.n_layers,
        "embedding_width": full.n_embd,
        "vocabulary": full.n_vocab,
        "trained_context": full.n_ctx_train,
        "weights": full.quantization,
        "bytes": full.n_bytes,
        "state_bytes_per_token": full.state_bytes_per_token,
        "state_bytes_per_sequence": full.state_bytes_per_sequence,
        "state_bytes_per_token_swa": windowed.state_bytes_per_token if has_windows else None,
        "state_bytes_per_sequence_swa": windowed.state_bytes_per_sequence if has_windows else None,
        "state_kv_type": None if full.state_bytes_per_token is None else str(KvType.F16),
        "pooling": full.pooling,
        "chat_template": None if template is None else f"{len(template)} characters",
        "fingerprint": full.fingerprint,
    }


def _value_text(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _refusal(name: str, support: Support) -> str | None:
    """Why a backend cannot run the file; None if it can."""
    status = registry().status(name)
    if not status.installed:
        return status.reason
    return None if support.supported else support.reason


def remarks(status: BackendStatus) -> str:
    """The status of a backend, and how to install missing packages."""
    complete = not status.hint or status.hint in status.reason
    return status.reason if complete else f"{status.reason} (to get it: {status.hint})"


def _device_table(statuses: Sequence[BackendStatus]) -> Table:
    """Every device of every backend, with the reason if it cannot be used."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("backend", "device", "usable", "remarks"):
        table.add_column(column)
    for status in statuses:
        for device in status.devices:
            remarks = Text(device.detail, style="dim")
            table.add_row(Text(status.name, style="bold"), Text(device.name), _usable(device), remarks)
    return table


def _usable(device: DeviceStatus) -> Text:
    """Whether a device can be used; "untried" if the conformance suite has never passed on it."""
    if not device.available:
        return Text("no", style="red")
    return Text("untried", style="yellow") if device.untried else Text("yes", style="green")


def _row(status: BackendStatus) -> list[Text]:
    there = (device for device in status.devices if device.available)
    devices = ", ".join(f"{device.name} (untried)" if device.untried else device.name for device in there)
    installed = Text("yes", style="green") if status.installed else Text("no", style="red")
    return [
        Text(status.name, style="bold"),
        installed,
        Text(status.version),
        Text(devices),
        Text(remarks(status), style="dim"),
    ]
