"""The tools of a chat: their schemas for the model, and running its calls."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any, cast

from slm_core.argument_checks import checked_list
from slm_core.chat.arguments import Misfit, fitted
from slm_core.constraints.schema import pydantic_model
from slm_core.errors import InvalidOption
from slm_core.generation.aio import in_thread
from slm_core.generation.events import ToolResult
from slm_core.toolschema import tool_schemas
from slm_core.types import Tool, ToolCall


class Toolbox:
    """Tools by name. Functions are run; calls of other tools are left to the caller.

    Args:
        tools: JSON schemas, functions, pydantic models.

    Attributes:
        tools: the tools.
        schemas: a JSON schema of each tool.

    Raises:
        InvalidOption: an object that is not a tool, or two tools with the same name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools
        self.schemas = tuple(tool_schemas(tools))
        names = [_name(schema) for schema in self.schemas]
        if len(set(names)) < len(names):
            raise InvalidOption(f"tools named {', '.join(names)} (accepted: different names)")
        self._by_name = dict(zip(names, tools, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each tool."""
        return tuple(self._by_name)

    def enforced(self, names: Collection[str] | None = None) -> tuple[Mapping[str, object], ...]:
        """The schemas that a grammar enforces, of all tools or of some; functions take no additional arguments."""
        named = zip(self._by_name.items(), self.schemas, strict=True)
        return tuple(
            _closed(schema) if _is_function(tool) else schema
            for (name, tool), schema in named
            if names is None or name in names
        )

    @property
    def answers(self) -> bool:
        """Whether there is a tool whose calls can be answered: run, or checked."""
        return any(_is_function(tool) or pydantic_model(tool) for tool in self.tools)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the functions that have to be awaited."""
        return tuple(name for name, tool in self._by_name.items() if inspect.iscoroutinefunction(tool))

    def leaves(self, call: ToolCall) -> bool:
        """Whether a call is valid and left to the caller."""
        tool = self._by_name.get(call.name)
        return tool is not None and not _is_function(tool) and _problem(tool, call) is None

    def run(self, call: ToolCall) -> ToolResult:
        """Run a call that is not left to the caller; the result contains its exception."""
        try:
            function, arguments = self._prepare(call)
            return ToolResult(call, as_text(function(**arguments)))
        except Exception as error:  # the caller's policy decides
            return _failed(call, error)

    async def arun(self, call: ToolCall) -> ToolResult:
        """Like ``run``, on an event loop: a coroutine is awaited, another function runs in a worker thread."""
        if not inspect.iscoroutinefunction(self._by_name.get(call.name)):
            return await in_thread(lambda: self.run(call), lambda: None)
        try:
            function, arguments = self._prepare(call)
            return ToolResult(call, as_text(await function(**arguments)))
        except Exception as error:  # as above
            return _failed(call, error)

    async def arun_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run calls concurrently; returns their results in the order of the calls."""
        return list(await asyncio.gather(*map(self.arun, calls)))

    def _prepare(self, call: ToolCall) -> tuple[Callable[..., Any], dict[str, object]]:
        tool = self._by_name.get(call.name)
        if tool is None:
            raise Misfit(f"there is no tool {call.name!r} (there are: {', '.join(self._by_name)})")
        problem = _problem(tool, call)
        if problem is not None:
            raise Misfit(problem)
        function = cast("Callable[..., Any]", tool)
        return function, fitted(function, call.arguments)


def checked_tools(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """The tools of a list; ``Toolbox`` checks each.

    Raises:
        InvalidOption: no list, such as one tool alone.
    """
    return tuple(checked_list("tools", tools, "a list of functions, JSON schemas and pydantic models"))


def as_text(result: object) -> str:
    """The text of a result for the model: a text unchanged, other values as JSON.

    Raises:
        TypeError, ValueError: the result is neither text nor JSON, a dataclass, an Enum or a pydantic object.
    """
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False, default=_json)


def _json(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if pydantic_model(type(value)) is not None:
        return cast("Any", value).model_dump(mode="json")
    raise TypeError(f"a tool returned a {type(value).__name__} (accepted: text, or what has a JSON form)")


def _problem(tool: Tool, call: ToolCall) -> str | None:
    """The error in the arguments of a call for a pydantic model; None if there is none, and for any other tool."""
    model = pydantic_model(tool)
    if model is None:
        return None
    from pydantic import ValidationError

    try:
        model.model_validate(dict(call.arguments))
    except ValidationError as error:
        first = error.errors()[0]
        return f"the argument {'.'.join(map(str, first['loc']))!r} does not fit: {first['msg']}"
    return None


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    named = "" if isinstance(error, Misfit) else f"{type(error).__name__}: "
    return ToolResult(call, f"Error: {named}{error}", error)


def _is_function(tool: Tool) -> bool:
    return inspect.isfunction(tool) or inspect.ismethod(tool)


def _closed(schema: Any) -> Mapping[str, object]:
    function = schema["function"]
    return {**schema, "function": {**function, "parameters": {**function["parameters"], "additionalProperties": False}}}


def _name(schema: Any) -> str:
    """The name in a schema, which may be only the inner part."""
    function = schema.get("function", schema)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidOption(f"tool {schema!r} (accepted: a JSON schema with a name)")
    return name
