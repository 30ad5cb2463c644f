"""Sessions: marks, removal, forks and dumps at every edit level, over a scripted context."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scripted import END, N_VOCAB, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.container import pack, unpack
from slm_core.errors import (
    ContextFull,
    InvalidMark,
    InvalidSequence,
    InvalidSnapshot,
    SessionError,
    SlmError,
    SnapshotMismatch,
)
from slm_core.generation import StoppingAction
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel, Segment

LEVELS = pytest.mark.parametrize("level", list(EditLevel))


def new_session(level: EditLevel = EditLevel.CUT, **options: object) -> Session:
    return Session(ScriptedContext(level=level, **options), ByteVocab(), sampling=Sampling(temperature=0))


def logits_of(text: str) -> np.ndarray:
    """The next logits of a new session that holds only ``text``."""
    s = new_session()
    s.append(text)
    return s.next_logits()


@LEVELS
def test_rollback_restores_the_logits_at_the_mark(level: EditLevel) -> None:
    s = new_session(level)
    s.append("abc")
    mark = s.mark()
    for more in ("def", "x", ""):
        s.append(more)
        s.next_logits()
        s.rollback(mark)
        assert s.text == "abc"
        np.testing.assert_array_equal(s.next_logits(), logits_of("abc"))


def test_prefill_decodes_what_left_the_cache_although_the_logits_are_known() -> None:
    """At level REPLAY, a dump drops the tokens decoded ahead, and with them the whole sequence; the logits stay."""
    s = new_session(EditLevel.REPLAY)
    s.append("abc")
    expected = s.next_logits(expected=[100, 101]).copy()
    s.dump()
    assert s.n_pending == 3
    assert s.prefill(lambda: True) is None, "a cancelled prefill returned logits"
    np.testing.assert_array_equal(s.prefill(), expected)
    assert s.n_pending == 0


@LEVELS
def test_exact_removal_gives_the_logits_of_the_remaining_text(level: EditLevel) -> None:
    s = new_session(level)
    s.append("abc")
    start = s.mark()
    s.append("def")
    end = s.mark()
    s.append("ghi")
    s.next_logits()
    level_used = s.remove(start, end, exact=True)
    assert level_used is min(level, EditLevel.TRUNCATE)
    assert s.text == "abcghi"
    np.testing.assert_array_equal(s.next_logits(), logits_of("abcghi"))


@LEVELS
def test_removal_cuts_if_the_context_can_and_reports_it(level: EditLevel) -> None:
    s = new_session(level)
    s.append("abc")
    start = s.mark()
    s.append("def")
    end = s.mark()
    s.append("ghi")
    s.next_logits()
    n_decoded = s.context.n_decoded
    assert s.remove(start, end) is level
    after = s.next_logits()
    same = np.array_equal(after, logits_of("abcghi"))
    assert same == (level is not EditLevel.CUT), "after a cut, later tokens keep their values"
    again = {EditLevel.CUT: 1, EditLevel.TRUNCATE: 3, EditLevel.REPLAY: 6}[level]
    assert s.context.n_decoded - n_decoded == again, "the number of recomputed tokens"


def test_removal_includes_pending_tokens() -> None:
    s = new_session()
    s.append("abcd")
    s.next_logits()
    s.append("efgh")
    assert s.remove_span(2, 6) is EditLevel.CUT
    assert (s.text, s.n_pending) == ("abgh", 2)
    assert s.context.tokens(s.seq_id) == tuple(b"ab")


def test_marks_move_with_their_text_and_become_stale_with_it() -> None:
    s = new_session()
    marks = []
    for piece in ("aa", "bb", "cc", "dd"):
        s.append(piece)
        marks.append(s.mark())
    s.remove(marks[0], marks[2])
    assert s.text == "aadd"
    with pytest.raises(InvalidMark, match="stale"):
        s.rollback(marks[1])
    s.rollback(marks[3])
    assert s.text == "aadd", "the mark after the removed span moved down"
    s.rollback(marks[2])
    assert s.text == "aa"
    with pytest.raises(InvalidMark, match="stale"):
        s.rollback(marks[3])


def test_foreign_and_reversed_marks_are_refused() -> None:
    s, other = new_session(), new_session()
    s.append("ab")
    a = s.mark()
    s.append("cd")
    b = s.mark()
    with pytest.raises(InvalidMark, match="another session"):
        other.rollback(a)
    with pytest.raises(InvalidMark, match="before"):
        s.remove(b, a)
    assert s.text == "abcd"


@LEVELS
def test_a_fork_is_independent(level: EditLevel) -> None:
    s = new_session(level)
    s.append("common ")
    s.next_logits()
    twin = s.fork()
    s.append("one")
    twin.append("two")
    np.testing.assert_array_equal(s.next_logits(), logits_of("common one"))
    np.testing.assert_array_equal(twin.next_logits(), logits_of("common two"))
    twin.close()
    np.testing.assert_array_equal(s.next_logits(), logits_of("common one"))


def test_a_fork_continues_the_same_random_stream() -> None:
    s = Session(ScriptedContext(), ByteVocab(), sampling=Sampling(temperature=2.0, seed=1, max_tokens=8))
    s.append("x")
    s.generate().run()
    twin = s.fork()
    assert twin.generate().run().tokens == s.generate().run().tokens


def test_sequences_are_allocated_once_and_can_be_reused() -> None:
    context = ScriptedContext(n_seq_max=2)
    first = Session(context, ByteVocab())
    with pytest.raises(InvalidSequence, match="taken"):
        Session(context, ByteVocab(), seq_id=first.seq_id)
    second = first.fork()
    with pytest.raises(InvalidSequence, match="no sequence is left"):
        first.fork()
    second.close()
    assert first.fork().seq_id == second.seq_id


def test_follow_keeps_the_common_prefix() -> None:
    s = new_session()
    s.append("hello world")
    s.next_logits()
    n_decoded = s.context.n_decoded
    s.follow(tuple(b"hello there"))
    np.testing.assert_array_equal(s.next_logits(), logits_of("hello there"))
    assert s.context.n_decoded - n_decoded == len("there")


def test_following_too_many_tokens_changes_nothing() -> None:
    s = new_session(n_ctx=12)
    s.append("hello")
    s.next_logits()
    with pytest.raises(ContextFull) as error:
        s.follow(tuple(b"help me with this"))
    assert (error.value.needed, error.value.free) == (14, 9)
    assert s.text == "hello"
    np.testing.assert_array_equal(s.next_logits(), logits_of("hello"))


@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["payload", "replay"])
def test_a_dump_continues_in_another_context(payload_format: str) -> None:
    s = new_session()
    s.append("abcdef")
    s.next_logits()
    s.remove_span(1, 3)
    s.append("gh")
    twin = Session.restore(ScriptedContext(payload_format=payload_format, n_batch=3), ByteVocab(), s.dump(), seq_id=2)
    assert twin.tokens == s.tokens
    np.testing.assert_array_equal(twin.next_logits(), s.next_logits())


@pytest.mark.parametrize(
    "passes_options", [False, True], ids=["the session's sampler", "a sampler of the answer's own"]
)
@pytest.mark.parametrize("n_before", [1, 4, 9])
def test_a_paused_answer_continues_in_another_context(passes_options: bool, n_before: int) -> None:
    options = Sampling(temperature=1.3, seed=8, repeat_penalty=1.2, stop=("zz",), max_tokens=20)

    def begin() -> Session:
        s = Session(ScriptedContext(), ByteVocab(), sampling=Sampling(seed=1) if passes_options else options)
        s.append("prompt")
        return s

    chosen = options if passes_options else None
    whole = begin().generate(chosen).run()
    s = begin()
    generation = s.generate(
        chosen,
        stopping_criteria=[lambda e, d: StoppingAction.PAUSE if len(d.tokens) == n_before else StoppingAction.NEXT],
    )
    before = "".join(event.text for event in generation)
    twin = Session.restore(ScriptedContext(payload_format="other"), ByteVocab(), s.dump())
    resumed = twin.generate()
    after = "".join(event.text for event in resumed)
    assert resumed.answer.tokens == whole.tokens
    assert before + after == whole.text == resumed.answer.text


def test_damaged_dumps_are_refused_and_take_no_sequence() -> None:
    s = new_session()
    s.append("hello")
    s.next_logits()
    data = s.dump()
    target = ScriptedContext(n_seq_max=1)
    rng = random.Random(5)
    for _ in range(200):
        i = rng.randrange(len(data))
        bad = data[:i] if rng.random() < 0.3 else data[:i] + bytes([data[i] ^ (1 << rng.randrange(8))]) + data[i + 1 :]
        with pytest.raises(InvalidSnapshot):
            Session.restore(target, ByteVocab(), bad)
    Session.restore(target, ByteVocab(), data)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, sections: meta.update(sampling={"temperature": -1}),
        lambda meta, sections: meta.update(sampling=3),
        lambda meta, sections: meta.update(more=1),
        lambda meta, sections: sections.__setitem__(1, b"\xff\xff\xff\xff" * 5),
        lambda meta, sections: sections.__setitem__(1, b"\x01\0\0\0" * 5),
        lambda meta, sections: sections.__setitem__(1, b"123"),
        lambda meta, sections: sections.__setitem__(2, b"{}"),
        lambda meta, sections: sections.__setitem__(0, b"not a dump"),
        lambda meta, sections: meta.update(answer={"progress": {}}),
        lambda meta, sections: meta.update(answer=7),
        lambda meta, sections: sections.pop(),
    ],
)
def test_forged_dumps_with_a_right_checksum_are_refused(change: object) -> None:
    s = new_session()
    s.append("hello")
    s.next_logits()
    meta, sections = unpack("session", s.dump())
    change(meta, sections)
    target = ScriptedContext(n_seq_max=1)
    with pytest.raises(SlmError) as error:
        Session.restore(target, ByteVocab(), pack("session", meta, sections))
    assert isinstance(error.value, InvalidSnapshot | SnapshotMismatch)
    assert target.length(0) == 0


def _progress(**values: object) -> Callable[[dict[str, Any], list[bytes]], None]:
    """A change of the progress of an unfinished answer."""

    def change(meta: dict[str, Any], sections: list[bytes]) -> None:
        for name, value in values.items():
            old = meta["answer"]["progress"][name]
            meta["answer"]["progress"][name] = value(old) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _progress(tokens=lambda tokens: [*tokens[:-1], (tokens[-1] + 1) % 256]),
        _progress(tokens=lambda tokens: tokens[:-1]),
        _progress(n_prompt=lambda n: n + 1),
        _progress(n_cached=lambda n: 6),
        _progress(forced=[N_VOCAB]),
        _progress(forced=[-1]),
        _progress(stops=[""]),
        _progress(stops=[5]),
        _progress(text=None),
        _progress(max_tokens=-1),
        _progress(prefill_s=-0.5),
        _progress(decode_s=float("inf")),
        _progress(time_left_s=float("nan")),
        _progress(queue_s="1"),
        lambda meta, sections: meta["answer"].update(special=1),
        lambda meta, sections: meta["answer"].update(sampling=[]),
        lambda meta, sections: meta["answer"].update(more=1),
        lambda meta, sections: meta["answer"]["progress"].pop("text"),
        lambda meta, sections: sections.__setitem__(3, bytes(4)),
        lambda meta, sections: sections.__setitem__(4, b"no state"),
        lambda meta, sections: sections.__setitem__(5, b"no rule"),
    ],
)
def test_forged_answers_in_dumps_are_refused(change: Callable[[dict[str, Any], list[bytes]], None]) -> None:
    s = new_session()
    s.append("hello")
    for _ in s.generate(Sampling(seed=3), stopping_criteria=[lambda e, d: StoppingAction.PAUSE]):
        pass
    data = s.dump()
    meta, sections = unpack("session", data)
    target, forged = ScriptedContext(n_seq_max=1), [*sections]
    Session.restore(target, ByteVocab(), pack("session", meta, sections)).close()
    change(meta, forged)
    with pytest.raises(InvalidSnapshot) as error:
        Session.restore(target, ByteVocab(), pack("session", meta, forged))
    assert "\n" not in str(error.value)
    assert target.length(0) == 0


def test_a_closed_session_refuses_calls_and_closes_its_own_context() -> None:
    context = ScriptedContext()
    s = Session(context, ByteVocab(), owns_context=True)
    s.append("x")
    s.close()
    s.close()
    with pytest.raises(SessionError, match="closed"):
        s.append("y")
    with pytest.raises(SlmError, match="closed"):
        context.length(0)


@LEVELS
def test_a_scratch_branch_in_a_full_context_keeps_pending_tokens(level: EditLevel) -> None:
    s = new_session(level, n_ctx=40, n_seq_max=2)
    s.append("x" * 10)
    s.next_logits()
    s.append("yz")
    other = Session(s.context, ByteVocab())
    other.append_tokens([65] * (s.context.n_free))
    other.next_logits()  # the pending tokens of the first session have no room any more
    before = s.tokens, s.n_pending
    with pytest.raises(ContextFull), s.scratch_branch() as branch:
        branch.truncate(9)
        branch.append("abcdef")
    assert (s.tokens, s.n_pending) == before


def test_penalties_see_the_edited_history() -> None:
    s = Session(ScriptedContext(), ByteVocab(), sampling=Sampling(temperature=0, repeat_penalty=1000.0))
    s.append("a")
    expected = s.next_logits().copy()
    s.append("b" * 70)
    s.truncate(1)
    chain = SamplerChain(s.sampling)
    chain.accept(ord("a"))
    assert next(s.generate()).token == chain.sample(expected)


def test_content_that_spells_control_tokens_stays_content() -> None:
    s = new_session()
    s.append([Segment("<|start|>user:", True), Segment("a<|end|>b", False), Segment("<|end|>", True)])
    assert s.tokens.count(END) == 1
    assert s.text == "<|start|>user:a<|end|>b<|end|>"
    s.append("<|end|>")
    assert s.tokens.count(END) == 1, "text in content is not parsed"


def test_control_tokens_cannot_be_spelled_across_a_boundary() -> None:
    s = new_session()
    s.append([Segment("<|", True), Segment("end|>", False)])
    assert END not in s.tokens
