"""The server's log: one line of JSON for each request, without texts of prompts and answers."""

from __future__ import annotations

import traceback
from typing import Any, TextIO

import structlog

from slm_core.server.calls import Call


class ServerLog:
    """Writes lines of JSON.

    Args:
        file: the file; None for no log.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._logger: Any = None
        if file is not None:
            self._logger = structlog.wrap_logger(
                structlog.WriteLogger(file),
                processors=[
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso", utc=True),
                    structlog.processors.JSONRenderer(),
                ],
                wrapper_class=structlog.BoundLogger,
                cache_logger_on_first_use=True,
            )

    def request(self, call: Call, method: str, path: str, status: int, seconds: float) -> None:
        """Log a request that is over."""
        if self._logger is not None:
            facts = {"request_id": call.request_id, "key": call.key, "method": method, "path": path}
            self._logger.info("request", **facts, status=status, seconds=round(seconds, 4), **call.facts)

    def failure(self, call: Call, error: BaseException) -> None:
        """Log an unexpected error: its type and place, without its message, which may quote a prompt."""
        if self._logger is not None:
            frames = traceback.extract_tb(error.__traceback__)
            where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            self._logger.error("failure", request_id=call.request_id, error=type(error).__name__, where=where)
