"""Answers with speculative decoding: the same tokens, events and session, in fewer batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

import slm_core as slm
from clear_answer import ANSWER, QUESTION
from scripted import ALL, END, N_VOCAB, ByteVocab, ScriptedContext, TagFormatter, says
from slm_core.chat import Chat, Session
from slm_core.errors import InvalidOption, InvalidToken, SessionError
from slm_core.generation import Event, FinishReason, StoppingAction
from slm_core.generation.events import SpeculationStats
from slm_core.generation.speculation import (
    Drafter,
    DraftFunction,
    DraftModel,
    PromptLookup,
    Proposal,
    Speculation,
    SpeculativeSource,
    SuffixIndex,
    rounds,
)
from slm_core.generation.speculation.dumped import DumpedSpeculation
from slm_core.generation.speculation.proposal import never
from slm_core.generation.token_loop import Progress
from slm_core.loading import demo_model_path
from slm_core.protocols import Advance, FastForward, Forward, Stop
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Logits

SCRIPTED_ANSWER = "one two three one two three one two four, één twee één twee één"
GREEDY = Sampling(temperature=0)
LEVELS = pytest.mark.parametrize("level", list(EditLevel))


def script(history: bytes) -> int | None:
    after = history.partition(b">")[2]
    answer = SCRIPTED_ANSWER.encode()
    return answer[len(after)] if len(after) < len(answer) else END


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
    """A drafter that follows the script."""
    answer = (*SCRIPTED_ANSWER.encode(), END)
    at = len(tokens) - 7
    return answer[at : at + n]


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


def summarized(events: Sequence[Event]) -> list[object]:
    return [(event.token, event.text, event.logprob) for event in events]


@LEVELS
@DRAFTERS
@pytest.mark.parametrize("temperature", [0, 0.8, 3.0])
def test_events_answer_and_session_are_the_same_as_without_drafts(
    level: EditLevel, name: str, temperature: float
) -> None:
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
    actual = drafted.generate(options, speculation=speculation(name))
    assert summarized(list(actual)) == summarized(list(expected))
    assert (actual.answer.text, actual.answer.finish_reason) == (expected.answer.text, expected.answer.finish_reason)
    assert drafted.tokens == plain.tokens
    assert drafted.context.tokens(0) == drafted.tokens[: drafted.n_tokens - drafted.n_pending], (
        "no rejected tokens remain"
    )
    np.testing.assert_array_equal(drafted.next_logits(), plain.next_logits())


def test_the_time_of_all_drafts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, n_drafts = [0.0], [0]

    def slow(tokens: Sequence[int], n: int) -> Sequence[int]:
        now[0] += 2
        n_drafts[0] += 1
        return half_right(tokens, n)

    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    stats = begin().generate(speculation=Speculation(DraftFunction(slow), **ALWAYS)).run().speculation
    assert n_drafts[0] > 1
    assert stats.draft_s == 2 * n_drafts[0]


def test_right_drafts_and_one_more_token_take_one_batch() -> None:
    s = begin()
    answer = s.generate(speculation=speculation("right")).run()
    n = len(answer.tokens)  # the last token is drafted, too
    n_rounds = -(-n // 8)
    assert s.context.n_batches == 1 + n_rounds, "the prompt, then eight tokens per batch"
    stats = answer.speculation
    assert (stats.rounds, stats.drafted, stats.accepted) == (n_rounds, n - n_rounds, n - n_rounds)
    assert stats.acceptance == 1
    assert stats.verify_s > 0


def test_wrong_drafts_are_counted_and_truncated() -> None:
    s = begin()
    answer = s.generate(Sampling(temperature=0, max_tokens=12), speculation=speculation("wrong")).run()
    assert answer.text == SCRIPTED_ANSWER[:12]
    drafted = sum(min(7, 12 - n - 1) for n in range(1, 11))  # after n tokens, limited by max_tokens
    assert (answer.speculation.rounds, answer.speculation.drafted, answer.speculation.accepted) == (10, drafted, 0)
    assert s.n_pending == 1


def test_drafts_are_limited_by_max_tokens() -> None:
    s = begin()
    s.generate(Sampling(temperature=0, max_tokens=5), speculation=speculation("right")).run()
    assert s.context.n_decoded == 7 + 4, "the last token is not decoded"


def test_below_truncate_drafting_is_off_and_reported() -> None:
    s = begin(level=EditLevel.REPLAY)
    answer = s.generate(speculation=speculation("right")).run()
    assert answer.text == SCRIPTED_ANSWER
    assert answer.speculation.rounds == 0
    assert answer.speculation.reason == "off: the context cannot take a wrong guess back (edit level REPLAY)"


def test_an_answer_without_drafts_has_no_stats() -> None:
    assert begin().generate().run().speculation is None


@DRAFTERS
def test_a_full_context_ends_the_answer_at_the_same_token(name: str) -> None:
    answers = [begin(n_ctx=30).generate(speculation=drafts).run() for drafts in (None, speculation(name))]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].finish_reason is FinishReason.LENGTH


@DRAFTERS
@pytest.mark.parametrize("capabilities", [ALL, frozenset()], ids=["shared", "copied"])
def test_drafted_answers_survive_pauses_forks_and_scratch_branches(
    name: str, capabilities: frozenset[Capability]
) -> None:
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
def test_after_an_edit_within_a_draft_the_answer_follows_the_history(level: EditLevel) -> None:
    s, plain = begin(level=level), begin(level=level)
    generation = s.generate(speculation=speculation("right"))
    for _ in range(5):
        next(generation)
    s.append("!")
    plain.append(SCRIPTED_ANSWER[:5] + "!")
    np.testing.assert_array_equal(s.next_logits(), plain.next_logits())


def test_a_session_continues_after_a_cancelled_drafted_answer() -> None:
    s = begin()
    generation = s.generate(speculation=speculation("right"))
    for _ in range(5):
        next(generation)
    generation.cancel()
    assert generation.run().text == SCRIPTED_ANSWER[:5]
    assert s.generate().run().text == SCRIPTED_ANSWER[5:]


class ScriptConstraint:
    """A constraint that allows the script's text up to ``end``, and forces ``n`` tokens once, from ``first`` on."""

    def __init__(self, end: int, first: int = -1, n: int = 0, at: int = 0) -> None:
        self.end, self.first, self.n, self.at, self.n_masked = end, first, n, at, 0

    @property
    def is_complete(self) -> bool:
        return self.at >= self.end

    def mask(self, logits: Logits) -> Logits:
        self.n_masked += 1
        row = np.full_like(logits, -np.inf)
        allowed = [SCRIPTED_ANSWER.encode()[self.at], ord("?")]
        row[allowed] = logits[allowed]
        return row

    def advance(self, token: int) -> Advance:
        if token not in (SCRIPTED_ANSWER.encode()[self.at], ord("?")):
            raise InvalidToken(f"{token}")
        self.at += 1
        if self.is_complete:
            return Stop()
        if self.at == self.first:
            return FastForward(tuple(SCRIPTED_ANSWER.encode()[self.first : self.first + self.n]))
        return Forward()

    def clone(self) -> ScriptConstraint:
        return ScriptConstraint(self.end, self.first, self.n, self.at)

    def state(self) -> bytes:
        return b""


@DRAFTERS
@pytest.mark.parametrize(("first", "n"), [(-1, 0), (9, 8), (10, 2)])
def test_drafts_obey_the_constraint(name: str, first: int, n: int) -> None:
    options = Sampling(temperature=2.0, seed=3, top_k=0, min_p=0, top_p=1.0)
    sessions = [begin(scripted=False), begin(scripted=False)]
    answers = [
        s.generate(options, constraint=ScriptConstraint(40, first, n), speculation=drafts).run()
        for s, drafts in zip(sessions, (None, speculation(name)), strict=True)
    ]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].finish_reason is FinishReason.CONSTRAINT
    assert sessions[0].tokens == sessions[1].tokens


def test_drafts_that_a_constraint_forbids_are_not_decoded() -> None:
    s = begin(scripted=False)
    answer = s.generate(constraint=ScriptConstraint(40), speculation=speculation("wrong")).run()
    assert answer.speculation.drafted == 0


def test_drafts_and_forced_tokens_share_a_batch() -> None:
    def one(tokens: Sequence[int], n: int) -> Sequence[int]:
        return right(tokens, 1)

    s = begin()
    answer = s.generate(
        constraint=ScriptConstraint(40, 9, 20), speculation=Speculation(DraftFunction(one), **ALWAYS)
    ).run()
    assert answer.text == SCRIPTED_ANSWER.encode()[:40].decode()
    assert s.context.n_batches < 15, "the twenty forced tokens are in one batch with the drafted token"


@pytest.mark.parametrize("tokens", [[-1], [N_VOCAB], [3, 10**9]])
def test_invalid_drafted_tokens_are_refused_and_change_nothing(tokens: list[int]) -> None:
    s = begin()
    generation = s.generate(speculation=Speculation(DraftFunction(lambda history, n: tokens), **ALWAYS))
    next(generation)
    with pytest.raises(InvalidToken):
        next(generation)
    assert s.text == "prompt>o"
    assert s.generate().run().text == SCRIPTED_ANSWER[1:]


def test_a_session_continues_after_an_error_of_a_drafter() -> None:
    def burst(tokens: Sequence[int], n: int) -> Sequence[int]:
        raise RuntimeError("drafter")

    s = begin()
    generation = s.generate(speculation=Speculation(DraftFunction(burst), **ALWAYS))
    next(generation)
    with pytest.raises(RuntimeError, match="drafter"):
        next(generation)
    assert s.generate().run().text == SCRIPTED_ANSWER[1:]


@pytest.mark.parametrize("n_max", [0, 65, -1, 1.5, True])
def test_n_max_is_a_number_from_1_to_64(n_max: object) -> None:
    with pytest.raises(InvalidOption, match="n_max"):
        Speculation(PromptLookup(), n_max=n_max)
    assert [Speculation(PromptLookup(), n_max=n).n_max for n in (1, 64)] == [1, 64]


def test_a_proposal_has_draft_probabilities_for_all_tokens_or_for_none() -> None:
    with pytest.raises(InvalidOption, match="2 tokens has 1"):
        Proposal([1, 2], [(np.array([1]), np.ones(1))])


# Dumps.


@pytest.mark.parametrize("name", ["lookup", "suffix"])
@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["same", "replayed"])
@pytest.mark.parametrize("n_before", [1, 9, 20])
def test_a_dumped_answer_continues_with_its_drafter(name: str, payload_format: str, n_before: int) -> None:
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


def test_a_drafter_function_must_be_passed_again_after_a_restore() -> None:
    s = begin()
    list(s.generate(speculation=speculation("right"), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]))
    data = s.dump()
    with pytest.raises(SessionError, match="paused"):
        s.generate(speculation=speculation("right"))
    twin = Session.restore(Counting(script, n_batch=64), ByteVocab(), data)
    with pytest.raises(SessionError, match="give it again"):
        twin.generate()
    answer = twin.generate(speculation=speculation("right")).run()
    assert answer.text == SCRIPTED_ANSWER
    assert answer.speculation.accepted > 30
    assert Session.restore(Counting(script), ByteVocab(), data).dump(), (
        "a missing drafter does not prevent another dump"
    )


# In chats, and with models.


def test_answers_of_chats_can_be_drafted() -> None:
    def chat() -> Chat:
        answer = "the same again, the same again, the same again"
        session = Session(ScriptedContext(says(answer), n_batch=64), ByteVocab(), sampling=GREEDY)
        return Chat(session, TagFormatter())

    plain, drafted = chat(), chat()
    for _ in range(2):
        expected = plain.send("go on")
        answer = drafted.send("go on", speculation=Speculation(PromptLookup(), **ALWAYS))
        assert (answer.text, answer.tokens) == (expected.text, expected.tokens)
        assert answer.speculation is not None
        assert answer.speculation.accepted > 20
    assert drafted.messages == plain.messages


@pytest.mark.parametrize(("small", "large"), [("native", "llamacpp"), ("llamacpp", "native")])
def test_a_loaded_model_can_draft_for_another(small: str, large: str) -> None:
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
    assert drafted.speculation.acceptance == 1, "the same model drafts, and each token of this answer has a clear gap"


DECODE_S = {  # seconds of decodes of some sizes, by machine, in decodes of one token; others are interpolated
    "AVX2": {1: 1.0, 2: 1.55, 3: 1.99, 4: 2.34, 5: 3.34, 8: 2.93, 16: 4.36, 17: 6.17},
    "compute-bound": {1: 1.0, 2: 1.7, 17: 9.0},
    "AVX-512": {1: 1.0, 17: 2.6},
    "a GPU": {1: 1.0, 17: 1.3},
}


def seconds_with_drafts(decode_s: dict[int, float], prompt: list[int], answer: list[int]) -> float:
    """Seconds of the answer's decodes after its first token, with prompt lookup; without drafts ``len(answer)`` - 1."""
    session = SimpleNamespace(edit_level=EditLevel.TRUNCATE)
    drafts = SpeculativeSource(session, Speculation(PromptLookup()), Progress(len(prompt), 0, len(answer), ()))
    history, n_taken, seconds = [*prompt, answer[0]], 1, 0.0
    while n_taken < len(answer):
        drafts.end_round()
        drafts.draft(history, never)
        tokens = [token for token, _ in drafts.queue][: len(answer) - n_taken - 1]
        seconds += (step_s := float(np.interp(len(tokens) + 1, list(decode_s), list(decode_s.values()))))
        drafts.begin_round(len(tokens), step_s)
        is_right = True
        while is_right and n_taken < len(answer):
            token = answer[n_taken]
            is_right = bool(drafts.queue) and drafts.queue[0][0] == token
            drafts.taken(token)
            history.append(token)
            n_taken += 1
    return seconds


def answers_that_copy(share: float, n_copied: int, length: int = 150) -> tuple[list[int], list[int]]:
    """A prompt, and an answer that copies runs of it with the probability ``share``; the other tokens are random."""
    random = np.random.default_rng(round(100 * share) + n_copied)
    prompt = random.integers(0, 10_000, 300).tolist()
    answer: list[int] = []
    while len(answer) < length:
        if random.random() < share:
            start = int(random.integers(0, len(prompt) - n_copied))
            answer += prompt[start : start + n_copied]
        else:
            answer.append(int(random.integers(0, 10_000)))
    return prompt, answer[:length]


@pytest.mark.parametrize("machine", DECODE_S)
def test_prompt_lookup_never_costs_more_than_three_percent(machine: str) -> None:
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        for n_copied in (3, 4, 6, 10, 30):
            prompt, answer = answers_that_copy(share, n_copied)
            seconds = seconds_with_drafts(DECODE_S[machine], prompt, answer)
            assert (len(answer) - 1) / seconds >= 0.97, (share, n_copied)
            if share == 1.0 and n_copied == 30:
                assert (len(answer) - 1) / seconds > 1.25, "it pays"


def test_while_drafting_is_off_drafts_are_compared_with_the_answer_and_not_decoded() -> None:
    new, known = list(range(100, 160)), list(range(40))
    prompt = [*known, *(token for i in new for token in (i, i + 1, 7))]
    session = SimpleNamespace(edit_level=EditLevel.TRUNCATE)
    drafts = SpeculativeSource(session, Speculation(PromptLookup(2, 2)), Progress(len(prompt), 0, 500, ()))

    def play(history: list[int], answer: list[int]) -> list[int]:
        lengths = []
        for token in answer:
            drafts.end_round()
            drafts.draft(history, never)
            lengths.append(len(drafts.queue))
            drafts.begin_round(len(drafts.queue), 1.0 + 0.6 * len(drafts.queue))
            drafts.taken(token)
            history.append(token)
            drafts.forget()
        return lengths

    history = list(prompt)
    assert play(history, new)[10:] == [0] * 50, "7 is drafted after each pair, which is wrong"
    assert drafts.stats.reason.startswith("off: ")
    n_drafted = drafts.stats.drafted
    lengths = play(history, known)
    assert lengths[:5] == [0] * 5
    assert min(lengths[30:]) > 0
    assert drafts.stats.reason == ""
    assert drafts.stats.drafted == n_drafted + sum(lengths)


def test_a_draft_is_compared_up_to_its_first_wrong_token_before_the_next_one_is_made() -> None:
    calls = []

    def fixed(tokens: Sequence[int], n: int) -> Sequence[int]:
        calls.append((len(tokens), n))
        return [1, 2, 3, 4][:n]

    session = SimpleNamespace(edit_level=EditLevel.TRUNCATE)
    drafts = SpeculativeSource(session, Speculation(DraftFunction(fixed), n_max=1), Progress(0, 0, 500, ()))
    drafts.begin_round(0, 1.0)
    drafts.begin_round(1, 1e6)  # a draft costs too much
    history: list[int] = []

    def play(answer: Sequence[int]) -> None:
        for token in answer:
            drafts.end_round()
            drafts.draft(history, never)
            drafts.taken(token)
            history.append(token)

    play([1, 2, 9, 1, 2, 3, 4, 5, 1])
    assert calls == [(0, 4), (3, 4), (7, 4), (8, 4)]
    for _ in range(30):
        drafts.begin_round(1, 1e-6)  # now it costs nothing: the rest of the draft that was compared is discarded
    play([9])
    assert calls[4:] == [(9, 1)]
    drafts.begin_round(1, 1e9)
    play([1, 2])
    assert calls[5:] == [(10, 4)]


def test_statistics_of_a_restored_answer_begin_with_those_of_its_dump() -> None:
    speculation = Speculation(PromptLookup(4, 1), n_max=4, adaptive=False)
    dumped = DumpedSpeculation(speculation, (), SpeculationStats(3, 11, 4, 0.5, 0.25, 2, 1), in_round=False)
    session = SimpleNamespace(edit_level=EditLevel.CUT)
    drafts = SpeculativeSource(session, speculation, Progress(3, 0, 9, ()), taken_up=dumped)
    assert drafts.stats == dumped.stats
    drafts.draft([7, 8, 9, 7, 8], never)
    drafts.begin_round(1, 0.125)
    drafts.taken(9)
    stats = drafts.stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.verify_s) == (4, 12, 5, 0.375)
    assert stats.draft_s > 0.5
    assert (stats.switched_off, stats.switched_on) == (2, 1)
