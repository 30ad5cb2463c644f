"""Tool calls: specs that allow only valid calls, from the tools and the model's call format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slm_core.constraints.limits import Limits
from slm_core.constraints.schema import lower_schema, schema_text
from slm_core.constraints.specs import Spec
from slm_core.errors import ConstraintError
from slm_core.types import CallFormat

HERMES_CALLS = CallFormat("<tool_call>", "</tool_call>", repeats=True)
"""Hermes, Qwen 2.5 and 3, and many later models."""
LLAMA3_CALLS = CallFormat("", arguments_key="parameters")
"""Llama 3.1 to 3.3: the answer is one JSON object."""
MISTRAL_CALLS = CallFormat("[TOOL_CALLS]", style="array")
"""Mistral up to v7: an array after a control token."""
MISTRAL_NAMED_CALLS = CallFormat("[TOOL_CALLS]", style="named", between="[ARGS]", repeats=True)
"""Mistral from v11 on: name and arguments are separate."""
JSON_CALLS = CallFormat("")
"""The answer is one JSON object."""


@dataclass(frozen=True, slots=True)
class ToolCalls(Spec):
    """Calls of tools, each with arguments that match the tool's schema; or free text without calls.

    Free text continues until a call begins (``format.begin``). If ``begin`` is "", an answer that begins like a call is
    a call.

    Attributes:
        tools: schemas as ``{"type": "function", "function": {"name": ..., "parameters": ...}}``, or the inner part.
        format: the model's call format: a ``CallFormat``, or its fields.
        required: the answer contains only calls, at least one.

    Raises:
        ConstraintError: a tool has no name, two tools have the same name, or a schema is not JSON.
    """

    kind = "tool_calls"
    tools: Sequence[Any]
    format: Any
    required: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tools, Mapping | str) or not isinstance(self.tools, Iterable):
            raise ConstraintError("tools: one alone (accepted: a sequence of tools)")
        tools = tuple(json.dumps(_tool(tool), ensure_ascii=False) for tool in self.tools)
        names = [json.loads(tool)["name"] for tool in tools]
        if not names or len(set(names)) < len(names):
            raise ConstraintError(f"tools named {names!r} (accepted: at least one, with different names)")
        object.__setattr__(self, "tools", tools)
        object.__setattr__(self, "format", _format(self.format))
        if not isinstance(self.required, bool):
            raise ConstraintError(f"required={self.required!r} (accepted: True, False)")

    def to_dict(self) -> dict[str, object]:
        """See ``Spec.to_dict``."""
        return {"kind": self.kind, "tools": list(self.tools), "format": asdict(self.format), "required": self.required}


@dataclass(frozen=True, slots=True)
class NoToolCalls(Spec):
    """Free text without tool calls.

    Attributes:
        format: the model's call format: a ``CallFormat``, or its fields.

    Raises:
        ConstraintError: ``format`` is neither.
    """

    kind = "no_tool_calls"
    format: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", _format(self.format))

    def to_dict(self) -> dict[str, object]:
        """See ``Spec.to_dict``."""
        return {"kind": self.kind, "format": asdict(self.format)}


def object_schema(spec: ToolCalls, limits: Limits) -> dict[str, Any]:
    """The JSON schema of one call, for the styles that write objects."""
    form = spec.format
    calls, definitions = [], {}
    for i, tool in enumerate(map(json.loads, spec.tools)):
        name, definitions[f"t{i}"] = tool["name"], lower_schema(tool["parameters"], limits, f"#/$defs/t{i}")
        members = {form.name_key: {"const": name}, form.arguments_key: {"$ref": f"#/$defs/t{i}"}}
        calls.append(
            {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
        )
    return {"$defs": definitions, "anyOf": calls}


def named_parameters(spec: ToolCalls, limits: Limits) -> list[tuple[str, Any]]:
    """The name and the parameters' schema of each tool."""
    tools = [json.loads(tool) for tool in spec.tools]
    return [(tool["name"], lower_schema(tool["parameters"], limits)) for tool in tools]


def _tool(tool: object) -> dict[str, object]:
    """The validated name and parameters of a tool."""
    if isinstance(tool, str):
        tool = json.loads(schema_text(tool))
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ConstraintError(f"tool {tool!r} (accepted: a mapping with a name and parameters)")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"name": name, "parameters": json.loads(schema_text(parameters))}


def _format(form: object) -> CallFormat:
    if isinstance(form, Mapping):
        try:
            form = CallFormat(**form)
        except TypeError as error:
            raise ConstraintError(f"call format {form!r}: {error}") from error
    if not isinstance(form, CallFormat):
        raise ConstraintError(f"call format {form!r} (accepted: a CallFormat)")
    if not isinstance(form.section, Sequence) or len(form.section) != 2:
        raise ConstraintError(f"call format {form!r} (accepted: a section of two texts)")
    form = replace(form, section=(form.section[0], form.section[1]))
    texts = (form.begin, form.end, form.name_key, form.arguments_key, form.before, form.between, *form.section)
    if form.style not in ("object", "array", "named") or not all(isinstance(text, str) for text in texts):
        raise ConstraintError(f"call format {form!r} (accepted styles: object, array, named)")
    if form.name_key == form.arguments_key or not isinstance(form.repeats, bool):
        raise ConstraintError(f"call format {form!r} (accepted: two different keys; repeats True or False)")
    if not form.begin and (form.end or form.repeats or any(form.section)):
        raise ConstraintError(f"call format {form!r} (accepted: no other text around calls without a begin marker)")
    return form
