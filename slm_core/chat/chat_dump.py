"""The bytes of a dumped chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slm_core.chat.messages import from_json
from slm_core.chat.overflow import NAMES
from slm_core.chat.session_dump import read_sampling
from slm_core.container import is_count, unpack
from slm_core.errors import InvalidSnapshot
from slm_core.sampling import Sampling
from slm_core.types import KvType, Message

# A forged dump must not make us reserve the machine's memory.
_MOST_SEQUENCES, _LARGEST_BATCH = 2**12, 2**14


@dataclass(frozen=True, slots=True)
class ChatState:
    """The content of a chat's dump.

    Attributes:
        messages: the conversation.
        sampling: the sampling options.
        tools: the schemas of the tools.
        thinking: see ``ChatOptions``.
        overflow: the name of the policy.
        n_answers: the number of earlier answers.
        context: n_ctx, n_seq_max and n_batch.
        kv_types: the types of keys and values that the context was asked for, or None.
        session: the session's dump.
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[Mapping[str, object], ...]
    thinking: bool | None
    overflow: str
    n_answers: int
    context: tuple[int, int, int]
    kv_types: tuple[KvType | None, KvType | None]
    session: bytes


def read(data: bytes) -> ChatState:
    """Read a dump; every value is checked.

    Raises:
        InvalidSnapshot, SnapshotMismatch: see ``snapshot.unpack``.
    """
    meta, sections = unpack("chat", data)
    names = {"messages", "sampling", "tools", "thinking", "overflow", "n_answers", "context", "kv_types"}
    if set(meta) != names or not sections:
        raise InvalidSnapshot("a part of the dump of a chat is missing")
    stored, tools, thinking, n_answers, sizes = (
        meta[name] for name in ("messages", "tools", "thinking", "n_answers", "context")
    )
    if not isinstance(stored, list) or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise InvalidSnapshot("the dump's messages or tools are malformed")
    if not isinstance(thinking, bool | None) or not isinstance(n_answers, int) or not is_count(n_answers):
        raise InvalidSnapshot("the dump's chat options are malformed")
    if meta["overflow"] not in NAMES:
        raise InvalidSnapshot("the dump's overflow policy is unknown")
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(is_count(n) for n in sizes):
        raise InvalidSnapshot("the dump's context sizes are malformed")
    if not all(sizes) or sizes[1] > _MOST_SEQUENCES or sizes[2] > _LARGEST_BATCH:
        raise InvalidSnapshot(
            f"the dump's context has {sizes[1]} sequences and batches of {sizes[2]}"
            f" (accepted: 1 to {_MOST_SEQUENCES}, 1 to {_LARGEST_BATCH})"
        )
    session, *of_rows = sections
    remaining = iter(of_rows)
    messages, sampling = tuple(from_json(each, remaining) for each in stored), read_sampling(meta["sampling"])
    if next(remaining, None) is not None:
        raise InvalidSnapshot("the dump has embedding rows of no message")
    overflow, context, kv_types = str(meta["overflow"]), (sizes[0], sizes[1], sizes[2]), _kv_types(meta["kv_types"])
    return ChatState(messages, sampling, tuple(tools), thinking, overflow, n_answers, context, kv_types, session)


def _kv_types(names: object) -> tuple[KvType | None, KvType | None]:
    if isinstance(names, list) and len(names) == 2 and all(name is None or name in list(KvType) for name in names):
        of_keys, of_values = (None if name is None else KvType(name) for name in names)
        return of_keys, of_values
    raise InvalidSnapshot("the dump's KV types are unknown")


def checked_n_ctx(n_ctx: int, limit: int) -> int:
    """The size of the context in a dump, if it is valid.

    Raises:
        InvalidSnapshot: the size is above the limit.
    """
    if n_ctx > limit:
        raise InvalidSnapshot(
            f"the dump asks for a context of {n_ctx} positions (accepted: 1 to {limit}):"
            " pass n_ctx= to confirm the size"
        )
    return n_ctx
