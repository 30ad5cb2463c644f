"""The flags that constrain answers, and where a constraint begins in a chat format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slm_core.cli.files import complete_path, read_text
from slm_core.constraints import AfterThinking, Choice, Gbnf, JsonSchema, Lark, Regex, Spec
from slm_core.errors import InvalidOption
from slm_core.protocols import Formatter

_PANEL = "Constraint (one of them)"
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintOptions:
    """The flags that constrain answers; at most one of them is set."""

    schema: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="Answers are JSON values of this JSON schema.",
            rich_help_panel=_PANEL,
            autocompletion=complete_path,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Answers match this regular expression.", rich_help_panel=_PANEL),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option("--choice", metavar="TEXT", help="Answers are one of these; repeat it.", rich_help_panel=_PANEL),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answers follow this grammar, GBNF or Lark.",
            rich_help_panel=_PANEL,
            autocompletion=complete_path,
        ),
    ] = None

    def spec(self) -> Spec | None:
        """The constraint of the flag that is set; None without one.

        Raises:
            InvalidOption: two flags are set, or a file is not text.
            OSError: a file cannot be read.
            ConstraintError: the schema is not JSON, or a choice is empty or repeated.
        """
        names = ("schema", "regex", "choice", "grammar")
        given = [f"--{name}" for name in names if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            raise InvalidOption(f"{given[0]} and {given[1]} do not go together: an answer has one constraint")
        if self.schema is not None:
            return read_schema(self.schema)
        if self.regex is not None:
            return Regex(self.regex)
        if self.choice:
            return Choice(self.choice)
        return None if self.grammar is None else read_grammar(self.grammar)


def read_schema(text: str) -> JsonSchema:
    """A JSON schema from its text, which begins with ``{``, ``true`` or ``false``, or from the file of that name.

    Raises:
        OSError: the file cannot be read.
        InvalidOption: the file is not text.
        ConstraintError: the schema is not JSON.
    """
    is_json = text.lstrip().startswith(("{", "true", "false"))
    return JsonSchema(text if is_json else read_text(Path(text)))


def read_grammar(path: Path) -> Gbnf | Lark:
    """The grammar of a file: Lark in FILE.lark, GBNF in FILE.gbnf and in other files that contain a rule with ``::=``.

    Raises:
        OSError: the file cannot be read.
        InvalidOption: the file is not text.
    """
    text = read_text(path)
    is_gbnf = path.suffix != ".lark" and (path.suffix == ".gbnf" or _GBNF_RULE.search(text) is not None)
    return Gbnf(text) if is_gbnf else Lark(text)


def after_reasoning(spec: Spec | None, chat_format: Formatter, *, thinking: bool | None) -> Spec | None:
    """The constraint of an answer in a chat format: it begins after the reasoning that the prompt opens."""
    end = None if spec is None else chat_format.reasoning_end(thinking=thinking)
    return spec if spec is None or end is None else AfterThinking(spec, end)


def check_tools(spec: Spec | None, *, has_tools: bool) -> None:
    """Refuse a constraint together with tools.

    Raises:
        InvalidOption: there are both.
    """
    if spec is not None and has_tools:
        raise InvalidOption("a constraint and tools do not go together: a constrained answer cannot call a tool")
