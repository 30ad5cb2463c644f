"""Embedding rows in sessions and chats: appended, edited, dumped, refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.chats import BenchModel
from slm_conformance.suite.scenarios.sessions import UNIFORM, next_row
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.embedding_rows import ROWS_MARK, EmbeddingRows
from slm_core.errors import ContextFull, InvalidEmbedding, InvalidOption, SessionError, UnsupportedInput
from slm_core.sampling import Sampling
from slm_core.types import EMBEDDED, Capability, Message, Role, Segment

GREEDY = Sampling(temperature=0, max_tokens=5)
N_BATCH = 16
"""Runs of more rows than this take several batches."""


class TestSessionRows(Scenarios):
    """Session and Chat: embedding rows take the place of tokens in a history, through all edits, forks and dumps."""

    above_contract = True

    def test_refused(self, bench: Bench) -> None:
        """Session: rows of another width, without room, or that are not declared raise and change nothing."""
        context = bench.context(n_ctx=32, n_batch=N_BATCH)
        session, n_embd = Session(context, bench.vocab), bench.model.info.n_embd
        session.append_tokens(bench.tokens(20))
        if Capability.EMBEDDING_INPUT not in bench.capabilities:
            with bench.refused("rows for a context that declares none", UnsupportedInput, context=context):
                session.append_rows(np.ones((3, n_embd), np.float32))
        else:
            with bench.refused("rows of another width", InvalidEmbedding, context=context):
                session.append_rows(np.ones((3, n_embd + 1), np.float32))
            with bench.refused("13 rows behind 20 of 32", ContextFull, context=context):
                session.append_rows(np.ones((13, n_embd), np.float32))
            has_blocks = Capability.BIDIRECTIONAL_BLOCKS in bench.capabilities
            too_long = InvalidOption if has_blocks else UnsupportedInput
            wide = Session(bench.context(n_batch=N_BATCH), bench.vocab)
            with bench.refused("a block that is longer than a batch", too_long, context=wide.context):
                wide.append_rows(np.ones((18, n_embd), np.float32), blocks=[(1, N_BATCH + 2)])
            if has_blocks:
                wide.append_rows(np.ones((18, n_embd), np.float32), blocks=[(1, N_BATCH + 1)])
            if Capability.MROPE_POSITIONS not in bench.capabilities:
                with bench.refused("offsets that are not declared", UnsupportedInput, context=context):
                    session.append_rows(np.ones((2, n_embd), np.float32), offsets=np.array([[0, 0, 0], [0, 0, 1]]))
        assert session.tokens == tuple(bench.tokens(20)), "refused rows are in the session"

    def test_edits(self, bench: Bench) -> None:
        """Session: rows among tokens; an exact removal of rows, and a truncation, decode the remaining rows again."""
        session, rows = _session(bench), _rows(bench, 20)
        tokens, more = bench.tokens(6), bench.tokens(5, seed=1)
        session.append_tokens(tokens)
        session.append_rows(rows)
        session.append_tokens(more)
        inputs = (*tokens, *[EMBEDDED] * 20, *more)
        assert session.tokens == inputs, f"the session holds {session.tokens}, not {inputs}"
        bench.agree(next_row(session), _expected(bench, tokens, rows, more), "the next logits after rows among tokens")
        session.remove_span(9, 14, exact=True)
        remaining = np.concatenate([rows[:3], rows[8:]])
        expected = _expected(bench, tokens, remaining, more)
        bench.agree(next_row(session), expected, "the next logits after a removal of 5 of 20 rows")
        session.truncate(12)
        bench.agree(next_row(session), _expected(bench, tokens, remaining[:6]), "the next logits after a truncation")

    def test_other_rows(self, bench: Bench) -> None:
        """Session: ``follow`` with other rows at the same positions decodes the other rows."""
        session, rows, others = _session(bench), _rows(bench, 10), _rows(bench, 10, seed=5)
        session.append_rows(rows)
        inputs = session.inputs
        next_row(session)
        session.truncate(0)
        session.append_rows(np.concatenate([rows[:4], others[4:]]))
        next_row(session)
        session.follow(inputs)
        bench.agree(next_row(session), _expected(bench, (), rows), "the next logits after rows that replaced others")

    def test_fork_and_scratch(self, bench: Bench) -> None:
        """Session: forks and scratch branches have the rows, and leave the session as it was."""
        session, rows = _session(bench), _rows(bench, 8)
        session.append_rows(rows)
        expected = _expected(bench, (), rows, bench.tokens(3))
        with session.fork() as other:
            other.append_tokens(bench.tokens(3))
            bench.agree(next_row(other), expected, "the next logits of a fork with rows")
        with session.scratch_branch() as branch:
            branch.truncate(2)
            branch.append_tokens(bench.tokens(4, seed=3))
            next_row(branch)
        session.append_tokens(bench.tokens(3))
        bench.agree(next_row(session), expected, "the next logits after a scratch branch that removed rows")

    def test_generate_and_dump(self, bench: Bench) -> None:
        """Session: an answer after rows, and a dump with decoded and pending rows, continue in another context."""
        session, rows = _session(bench, UNIFORM), _rows(bench, 12)
        session.append_rows(rows[:7])
        answer = session.generate().run()
        session.append_rows(rows[7:])
        data = session.dump()
        session.append_tokens(bench.tokens(2))
        expected = _expected(bench, rows[:7], answer.tokens, rows[7:], bench.tokens(2))
        bench.agree(next_row(session), expected, "the next logits after an answer between rows")
        restored = Session.restore(bench.context(n_batch=N_BATCH), bench.vocab, data)
        restored.append_tokens(bench.tokens(2))
        assert restored.tokens == session.tokens, "a restored session has other tokens"
        bench.agree(next_row(restored), expected, "the next logits of a restored session with rows")

    def test_blocks(self, bench: Bench) -> None:
        """Session: a bidirectional block is decoded whole, also again, and an edit cannot divide it."""
        if Capability.BIDIRECTIONAL_BLOCKS not in bench.capabilities:
            pytest.skip("declared absent: bidirectional_blocks")
        session, rows, tokens = _session(bench), _rows(bench, 14), bench.tokens(8)
        session.append_tokens(tokens)
        session.append_rows(rows, blocks=[(1, 13)])
        reference = bench.reference()
        reference.decode(tokens)
        wide = rows.astype(np.float64)
        parts = [reference.embed_rows(wide[a:b], bidirectional=a == 1) for a, b in ((0, 1), (1, 13), (13, 14))]
        expected = reference.logits(np.concatenate(parts))
        bench.agree(next_row(session), expected[-1:], "the next logits after a block of 12 rows")
        with bench.refused("a truncation in a block", SessionError, context=session.context):
            session.truncate(15)
        session.truncate(21)
        bench.agree(next_row(session), expected[12:13], "the next logits after a truncation at the end of a block")
        before = session.n_tokens
        with bench.refused("a removal that divides a block", SessionError, context=session.context):
            session.remove_span(3, 12)
        assert session.n_tokens == before, "a refused removal changed the history"

    def test_a_message(self, bench: Bench) -> None:
        """Chat: the rows of a message are at the place of their part, also after turns, dumps and edits."""
        session = _session(bench)
        rows, others = (EmbeddingRows(_rows(bench, 6, seed=i), before="<|im_end|>") for i in (0, 1))
        first, second = Message(Role.USER, ["see ", rows, " and say"]), Message(Role.USER, [others, "what", rows, "is"])
        answer = Message(Role.ASSISTANT, "it is")
        with Chat(session, bench.formatter, messages=(first, answer), options=ChatOptions(GREEDY)) as chat:
            _agree_with_messages(bench, chat, "the next logits after a message with rows")
            chat.send(second)
            data = chat.dump()
            chat.edit(0, ["see ", others, " and say"])
            _agree_with_messages(bench, chat, "the next logits after an edit that changed the rows of a message")
        with Chat.restore(BenchModel(bench), data) as restored:
            assert restored.messages[:3] == (first, answer, second), "a restored chat has other messages"
            restored.delete(3)
            _agree_with_messages(bench, restored, "the next logits of a restored chat with rows")
            unchanged = (restored.messages, restored.session.tokens)
            with bench.refused("a text that stands for rows", InvalidOption, context=restored.session.context):
                restored.edit(1, "a\U000f0001")
            assert (restored.messages, restored.session.tokens) == unchanged, "a refused edit changed the chat"
        if Capability.BIDIRECTIONAL_BLOCKS in bench.capabilities:
            blocks = EmbeddingRows(rows.rows, [(0, 2), (2, 5)])
            with Chat(_session(bench), bench.formatter, messages=[Message(Role.USER, ["see ", blocks])]) as chat:
                row, data = next_row(chat.session), chat.dump()
                with Chat.restore(BenchModel(bench), data) as restored:
                    assert restored.messages == chat.messages, "a restored chat has other blocks"
                    assert restored.session.inputs == chat.session.inputs, "a restored chat's prompt has other blocks"
                    bench.same(next_row(restored.session), row, "the next logits of a restored chat with blocks")


def _session(bench: Bench, sampling: Sampling | None = None) -> Session:
    if Capability.EMBEDDING_INPUT not in bench.capabilities:
        pytest.skip("declared absent: embedding_input")
    return Session(bench.context(n_batch=N_BATCH), bench.vocab, sampling=sampling)


def _rows(bench: Bench, n: int, seed: int = 0) -> Rows:
    """Embedding rows between those of two tokens, float32 [n, E]."""
    table = bench.reference().table(bench.tokens(n + 1, seed=seed + 20))
    return ((table[1:] + table[:-1]) / 2).astype(np.float32)


def _expected(bench: Bench, *parts: Sequence[int] | Rows) -> Rows:
    """The logits of the reference after tokens and rows, [1, V]."""
    reference = bench.reference()
    row = np.empty((0, 0))
    for part in parts:
        if isinstance(part, np.ndarray):
            row = reference.logits(reference.embed_rows(part.astype(np.float64))[-1:])
        elif len(part):
            row = reference.decode(part)[-1:]
    return row


def _agree_with_messages(bench: Bench, chat: Chat, what: str) -> None:
    """Check the next logits: the reference gets the rendered messages, with the rows at the place of a marker text."""
    bench.agree(next_row(chat.session), _expected(bench, *_prompt(bench, chat.messages)), what)


def _prompt(bench: Bench, messages: Sequence[Message]) -> list[Sequence[int] | Rows]:
    """Tokens and rows of a prompt."""
    mark = "~rows~"
    rows = [each for message in messages for each in message.rows]
    texts = [Message(m.role, mark.join(m.content.split(ROWS_MARK))) for m in messages]
    segments = bench.formatter.render(texts, add_generation_prompt=False)
    runs: list[list[Segment]] = [[]]
    for segment in segments:
        first, *others = segment.text.split(mark)
        runs[-1].append(Segment(first, segment.control))
        for text, each in zip(others, rows[len(runs) - 1 :], strict=False):
            runs[-1].append(Segment(each.before, control=True))
            runs.append([Segment(each.after, control=True), Segment(text, segment.control)])
    parts: list[Sequence[int] | Rows] = [encode_segments(bench.vocab, runs[0])]
    for each, run in zip(rows, runs[1:], strict=True):
        parts += [each.rows, encode_segments(bench.vocab, run)]
    return parts
