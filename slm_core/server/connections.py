"""Connections of clients that send a request's head slowly, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 15.0
"""Seconds for the head of a request; uvicorn has no limit for it."""


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # uvicorn chooses the class when it is imported
    """Closes a connection whose next request's head has not arrived in time."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        super().data_received(data)
        if not self._waits:
            self._stop()
        elif self._timer is None:
            self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop()
        super().connection_lost(exc)

    @property
    def _waits(self) -> bool:
        """Whether no request is read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self._close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if self._waits:
            self.transport.close()
