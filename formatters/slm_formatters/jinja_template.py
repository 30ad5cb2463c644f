"""A jinja chat template, compiled once, rendered from plain data into segments."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from traceback import walk_tb
from types import MappingProxyType

import jinja2
from jinja2 import meta, nodes

from slm_core.errors import TemplateError
from slm_core.types import Role, Segment
from slm_formatters import tracked
from slm_formatters.limits import Limits, Run, running
from slm_formatters.sandbox import ChatEnvironment, Instrument, TemplateRefusal

_MAX_SOURCE = 1 << 19
_MAX_REFUSAL = 500
_PROVIDED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


class JinjaTemplate:
    """A chat template of a model file.

    Args:
        source: the template.
        limits: bounds on compiling and on each rendering.

    Attributes:
        constants: the text constants in the template's expressions.

    Raises:
        TemplateError: the template is too long, or is not valid jinja.
    """

    def __init__(self, source: str, limits: Limits = Limits()) -> None:  # noqa: B008  # immutable
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters (accepted: up to {_MAX_SOURCE})")
        self._limits = limits
        try:
            with running(Run(limits)):
                self._template, self._variables, self.constants = _compile(source)
        except TemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid jinja: line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # untrusted source: parser and compiler may raise anything
            raise TemplateError(f"the chat template cannot be compiled: {_describe(error)}") from error

    def reads(self, variable: str) -> bool:
        """Whether the template reads an external variable."""
        return variable in self._variables

    @property
    def options(self) -> frozenset[str]:
        """The external variables that the template reads, except the standard ones."""
        return self._variables - _PROVIDED - _environment().globals.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        tokens: Mapping[str, str] = MappingProxyType({}),
        now: datetime | None = None,
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> list[Segment]:
        """Render messages: mappings with "role", "content" and other keys that the template reads.

        Args:
            messages: the conversation.
            tools: JSON schemas.
            add_generation_prompt: end with the start of the assistant's answer.
            tokens: texts of tokens by their names in templates: "bos_token", "eos_token", ...
            now: the time for ``strftime_now``; None for the real time.
            options: additional variables: None, numbers, strings, and sequences and mappings of these.

        Raises:
            TemplateError: the template refused, failed or exceeded its limits.
        """
        try:
            with running(Run(self._limits, now)):
                text = self._template.render(
                    messages=[_mark_message(message) for message in messages],
                    tools=tracked.mark(tools),
                    add_generation_prompt=add_generation_prompt,
                    **{"documents": None, **tokens, **{name: tracked.mark(value) for name, value in options.items()}},
                )
        except TemplateError:
            raise
        except TemplateRefusal as error:
            refusal = " ".join(str(error).split())[:_MAX_REFUSAL]
            raise TemplateError(f"the chat template refused the messages: {refusal}") from error
        except Exception as error:  # untrusted source: it may raise anything
            raise TemplateError(f"the chat template failed{_place(error)}: {_describe(error)}") from error
        return tracked.segments(text)


@functools.cache
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str], frozenset[str]]:
    """The template, the variables that it reads, and the text constants in its expressions."""
    tree = _environment().parse(source)
    constants = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    # This call also folds lists of constants into one constant: the constants are collected before it.
    variables = frozenset(meta.find_undeclared_variables(tree))
    Instrument().visit(tree)
    return _environment().from_string(tree), variables, constants


def _mark_message(message: Mapping[str, object]) -> dict[str, object]:
    """A message with all strings as content, except its role, which templates write into control text."""
    is_known_role = message.get("role") in set(Role)
    return {name: value if name == "role" and is_known_role else tracked.mark(value) for name, value in message.items()}


def _describe(error: Exception) -> str:
    """One line about an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REFUSAL]


def _place(error: Exception) -> str:
    """The line of the template that raised, from jinja's entry in the traceback."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""
