"""Answers that are drafted for: the same tokens, the same events, the same session; only fewer batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import slm_core as slm
from clear_answer import ANSWER, QUESTION
from scripted import ALL, END, N_VOCAB, ByteVocab, ScriptedContext, TagFormatter, says
from slm_core.chat import Chat, Session
from slm_core.errors import InvalidOption, InvalidToken, SessionError
from slm_core.generation import Event, FinishReason, StoppingAction
from slm_core.generation.speculation import (
    Drafter,
    DraftFunction,
    DraftModel,
    PromptLookup,
    Proposal,
    Speculation,
    SuffixIndex,
)
from slm_core.loading import demo_model_path
from slm_core.protocols import Advance, FastForward, Forward, Stop
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Logits

SAID = "one two three one two three one two four, één twee één twee één"
GREEDY = Sampling(temperature=0)
LEVELS = pytest.mark.parametrize("level", list(EditLevel))


def script(history: bytes) -> int | None:
    after = history.partition(b">")[2]
    said = SAID.encode()
    return said[len(after)] if len(after) < len(said) else END


class Counting(ScriptedContext):
    """Counts batches."""

    n_batches = 0

    def decode(self, batch: object) -> Logits:
        self.n_batches += 1
        return super().decode(batch)


def begin(*, scripted: bool = True, level: EditLevel = EditLevel.CUT, **options: object) -> Session:
    context = Counting(script if scripted else lambda data: None, n_batch=64, level=level, **options)
    session = Session(context, ByteVocab(), sampling=GREEDY)
    session.append("prompt>")
    return session


def right(tokens: Sequence[int], n: int) -> Sequence[int]:
    """Knows the script."""
    said = (*SAID.encode(), END)
    at = len(tokens) - 7
    return said[at : at + n]


def half_right(tokens: Sequence[int], n: int) -> Sequence[int]:
    """Every third token is wrong."""
    return [token if (len(tokens) + i) % 3 else 0 for i, token in enumerate(right(tokens, n))]


def wrong(tokens: Sequence[int], n: int) -> Sequence[int]:
    return [1] * n


def drafters() -> dict[str, Drafter]:
    model = DraftModel(ScriptedContext(script, n_seq_max=1), ByteVocab())
    return {
        "right": DraftFunction(right),
        "half right": DraftFunction(half_right),
        "wrong": DraftFunction(wrong),
        "nothing": DraftFunction(lambda tokens, n: ()),
        "lookup": PromptLookup(),
        "suffix": SuffixIndex(),
        "model": model,
    }


DRAFTERS = pytest.mark.parametrize("name", list(drafters()))
ALWAYS = {"n_max": 7, "adaptive": False}


def speculation(name: str) -> Speculation:
    return Speculation(drafters()[name], **ALWAYS)


def said(events: Sequence[Event]) -> list[object]:
    return [(event.token, event.text, event.logprob) for event in events]


@LEVELS
@DRAFTERS
@pytest.mark.parametrize("temperature", [0, 0.8, 3.0])
def test_events_answer_and_session_are_those_without_drafts(level: EditLevel, name: str, temperature: float) -> None:
    options = Sampling(
        temperature=temperature,
        seed=3,
        max_tokens=60,
        stop=("vier", "één twee é"),
        repeat_penalty=1.3,
        min_p=0,
        top_k=0,
    )
    plain, drafted = begin(level=level), begin(level=level)
    expected = plain.generate(options)
    found = drafted.generate(options, speculation=speculation(name))
    assert said(list(found)) == said(list(expected))
    assert (found.answer.text, found.answer.finish_reason) == (expected.answer.text, expected.answer.finish_reason)
    assert drafted.tokens == plain.tokens
    assert drafted.context.tokens(0) == drafted.tokens[: drafted.n_tokens - drafted.n_pending], "nothing is left behind"
    np.testing.assert_array_equal(drafted.next_logits(), plain.next_logits())


def test_right_drafts_take_a_batch_for_all_of_them_and_one_more_token() -> None:
    s = begin()
    answer = s.generate(speculation=speculation("right")).run()
    n = len(answer.tokens)  # the last one is drafted, too
    n_rounds = -(-n // 8)
    assert s.context.n_batches == 1 + n_rounds, "the prompt, then eight tokens a batch"
    stats = answer.speculation
    assert (stats.rounds, stats.drafted, stats.accepted) == (n_rounds, n - n_rounds, n - n_rounds)
    assert stats.acceptance == 1
    assert stats.verify_s > 0


def test_wrong_drafts_are_counted_and_taken_back() -> None:
    s = begin()
    answer = s.generate(Sampling(temperature=0, max_tokens=12), speculation=speculation("wrong")).run()
    assert answer.text == SAID[:12]
    drafted = sum(min(7, 12 - n - 1) for n in range(1, 11))  # after n tokens, as far as the answer may go
    assert (answer.speculation.rounds, answer.speculation.drafted, answer.speculation.accepted) == (10, drafted, 0)
    assert s.n_pending == 1


def test_no_more_is_drafted_than_the_answer_may_still_take() -> None:
    s = begin()
    s.generate(Sampling(temperature=0, max_tokens=5), speculation=speculation("right")).run()
    assert s.context.n_decoded == 7 + 4, "the last token is not decoded"


def test_below_truncate_it_is_off_and_says_so() -> None:
    s = begin(level=EditLevel.REPLAY)
    answer = s.generate(speculation=speculation("right")).run()
    assert answer.text == SAID
    assert answer.speculation.rounds == 0
    assert answer.speculation.reason == "off: the context cannot take a wrong guess back (edit level REPLAY)"


def test_an_answer_that_nothing_drafts_for_has_no_stats() -> None:
    assert begin().generate().run().speculation is None


@DRAFTERS
def test_a_full_context_ends_the_answer_where_it_would_have(name: str) -> None:
    answers = [begin(n_ctx=30).generate(speculation=drafts).run() for drafts in (None, speculation(name))]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].finish_reason is FinishReason.LENGTH


@DRAFTERS
@pytest.mark.parametrize("capabilities", [ALL, frozenset()], ids=["shared", "copied"])
def test_paused_anywhere_forked_and_left_for_a_while(name: str, capabilities: frozenset[Capability]) -> None:
    options = Sampling(temperature=1.5, seed=8, max_tokens=25, top_k=0, min_p=0)
    whole = begin().generate(options).run()
    s = begin(capabilities=capabilities)
    generation = s.generate(
        options, speculation=speculation(name), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]
    )
    while not generation.finished:
        list(generation)
        with s.fork() as twin:
            twin.append("!")
            assert twin.next_logits() is not None
        with s.scratch_branch() as elsewhere:
            elsewhere.generate(Sampling(temperature=0, max_tokens=3), speculation=speculation("wrong")).run()
        generation = s.generate() if generation.paused else generation
    assert generation.answer.tokens == whole.tokens


@LEVELS
def test_an_edit_in_the_middle_of_a_draft_begins_from_the_history(level: EditLevel) -> None:
    s, plain = begin(level=level), begin(level=level)
    generation = s.generate(speculation=speculation("right"))
    for _ in range(5):
        next(generation)
    s.append("!")
    plain.append(SAID[:5] + "!")
    np.testing.assert_array_equal(s.next_logits(), plain.next_logits())


def test_cancelling_ends_it_and_leaves_a_session_that_goes_on() -> None:
    s = begin()
    generation = s.generate(speculation=speculation("right"))
    for _ in range(5):
        next(generation)
    generation.cancel()
    assert generation.run().text == SAID[:5]
    assert s.generate().run().text == SAID[5:]


class Bytes:
    """Allows the script's text up to ``end``; says once that the ``n`` tokens from ``first`` on must follow."""

    def __init__(self, end: int, first: int = -1, n: int = 0, at: int = 0) -> None:
        self.end, self.first, self.n, self.at, self.n_masked = end, first, n, at, 0

    @property
    def is_complete(self) -> bool:
        return self.at >= self.end

    def mask(self, logits: Logits) -> Logits:
        self.n_masked += 1
        row = np.full_like(logits, -np.inf)
        allowed = [SAID.encode()[self.at], ord("?")]
        row[allowed] = logits[allowed]
        return row

    def advance(self, token: int) -> Advance:
        if token not in (SAID.encode()[self.at], ord("?")):
            raise InvalidToken(f"{token}")
        self.at += 1
        if self.is_complete:
            return Stop()
        if self.at == self.first:
            return FastForward(tuple(SAID.encode()[self.first : self.first + self.n]))
        return Forward()

    def clone(self) -> Bytes:
        return Bytes(self.end, self.first, self.n, self.at)

    def state(self) -> bytes:
        return b""


@DRAFTERS
@pytest.mark.parametrize(("first", "n"), [(-1, 0), (9, 8), (10, 2)])
def test_a_constraint_rules_drafts_too(name: str, first: int, n: int) -> None:
    options = Sampling(temperature=2.0, seed=3, top_k=0, min_p=0, top_p=1.0)
    sessions = [begin(scripted=False), begin(scripted=False)]
    answers = [
        s.generate(options, constraint=Bytes(40, first, n), speculation=drafts).run()
        for s, drafts in zip(sessions, (None, speculation(name)), strict=True)
    ]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].finish_reason is FinishReason.CONSTRAINT
    assert sessions[0].tokens == sessions[1].tokens


def test_drafts_that_a_constraint_forbids_are_not_decoded() -> None:
    s = begin(scripted=False)
    answer = s.generate(constraint=Bytes(40), speculation=speculation("wrong")).run()
    assert answer.speculation.drafted == 0


def test_drafts_go_where_a_constraint_leads() -> None:
    def one(tokens: Sequence[int], n: int) -> Sequence[int]:
        return right(tokens, 1)

    s = begin()
    answer = s.generate(constraint=Bytes(40, 9, 20), speculation=Speculation(DraftFunction(one), **ALWAYS)).run()
    assert answer.text == SAID.encode()[:40].decode()
    assert s.context.n_batches < 15, "the twenty that are forced came along with the one that was drafted"


@pytest.mark.parametrize("tokens", [[-1], [N_VOCAB], [3, 10**9]])
def test_a_drafter_that_names_no_token_is_refused_and_nothing_changes(tokens: list[int]) -> None:
    s = begin()
    generation = s.generate(speculation=Speculation(DraftFunction(lambda history, n: tokens), **ALWAYS))
    next(generation)
    with pytest.raises(InvalidToken):
        next(generation)
    assert s.text == "prompt>o"
    assert s.generate().run().text == SAID[1:]


def test_a_drafter_that_raises_leaves_a_session_that_goes_on() -> None:
    def burst(tokens: Sequence[int], n: int) -> Sequence[int]:
        raise RuntimeError("drafter")

    s = begin()
    generation = s.generate(speculation=Speculation(DraftFunction(burst), **ALWAYS))
    next(generation)
    with pytest.raises(RuntimeError, match="drafter"):
        next(generation)
    assert s.generate().run().text == SAID[1:]


@pytest.mark.parametrize("n_max", [0, 65, -1, 1.5, True])
def test_the_longest_draft_is_a_number_from_1_to_64(n_max: object) -> None:
    with pytest.raises(InvalidOption, match="n_max"):
        Speculation(PromptLookup(), n_max=n_max)


def test_a_proposal_has_draft_probabilities_for_all_tokens_or_for_none() -> None:
    with pytest.raises(InvalidOption, match="2 tokens has 1"):
        Proposal([1, 2], [(np.array([1]), np.ones(1))])


# Dumps.


@pytest.mark.parametrize("name", ["lookup", "suffix"])
@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["same", "replayed"])
@pytest.mark.parametrize("n_before", [1, 9, 20])
def test_a_dumped_answer_goes_on_with_its_drafter(name: str, payload_format: str, n_before: int) -> None:
    options = Sampling(temperature=0.9, seed=5, max_tokens=55, repeat_penalty=1.1)
    whole = begin().generate(options).run()
    s = begin()
    pause = [lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == n_before else StoppingAction.NEXT]
    before = s.generate(options, speculation=speculation(name), stopping_criteria=pause)
    text = "".join(event.text for event in before)
    twin = Session.restore(Counting(script, n_batch=64, payload_format=payload_format), ByteVocab(), s.dump())
    resumed = twin.generate()
    text += "".join(event.text for event in resumed)
    assert (resumed.answer.tokens, text) == (whole.tokens, whole.text)
    assert resumed.answer.speculation.rounds > 0
    here = s.generate(stopping_criteria=[]).run()
    assert here.tokens == whole.tokens
    stats = resumed.answer.speculation
    assert (stats.rounds, stats.drafted, stats.accepted) == (
        here.speculation.rounds,
        here.speculation.drafted,
        here.speculation.accepted,
    )


def test_a_drafter_that_is_code_is_given_again() -> None:
    s = begin()
    list(s.generate(speculation=speculation("right"), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]))
    data = s.dump()
    with pytest.raises(SessionError, match="paused"):
        s.generate(speculation=speculation("right"))
    twin = Session.restore(Counting(script, n_batch=64), ByteVocab(), data)
    with pytest.raises(SessionError, match="give it again"):
        twin.generate()
    answer = twin.generate(speculation=speculation("right")).run()
    assert answer.text == SAID
    assert answer.speculation.accepted > 30
    assert Session.restore(Counting(script), ByteVocab(), data).dump(), "what is missing does not hinder another dump"


# In chats, and with models.


def test_an_answer_of_a_chat_is_drafted_for() -> None:
    def chat() -> Chat:
        answer = "the same again, the same again, the same again"
        held = Session(ScriptedContext(says(answer), n_batch=64), ByteVocab(), sampling=GREEDY)
        return Chat(held, TagFormatter())

    plain, drafted = chat(), chat()
    for _ in range(2):
        expected = plain.send("go on")
        answer = drafted.send("go on", speculation=Speculation(PromptLookup(), **ALWAYS))
        assert (answer.text, answer.tokens) == (expected.text, expected.tokens)
        assert answer.speculation is not None
        assert answer.speculation.accepted > 20
    assert drafted.messages == plain.messages


@pytest.mark.parametrize(("small", "large"), [("native", "llamacpp"), ("llamacpp", "native")])
def test_a_loaded_model_drafts_for_another(small: str, large: str) -> None:
    options = Sampling(temperature=0)
    with (
        slm.load(demo_model_path(), backend=small) as drafts,
        slm.load(demo_model_path(), backend=large) as answers,
        drafts.drafter(answers, n_ctx=256) as drafter,
        answers.session(n_ctx=256) as session,
    ):
        session.append(QUESTION)
        mark = session.mark()
        plain = session.generate(options).run()
        session.rollback(mark)
        drafted = session.generate(options, speculation=Speculation(drafter, **ALWAYS)).run()
    assert drafted.text == plain.text == ANSWER
    assert drafted.tokens == plain.tokens
    assert drafted.speculation is not None
    assert drafted.speculation.acceptance == 1, "the same model drafts, and each token of this answer is clear"
