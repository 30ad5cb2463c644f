"""One connection per answer: complete answers, early ends on both sides, and unexpected connections."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

import pytest

from slm_core.server.cluster.bridge import Bridge, ReturnAddress, bring
from slm_core.server.cluster.forwarding import Ended, Sent

WAIT_S = 30
START = Sent(b"", 200, ((b"content-type", b"text/plain"),))
END = Ended(True, "/v1/x", {"completion_tokens": 3, "stream": True, "model": "m"})


class Answer:
    """An answer whose parts can be held back."""

    def __init__(self, parts: Sequence[Sequence[Sent | Ended]], hold: bool = False) -> None:
        self.batches = parts
        self.hold = hold
        self.is_left = asyncio.Event()

    async def __call__(self) -> AsyncGenerator[Sequence[Sent | Ended]]:
        try:
            for parts in self.batches:
                yield parts
            if self.hold:
                await asyncio.Event().wait()
        finally:
            self.is_left.set()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, WAIT_S))


async def started() -> Bridge:
    bridge = Bridge("127.0.0.1")
    await bridge.start()
    return bridge


def test_answers_arrive_whole_and_are_not_mixed() -> None:
    async def main() -> None:
        bridge = await started()
        large = bytes(range(256)) * 8192

        async def one(number: int) -> None:
            batches = [[START], [Sent(b"%d" % number), Sent(large)], [Sent(b"last"), END]]
            async with bridge.expected() as expected:
                bringing = asyncio.create_task(bring(Answer(batches)(), expected.address))
                assert [part async for part in expected.parts()] == [part for batch in batches for part in batch]
                await bringing

        await asyncio.gather(*map(one, range(20)))
        await bridge.close()

    run(main())


def test_a_part_does_not_wait_for_the_next() -> None:
    async def main() -> None:
        bridge = await started()
        answer = Answer([[START, Sent(b"first")]], hold=True)
        async with bridge.expected() as expected:
            bringing = asyncio.create_task(bring(answer(), expected.address))
            parts = expected.parts()
            assert [await anext(parts), await anext(parts)] == [START, Sent(b"first")]
            assert not answer.is_left.is_set()
            await parts.aclose()
        await answer.is_left.wait()  # the front has closed the connection, so the answer is not computed any more
        await bringing
        await bridge.close()

    run(main())


def test_a_replica_that_ends_early_is_not_the_end_of_the_answer() -> None:
    async def main() -> None:
        bridge = await started()
        async with bridge.expected() as expected:
            bringing = asyncio.create_task(bring(Answer([[START]])(), expected.address))
            parts = expected.parts()
            assert await anext(parts) == START
            with pytest.raises(EOFError):
                await anext(parts)
            await bringing
        async with bridge.expected() as expected:
            expected.fail()
            with pytest.raises(EOFError):
                await anext(expected.parts())
        await bridge.close()

    run(main())


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was executed",))


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 100])
def test_connections_that_nobody_expects_are_closed(data: bytes) -> None:
    async def main() -> None:
        bridge = await started()
        async with bridge.expected() as expected:
            address = expected.address
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            bringing = asyncio.create_task(bring(Answer([[START, END]])(), address))
            assert [part async for part in expected.parts()] == [START, END]
            await bringing
        late = ReturnAddress(address.host, address.port, address.secret)
        answer = Answer([[START]], hold=True)
        await bring(answer(), late)  # a secret is valid for one answer, so nobody reads this one
        await answer.is_left.wait()
        await bridge.close()

    run(main())


def test_what_arrives_is_never_executed() -> None:
    async def main() -> None:
        bridge = await started()
        async with bridge.expected() as expected:
            address, data = expected.address, pickle.dumps(Exploit())
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(address.secret + len(data).to_bytes(4, "big") + data)
            with pytest.raises(EOFError):
                await anext(expected.parts())
            writer.close()
        await bridge.close()

    run(main())
