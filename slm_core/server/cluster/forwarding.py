"""A request on its way from the front to a replica, and the fields that the front reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slm_core.server.calls import Forwarded

_KEPT = re.compile(r"/v1/(?:sessions|responses)/(?:sess|resp)_([0-9a-f]{24})(?:/|$)")
_RESPONSE = re.compile(r"resp_([0-9a-f]{24})")
_N_TAG = 8
_IN_ORDER = ("tools", "system", "instructions", "messages", "input", "prompt", "query", "content")
"""Parts of a body whose texts begin a prompt, in the order in which templates write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An HTTP request that passed the checks of the front, with its body.

    Attributes:
        method: "GET", ...
        path: the path, decoded.
        query: the query, without "?".
        headers: names in lower case, and values.
        body: the body.
        request_id: its id in logs.
        key: the name of the client's key; "" without keys.
        text: the beginning of its prompt, for the choice of a replica; "" for requests without a prompt.
        home: the tag of the replica that has the requested session or response; "" if any replica can answer.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    request_id: str = ""
    key: str = ""
    text: str = field(default="", repr=False)
    home: str = ""

    def forwarded(self, tag: str) -> Forwarded:
        """The id of the request and its client, for the replica with a tag."""
        return Forwarded(self.request_id, self.key, tag)


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A part of an answer. The first one has the status and the headers."""

    body: bytes = b""
    status: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of an answer.

    Attributes:
        is_complete: whether it is whole; after an unexpected error it is not.
        route: the path of its route, for metrics.
        facts: additional values of its log line.
    """

    is_complete: bool
    route: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer of one replica.

    Attributes:
        tag: the replica.
        status: the HTTP status.
        body: the body.
    """

    tag: str
    status: int
    body: bytes


def tag_of(name: str) -> str:
    """The tag of a replica: ids of sessions and responses begin with it."""
    return hashlib.blake2b(name.encode(), digest_size=_N_TAG // 2).hexdigest()


def home_of(path: str, body: Mapping[str, object]) -> str:
    """The tag of the replica that made the session or response of a request; "" if it names none."""
    match = _KEPT.match(path)
    if match is None and isinstance(previous := body.get("previous_response_id"), str):
        match = _RESPONSE.fullmatch(previous)
    return "" if match is None else match[1][:_N_TAG]


def prompt_text(body: Mapping[str, object]) -> str:
    """The beginning of the prompt of a request. Requests with the same history have the same beginning."""
    parts: list[str] = [str(body.get("model", ""))]
    for name in _IN_ORDER:
        value = body.get(name)
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                parts.append(item if isinstance(item, str) else json.dumps(item, sort_keys=True))
    return "\n".join(parts) if len(parts) > 1 else ""


def fields_of(body: bytes) -> Mapping[str, object]:
    """The fields of a JSON body; none if it is not a JSON object: the replica reports the error."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
