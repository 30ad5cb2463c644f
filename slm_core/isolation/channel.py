"""A socket that carries messages.

A message on the wire, little-endian::

    uint32   length of the header
    uint64   length of the payload
    header   JSON, see ``values``
    payload  raw bytes
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_core.isolation.values import Garbled, Message, unpack

_PREFIX = struct.Struct("<IQ")
_LONGEST_HEADER = 1 << 20
_STEP = 1 << 20
"""Bytes of memory to allocate at a time, as data arrives: a forged length allocates no more."""
_BUFFER_BYTES = 1 << 20
_MOST_BUFFERS = 512  # of one sendmsg; the system allows 1024
ANY_LENGTH = 1 << 62


class Channel:
    """Sends and receives messages, one at a time.

    Args:
        connection: a connected stream socket; it is closed with the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, message: Message, deadline: float | None = None) -> None:
        """Send a message.

        Args:
            message: the message.
            deadline: the latest end, in seconds of ``time.monotonic``.

        Raises:
            TimeoutError: after the deadline; the channel cannot be used any more.
            OSError: the other end is closed.
        """
        header, payload = message
        n_bytes = sum(len(part) for part in payload)
        parts: list[bytes | memoryview] = [_PREFIX.pack(len(header), n_bytes) + header, *payload]
        if len(parts) > _MOST_BUFFERS:
            parts = [b"".join(parts)]
        self._send_all(parts, deadline)

    def receive(self, deadline: float | None = None, *, most_bytes: int = ANY_LENGTH) -> Any:
        """The value of the next message.

        Args:
            deadline: the latest end, in seconds of ``time.monotonic``.
            most_bytes: the longest payload.

        Raises:
            EOFError: the other end is closed.
            Garbled: the bytes are not a message.
            TimeoutError: after the deadline.
        """
        prefix = memoryview(bytearray(_PREFIX.size))
        self._fill(prefix, deadline)
        n_header, n_payload = _PREFIX.unpack(prefix)
        if n_header > _LONGEST_HEADER or n_payload > most_bytes:
            raise Garbled(f"a message of {n_header} and {n_payload} bytes")
        header = memoryview(bytearray(n_header))
        self._fill(header, deadline)
        return unpack(bytes(header), self._received(n_payload, deadline))

    def send_files(self, descriptors: Sequence[int]) -> None:
        """Send descriptors of open files or sockets to the other process."""
        if sys.platform == "win32":
            raise AssertionError("`isolated` refuses Windows")
        socket.send_fds(self._socket, [b"+"], descriptors)

    def receive_files(self, n: int) -> list[int]:
        """Receive ``n`` descriptors, which belong to the caller.

        Raises:
            EOFError: the other end of this channel is closed.
        """
        if sys.platform == "win32":
            raise AssertionError("`isolated` refuses Windows")
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, n)
        if len(descriptors) != n:
            raise EOFError("the other end is closed")
        return descriptors

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        self._socket.close()

    def _send_all(self, parts: Sequence[bytes | memoryview], deadline: float | None) -> None:
        if sys.platform == "win32":
            raise AssertionError("`isolated` refuses Windows")
        while parts:
            self._limit(deadline)
            n_sent = self._socket.sendmsg(parts)
            remaining: list[bytes | memoryview] = []
            for part in parts:
                if n_sent < len(part):
                    remaining.append(memoryview(part)[n_sent:])
                n_sent = max(0, n_sent - len(part))
            parts = remaining

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        while len(view):
            self._limit(deadline)
            n = self._socket.recv_into(view)
            if n == 0:
                raise EOFError("the other end is closed")
            view = view[n:]

    def _received(self, n_bytes: int, deadline: float | None) -> memoryview:
        """Receive ``n_bytes``; memory is allocated as they arrive."""
        if n_bytes <= _STEP:
            data = np.empty(n_bytes, np.uint8).data
            self._fill(data, deadline)
            return data
        received = bytearray()
        while len(received) < n_bytes:
            step = min(_STEP, n_bytes - len(received))
            first = len(received)
            received += bytes(step)
            with memoryview(received) as view:
                self._fill(view[first:], deadline)
        return memoryview(received)

    def _limit(self, deadline: float | None) -> None:
        if deadline is None:
            if self._socket.gettimeout() is not None:
                self._socket.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)
