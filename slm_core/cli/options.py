"""Flags that several commands share.

A group of flags is a dataclass whose fields are the flags. A command decorated with ``expand_groups`` takes the
dataclass as one keyword argument, and typer gets its fields. Flags of sampling show the defaults of ``Sampling``.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, TypeAlias, TypedDict, get_type_hints

import typer

from slm_core.cli.files import complete_path, read_text
from slm_core.cli.terminal import progress_of
from slm_core.errors import ContextFull, InvalidOption
from slm_core.isolation import Isolation
from slm_core.loading import demo_model_path, load
from slm_core.model import Model
from slm_core.plugins import registry
from slm_core.sampling import Sampling
from slm_core.sampling.aliases import PRESETS
from slm_core.types import KvType

_DEFAULT_CTX = 4096
_DEFAULTS = {field.name: field.default for field in fields(Sampling)}


def model_files(incomplete: str) -> list[str]:
    """The GGUF files and the directories whose names begin with ``incomplete``, for completion."""
    name = incomplete.rpartition("/")[2]
    folder = incomplete.removesuffix(name)
    try:
        paths = sorted(path for path in Path(folder or ".").iterdir() if path.name.startswith(name))
    except OSError:
        return []
    return [folder + path.name for path in paths if path.is_dir() or path.suffix == ".gguf"]


def _backend_names(incomplete: str) -> list[str]:
    return [name for name in registry().backends if name.startswith(incomplete)]


def _formatter_names(incomplete: str) -> list[str]:
    return [name for name in registry().formatters if name.startswith(incomplete)]


def _preset_names(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


def _kv_type_names(incomplete: str) -> list[str]:
    before, comma, name = incomplete.rpartition(",")
    return [before + comma + kv_type for kv_type in KvType if kv_type.startswith(name)]


def _sampling(name: str, help_text: str) -> typer.models.OptionInfo:
    """The flag of the option ``name`` of ``Sampling``."""
    default = _DEFAULTS[name]
    shown = "" if default in (None, ()) else f" (default {default})"
    option: typer.models.OptionInfo = typer.Option(
        f"--{name.replace('_', '-')}", help=help_text + shown, show_default=False, rich_help_panel="Sampling"
    )
    return option


A_MODEL = "A GGUF file, a directory of a model, or hf://user/repo:TYPE"
ModelPath: TypeAlias = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help=f"{A_MODEL}; the demo model if none is named."),
]
Device: TypeAlias = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")]
Isolated: TypeAlias = Annotated[
    bool, typer.Option("--isolated", help="Run the backend in a process of its own, whose crash is an error.")
]
Threads: TypeAlias = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads.")]
Format: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", help="A chat format in place of the model's own.", autocompletion=_formatter_names
    ),
]
ContextSize: TypeAlias = Annotated[
    int | None, typer.Option("--ctx", min=1, help=f"Tokens of context (default: the model's, at most {_DEFAULT_CTX}).")
]
KvTypeFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--kv-type",
        metavar="TYPE[,TYPE]",
        help=f"How the KV cache stores keys and values, or keys, values: {', '.join(KvType)}.",
        autocompletion=_kv_type_names,
    ),
]
System: TypeAlias = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="A system message.")]
Thinking: TypeAlias = Annotated[bool | None, typer.Option(help="Turn reasoning on or off.", show_default=False)]
Completions: TypeAlias = Annotated[
    int, typer.Option("-n", min=1, metavar="N", help="The number of answers.", rich_help_panel="Several answers")
]
BestOf: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="M", help="Generate M and show the N likeliest.", rich_help_panel="Several answers"),
]
BeamWidth: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--beams",
        min=1,
        metavar="W",
        help="Beam search with W beams, no sampling.",
        rich_help_panel="Several answers",
    ),
]
SessionFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--session", metavar="FILE", help="Continue the conversation in FILE, and store it there."),
]
OverflowPolicy: TypeAlias = Annotated[
    str | None,
    typer.Option("--overflow", metavar="NAME", help="When the context is full: error, truncate_middle or shift."),
]
ToolsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        help="Tools that the model may call: functions of FILE.py, which slm runs, or schemas in FILE.json.",
        autocompletion=complete_path,
    ),
]
Stats: TypeAlias = Annotated[bool, typer.Option("--stats", help="Print tokens and seconds on standard error.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class KvTypes(TypedDict, total=False):
    """The KV types of ``--kv-type``, as keywords of ``Model.chat`` and other calls; none for the defaults."""

    kv_type_k: KvType
    kv_type_v: KvType


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatOptions:
    """The flags that replace the model's chat format."""

    format: Format = None
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A jinja chat template in place of the model's own.",
            autocompletion=complete_path,
        ),
    ] = None

    @property
    def is_set(self) -> bool:
        """Whether one of the flags is set."""
        return self.format is not None or self.template is not None

    def template_text(self) -> str | None:
        """The text of the template; None without one.

        Raises:
            InvalidOption: both flags are set, or the file is not text.
            OSError: the file cannot be read.
        """
        if self.format is not None and self.template is not None:
            raise InvalidOption("--template and --format do not go together: a model has one chat format")
        return None if self.template is None else read_text(self.template)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The flags of commands that load a model."""

    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", "-b", metavar="NAME", help="The backend that runs it.", autocompletion=_backend_names
        ),
    ] = None
    device: Device = "auto"
    threads: Threads = None
    isolated: Isolated = False
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="A vocabulary in place of the model's: a directory with tokenizer.json, or a GGUF file.",
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the backend; may be repeated."),
    ] = None

    def load(
        self,
        model: Path | None,
        chat_format: ChatFormatOptions | None = None,
        isolation: Isolation | None = None,
    ) -> Model:
        """Load a model (None: the demo model), with a progress bar on a terminal; ``isolation`` replaces --isolated."""
        source = demo_model_path() if model is None else model
        chosen = ChatFormatOptions() if chat_format is None else chat_format
        template = chosen.template_text()
        with progress_of(f"Loading {source.name}") as progress:
            return load(
                source,
                backend=self.backend,
                device=self.device,
                n_threads=self.threads,
                isolated=self.isolated if isolation is None else isolation,
                progress=progress,
                formatter=chosen.format,
                chat_template=template,
                tokenizer=self.tokenizer,
                **dict(map(read_option, self.option or ())),  # type: ignore[arg-type]  # options of the engine
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The flags of sampling; None or [] means that the flag is not set."""

    temperature: Annotated[float | None, _sampling("temperature", "0 is greedy.")] = None
    top_k: Annotated[int | None, _sampling("top_k", "Keep the k likeliest tokens; 0 is off.")] = None
    top_p: Annotated[float | None, _sampling("top_p", "Keep tokens up to this probability.")] = None
    min_p: Annotated[float | None, _sampling("min_p", "Drop tokens less likely than this share.")] = None
    repeat_penalty: Annotated[float | None, _sampling("repeat_penalty", "Against repetition; 1 is off.")] = None
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help=f"A preset, which other options override: {', '.join(PRESETS)}.",
            rich_help_panel="Sampling",
            autocompletion=_preset_names,
        ),
    ] = None
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--sampling",
            "-S",
            metavar="KEY=VALUE",
            help="Any other sampling option, in any spelling; may be repeated.",
            rich_help_panel="Sampling",
        ),
    ] = None
    seed: Annotated[int | None, _sampling("seed", "Makes the draws repeatable.")] = None
    max_tokens: Annotated[int | None, _sampling("max_tokens", "The longest answer.")] = None
    stop: Annotated[list[str] | None, _sampling("stop", "A text that ends it; may be repeated.")] = None

    def set_flags(self) -> dict[str, object]:
        """The flags on the command line, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, [])}

    def sampling(self) -> Sampling:
        """The options of the preset (default: "balanced"), overridden by the other flags.

        Raises:
            InvalidOption: an option is set twice, or commands do not support it.
        """
        changes = {name: value for name, value in self.set_flags().items() if name in _DEFAULTS}
        for name, value in (read_option(text, "--sampling") for text in self.others or ()):
            if name in changes:
                raise InvalidOption(f"the sampling option {name!r} is given twice")
            changes[name] = value
        sampling = Sampling.preset(self.preset or "balanced", **changes)
        if sampling.logprobs is not None:
            raise InvalidOption("commands do not show log-probabilities: ask for logprobs in Python, or use slm score")
        return sampling


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of ``command`` whose type is a dataclass by the fields of the dataclass, for typer.

    Args:
        command: a function that is called only with keywords.

    Raises:
        ValueError: two parameters have the same name.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def expanded(**values: object) -> None:
        values_of_groups = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()
        }
        command(**values, **values_of_groups)

    parameters = (
        p
        for name, parameter in signature.parameters.items()
        for p in (_flags(groups[name]) if name in groups else [parameter])
    )
    expanded.__signature__ = signature.replace(parameters=list(parameters))  # type: ignore[attr-defined]
    return expanded


def _flags(group: type) -> Iterator[inspect.Parameter]:
    """The fields of a dataclass as parameters of a function."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )


def context_size(model: Model, n_ctx: int | None) -> int:
    """``n_ctx``; if None, the context the model was trained with, at most 4096 tokens."""
    return min(model.info.n_ctx_train, _DEFAULT_CTX) if n_ctx is None else n_ctx


def read_kv_types(text: str | None) -> KvTypes:
    """Parse ``TYPE[,TYPE]``: the types of keys and of values, which are the same if there is one. None sets neither.

    Raises:
        InvalidOption: an unknown type, or more than two.
    """
    if text is None:
        return KvTypes()
    names = text.lower().split(",")
    if len(names) > 2 or not set(names) <= set(KvType):
        raise InvalidOption(f"--kv-type {text!r} (accepted: one type, or two with a comma, of {', '.join(KvType)})")
    return KvTypes(kv_type_k=KvType(names[0]), kv_type_v=KvType(names[-1]))


def full_context(error: ContextFull, remedies: str) -> str:
    """The message of a full context, with remedies in the words of the command line."""
    return f"the context is full: {error.needed} tokens needed, {error.free} free ({remedies})"


def read_option(text: str, flag: str = "--option") -> tuple[str, object]:
    """Parse ``KEY=VALUE``; a value that is valid JSON is parsed as JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidOption(f"{flag} {text!r} (accepted: KEY=VALUE)")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
