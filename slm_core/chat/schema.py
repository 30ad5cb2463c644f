"""Schemas of extracted values: JSON schemas, pydantic models and dataclasses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from slm_core.chat.arguments import fitted_value
from slm_core.constraints import JsonSchema
from slm_core.constraints.dataclass_schema import is_dataclass_type
from slm_core.constraints.schema import pydantic_model
from slm_core.errors import OracleError

if TYPE_CHECKING:
    from pydantic import BaseModel


class Schema:
    """The schema of an extracted value.

    Args:
        schema: a pydantic model class, a dataclass, or a JSON schema as a mapping or text.

    Attributes:
        spec: the constraint of the answer.

    Raises:
        ConstraintError: ``schema`` is none of these.
    """

    def __init__(self, schema: object) -> None:
        self.spec = JsonSchema(schema)
        self._dataclass = schema if is_dataclass_type(schema) else None
        self._model: type[BaseModel] | None = pydantic_model(schema)

    def question(self) -> str:
        """A question that requests the JSON."""
        schema = json.loads(self.spec.schema)
        keys = ", ".join(schema.get("properties", ())) if isinstance(schema, dict) else ""
        return f"Give me JSON with the keys {keys}." if keys else "Answer in JSON."

    def read(self, text: str) -> object:
        """The value of a constrained answer, as an object if the schema is a pydantic model or a dataclass.

        Raises:
            OracleError: a validator of the pydantic model, or ``__post_init__`` of the dataclass, refuses the value.
        """
        value: object = json.loads(text)
        if self._dataclass is not None:
            return _built(self._dataclass, value)
        if self._model is None:
            return value
        from pydantic import ValidationError

        try:
            return self._model.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise OracleError(
                f"the answer's JSON does not fit {self._model.__name__}: {location}: {first['msg']}"
            ) from error


def _built(cls: type, value: object) -> object:
    try:
        return fitted_value(cls, value, cls.__name__)
    except Exception as error:  # the class may raise any exception
        raise OracleError(f"the answer's JSON does not fit {cls.__name__}: {error}") from error
