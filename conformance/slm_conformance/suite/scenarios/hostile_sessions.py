"""Damaged dumps of sessions and chats, and dumps that were made to do harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.hostile import hostile_dumps
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.chats import LOOK, BenchModel
from slm_conformance.suite.scenarios.hostile import spread_indices
from slm_conformance.suite.scenarios.sessions import fresh_row, next_row
from slm_core.chat import Chat, ChatOptions, Session
from slm_core.container import pack, unpack
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import ContextClosed, InvalidSnapshot, SlmError, SnapshotMismatch
from slm_core.formatting import formatter
from slm_core.generation import StoppingAction
from slm_core.protocols import Context
from slm_core.sampling import Sampling
from slm_core.types import EMBEDDED, Capability, MalformedCall, Message, Role, ToolCall

_Restored = TypeVar("_Restored")
N_SESSIONS, N_CHATS = 150, 50
N_SESSION_FIELDS, N_CHAT_FIELDS = 250, 150
"""The largest number of dumps with one field of another kind; see ``_other_fields``."""
BRIEF = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat format that shows the content of messages only."""
ODD: tuple[object, ...] = (None, True, -1, 0.5, 2**64, "", "x", [], [[]], {}, {"x": "y"})
"""Values that a field of a dump may have by mistake."""
N_DAMAGED = 1_500
"""The number of positions at which a dump is truncated, and changed; see ``spread_indices``."""

SAMPLING = Sampling(temperature=0.9, repeat_penalty=1.2, seed=5, max_tokens=6, stop=("never said",))


class TestHostileSessions(Scenarios):
    """Session, Chat: no bytes crash, hang, exhaust memory, or leave half a session or a context open."""

    above_contract = True

    def test_a_damaged_session(self, bench: Bench) -> None:
        """Session: a dump of a paused answer that is truncated or has a changed byte raises and leaves nothing."""
        data = _session_dump(bench)
        context = bench.context(n_ctx=64, n_seq_max=1)
        for what, damaged in _damaged(data):
            with bench.refused(f"a session's dump {what}", InvalidSnapshot, SnapshotMismatch, context=context):
                Session.restore(context, bench.vocab, damaged)
        _check_intact(bench, Session.restore(context, bench.vocab, data))

    def test_hostile_sessions(self, bench: Bench) -> None:
        """Session: dumps with false fields and right checksums raise and leave nothing, or work as sessions."""
        context, data = bench.context(n_ctx=64, n_seq_max=2), _session_dump(bench, rows=_rows(bench))
        keeper = Session(context, bench.vocab, seq_id=1)
        keeper.append_tokens(bench.tokens(9))
        row = next_row(keeper)
        for i, hostile in enumerate(
            chain(
                _other_sections("session", data),
                _other_fields("session", data, *_share(bench, N_SESSION_FIELDS)),
                _hostile("session", data, *_share(bench, N_SESSIONS)),
            )
        ):
            before = contents_of(context)
            session = _restored(i, partial(Session.restore, context, bench.vocab, hostile))
            if session is None:
                assert contents_of(context) == before, f"hostile dump {i} was refused, but the context changed"
                continue
            strange = [token for token in session.tokens if not 0 <= token < bench.vocab.size and token != EMBEDDED]
            assert not strange, f"hostile dump {i}: token {strange[0]} is outside the vocabulary"
            _check_session_works(i, session)
            session.close()
        assert context.length(0) == 0, "a session that was refused or closed left tokens"
        bench.same(next_row(keeper), row, "the next logits of a session beside hostile ones")

    def test_a_damaged_chat(self, bench: Bench) -> None:
        """Chat: a dump that is truncated or has a changed byte raises before a context is made."""
        model, data = _model(bench), _chat_dump(bench)
        for what, damaged in _damaged(data):
            with bench.refused(f"a chat's dump {what}", InvalidSnapshot, SnapshotMismatch):
                Chat.restore(model, damaged)
        assert not model.requested, "a context was made for a damaged dump of a chat"
        with Chat.restore(model, data) as chat:
            _check_intact(bench, chat.session)

    def test_hostile_chats(self, bench: Bench) -> None:
        """Chat: dumps with false fields raise, or give chats that answer; no context is left open."""
        model, data = _model(bench), _chat_dump(bench, rows=_rows(bench))
        most = max(4096, bench.model.info.n_ctx_train)
        for i, hostile in enumerate(
            chain(
                _sizes(data),
                _other_sections("chat", data),
                _other_fields("chat", data, *_share(bench, N_CHAT_FIELDS)),
                _hostile("chat", data, *_share(bench, N_CHATS)),
            )
        ):
            chat = _restored(i, partial(Chat.restore, model, hostile))
            if chat is not None:
                _check_chat_works(i, chat)
                chat.close()
            for context in model.contexts:
                _check_closed(i, context)
            model.contexts.clear()
        largest = max(options.n_ctx for options in model.requested)
        assert largest <= most, f"a dump of a few kB made a context of {largest} positions (allowed: {most})"
        largest = max(max(options.n_seq_max, options.n_batch) for options in model.requested)
        assert largest <= 2**14, f"a dump of a few kB made a context of {largest} sequences, or positions in a batch"


def _rows(bench: Bench) -> EmbeddingRows | None:
    """Embedding rows, if the context takes them."""
    if Capability.EMBEDDING_INPUT not in bench.capabilities:
        return None
    width = bench.model.info.n_embd
    blocks = [(0, 2)] if Capability.BIDIRECTIONAL_BLOCKS in bench.capabilities else []
    return EmbeddingRows(np.full((3, width), 0.5, np.float32), blocks)


def _session_dump(bench: Bench, rows: EmbeddingRows | None = None) -> bytes:
    session = Session(bench.context(n_ctx=64), bench.vocab, sampling=SAMPLING)
    session.append_tokens(bench.tokens(3))
    if rows is not None:
        session.append_rows(rows.rows, blocks=rows.blocks)
    for _event in session.generate(stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]):
        pass
    return session.dump()


def _chat_dump(bench: Bench, rows: EmbeddingRows | None = None) -> bytes:
    """A dump in which each field has a value."""
    session = Session(bench.context(n_ctx=64, n_seq_max=1), bench.vocab)
    calls, malformed = (ToolCall("f", {"n": 1}, "c"),), (MalformedCall("{", "no"),)
    messages = (
        Message(Role.USER, "a" if rows is None else ["a", rows]),
        Message(Role.ASSISTANT, "", "b", calls, malformed_calls=malformed),
        Message(Role.TOOL, "d", name="f", tool_call_id="c"),
    )
    chat = Chat(session, _model(bench).formatter, messages=messages, options=ChatOptions(SAMPLING, (LOOK,)))
    return chat.dump()


def _model(bench: Bench) -> BenchModel:
    model = BenchModel(bench)
    model.formatter = formatter(BRIEF, model=bench.model)
    return model


def _damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    for n in spread_indices(len(data), N_DAMAGED):
        yield f"cut off after {n} of {len(data)} bytes", data[:n]
        changed = (data[n] + 1 + 37 * n % 255) % 256
        yield f"with byte {n} changed", data[:n] + bytes([changed]) + data[n + 1 :]


def _share(bench: Bench, usual: int) -> tuple[int, int]:
    """The number of dumps to try, and their seed: each of the adopter's models gets different dumps."""
    return bench.workshop.share(usual), bench.workshop.fixtures.models.index(bench.name)


def _hostile(kind: str, data: bytes, n: int, seed: int) -> Iterator[bytes]:
    """Dumps with false fields, and dumps whose inner dump has false fields."""
    meta, (inner, *others) = unpack(kind, data)
    yield from hostile_dumps([data], n - n // 3, seed)
    for hostile in hostile_dumps([inner], n // 3, seed):
        yield pack(kind, meta, (hostile, *others))


def _other_fields(kind: str, data: bytes, n: int, seed: int) -> Iterator[bytes]:
    """Dumps in which one field has another kind of value, or is missing; at most ``n`` dumps, chosen by the seed."""
    meta, sections = unpack(kind, data)
    changes = [(path, value) for path in _paths(meta) for value in (*ODD, ...)]
    chosen = np.random.default_rng(seed).permutation(len(changes))[:n]
    for path, value in (changes[i] for i in sorted(chosen)):
        changed: Any = json.loads(json.dumps(meta))
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        if value is ...:
            del parent[path[-1]]
        else:
            parent[path[-1]] = value
        yield pack(kind, changed, sections)


def _other_sections(kind: str, data: bytes) -> Iterator[bytes]:
    """Dumps in which one section is missing, empty, repeated, or has another length; and one without sections."""
    meta, sections = unpack(kind, data)
    yield pack(kind, meta, ())
    for i, section in enumerate(sections):
        changes = ((), (b"",), (section, section), (section[:-1],), (section + b"\0",), (section + bytes(4),))
        for changed in changes:
            yield pack(kind, meta, (*sections[:i], *changed, *sections[i + 1 :]))


def _paths(node: Any) -> Iterator[tuple[Any, ...]]:
    """The keys and indexes that lead to each value inside."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield (key,)
        if isinstance(node[key], dict | list):
            yield from ((key, *path) for path in _paths(node[key]))


def _sizes(data: bytes) -> Iterator[bytes]:
    """Chat dumps that ask for contexts of other sizes."""
    meta, sections = unpack("chat", data)
    sizes = cast("Sequence[int]", meta["context"])
    for i in range(3):
        for size in (0, -1, 10**5, 2**31 - 1, 2**31, 2**40, 2**64, 10**400, 0.5, True, None, "64", [64]):
            yield pack("chat", {**meta, "context": [*sizes[:i], size, *sizes[i + 1 :]]}, sections)


def _restored(i: int, restore: Callable[[], _Restored]) -> _Restored | None:
    try:
        return restore()
    except SlmError as error:
        assert "\n" not in str(error), f"hostile dump {i}: the message is not one line: {error}"
        return None
    except Exception as error:
        raise AssertionError(f"hostile dump {i}: raised {type(error).__name__} ({error}), no SlmError") from error


def _check_session_works(i: int, session: Session) -> None:
    """Require that a restored session works: it samples two tokens, and can be dumped again."""
    try:
        running = session.generate(stopping_criteria=())
        for _ in range(2):
            next(running, None)
        session.dump()
        running.cancel()
        tokens = running.run().tokens
    except SlmError as error:
        assert "\n" not in str(error), f"hostile dump {i}: the message is not one line: {error}"
    except Exception as error:
        raise AssertionError(f"hostile dump {i} was restored, then raised {type(error).__name__} ({error})") from error
    else:
        end_of_history = session.tokens[session.n_tokens - len(tokens) :]
        assert tokens == end_of_history, (
            f"hostile dump {i} was restored with an answer {tokens} that its history lacks: {end_of_history}"
        )


def _check_chat_works(i: int, chat: Chat) -> None:
    """Require that a restored chat answers."""
    try:
        chat.send("b", stopping_criteria=[lambda event, draft: StoppingAction.STOP])
        chat.dump()
    except SlmError as error:
        assert "\n" not in str(error), f"hostile dump {i}: the message is not one line: {error}"
    except Exception as error:
        raise AssertionError(f"hostile dump {i} was restored, then raised {type(error).__name__} ({error})") from error


def _check_closed(i: int, context: Context) -> None:
    try:
        context.clear()
    except ContextClosed:
        return
    raise AssertionError(f"hostile dump {i}: the context that was made for it is still open")


def _check_intact(bench: Bench, session: Session) -> None:
    """Restore the valid dump, after the damaged ones."""
    bench.agree(next_row(session), fresh_row(bench, session), "the next logits of a sound dump after damaged ones")
