"""``slm template``: shows the prompt of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from slm_core.chat.prompt import encode_segments, special_spans
from slm_core.cli import options as o
from slm_core.cli.files import read_stdin, read_text
from slm_core.cli.terminal import note, out, print_json, write
from slm_core.formatting import formatter
from slm_core.loading import demo_model_path
from slm_core.paths import local
from slm_core.protocols import Vocab
from slm_core.types import Segment
from slm_core.vocabularies import load_vocab

_STYLES = {"special": "bold magenta", "control": "cyan", "content": ""}


def template(
    model: o.ModelPath = None,
    messages: Annotated[
        str, typer.Option("--messages", "-m", metavar="FILE", help='JSON: a list of messages; "-" is standard input.')
    ] = "-",
    tools: Annotated[
        Path | None, typer.Option("--tools", metavar="FILE", help="JSON: a list of the tools' schemas.")
    ] = None,
    thinking: o.Thinking = None,
    template_file: Annotated[
        Path | None, typer.Option("--template", metavar="FILE", help="A jinja template instead of the model's.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--formatter", "--format", metavar="NAME", help="A chat format instead of the model's template."),
    ] = None,
    generation_prompt: Annotated[
        bool, typer.Option(help="End with the start of the assistant's answer.", show_default=False)
    ] = True,
    ids_only: Annotated[bool, typer.Option("--ids", help="Print only the token ids, on one line.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show the prompt of messages; special tokens and other text of the template are highlighted."""
    if template_file is not None and name is not None:
        raise typer.BadParameter("give --template or --formatter, not both", param_hint="--template")
    path = demo_model_path() if model is None else local(model)
    text = None if template_file is None else read_text(template_file)
    chat_format = formatter(template=text, name=name, model=path)
    segments = chat_format.render(
        _read_list(messages, "--messages", "messages"),
        tools=None if tools is None else _read_list(str(tools), "--tools", "tools"),
        add_generation_prompt=generation_prompt,
        thinking=thinking,
    )
    vocab = None if path.is_dir() else load_vocab(path)
    if as_json or ids_only:
        ids = encode_segments(_known(vocab), segments)
        parts = [{"text": segment.text, "control": segment.control} for segment in segments]
        if as_json:
            print_json({"formatter": chat_format.name, "segments": parts, "ids": ids})
        else:
            write(out(), " ".join(map(str, ids)) + "\n")
        return
    console = out()
    for kind, part in _kinds(vocab, segments):
        write(console, part, _STYLES[kind])
    if console.is_terminal:
        note(f"\n{chat_format.name}")


def _known(vocab: Vocab | None) -> Vocab:
    if vocab is None:
        raise typer.BadParameter("ids need a model file with a vocabulary, not a directory", param_hint="MODEL")
    return vocab


def _kinds(vocab: Vocab | None, segments: Sequence[Segment]) -> Iterator[tuple[str, str]]:
    """The prompt in pieces: special tokens, other control text, and content."""
    spans = [] if vocab is None else special_spans(vocab, segments)
    text = "".join(segment.text for segment in segments)
    special = [False] * len(text)
    for start, end in spans:
        special[start:end] = [True] * (end - start)
    control = [segment.control for segment in segments for _ in segment.text]
    kinds = ["special" if a else "control" if b else "content" for a, b in zip(special, control, strict=True)]
    bounds = [0, *(i for i in range(1, len(text)) if kinds[i] != kinds[i - 1]), len(text)]
    for start, end in pairwise(bounds):
        if end > start:
            yield kinds[start], text[start:end]


def _read_list(path: str, option: str, key: str) -> list[Mapping[str, Any]]:
    """A JSON list of objects: the whole file, or the value of ``key`` in an object."""
    text = read_stdin() if path == "-" else read_text(Path(path))
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}", param_hint=option) from None
    items = items.get(key) if isinstance(items, dict) else items
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise typer.BadParameter(f"{path} does not hold a list of objects", param_hint=option)
    return items
