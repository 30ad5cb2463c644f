"""Deserializes specs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from slm_core.constraints.specs import (
    AfterThinking,
    AnyJson,
    AnyOf,
    Choice,
    Gbnf,
    JsonSchema,
    Lark,
    Regex,
    Spec,
    Triggered,
)
from slm_core.constraints.toolcalls import NoToolCalls, ToolCalls
from slm_core.errors import ConstraintError

_KINDS: tuple[type[Spec], ...] = (
    *(JsonSchema, AnyJson, Regex, Lark, Gbnf, Choice),
    *(ToolCalls, NoToolCalls, Triggered, AfterThinking, AnyOf),
)


def spec_from_dict(values: object) -> Spec:
    """Deserialize the result of ``Spec.to_dict``.

    Raises:
        ConstraintError: the values are not a serialized spec.
    """
    kind = values.get("kind") if isinstance(values, Mapping) else None
    chosen = next((one for one in _KINDS if one.kind == kind), None)
    if chosen is None or not isinstance(values, Mapping):
        raise ConstraintError(f"spec of kind {kind!r} (accepted: {', '.join(one.kind for one in _KINDS)})")
    names = [one.name for one in fields(chosen)]  # type: ignore[arg-type]  # all of them are dataclasses
    if set(values) != {"kind", *names}:
        raise ConstraintError(f"spec {kind} with {sorted(set(values) - {'kind'})} (accepted: {', '.join(names)})")
    nested: dict[str, object] = {"spec": spec_from_dict(values["spec"])} if "spec" in names else {}
    if "specs" in names and isinstance(values["specs"], list):
        nested["specs"] = [spec_from_dict(each) for each in values["specs"]]
    return chosen(**{name: nested.get(name, values[name]) for name in names})
