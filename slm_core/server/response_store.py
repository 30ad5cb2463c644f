"""Stored responses, and responses that are generated in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic import TypeAdapter

from slm_core.server.errors import ApiError
from slm_core.server.json_text import encoded
from slm_core.server.responses_fields import InputItem

MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class FinishedResponse:
    """A response that is over, for another server; see ``StoredResponse`` for the attributes."""

    id: str
    key: str
    response: dict[str, Any]
    earlier: Sequence[InputItem]
    items: Sequence[InputItem]
    frames: Sequence[bytes]
    is_background: bool


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response that later requests can read or continue.

    Attributes:
        id: its id.
        key: the client that may read it.
        response: its JSON, which changes while it is generated.
        earlier: the items before its input.
        items: the items of its input.
        frames: the events of a background response so far.
        task: the task that generates a background response; None for other responses, and for responses of another
            server.
        is_background: whether its events are kept.
    """

    id: str
    key: str
    response: dict[str, Any]
    earlier: Sequence[InputItem]
    items: Sequence[InputItem]
    frames: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    is_background: bool = False
    _changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def is_over(self) -> bool:
        """Whether its generation has ended."""
        return self.task is None or self.task.done()

    @property
    def n_bytes(self) -> int:
        """Its size in bytes, as JSON."""
        items = encoded(_ITEMS.dump_python([*self.items]))
        return len(encoded(self.response)) + len(items) + sum(map(len, self.frames))

    def conversation(self) -> list[InputItem]:
        """All items up to the end of this response.

        Raises:
            ApiError: it is not over, or it has failed.
        """
        if self.response["status"] not in ("completed", "incomplete"):
            message = f"the response {self.id} is {self.response['status']}: it cannot be continued"
            raise ApiError(400, message, param="previous_response_id")
        return [*self.earlier, *self.items, *_ITEMS.validate_python(self.response["output"])]

    def add(self, frame: bytes) -> None:
        """Add an event."""
        self.frames.append(frame)
        self.notify()

    def notify(self) -> None:
        """Wake the readers of ``events``."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def events(self, first: int) -> AsyncIterator[bytes]:
        """The events from number ``first`` on, as they come."""
        while True:
            while first < len(self.frames):
                yield self.frames[first]
                first += 1
            if self.is_over:
                return
            await self._changed.wait()


class ResponseStore:
    """Responses by id. The least recently used ones are forgotten beyond ``MOST_RESPONSES`` and ``MOST_BYTES``."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or note that it has grown."""
        self._responses[stored.id] = stored
        self._sizes[stored.id] = stored.n_bytes
        self._responses.move_to_end(stored.id)
        while len(self._responses) > MOST_RESPONSES or sum(self._sizes.values()) > MOST_BYTES:
            oldest = next((each for each in self._responses.values() if each.is_over), None)
            if oldest is None:
                return
            self._forget(oldest)

    def get(self, response_id: str, key: str, param: str | None = None) -> StoredResponse:
        """The response with an id.

        Raises:
            ApiError: there is none, or it is another client's.
        """
        stored = self._responses.get(response_id)
        if stored is None or stored.key != key:
            message = f"there is no response {response_id!r:.100} (the server keeps the last {MOST_RESPONSES})"
            raise ApiError(404, message, "response_not_found", param)
        self._responses.move_to_end(stored.id)
        return stored

    def finished(self) -> Sequence[FinishedResponse]:
        """All responses that are over, the least recently used first."""
        return [
            FinishedResponse(
                each.id, each.key, each.response, each.earlier, each.items, each.frames, each.is_background
            )
            for each in self._responses.values()
            if each.is_over
        ]

    def adopt(self, responses: Iterable[FinishedResponse]) -> None:
        """Store responses of another server, too."""
        for each in responses:
            frames, kind = list(each.frames), each.is_background
            self.put(
                StoredResponse(
                    each.id, each.key, each.response, each.earlier, each.items, frames=frames, is_background=kind
                )
            )

    async def delete(self, stored: StoredResponse) -> None:
        """Forget a response; it is cancelled if it is not over."""
        await cancel(stored)
        self._forget(stored)

    async def close(self, grace_s: float) -> None:
        """Wait for the background responses, and cancel responses that take longer."""
        tasks = [stored.task for stored in self._responses.values() if stored.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for stored in list(self._responses.values()):
            await cancel(stored)

    def _forget(self, stored: StoredResponse) -> None:
        self._responses.pop(stored.id, None)
        self._sizes.pop(stored.id, None)


async def cancel(stored: StoredResponse) -> None:
    """Cancel a background response, and wait until it has ended."""
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        await asyncio.wait([stored.task])
