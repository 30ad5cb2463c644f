"""Toys above which damaged and hostile dumps of sessions and chats do harm."""

from __future__ import annotations

import hashlib
from typing import Any

from slm_conformance.mutants.above import breaks
from slm_core.chat import Session, chat_dump, session_dump
from slm_core.chat.sequences import release

# ruff: noqa: N802, SLF001  (the names are those of backends; mutants change internals)


def _with_its_last_byte(data: bytes) -> bytes:
    """The dump with the last byte that its checksum should have."""
    return data[:-1] + hashlib.blake2b(data[:-32], digest_size=32).digest()[-1:]


@breaks("TestHostileSessions::test_a_damaged_session", session_dump, "unpack")
def SessionChecksumCut(whole: Any, kind: str, data: bytes) -> Any:
    """The last byte of a session's checksum is not compared."""
    return whole(kind, _with_its_last_byte(data))


@breaks("TestHostileSessions::test_a_damaged_chat", chat_dump, "unpack")
def ChatChecksumCut(whole: Any, kind: str, data: bytes) -> Any:
    """The last byte of a chat's checksum is not compared."""
    return whole(kind, _with_its_last_byte(data))


@breaks("TestHostileSessions::test_hostile_sessions", Session, "close")
def RefusedSessionsStay(whole: Any, session: Session) -> None:
    """A session that is refused after its context restored the sequence leaves the sequence there."""
    if session._source.tokens:
        whole(session)
    else:
        session._source.closed = True
        release(session.context, session.seq_id)


@breaks("TestHostileSessions::test_hostile_chats", chat_dump, "checked_n_ctx")
def SizesTrusted(whole: Any, n_ctx: int, limit: int) -> int:
    """A chat's dump may request a context of any size."""
    return n_ctx
