"""Answers on their way from a replica to the front: over a connection of their own.

Ray takes milliseconds of two cores for each item that a replica streams; a connection takes microseconds. The front
listens, each request contains its address, and the replica connects to it. Messages are data; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from slm_core.server.cluster.forwarding import Ended, Sent

_N_SECRET = 32
_N_LENGTH = 4
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Sent | Ended])
_HELLO_S = 10.0
"""Seconds within which a new connection has to send the secret of its answer."""


@dataclass(frozen=True, slots=True)
class ReturnAddress:
    """Where an answer is expected.

    Attributes:
        host: the address of the front.
        port: its port.
        secret: the secret that the replica has to send first; it is valid for one answer.
    """

    host: str
    port: int
    secret: bytes


class Bridge:
    """The front's end: it listens for the answers that it expects, and closes other connections.

    Args:
        host: the address that replicas reach.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._expected: dict[bytes, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on any free port."""
        self._server = await asyncio.start_server(self._connected, self._host, 0)

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    @asynccontextmanager
    async def expected(self) -> AsyncIterator[ExpectedAnswer]:
        """An answer that may come within the block. Leaving it closes the connection: nobody waits any more."""
        assert self._server is not None
        secret = secrets.token_bytes(_N_SECRET)
        port = self._server.sockets[0].getsockname()[1]
        connected = self._expected[secret] = asyncio.get_running_loop().create_future()
        try:
            yield ExpectedAnswer(ReturnAddress(self._host, port, secret), connected)
        finally:
            del self._expected[secret]
            connected.cancel()
            if not connected.cancelled() and connected.exception() is None:
                connected.result()[1].close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                secret = await reader.readexactly(_N_SECRET)
            expected = self._expected[secret]
        except (KeyError, OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.close()
            return
        if expected.done():
            writer.close()
        else:
            expected.set_result((reader, writer))


class ExpectedAnswer:
    """An answer that a replica will bring.

    Args:
        address: the address, for the replica.
        connected: done when the replica has connected.
    """

    def __init__(
        self,
        address: ReturnAddress,
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> None:
        self.address = address
        self._connected = connected

    def fail(self) -> None:
        """Record that no replica will connect."""
        if not self._connected.done():
            self._connected.set_exception(EOFError("the replica ended"))

    @property
    def is_connected(self) -> bool:
        """Whether a replica has connected."""
        return self._connected.done()

    async def parts(self) -> AsyncGenerator[Sent | Ended]:
        """The parts of the answer.

        Raises:
            EOFError: the replica ended before the answer.
        """
        reader, _ = await self._connected
        while True:
            try:
                length = int.from_bytes(await reader.readexactly(_N_LENGTH), "big")
                parts = _DECODER.decode(await reader.readexactly(length))
            except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
                raise EOFError("the connection to the replica ended") from error
            for part in parts:
                yield part
                if isinstance(part, Ended):
                    return


async def bring(answer: AsyncGenerator[Sequence[Sent | Ended]], address: ReturnAddress) -> None:
    """Send an answer to the front, as it comes. It ends early if nobody waits for the rest.

    Raises:
        OSError: the front cannot be reached.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writing = asyncio.ensure_future(_write(answer, address.secret, writer))
    left = asyncio.ensure_future(reader.read(1))  # the front sends nothing: this ends when it closes the connection
    try:
        await asyncio.wait([writing, left], return_when=asyncio.FIRST_COMPLETED)
    finally:
        writing.cancel()
        left.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):  # the front has left
            await writing
        writer.close()


async def _write(answer: AsyncGenerator[Sequence[Sent | Ended]], secret: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(secret)
    async with aclosing(answer):
        async for parts in answer:
            data = _ENCODER.encode(parts)
            writer.write(len(data).to_bytes(_N_LENGTH, "big") + data)
            await writer.drain()
