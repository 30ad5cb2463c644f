"""Fields of request bodies that several APIs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from slm_core.sampling import Sampling

_T = TypeVar("_T")


class _OneError:
    """Ends the validation of a list with its first error. pydantic's FailFast cannot be a member of a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


Items: TypeAlias = Annotated[list[_T], _OneError()]
"""A list in a body. Validation ends at its first invalid item: a body has room for millions, which take minutes."""


def _checked_tokens(value: object, validate: Callable[[object], list[int]]) -> list[int]:
    """A list of integers. The loop is code in Python: pydantic would hold the GIL for all of a list of millions."""
    if type(value) is not list:
        return validate(value)
    for i, token in enumerate(value):
        if type(token) is not int:
            wrong: InitErrorDetails = {"type": "int_type", "loc": (i,), "input": token}
            raise ValidationError.from_exception_data("list", [wrong])
    return value


Tokens: TypeAlias = Annotated[list[int], WrapValidator(_checked_tokens)]
"""A list of tokens of a body."""


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """The names of the fields of a part of a body."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class Strict(BaseModel):
    """A part of a body: an unknown field is an error, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_more_unknown(cls, value: object) -> object:
        """Drop unknown fields that are null, and all other unknown fields except the first (one error; see ``Items``).

        A null counts as absent: clients send messages back with a null for each field of newer versions of their API.

        This runs for each part of a body. It is Python code, so other threads can take the GIL, which pydantic holds.
        """
        known = _names(cls)
        if not isinstance(value, dict) or known.issuperset(value):
            return value
        unknown = next((name for name, each in value.items() if name not in known and each is not None), None)
        return {name: each for name, each in value.items() if name in known or name == unknown}


def _first_wrong(*kinds: type) -> Callable[[object], object]:
    """A function that reduces a dict with wrong values to the first wrong entry (one error; see ``Items``)."""

    def leave(value: object) -> object:
        entries = value.items() if isinstance(value, dict) else ()
        wrong = next(((name, each) for name, each in entries if type(each) not in kinds), None)
        return value if wrong is None else dict([wrong])

    return leave


Numbers: TypeAlias = Annotated[dict[str, float], BeforeValidator(_first_wrong(int, float))]
Texts: TypeAlias = Annotated[dict[str, str], BeforeValidator(_first_wrong(str))]


class SamplingFields(Strict):
    """Options of ``slm_core.Sampling`` under their names (docs/sampling.md), except ``custom``."""

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    top_a: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repeat_penalty: float | None = None
    penalty_window: int | None = None
    no_repeat_ngram: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_window: int | None = None
    dry_breakers: Items[str | int] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    adaptive_entropy: float | None = None
    adaptive_decay: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    min_tokens: int | None = None
    min_keep: int | None = None
    order: Items[str] | None = Field(None, description="The order of the steps.")
    temperature: float | None = Field(None, description="0 chooses the likeliest token.")
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Numbers | None = Field(None, description="Added to the logits of tokens, by id.")
    banned_tokens: Tokens | None = Field(None, description="Ids of tokens that are never chosen.")
    eog_bias: float | None = Field(None, description="Added to the logits of tokens that end an answer.")
    seed: int | None = None
    stop: str | Items[str] | None = Field(None, description="Texts that end the answer.")

    def sampling(self, default: Sampling, **others: object) -> Sampling:
        """The sampling options: the defaults, replaced by the options in the body.

        Args:
            default: the default options.
            others: options that this API names in its own way; None keeps the default.

        Raises:
            InvalidOption: an invalid value.
        """
        values: Mapping[str, object] = {
            name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None
        }
        given = {**values, **{name: value for name, value in others.items() if value is not None}}
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        return Sampling.from_dict({**default.to_dict(), **given})


class EngineFields(Strict):
    """Fields for the engine."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    priority: float | None = Field(
        None,
        description="Requests with a larger priority come first; by default 0. The operator says what is allowed.",
    )
    cache_salt: str | None = Field(None, description="Requests share cached prefixes only with the same salt.")
