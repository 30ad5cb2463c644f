"""The token loop over a scripted context: stopping criteria, limits, ends, pauses and cancellation."""

from __future__ import annotations

import numpy as np
import pytest

from scripted import END, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.errors import ContextFull, InvalidOption, SessionError
from slm_core.generation import Draft, Event, FinishReason, StoppingAction, token_loop
from slm_core.numerics import log_probability
from slm_core.protocols import Advance, FastForward, Forward, Stop
from slm_core.sampling import Sampling

GREEDY = Sampling(temperature=0)


def session(answer: str = "", *, n_ctx: int = 400, sampling: Sampling = GREEDY, **options: object) -> Session:
    """A session whose model generates ``answer`` after the prompt, then ends."""
    data = answer.encode()

    def script(history: bytes) -> int | None:
        after = history.partition(b">")[2]
        return data[len(after)] if len(after) < len(data) else END

    context = ScriptedContext(script if answer else lambda history: None, n_ctx=n_ctx, **options)
    session = Session(context, ByteVocab(), sampling=sampling)
    session.append("prompt>")
    return session


def test_an_answer_ends_with_eog_which_is_no_text() -> None:
    s = session("héllo")
    generation = s.generate()
    events = list(generation)
    answer = generation.answer
    assert answer.text == "héllo" == "".join(e.text for e in events)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.tokens == (*"héllo".encode(), END)
    assert s.tokens == (*b"prompt>", *answer.tokens), "the history contains all sampled tokens"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 7)


def test_log_probabilities_are_those_of_the_logits() -> None:
    s = session()
    row = s.next_logits().astype(np.float64)
    event = next(s.generate())
    assert event.logprob == pytest.approx(row[event.token] - np.log(np.exp(row).sum()), abs=1e-6)


@pytest.mark.parametrize("height", [0.0, 59.0, 61.0, 1e4, -59.0, -61.0, -1e4])
def test_log_probabilities_of_high_and_low_logits(height: float) -> None:
    """The spacing of float32 at 1e4 is about 1e-3: the expected value uses the rounded logits."""
    row = (height + np.random.default_rng(2).standard_normal(999)).astype(np.float32)
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    assert [log_probability(row, token) for token in (0, 500)] == pytest.approx(exact[[0, 500]], abs=1e-5)


def test_observed_events_have_log_probabilities() -> None:
    s = session("abc")
    from_on_event: list[float] = []
    from_criterion: list[float] = []

    def criterion(event: Event, draft: Draft) -> StoppingAction:
        from_criterion.append(event.logprob)
        return StoppingAction.NEXT

    start = s.mark()
    expected = [event.logprob for event in s.generate()]
    s.rollback(start)
    s.generate(stopping_criteria=[criterion]).run()
    s.rollback(start)
    s.generate(on_event=lambda event: from_on_event.append(event.logprob)).run()
    assert from_criterion == from_on_event == expected
    assert not np.isnan(expected).any()


def test_a_paused_run_can_be_iterated() -> None:
    s = session("abcd")
    paused = s.generate(Sampling(temperature=0), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
    with pytest.raises(SessionError, match="paused"):
        paused.run()
    events = list(s.generate(stopping_criteria=[]))
    assert len(events) == 4
    assert not np.isnan([event.logprob for event in events]).any()


def test_unobserved_log_probabilities_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(logits: np.ndarray, token: int) -> float:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(token_loop, "log_probability", refuse)
    assert session("abc").generate(Sampling(temperature=0)).run().text == "abc"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_max_tokens_is_exact(limit: int) -> None:
    generation = session("abcdef").generate(Sampling(temperature=0, max_tokens=limit))
    for _ in range(limit):
        next(generation)
    assert generation.finished == (limit > 0), "the last token ends the answer"
    answer = generation.run()
    assert (answer.text, answer.finish_reason) == ("abcdef"[:limit], FinishReason.LENGTH)


def test_a_stop_string_across_token_boundaries_never_leaks() -> None:
    events = list(generation := session("one STOP two").generate(Sampling(temperature=0, stop=("STOP",))))
    assert generation.answer.text == "one "
    assert generation.answer.finish_reason is FinishReason.STOP
    assert not any("S" in e.text for e in events)


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("one STOP two", ("two", "STOP"), "STOP"),
        ("abcd", ("bcd", "c"), "c"),
        ("abcd", ("bc", "b", "abcd"), "b"),
        ("abcd", ("x",), None),
        ("abcd", (), None),
    ],
)
def test_an_answer_names_the_stop_text_that_ended_it(text: str, stops: tuple[str, ...], found: str | None) -> None:
    """The one that is complete first."""
    assert session(text).generate(Sampling(temperature=0, stop=stops)).run().stop == found


def test_held_text_is_emitted_at_the_end_of_the_answer() -> None:
    for limit, reason in ((None, FinishReason.STOP), (3, FinishReason.LENGTH)):
        generation = session("aST").generate(Sampling(temperature=0, stop=("STOP",), max_tokens=limit))
        assert "".join(e.text for e in generation) == "aST" == generation.answer.text
        assert generation.answer.finish_reason is reason


def test_a_full_context_ends_the_answer_and_stays_usable() -> None:
    s = session("abcdefghijkl", n_ctx=10)
    answer = s.generate().run()
    assert (answer.text, answer.finish_reason) == ("abcd", FinishReason.LENGTH), "the last token takes no position"
    s.truncate(7)
    assert s.generate(Sampling(temperature=0, max_tokens=2)).run().text == "ab"


def test_a_prompt_that_does_not_fit_raises_and_changes_nothing() -> None:
    s = session(n_ctx=10)
    with pytest.raises(ContextFull) as error:
        s.append("12345")
    assert (error.value.needed, error.value.free) == (12, 10)
    assert s.tokens == tuple(b"prompt>")


def test_stopping_criteria_are_called_in_order_up_to_the_first_action() -> None:
    calls = []

    def criterion(name: str, action: StoppingAction, at: int) -> object:
        def decide(event: Event, draft: Draft) -> StoppingAction:
            calls.append((name, draft.text))
            return action if len(draft.tokens) == at else StoppingAction.NEXT

        return decide

    stopping_criteria = [
        criterion("a", StoppingAction.CONTINUE, 2),
        criterion("b", StoppingAction.FINISH, 2),
        criterion("c", StoppingAction.FINISH, 3),
    ]
    answer = session("abcdef").generate(stopping_criteria=stopping_criteria).run()
    assert (answer.text, answer.finish_reason) == ("abc", FinishReason.STOP)
    assert calls == [(n, "a") for n in "abc"] + [("a", "ab")] + [(n, "abc") for n in "abc"]


def test_the_action_stop_ends_the_answer_as_incomplete() -> None:
    answer = session("abc").generate(stopping_criteria=[lambda event, draft: StoppingAction.STOP]).run()
    assert (answer.text, answer.finish_reason) == ("a", FinishReason.CANCELLED)


def test_a_criterion_never_disables_the_token_limit() -> None:
    answer = session("abcdef").generate(
        Sampling(temperature=0, max_tokens=2), stopping_criteria=[lambda event, draft: StoppingAction.CONTINUE]
    )
    assert answer.run().text == "ab"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_pausing_after_each_token_changes_nothing(temperature: float) -> None:
    answer = "" if temperature else "né one XY two XYZ three"
    options = Sampling(temperature=temperature, seed=4, stop=("XYZ",), max_tokens=30)
    whole = session(answer).generate(options).run()
    s = session(answer)
    generation = s.generate(options, stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
    text, rounds = "", 0
    while not generation.finished:
        text += "".join(event.text for event in generation)
        rounds += 1
        generation = s.generate() if generation.paused else generation
    assert rounds >= len(whole.tokens) > 10, "the answer is paused after each token"
    assert generation.answer.tokens == whole.tokens
    assert text == whole.text == generation.answer.text


def test_a_paused_answer_takes_no_new_options_but_new_stopping_criteria() -> None:
    s = session("abcdef")
    list(s.generate(stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]))
    with pytest.raises(SessionError, match="paused"):
        s.generate(GREEDY)
    assert s.generate(stopping_criteria=[]).run().text == "abcdef"


def test_an_edit_ends_a_paused_answer() -> None:
    s = session("abcdef")
    generation = s.generate(stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
    list(generation)
    s.append("!")
    assert s.generate(Sampling(temperature=0, max_tokens=1)) is not generation


def test_cancelling_in_prefill_takes_at_most_one_more_batch() -> None:
    s = session()
    s.append("x" * 200)
    generation = s.generate()
    s.context.on_decode = generation.cancel
    assert generation.run().finish_reason is FinishReason.CANCELLED
    assert s.context.n_decoded == s.context.n_batch
    s.context.on_decode = lambda: None
    assert len(s.generate(Sampling(temperature=0, max_tokens=2)).run().tokens) == 2


def test_cancelling_before_the_first_token_gives_no_tokens() -> None:
    s = session("abc")
    s.next_logits()
    generation = s.generate()
    generation.cancel()
    assert generation.run().tokens == ()


def test_cancelling_between_tokens_emits_the_held_text() -> None:
    generation = session("aSTxyz").generate(Sampling(temperature=0, stop=("STOP",)))
    shown = [next(generation).text for _ in range(3)]
    generation.cancel()
    rest = list(generation)
    assert (shown, [(e.token, e.text) for e in rest]) == (["a", "", ""], [(None, "ST")])
    assert (generation.answer.text, generation.answer.finish_reason) == ("aST", FinishReason.CANCELLED)


def test_a_session_continues_after_an_error_of_a_criterion() -> None:
    def burst(event: Event, draft: Draft) -> StoppingAction:
        raise RuntimeError("criterion")

    s = session("abcdef")
    with pytest.raises(RuntimeError, match="criterion"):
        s.generate(stopping_criteria=[burst]).run()
    assert s.tokens == (*b"prompt>", *b"a")
    assert s.generate(GREEDY).run().text == "bcdef"


@pytest.mark.parametrize(("answer", "stop"), [("ab", ()), ("abSTOPcd", ("STOP",))])
def test_an_error_of_a_criterion_at_the_last_token_does_not_extend_the_answer(answer, stop) -> None:
    def burst(event: Event, draft: Draft) -> StoppingAction:
        if draft.tokens[-1] in (END, *b"P"):
            raise RuntimeError("criterion")
        return StoppingAction.NEXT

    generation = session(answer).generate(Sampling(temperature=0, stop=stop), stopping_criteria=[burst])
    with pytest.raises(RuntimeError, match="criterion"):
        list(generation)
    assert list(generation) == []
    assert (generation.answer.text, generation.answer.finish_reason) == ("ab", FinishReason.STOP)


@pytest.mark.parametrize(
    "refused",
    [{"sampling": Sampling(logit_bias={10**6: 1.0})}, {"timeout": -1}, {"constraint": "text"}],
    ids=lambda options: next(iter(options)),
)
def test_refused_options_leave_the_running_answer_unchanged(refused) -> None:
    s = session("abcdef")
    generation = s.generate(GREEDY)
    next(generation)
    with pytest.raises(InvalidOption):
        s.generate(**refused)
    assert generation.run().text == "abcdef"


class OnlyText:
    """Allows the bytes of one text, forces all bytes after the first if ``forced``, and is then complete."""

    def __init__(self, text: bytes, *, forced: bool) -> None:
        self.remaining, self.forced, self.n_masked = list(text), forced, 0

    @property
    def is_complete(self) -> bool:
        return not self.remaining

    def mask(self, logits: np.ndarray) -> np.ndarray:
        self.n_masked += 1
        row = np.full_like(logits, -np.inf)
        row[self.remaining[0]] = logits[self.remaining[0]]
        return row

    def advance(self, token: int) -> Advance:
        assert token == self.remaining.pop(0)
        if not self.remaining:
            return Stop()
        return FastForward(tuple(self.remaining)) if self.forced and len(self.remaining) == 3 else Forward()

    def clone(self) -> OnlyText:
        return self  # so that the test can inspect it


@pytest.mark.parametrize("forced", [False, True])
def test_an_answer_obeys_the_constraint(forced: bool) -> None:
    only = OnlyText(b"yes!", forced=forced)
    answer = session("something else").generate(constraint=only).run()
    assert (answer.text, answer.finish_reason) == ("yes!", FinishReason.CONSTRAINT)
    assert only.n_masked == (1 if forced else 4), "forced tokens are not sampled"


def test_generating_without_a_prompt_is_an_error() -> None:
    with pytest.raises(SessionError, match="nothing to continue"):
        Session(ScriptedContext(), ByteVocab()).generate()


def test_the_answer_is_not_available_before_its_end() -> None:
    generation = session("ab").generate()
    next(generation)
    with pytest.raises(SessionError, match="not over"):
        _ = generation.answer
