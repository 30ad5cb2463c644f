"""Answers that continue in a full context: the kept tokens, the dropped tokens, and the report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.errors import ContextFull, InvalidOption, SessionError
from slm_core.generation import FinishReason, StoppingAction
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import PromptLookup, Speculation
from slm_core.sampling import Sampling
from slm_core.types import EditLevel, Pos

GREEDY = Sampling(temperature=0, max_tokens=60)
PROMPT = "a prompt"


def session_of(n_ctx: int = 24, **options: Any) -> Session:
    session = Session(ScriptedContext(n_ctx=n_ctx, n_batch=8, **options), ByteVocab())
    session.append(PROMPT)
    return session


def shifted_answer(level: EditLevel, shift: TokenShift, n_ctx: int = 24) -> tuple[list[int], list[int]]:
    """The answer and the remaining history, computed by plain calls of a context."""
    context = ScriptedContext(n_ctx=n_ctx, n_batch=n_ctx, level=EditLevel.CUT)
    history, answer = list(PROMPT.encode()), []

    def feed(tokens: list[int]) -> np.ndarray:
        batch = context.new_batch()
        batch.extend(tokens, Pos(0, context.length(0)), logits="last")
        return context.decode(batch)[-1].copy()

    row = feed(history)
    while True:
        answer.append(int(row.argmax()))
        history.append(answer[-1])
        if len(answer) == GREEDY.max_tokens or answer[-1] in ByteVocab.eog_ids:
            return answer, history
        if context.n_free == 0:
            end = shift.keep + math.ceil((len(history) - shift.keep) * shift.share)
            del history[shift.keep : end]
            if level is EditLevel.CUT:
                context.cut(Pos(0, shift.keep), Pos(0, end))
            else:
                context.drop(0)
        row = feed(history[context.length(0) :])


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("shift", [TokenShift(), TokenShift(keep=1, share=0.1), TokenShift(keep=8, share=0.9)])
def test_the_first_tokens_stay_and_the_answer_continues(level, shift) -> None:
    session = session_of(level=level)
    answer = session.generate(GREEDY, shift=shift).run()
    expected, remaining = shifted_answer(level, shift)
    assert list(answer.tokens) == expected and len(expected) > 24
    assert list(session.tokens) == remaining
    assert bytes(session.tokens[: shift.keep]) == PROMPT.encode()[: shift.keep]
    assert answer.overflowed is not None
    assert answer.overflowed.n_tokens == len(PROMPT) + len(expected) - len(remaining)
    assert answer.overflowed.level is min(level, EditLevel.CUT)
    assert answer.overflowed.messages == ()


def test_without_a_shift_the_answer_ends() -> None:
    answer = session_of().generate(GREEDY).run()
    assert (answer.finish_reason, answer.overflowed) == (FinishReason.LENGTH, None)
    assert session_of(n_ctx=200).generate(GREEDY, shift=TokenShift()).run().overflowed is None


def test_marks_in_the_dropped_range_become_stale_and_later_marks_move() -> None:
    session = session_of()
    early, inner = session.mark(), None
    generation = session.generate(GREEDY, shift=TokenShift(keep=4))
    for _ in range(10):
        next(generation)
    inner = session.mark()
    generation.run()
    for mark in (early, inner):
        with pytest.raises(SessionError, match="stale"):
            session.rollback(mark)


def test_a_shift_in_a_context_filled_by_others() -> None:
    session = session_of()
    other = Session(session.context, ByteVocab())
    other.append("0123456789abcde")
    other.next_logits()
    answer = session.generate(GREEDY, shift=TokenShift(keep=7)).run()
    assert len(answer.tokens) == 60 and answer.overflowed is not None
    tight = session_of(n_ctx=9)
    assert tight.generate(GREEDY, shift=TokenShift(keep=9)).run().finish_reason is FinishReason.LENGTH


def test_incompatible_options_are_refused() -> None:
    session = session_of()
    with pytest.raises(InvalidOption, match="do not go together"):
        session.generate(GREEDY, shift=TokenShift(), speculation=Speculation(PromptLookup()))
    paused = session.generate(GREEDY, shift=TokenShift(), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
    next(paused)
    with pytest.raises(SessionError, match="shifts tokens out cannot be dumped"):
        session.dump()
    with pytest.raises(SessionError, match="without options"):
        session.generate(shift=TokenShift())
    for options in ({"keep": 0}, {"keep": True}, {"share": 0.0}, {"share": 1.0}, {"share": "half"}):
        with pytest.raises(InvalidOption, match=f"{next(iter(options))}="):
            TokenShift(**options)
    with pytest.raises(ContextFull):
        session_of(n_ctx=7)
