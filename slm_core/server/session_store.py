"""Sessions: conversations that the server keeps."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from slm_core.server.errors import ApiError
from slm_core.server.json_text import encoded
from slm_core.server.openai_chat import ChatMessage, Tool

MOST_SESSIONS = 256
MOST_BYTES = 64 << 20
_MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


@dataclass(slots=True, eq=False)
class ServedSession:
    """A conversation. Messages are in the form of OpenAI's chat completions.

    Attributes:
        key: the client that may use it.
        model: the name of the model.
        name: a name for people.
        messages: the messages.
        tools: the tools that the model may call.
        usage: the numbers of tokens of the last answer; None before.
        id: its id.
        created: the time, in seconds since 1970.
    """

    key: str
    model: str
    name: str
    messages: list[ChatMessage]
    tools: list[Tool]
    usage: dict[str, Any] | None = None
    id: str = field(default_factory=lambda: f"sess_{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _is_busy: bool = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The only change at this time.

        Raises:
            ApiError: the session is answering.
        """
        if self._is_busy:
            raise ApiError(409, "the session is answering: wait, or fork it", "session_busy")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def content(self) -> dict[str, Any]:
        """What a dump contains: it is restored on any model and backend."""
        return {
            "model": self.model,
            "name": self.name,
            "messages": _MESSAGES.dump_python(self.messages, exclude_none=True),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
        }

    def json(self) -> dict[str, Any]:
        """The session as clients see it."""
        return {
            "id": self.id,
            "object": "session",
            "created": self.created,
            **self.content(),
            "usage": self.usage,
            "answering": self._is_busy,
        }

    @property
    def n_bytes(self) -> int:
        """The size of its messages."""
        return size_of(self.messages)


def size_of(messages: Sequence[ChatMessage]) -> int:
    """The size of messages, in bytes of JSON."""
    return len(encoded(_MESSAGES.dump_python([*messages])))


class SessionStore:
    """Sessions by id, at most ``MOST_SESSIONS`` of all clients, with messages of at most ``MOST_BYTES``."""

    def __init__(self) -> None:
        self._sessions: dict[str, ServedSession] = {}

    def add(self, session: ServedSession) -> None:
        """Keep a session.

        Raises:
            ApiError: there are too many, or they are too large.
        """
        if len(self._sessions) >= MOST_SESSIONS:
            raise _full(f"the server keeps {MOST_SESSIONS} sessions")
        self.check_size(session.n_bytes)
        self._sessions[session.id] = session

    def check_size(self, n_bytes: int) -> None:
        """Refuse messages for which there is no memory.

        Raises:
            ApiError: sessions would be too large.
        """
        if sum(session.n_bytes for session in self._sessions.values()) + n_bytes > MOST_BYTES:
            raise _full(f"the server keeps {MOST_BYTES >> 20} MiB of messages")

    def get(self, session_id: str, key: str) -> ServedSession:
        """The session with an id.

        Raises:
            ApiError: there is none, or it is another client's.
        """
        session = self._sessions.get(session_id)
        if session is None or session.key != key:
            raise ApiError(404, f"there is no session {session_id!r:.100}", "session_not_found")
        return session

    def of(self, key: str) -> Sequence[ServedSession]:
        """The sessions of a client, oldest first."""
        return [session for session in self._sessions.values() if session.key == key]

    def remove(self, session: ServedSession) -> None:
        """Forget a session."""
        del self._sessions[session.id]


def _full(limit: str) -> ApiError:
    return ApiError(429, f"{limit}: delete some first", "too_many_sessions", headers={"retry-after": "1"})
