"""Every parameter of ``Session.generate`` has an effect: a new parameter without a check here fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from scripted import START, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.errors import InvalidOption, SessionError, UnknownOption
from slm_core.generation import FinishReason, StoppingAction
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import DraftFunction, PromptLookup, Speculation
from slm_core.sampling import Sampling
from slm_core.types import Logits


def session() -> Session:
    session = Session(ScriptedContext(n_batch=4), ByteVocab(), sampling=Sampling(temperature=0, max_tokens=8))
    session.append("prompt>")
    return session


def plain_tokens() -> tuple[int, ...]:
    return session().generate().run().tokens


def check_sampling() -> None:
    assert session().generate(Sampling(temperature=0, max_tokens=3)).run().tokens == plain_tokens()[:3]


def check_max_tokens() -> None:
    assert session().generate(max_tokens=3).run().tokens == plain_tokens()[:3]
    assert session().generate(Sampling(temperature=0), max_tokens=3).run().tokens == plain_tokens()[:3]


def drawn(session: Session, **options: float) -> tuple[int, ...]:
    return session.generate(**options).run().tokens  # type: ignore[arg-type]  # the names are those of the parameters


def check_temperature() -> None:
    """It is that of the sampling: the distribution is checked there."""
    same = session().generate(Sampling(temperature=1.5, max_tokens=8, seed=2)).run().tokens
    assert drawn(session(), temperature=1.5, seed=2) == same != plain_tokens()


def check_seed() -> None:
    check_temperature()
    assert len({drawn(session(), temperature=2.0, seed=seed) for seed in range(4)}) == 4


def check_top_p() -> None:
    assert drawn(session(), temperature=3.0, top_p=1e-9, seed=1) == plain_tokens(), "the likeliest token alone"


def check_stop() -> None:
    texts = session().generate().run().text
    for stop in (texts[2], [texts[2], "\0\0"]):
        answer = session().generate(stop=stop).run()
        assert (answer.text, answer.stop) == (texts[: texts.index(texts[2])], texts[2])


def test_a_shorter_answer_draws_the_tokens_of_the_longer_one() -> None:
    """Length and stops leave the session's own draws alone, which continue from answer to answer."""
    sampling = Sampling(temperature=2.0, seed=5, max_tokens=8)
    whole, parts = (Session(ScriptedContext(n_batch=4), ByteVocab(), sampling=sampling) for _ in range(2))
    for each in (whole, parts):
        each.append("prompt>")
    expected = whole.generate().run().tokens
    assert (*parts.generate(max_tokens=3).run().tokens, *parts.generate(max_tokens=5).run().tokens) == expected


@pytest.mark.parametrize("options", [{"max_tokens": 3}, {"temperature": 0}, {"top_p": 0.5}, {"seed": 1}, {"stop": "x"}])
def test_a_paused_answer_keeps_its_options(options: dict[str, object]) -> None:
    s = session()
    list(s.generate(stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]))
    with pytest.raises(SessionError, match="paused"):
        s.generate(**options)


def check_stopping_criteria() -> None:
    answer = session().generate(stopping_criteria=[lambda event, draft: StoppingAction.STOP]).run()
    assert (answer.tokens, answer.finish_reason) == (plain_tokens()[:1], FinishReason.CANCELLED)


def check_constraint() -> None:
    assert session().generate(constraint=Regex("[ab]{5}")).run().text.strip("ab") == ""


class AlwaysOneToken:
    """A sampler that always returns one token."""

    def sample(self, logits: Logits) -> int:
        return START

    def accept(self, token: int) -> None:
        pass

    def set_history(self, tokens: Sequence[int]) -> None:
        pass


def check_sampler() -> None:
    assert session().generate(sampler=AlwaysOneToken()).run().tokens == (START,) * 8


def check_logits_processors() -> None:
    def only_start(tokens: Sequence[int], logits: Logits) -> Logits:
        logits[np.arange(len(logits)) != START] = -np.inf
        return logits

    assert session().generate(logits_processors=[only_start]).run().tokens == (START,) * 8


def check_special() -> None:
    texts = [session().generate(sampler=AlwaysOneToken(), special=special).run().text for special in (False, True)]
    assert texts == ["", "<|start|>" * 8]


def check_speculation() -> None:
    expected = plain_tokens()
    s = session()
    answer = s.generate(
        speculation=Speculation(DraftFunction(lambda tokens, n: expected[len(tokens) - 7 :][:n]), adaptive=False)
    ).run()
    assert answer.tokens == expected
    assert answer.speculation is not None
    assert answer.speculation.accepted == 5, (
        "of eight tokens, the prompt's logits give the first, and a batch has room for four"
    )


def check_shift() -> None:
    def full() -> Session:
        session = Session(
            ScriptedContext(n_ctx=12, n_batch=4), ByteVocab(), sampling=Sampling(temperature=0, max_tokens=8)
        )
        session.append("prompt>")
        return session

    assert full().generate().run().finish_reason is FinishReason.LENGTH
    assert len(full().generate().run().tokens) == 6
    assert len(full().generate(shift=TokenShift()).run().tokens) == 8


def check_timeout() -> None:
    answer = session().generate(timeout=1e-9).run()
    assert (answer.tokens, answer.timed_out) == ((), True)


def check_on_event() -> None:
    tokens: list[int | None] = []
    session().generate(on_event=lambda event: tokens.append(event.token)).run()
    assert tuple(tokens) == plain_tokens()


def check_progress() -> None:
    reports: list[tuple[int, int]] = []
    session().generate(progress=lambda done, total: reports.append((done, total))).run()
    assert reports == [(0, 7), (4, 7), (7, 7)]


CHECKS: Mapping[str, Callable[[], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
PARAMETERS = [name for name in inspect.signature(Session.generate).parameters if name != "self"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_of_generate_changes_something(name: str) -> None:
    assert name in CHECKS, f"generate({name}=...) is not tested here: write check_{name}"
    CHECKS[name]()


def test_every_check_belongs_to_a_parameter() -> None:
    assert set(CHECKS) == set(PARAMETERS)


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(UnknownOption, match="temperatur"):
        session().generate(temperatur=1)


WRONG_KINDS: dict[str, object] = {
    "sampling": {"temperature": 0},
    "constraint": "[ab]{5}",
    "speculation": PromptLookup(),
    "shift": 5,
    "timeout": "3",
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_value_of_the_wrong_kind_is_refused(name: str) -> None:
    s = session()
    with pytest.raises(InvalidOption, match=rf"^{name}=.* \(accepted: "):
        s.generate(**{name: WRONG_KINDS[name]})
    assert s.generate().run().tokens == plain_tokens(), "the session is unchanged"


@pytest.mark.parametrize("returned", [None, 1, "stop"])
def test_a_stopping_criterion_returns_an_action(returned: object) -> None:
    s = session()
    with pytest.raises(InvalidOption, match=r"^a stopping criterion gave .* \(accepted: a StoppingAction"):
        s.generate(stopping_criteria=[lambda event, draft: returned]).run()
    assert s.text == "prompt>" + bytes(plain_tokens()[:1]).decode("utf-8", "replace"), (
        "the token of the failed call stays"
    )


def test_searches_and_completions_refuse_values_of_the_wrong_kind() -> None:
    for ask in (lambda: session().beam_search({"width": 3}), lambda: session().completions(2, {"temperature": 0})):
        with pytest.raises(InvalidOption, match=r"accepted: (Beams|Sampling), None"):
            ask()


def test_next_logits_returns_a_copy() -> None:
    s = session()
    row = s.next_logits()
    before = row.copy()
    s.fork().append("other")
    np.testing.assert_array_equal(row, before)
