"""The hooks of plugins, one per kind. Built-in backends and formatters register through the same hooks.

A plugin is a module, named by an entry point of the group ``slm_core``, with functions of these names marked
``@slm_core.hookimpl``. It is imported whenever plugins are listed, so it must import nothing heavy: it returns
entries whose targets are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pluggy

PROJECT = "slm_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Entry:
    """An object that a plugin provides.

    Attributes:
        name: its name; lower case letters, digits and underscores; names of architectures and commands may have
            hyphens, too.
        target: "package.module:attribute", imported on first use and called to get the object. A plugin of
            ``add_plugin`` may pass the callable itself.
        hint: the command that installs the requirements of the target.
        tokens: for a chat format: if a vocabulary has all these control tokens, the format can be guessed.
    """

    name: str
    target: str | Callable[..., object]
    hint: str = ""
    tokens: Sequence[str] = ()


@hookspec
def slm_backends() -> Sequence[Entry]:  # type: ignore[empty-body]  # pluggy never calls a specification
    """Backends; a target called without arguments returns a ``protocols.Backend``."""


@hookspec
def slm_formatters() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Chat formats; a target called with a ``plugins.FormatterSource`` returns a ``protocols.Formatter``."""


@hookspec
def slm_answer_formats() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Formats of answers, by the name of a ``parser``; a target returns a ``protocols.AnswerFormat``."""


@hookspec
def slm_sampler_steps() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Sampler steps; a target called with the step's options, by name, returns a ``sampling.Step``."""


@hookspec
def slm_architectures() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Architectures of model files, by their GGUF names; a target called with a ``Keys`` returns a ``ModelSpec``."""


@hookspec
def slm_converters() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Formats of converted models; a target is a ``protocols.Converter``."""


@hookspec
def slm_commands() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Commands of ``slm``; a target is a ``typer.Typer``: its one command, or a group of its commands."""
