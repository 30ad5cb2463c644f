"""Sessions: conversations that the server keeps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from slm_core.errors import InvalidOption
from slm_core.server.errors import ApiError
from slm_core.server.fields import Strict
from slm_core.server.json_text import encoded
from slm_core.server.openai_chat import ChatMessage, Tool
from slm_core.server.session_files import SessionFiles

MOST_SESSIONS = 256
MOST_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class ServedSession:
    """A conversation. Messages are in the form of OpenAI's chat completions.

    Attributes:
        id: its id.
        key: the client that may use it.
        model: the name of the model.
        name: a name for people.
        messages: the messages.
        tools: the tools that the model may call.
        usage: the numbers of tokens of the last answer; None before.
        created: the time, in seconds since 1970.
        n_bytes: the size of its messages. It is computed when they change: computing it for all sessions would delay
            all streams.
    """

    id: str
    key: str
    model: str
    name: str
    messages: list[ChatMessage]
    tools: list[Tool]
    usage: dict[str, Any] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _is_busy: bool = False
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_bytes = size_of(self.messages)

    def change(self, messages: list[ChatMessage], usage: dict[str, Any] | None) -> None:
        """Replace the messages, and the numbers of tokens of the last answer."""
        self.messages, self.usage, self.n_bytes = messages, usage, size_of(messages)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the session as busy within the block: nothing else changes it meanwhile.

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
        """The content of a dump, which can be restored on any model and backend."""
        return {
            "model": self.model,
            "name": self.name,
            "messages": _dumped(self.messages),
            "tools": _dumped(self.tools),
        }

    def json(self) -> dict[str, Any]:
        """The session as clients see it."""
        return {**self._about(), **self.content(), **self._state()}

    def listed(self) -> dict[str, Any]:
        """The session in a list: the number of its messages in their place."""
        about = {**self._about(), "model": self.model, "name": self.name, "tools": _dumped(self.tools)}
        return {**about, **self._state(), "n_messages": len(self.messages)}

    def _about(self) -> dict[str, Any]:
        return {"id": self.id, "object": "session", "created": self.created}

    def _state(self) -> dict[str, Any]:
        return {"usage": self.usage, "answering": self._is_busy}


def size_of(messages: Sequence[ChatMessage]) -> int:
    """The size of messages, in bytes of JSON."""
    return len(encoded(_dumped(messages, exclude_none=False)))


def _dumped(parts: Sequence[BaseModel], *, exclude_none: bool = True) -> list[dict[str, Any]]:
    """Parts as JSON values, one by one: pydantic holds the GIL in a call, and other threads get it between two."""
    return [part.model_dump(exclude_none=exclude_none) for part in parts]


class _SessionFile(Strict):
    """The content of a session's file."""

    object: Literal["session.file"] = "session.file"
    version: Literal[1] = 1
    id: str = Field(pattern=r"^sess_[0-9a-f]{24}$")
    created: int
    key: str
    model: str
    name: str
    messages: list[ChatMessage]
    tools: list[Tool]
    usage: dict[str, Any] | None


class SessionStore:
    """Sessions by id, at most ``MOST_SESSIONS`` of all clients, with messages of at most ``MOST_BYTES``.

    Changes take long for long conversations, and write to the disk: make them in a thread, not in the event loop.

    Args:
        folder: keeps them on the disk, too: a change is saved when its method returns. None: only in memory.

    Raises:
        InvalidOption: the folder cannot be used, or a file in it is not a session.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._sessions: dict[str, ServedSession] = {}
        self._changing = threading.Lock()
        self._files = None if folder is None else SessionFiles(folder)
        if self._files is not None:
            for path, content in self._files.read():
                session = _read(path, content)
                self._sessions[session.id] = session

    def add(self, session: ServedSession) -> None:
        """Keep a session.

        Raises:
            ApiError: there are too many, they are too large, or the session cannot be saved.
        """
        with self._changing:
            if len(self._sessions) >= MOST_SESSIONS:
                raise _full(f"the server keeps {MOST_SESSIONS} sessions")
            self.check_size(session.n_bytes)
            self._save(session, session.messages, session.usage)
            self._sessions[session.id] = session

    def update(self, session: ServedSession, messages: list[ChatMessage], usage: dict[str, Any] | None = None) -> None:
        """Replace the messages of a session.

        Args:
            session: a session of this store.
            messages: its messages from now on.
            usage: the numbers of tokens of an answer; None keeps the numbers of the answer before.

        Raises:
            ApiError: the session cannot be saved; it is unchanged.
        """
        usage = session.usage if usage is None else usage
        with self._changing:
            self._save(session, messages, usage)
            session.change(messages, usage)

    def check_size(self, n_bytes: int) -> None:
        """Refuse messages for which there is no memory.

        Raises:
            ApiError: sessions would be too large.
        """
        if sum(session.n_bytes for session in self.all) + n_bytes > MOST_BYTES:
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
        return [session for session in self.all if session.key == key]

    @property
    def all(self) -> Sequence[ServedSession]:
        """The sessions of all clients."""
        return tuple(self._sessions.values())

    def adopt(self, sessions: Iterable[ServedSession]) -> None:
        """Keep sessions of another server, too, however many there are: nothing is lost."""
        for session in sessions:
            with self._changing:
                self._save(session, session.messages, session.usage)
                self._sessions[session.id] = replace(session, _is_busy=False)  # its answer there was cut off

    def remove(self, session: ServedSession) -> None:
        """Forget a session.

        Raises:
            ApiError: its file cannot be removed.
        """
        with self._changing:
            if self._files is not None:
                self._files.remove(session.id)
            del self._sessions[session.id]

    def _save(self, session: ServedSession, messages: list[ChatMessage], usage: dict[str, Any] | None) -> None:
        if self._files is None:
            return
        content = {
            "object": "session.file",
            "version": 1,
            "id": session.id,
            "created": session.created,
            "key": session.key,
            "model": session.model,
            "name": session.name,
            "messages": _dumped(messages),
            "tools": _dumped(session.tools),
            "usage": usage,
        }
        self._files.write(session.id, encoded(content))


def _read(path: Path, content: bytes) -> ServedSession:
    """The session of a file.

    Raises:
        InvalidOption: it is not a session's file.
    """
    try:
        saved = _SessionFile.model_validate(json.loads(content))
        if path.stem != saved.id:
            raise ValueError(f"it is the file of {saved.id}")
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        message = f"{path}: not a session's file: {where}: {error.errors()[0]['msg']}"
        raise InvalidOption(f"{message} (move it away to start without it)") from error
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"{path}: not a session's file: {error} (move it away to start without it)") from error
    return ServedSession(
        saved.id, saved.key, saved.model, saved.name, saved.messages, saved.tools, saved.usage, saved.created
    )


def _full(limit: str) -> ApiError:
    return ApiError(429, f"{limit}: delete some first", "too_many_sessions", headers={"retry-after": "1"})
