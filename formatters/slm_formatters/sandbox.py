"""The jinja environment of chat templates: the same as in transformers, with content marks and limits.

Every operation of a template that can build text, or take long, goes through this environment: operators, calls,
filters, output, and, by rewriting the syntax tree, loops, ``~`` and literals of lists and mappings.
"""

from __future__ import annotations

import functools
import itertools
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from slm_core.errors import TemplateError
from slm_formatters import tracked
from slm_formatters.limits import current
from slm_formatters.tracked import Text, concat, seal, to_text

_MAX_INT_BITS = 1 << 16
_MAX_COUNT = 10_000

_PASSING = (
    *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
    *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round"),
    *("select", "selectattr", "slice", "sort", "sum", "unique", "wordcount"),
)
"""Filters that return numbers, or values of their input, which keep their marks."""

_SEALING = ("e", "escape", "filesizeformat", "forceescape", "truncate", "urlencode")
"""Filters whose whole result is content."""

_SHORT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters whose whole result is content, and which take short values only: their cost is not linear in the length."""
_MAX_SHORT = 1 << 14

_NUMBER_METHODS = frozenset(
    {"as_integer_ratio", "bit_count", "bit_length", "conjugate", "count", "index", "is_integer"}
)
"""Methods of numbers and ranges."""

_COUNTED = frozenset({"batch", "round", "slice"})
"""Filters whose cost grows with an integer argument."""


class TemplateRefusal(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that tracks content through a template, and limits the template's resources."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, finalize=to_text, extensions=[GenerationTag, loopcontrols]
        )
        self.filters = _filters()
        self.globals = {
            "range": self.globals["range"],
            "dict": _Dict(),
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator."""
        current().spend()
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                return tracked.add(left, right)
            case "%" if isinstance(left, str):
                return tracked.percent(left, right)
            case "*":
                return _multiply(left, right)
            case "**":
                _check_power(left, right)
        return checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template."""
        current().spend()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            obj = functools.partial(tracked.call_method, owner, obj.__name__)
        elif isinstance(obj, types.BuiltinMethodType) and not _is_cheap(owner, obj.__name__):
            raise TemplateError(f"the chat template calls {obj.__name__}, which is not available to templates")
        return checked(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A replacement of ``str.format`` and ``str.format_map``."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or value.__name__ not in ("format", "format_map"):
            return None
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(owner, (), mapping)
        return lambda *args, **kwargs: formatter.vformat(owner, args, kwargs)

    @staticmethod
    def each(values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop; each is added to the account."""
        spend = current().spend
        for value in values:
            spend()
            yield value

    @staticmethod
    def tilde(*values: Any) -> str:
        """The operator ``~``."""
        return concat(map(to_text, values))

    @staticmethod
    def literal(value: Any) -> Any:
        """A list, tuple or mapping of the template; the call checks it."""
        return value


class GenerationTag(Extension):
    """``{% generation %}``, which marks the assistant's text, on which a model is trained."""

    tags = {"generation"}  # noqa: RUF012  # as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    @staticmethod
    def mark(caller: Callable[[], str]) -> str:
        """Write the body, marked."""
        return tracked.generated(caller())


class Instrument(NodeTransformer):
    """Rewrites a syntax tree so that loops, ``~`` and literals of containers go through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: D102, N802  # a name that jinja2 prescribes
        self.generic_visit(node)
        node.iter = _call("each", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: D102, N802
        self.generic_visit(node)
        return _call("tilde", node.nodes)

    def _visit_literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        storing = isinstance(node, nodes.Tuple) and node.ctx != "load"
        items = [] if isinstance(node, nodes.Dict) else node.items
        constant = bool(items) and all(isinstance(item, nodes.Const) for item in items)
        return node if storing or constant else _call("literal", [node])

    visit_List = visit_Tuple = visit_Dict = _visit_literal  # noqa: N815


class _Formatter(SandboxedFormatter):
    """``str.format`` within the sandbox, with marks."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        numbers = itertools.count()
        pieces: list[str] = []
        for literal, name, spec, conversion in self.parse(format_string):
            pieces.append(literal)
            if name is not None:
                field = f"{next(numbers)}{name}" if not name or name[0] in ".[" else name
                value = self.get_field(field, args, kwargs)[0]
                pieces.append(self._field(value, conversion, self.vformat(spec or "", args, kwargs)))
        text = concat(pieces)
        return seal(text) if isinstance(format_string, Text) else text

    def _field(self, value: Any, conversion: str | None, spec: str) -> str:
        if not spec and conversion in (None, "s"):
            return to_text(value)
        tracked.check_format(spec)
        current().check(value)
        text = format(self.convert_field(value, conversion), spec)
        return text if isinstance(value, (int, float)) else seal(text)


class _Namespace(Namespace):
    """jinja's ``namespace`` without private names, as transformers has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may name an attribute "self"
        for name in dict(*args[1:], **kwargs):
            _check_public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict`` without a way to its class, as transformers has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _is_cheap(owner: object, name: str) -> bool:
    """Whether the cost of a method of a built-in type is bounded by the size of its object."""
    return isinstance(owner, (dict, list, tuple)) or (
        isinstance(owner, (int, float, range)) and name in _NUMBER_METHODS
    )


def checked(value: Any) -> Any:
    """``value``, if it is within the limits."""
    if isinstance(value, (list, tuple, dict)):
        current().check(value)
    return value


def _call(name: str, arguments: Sequence[nodes.Node]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=arguments[0].lineno)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(to_text(message))


def _strftime_now(pattern: str) -> str:
    current().build(len(pattern) * 64)
    text = (current().now or datetime.now()).strftime(pattern)  # local time, as templates expect
    return seal(text) if isinstance(pattern, Text) else text


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return left * right
    repeated, count = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(count, int) or not isinstance(repeated, (str, list, tuple)):
        return left * right
    current().build(max(len(repeated) * count, 0))
    if isinstance(repeated, str):
        return concat(itertools.repeat(repeated, max(count, 0)))
    return checked(repeated * count)


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits(base.bit_length() * abs(exponent))


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise TemplateError(f"the chat template computes a number of {bits} bits (accepted: up to {_MAX_INT_BITS})")


def _filters() -> dict[str, Callable[..., Any]]:
    filters: dict[str, Callable[..., Any]] = {
        "center": lambda value, width=80: _text_method("center", value, width),
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": lambda value, old, new, count=-1: _text_method("replace", value, to_text(old), to_text(new), count),
        "safe": lambda value: tracked.safe(to_text(value)),
        "string": to_text,
        "title": _title,
        "tojson": _tojson,
        "trim": lambda value, chars=None: _text_method("strip", value, chars),
        **{
            name: functools.partial(lambda name, value: _text_method(name, value), name)
            for name in ("capitalize", "lower", "upper")
        },
    }
    passing = {name: _bounded(FILTERS[name], name) for name in _PASSING}
    sealing = {name: _sealing(_bounded(FILTERS[name], name)) for name in (*_SEALING, *_SHORT)}
    return passing | sealing | filters


def _bounded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter of jinja with a limited result."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        current().spend()
        if name in _COUNTED:
            _check_counts(*args[1:], *kwargs.values())
        if name in _SHORT:
            _check_short(name, *args, *kwargs.values())
        return checked(function(*args, **kwargs))

    return bounded


def _check_counts(*arguments: object) -> None:
    for count in arguments:
        if isinstance(count, int) and abs(count) > _MAX_COUNT:
            raise TemplateError(f"the chat template gives a filter the number {count} (accepted: up to {_MAX_COUNT})")


def _check_short(name: str, *values: object) -> None:
    for value in values:
        if isinstance(value, (str, list, tuple, dict)) and len(to_text(value)) > _MAX_SHORT:
            raise TemplateError(f"the chat template gives {name} a long value (accepted: {_MAX_SHORT} characters)")


def _sealing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja with its result as content."""

    @functools.wraps(function)
    def sealing(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return seal(result) if isinstance(result, str) else result

    return sealing


def _text_method(name: str, value: object, *args: object) -> object:
    current().spend()
    return tracked.call_method(to_text(value), name, *args)


def _title(value: object) -> str:
    text = to_text(value)
    plain = FILTERS["title"](str.__str__(text))
    return tracked.recased(text, plain)


def _indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(value, str):
        raise TypeError(f"indent needs a string, not a {type(value).__name__}")
    text = value
    _check_counts(width)
    margin = len(width) if isinstance(width, str) else width
    current().build(len(text) + (text.count("\n") + 1) * margin)
    return seal(FILTERS["indent"](str.__str__(text), width, first, blank))


def _format(value: object, *args: object, **kwargs: object) -> str:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return tracked.percent(to_text(value), kwargs or args)


@pass_environment
def _join(
    environment: ChatEnvironment, values: Iterable[Any], separator: object = "", attribute: str | int | None = None
) -> Any:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return tracked.call_method(to_text(separator), "join", [to_text(value) for value in environment.each(values)])


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON like in transformers: not escaped for HTML, keys in their order."""
    run = current()
    run.check(value)
    _check_counts(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text = encoder.encode(value) if indent is None else concat(encoder.iterencode(value))
    run.build(len(text))
    return seal(text) if isinstance(value, (str, list, tuple, dict)) else text
