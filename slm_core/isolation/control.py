"""The calls of an isolated model and its vocabulary, made by the parent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from slm_core.errors import BackendCrashed
from slm_core.isolation.channel import ANY_LENGTH
from slm_core.isolation.process import Process, deadline_after
from slm_core.isolation.raised import rebuilt
from slm_core.isolation.values import Garbled, pack


class Control:
    """The calls of a model and its vocabulary, one at a time.

    Args:
        process: the process of the model.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self._lock = threading.Lock()

    def ask(
        self,
        call: str,
        *arguments: object,
        timeout_s: float | None = None,
        most_bytes: int = ANY_LENGTH,
        sent: Sequence[int] = (),
    ) -> Any:
        """Make a call that changes nothing in the parent; returns its value.

        Args:
            call: the name of the call.
            arguments: its arguments.
            timeout_s: seconds; None for the timeout of calls.
            most_bytes: the longest payload of the reply.
            sent: descriptors of files that are sent after the call.
        """
        message, control = pack([call, *arguments]), self.process.control
        send = (lambda: control.send_files(sent)) if sent else None
        with self._lock:
            reply = self.process.exchange(
                control, call, message, deadline=deadline_after(timeout_s), most_bytes=most_bytes, before_reply=send
            )
        return self.settled(call, reply)

    def settled(self, call: str, reply: object) -> Any:
        """The value of a reply.

        Raises:
            BackendCrashed: it is not a valid reply; the process was ended.
        """
        match reply:
            case ["ok", value]:
                return value
            case ["error", described]:
                try:
                    error = rebuilt(described)
                except Garbled:
                    raise self.garbled(call) from None
                raise error
            case _:
                raise self.garbled(call)

    def garbled(self, call: str) -> BackendCrashed:
        """End the process, which sent an invalid value; returns the error."""
        return self.process.fail(f"was killed: its answer to {call} is malformed")
