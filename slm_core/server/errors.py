"""Errors as HTTP answers: one status and code for each exception, and one JSON form for each API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from slm_core.errors import (
    BackendError,
    ConstraintError,
    ContextFull,
    EngineClosed,
    InvalidToken,
    OptionError,
    SamplingError,
    SlmError,
    TemplateError,
    UnsupportedOutput,
    VocabError,
)
from slm_core.sampling import Sampling

_REFUSED = (OptionError, ConstraintError, TemplateError, VocabError, InvalidToken, SamplingError, UnsupportedOutput)
"""Errors that the client causes."""
_PARAMS = {*(each.name for each in fields(Sampling)), "tool_choice", "priority", "chat_template_kwargs"}
ENDED_BY_SERVER = ("unavailable", "cancelled")
"""Codes of errors of answers that have not failed: the server stops, or unloads the model."""
_INTERNAL = "internal error; the server's log has the details under this request's id"


class ApiError(SlmError):
    """An answer that is an error.

    Attributes:
        status: the HTTP status.
        message: one line.
        code: a word for programs ("context_length_exceeded").
        param: the parameter that is wrong; None if it is not one parameter.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "invalid_value",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The kind of error, in OpenAI's words."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_ROLES = ("system", "developer", "user", "assistant", "tool")

Envelope = Callable[[ApiError, str], Mapping[str, object]]
"""The JSON form of an error in an API; called with the error and the request's id."""


def openai_envelope(error: ApiError, request_id: str) -> Mapping[str, object]:
    """OpenAI's form."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_envelope(error: ApiError, request_id: str) -> Mapping[str, object]:
    """Anthropic's form."""
    kind = "api_error" if error.kind == "server_error" else error.kind
    kind = "overloaded_error" if error.status == 503 else kind
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def ollama_envelope(error: ApiError, request_id: str) -> Mapping[str, object]:
    """Ollama's form."""
    return {"error": error.message}


_ENVELOPES: Sequence[tuple[str, Envelope]] = (("/v1/messages", anthropic_envelope), ("/api/", ollama_envelope))


def envelope_for(path: str) -> Envelope:
    """The JSON form of errors for a path."""
    return next((envelope for prefix, envelope in _ENVELOPES if path.startswith(prefix)), openai_envelope)


def api_error(error: BaseException) -> ApiError:
    """The answer for an exception. The text of an unexpected exception is not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFull):
        n_prompt, n_ctx = error.needed - 1, error.free
        message = f"the prompt has {n_prompt} tokens, but the context has room for {n_ctx}, one of them for the answer"
        return ApiError(400, message, "context_length_exceeded", "messages")
    if isinstance(error, _REFUSED):
        first = re.match(r"\w*", str(error))
        assert first is not None
        return ApiError(400, str(error), param=first[0] if first[0] in _PARAMS else None)
    if isinstance(error, EngineClosed):
        return ApiError(503, "the model is being unloaded, or the server stops: try again", "unavailable")
    if isinstance(error, BackendError):
        return ApiError(503, "the model's engine failed: try again", "engine_failed")
    return ApiError(500, _INTERNAL, "internal_error")


def invalid_json() -> ApiError:
    """The answer for a body that cannot be parsed."""
    return ApiError(400, "the body is not valid JSON", "invalid_json")


def validation_error(errors: Sequence[Mapping[str, object]]) -> ApiError:
    """The answer for a body that does not fit the request model: it names the first parameter that is wrong."""
    first = _deepest(errors)
    location = first["loc"]
    assert isinstance(location, tuple)
    param = _dotted(location)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", "unknown_parameter", param)
    if (unsupported := _unsupported(first, param)) is not None:
        return unsupported
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'a JSON body'} is missing", "missing_parameter", param or None)
    if first["type"] == "model_attributes_type" and not param:
        return ApiError(400, "the body is not a JSON object with Content-Type: application/json", "invalid_json")
    if first["type"] == "json_invalid":
        return invalid_json()
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param or None)


def _unsupported(error: Mapping[str, Any], param: str) -> ApiError | None:
    """The answer for a message, or a part of one, of a kind that is unknown here, such as an image; None for others."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "too_long" and context["max_length"] == 0:
        return ApiError(400, f"{param} is not supported", param=param)
    if kind == "union_tag_invalid":
        param = f"{param}.{context['discriminator']}".replace("'", "").lstrip(".")
        value, accepted = context["tag"], context["expected_tags"]
    elif kind == "literal_error" and param.endswith(".type"):
        value, accepted = error["input"], context["expected"]
    else:
        return None
    return ApiError(400, f"{param}: {value!r:.80} is not supported (accepted: {accepted})", param=param)


def _deepest(errors: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    """The first error. If it says that a value is not a text, but a list or an object may be one: the error in it."""
    first = errors[0]
    location = first["loc"]
    assert isinstance(location, tuple)
    is_object = first["type"] == "literal_error" and isinstance(first["input"], dict)
    if location[-1:] != ("str",) and not is_object:
        return first
    place = location[:-1]
    inner = [error for error in errors[is_object:] if tuple(error["loc"])[: len(place)] == place]  # type: ignore[arg-type]
    if not inner:
        return first
    return max(inner, key=lambda error: len(error["loc"]))  # type: ignore[arg-type]  # pydantic's errors have untyped values


def _dotted(location: Sequence[object]) -> str:
    """A location like ``messages[0].content``; pydantic's names of a union's members are left out."""
    text, before = "", None
    for part in location[1:] if location[:1] == ("body",) else location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (isinstance(before, int) and part in _ROLES) and part != "str" and re.fullmatch(r"\w+", str(part)):
            text += f".{part}" if text else str(part)
        before = part
    return text
