"""Options that several commands take, and what is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from slm_core.cli.terminal import progress_of
from slm_core.errors import InvalidOption
from slm_core.loading import LoadedModel, demo_model_path, load
from slm_core.plugins import registry
from slm_core.sampling import Sampling
from slm_core.sampling.aliases import PRESETS

_DEFAULT_CTX = 4096
_DEFAULTS = {field.name: field.default for field in fields(Sampling)}


def _backend_names(incomplete: str) -> list[str]:
    return [name for name in registry().backends if name.startswith(incomplete)]


def _formatter_names(incomplete: str) -> list[str]:
    return [name for name in registry().formatters if name.startswith(incomplete)]


def _preset_names(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


def _sampling(name: str, flag: str, help_text: str) -> typer.models.OptionInfo:
    default = _DEFAULTS[name]
    shown = "" if default in (None, ()) else f" (default {default})"
    option: typer.models.OptionInfo = typer.Option(
        flag, help=help_text + shown, show_default=False, rich_help_panel="Sampling"
    )
    return option


A_MODEL = "A GGUF file, a directory of a model, or hf://user/repo:TYPE"
ModelPath: TypeAlias = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help=f"{A_MODEL}; the demo model if none is named."),
]
BackendName: TypeAlias = Annotated[
    str | None,
    typer.Option("--backend", "-b", metavar="NAME", help="The engine to run it on.", autocompletion=_backend_names),
]
Device: TypeAlias = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")]
Threads: TypeAlias = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads.")]
BackendOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the engine; may be repeated."),
]
Format: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help="A chat format in place of the model's own.", autocompletion=_formatter_names
    ),
]
ContextSize: TypeAlias = Annotated[
    int | None, typer.Option("--ctx", min=1, help=f"Tokens of context (default: the model's, at most {_DEFAULT_CTX}).")
]
System: TypeAlias = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="A system message.")]
Thinking: TypeAlias = Annotated[bool | None, typer.Option(help="Ask for reasoning, or for none.", show_default=False)]
Temperature: TypeAlias = Annotated[float | None, _sampling("temperature", "--temperature", "0 is greedy.")]
TopK: TypeAlias = Annotated[int | None, _sampling("top_k", "--top-k", "Keep the k likeliest tokens; 0 is off.")]
TopP: TypeAlias = Annotated[float | None, _sampling("top_p", "--top-p", "Keep tokens up to this probability.")]
MinP: TypeAlias = Annotated[float | None, _sampling("min_p", "--min-p", "Drop tokens less likely than this share.")]
RepeatPenalty: TypeAlias = Annotated[
    float | None, _sampling("repeat_penalty", "--repeat-penalty", "Against repetition; 1 is off.")
]
Seed: TypeAlias = Annotated[int | None, _sampling("seed", "--seed", "Makes the draws repeatable.")]
MaxTokens: TypeAlias = Annotated[int | None, _sampling("max_tokens", "--max-tokens", "The longest answer.")]
Stops: TypeAlias = Annotated[list[str] | None, _sampling("stop", "--stop", "A text that ends it; may be repeated.")]
Preset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help=f"A set of sampling options that the others change: {', '.join(PRESETS)}.",
        rich_help_panel="Sampling",
        autocompletion=_preset_names,
    ),
]
SamplingOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        "-S",
        metavar="KEY=VALUE",
        help="Any other sampling option, in any spelling; may be repeated.",
        rich_help_panel="Sampling",
    ),
]
Completions: TypeAlias = Annotated[
    int, typer.Option("-n", min=1, metavar="N", help="So many answers.", rich_help_panel="Several answers")
]
BestOf: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="M", help="Make M and show the N likeliest.", rich_help_panel="Several answers"),
]
BeamWidth: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--beams", min=1, metavar="W", help="Search with W beams, and draw nothing.", rich_help_panel="Several answers"
    ),
]
SessionFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--session", metavar="FILE", help="Go on with the conversation in FILE, and keep it there."),
]
OverflowPolicy: TypeAlias = Annotated[
    str | None,
    typer.Option("--overflow", metavar="NAME", help="When the context is full: error, truncate_middle or shift."),
]
Stats: TypeAlias = Annotated[bool, typer.Option("--stats", help="Tell tokens and seconds on standard error.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Loading:
    """How to load a model: the options that name it and its engine."""

    path: Path | None
    backend: str | None = None
    device: str = "auto"
    threads: int | None = None
    options: Sequence[str] = ()
    format: str | None = None

    @property
    def source(self) -> Path:
        """The file: the one that was named, or the demo model."""
        return demo_model_path() if self.path is None else self.path

    def load(self) -> LoadedModel:
        """Load it, with a progress bar on a terminal."""
        with progress_of(f"Loading {self.source.name}") as progress:
            return load(
                self.source,
                backend=self.backend,
                device=self.device,
                n_threads=self.threads,
                progress=progress,
                formatter=self.format,
                **dict(map(_read_option, self.options)),  # type: ignore[arg-type]  # options of the engine
            )


def sampling_of(preset: str | None = None, others: Sequence[str] | None = None, **flags: object) -> Sampling:
    """A preset with those options that were given; the others keep their defaults.

    Args:
        preset: the preset; "balanced" if None.
        others: options as ``KEY=VALUE``.
        flags: options that have a flag of their own, None or [] where it was not given.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    for name, value in (_read_option(text, "--sampling") for text in others or ()):
        if name in given:
            raise InvalidOption(f"the sampling option {name!r} is given twice")
        given[name] = value
    sampling = Sampling.preset(preset or "balanced", **given)
    if sampling.logprobs is not None:
        raise InvalidOption("commands do not show log-probabilities: ask for logprobs in Python, or use slm score")
    return sampling


def context_size(model: LoadedModel, wanted: int | None) -> int:
    """The size asked for, or a sensible one."""
    return min(model.info.n_ctx_train, _DEFAULT_CTX) if wanted is None else wanted


def _read_option(text: str, flag: str = "--option") -> tuple[str, object]:
    """``KEY=VALUE``, in which a value that is JSON is read as JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidOption(f"{flag} {text!r} (accepted: KEY=VALUE)")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
