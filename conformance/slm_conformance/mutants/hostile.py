"""Mutants that accept damaged or hostile dumps of sessions and chats."""

from __future__ import annotations

import hashlib
from typing import Any

from slm_conformance.mutants.above import breaks
from slm_core.chat import Session, chat_dump, session_dump
from slm_core.chat.sequences import release

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)


def _with_its_last_byte(data: bytes) -> bytes:
    """The dump with the last byte of its checksum corrected."""
    return data[:-1] + hashlib.blake2b(data[:-32], digest_size=32).digest()[-1:]


@breaks("TestHostileSessions::test_a_damaged_session", session_dump, "unpack")
def SessionChecksumCut(original: Any, kind: str, data: bytes) -> Any:
    """The last byte of a session's checksum is not compared."""
    return original(kind, _with_its_last_byte(data))


@breaks("TestHostileSessions::test_a_damaged_chat", chat_dump, "unpack")
def ChatChecksumCut(original: Any, kind: str, data: bytes) -> Any:
    """The last byte of a chat's checksum is not compared."""
    return original(kind, _with_its_last_byte(data))


@breaks("TestHostileSessions::test_hostile_sessions", Session, "close")
def RefusedSessionsStay(original: Any, session: Session) -> None:
    """If a dump of a session is refused after its sequence was restored, the sequence is not emptied."""
    if session._source.inputs:
        original(session)
    else:
        session._source.closed = True
        release(session.context, session.seq_id)


@breaks("TestHostileSessions::test_hostile_chats", chat_dump, "checked_n_ctx")
def SizesTrusted(original: Any, n_ctx: int, limit: int) -> int:
    """A chat's dump may request a context of any size."""
    return n_ctx
