"""Answers drafted by the model's own MTP layer: the same text, and several accepted tokens per round if it is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import slm_core as slm
from mtp_models import next_token, predictable_model
from slm_conformance.oracle.families import family_model
from slm_core.constraints import Regex
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation.speculation import MtpDrafter, PromptLookup, Speculation, drafter_of
from slm_core.model import Model

GREEDY = slm.Sampling(temperature=0, max_tokens=24)
SAMPLED = slm.Sampling(temperature=1.5, seed=11, max_tokens=24)
DRAFTS = Speculation("mtp", n_max=4, adaptive=False)
PROMPT = [5, 9, 120, 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def random(folder: Path) -> Iterator[Model]:
    with slm.load(family_model(folder, "small_mtp"), backend="native") as model:
        yield model


@pytest.fixture(scope="module")
def predictable(folder: Path) -> Iterator[Model]:
    with slm.load(predictable_model(folder / "predictable.gguf"), backend="native") as model:
        yield model


def session(model: Model, prompt: list[int] = PROMPT, **sizes: int) -> slm.Session:
    opened = model.session(**{"n_ctx": 256, "sampling": GREEDY, **sizes})
    opened.append_tokens(prompt)
    return opened


def the_answer(model: Model, n: int) -> tuple[int, ...]:
    tokens = [PROMPT[-1]]
    for _ in range(n):
        tokens.append(next_token(tokens[-1], model.vocab.size))
    return tuple(tokens[1:])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_tokens(random: Model, predictable: Model, sampling: slm.Sampling) -> None:
    for model in (random, predictable):
        expected = session(model).generate(sampling).run()
        answer = session(model).generate(sampling, speculation=DRAFTS).run()
        assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
        assert answer.speculation is not None and answer.speculation.drafted > 0


def test_right_predictions_are_accepted(predictable: Model) -> None:
    """The answer is known: each token is a function of the one before. Four of four drafted tokens are right."""
    answer = session(predictable).generate(speculation=DRAFTS).run()
    assert answer.tokens == the_answer(predictable, 24)
    stats = answer.speculation
    assert stats is not None and stats.accepted == stats.drafted > 0
    assert stats.accepted / stats.rounds > 3, "the last round is shorter"


def test_wrong_predictions_are_rejected(folder: Path) -> None:
    """An MTP layer that never sees the last token predicts the token before."""
    with slm.load(predictable_model(folder / "wrong.gguf", right=False), backend="native") as model:
        answer = session(model).generate(speculation=DRAFTS).run()
        assert answer.tokens == the_answer(model, 24)
        assert answer.speculation is not None and answer.speculation.drafted > answer.speculation.accepted == 0


def test_adaptive_lengths(predictable: Model) -> None:
    long = slm.Sampling(temperature=0, max_tokens=120)
    answer = session(predictable).generate(long, speculation=Speculation("mtp")).run()
    assert len(answer.tokens) > 60 and answer.tokens == session(predictable).generate(long).run().tokens


def test_edits_between_answers(random: Model) -> None:
    """Rolled back, forked, cut, dumped and restored: each answer equals the one without drafts."""
    mine, plain = session(random), session(random)
    for each in (mine, plain):
        drafts = DRAFTS if each is mine else None
        mark = each.mark()
        each.generate(speculation=drafts).run()
        each.rollback(mark)
        each.append_tokens([7, 8, 9])
        each.generate(speculation=drafts).run()
        each.remove_span(2, 9)
        each.generate(speculation=drafts).run()
    assert mine.tokens == plain.tokens
    twin = mine.fork()
    restored = slm.Session.restore(random.new_context(n_ctx=256), random.vocab, mine.dump(), owns_context=True)
    expected = plain.generate().run().tokens
    assert [each.generate(speculation=DRAFTS).run().tokens for each in (twin, restored, mine)] == [expected] * 3


def test_a_full_context(predictable: Model) -> None:
    """Drafts end where the context does, and so does the answer, as without them."""
    for drafts in (None, DRAFTS):
        answer = session(predictable, n_ctx=21).generate(slm.Sampling(temperature=0), speculation=drafts).run()
        assert answer.tokens == the_answer(predictable, 18) and answer.finish_reason == "length"


def test_a_constraint(random: Model) -> None:
    rule = Regex("[a-f]{8}")
    expected = session(random).generate(constraint=rule).run()
    answer = session(random).generate(constraint=rule, speculation=DRAFTS).run()
    assert answer.text == expected.text


def test_pauses_and_dumps(predictable: Model) -> None:
    """A dump names the drafter, so that the restored answer continues with it."""

    def pause_early(event: slm.Event, draft: slm.Draft) -> slm.StoppingAction:
        return slm.StoppingAction.PAUSE if len(draft.tokens) == 7 else slm.StoppingAction.NEXT

    mine = session(predictable)
    paused = mine.generate(speculation=DRAFTS, stopping_criteria=[pause_early])
    list(paused)
    assert paused.paused
    data = mine.dump()
    restored = slm.Session.restore(predictable.new_context(n_ctx=256), predictable.vocab, data, owns_context=True)
    answer = restored.generate(stopping_criteria=[]).run()
    assert answer.tokens == the_answer(predictable, 24)
    assert answer.speculation is not None and answer.speculation.accepted > 12
    assert mine.generate(stopping_criteria=[]).run().tokens == answer.tokens


def test_a_dump_for_a_context_without_the_layer(folder: Path, predictable: Model) -> None:
    def pause_early(event: slm.Event, draft: slm.Draft) -> slm.StoppingAction:
        return slm.StoppingAction.PAUSE if len(draft.tokens) == 7 else slm.StoppingAction.NEXT

    mine = session(predictable)
    list(mine.generate(speculation=DRAFTS, stopping_criteria=[pause_early]))
    with slm.load(folder / "predictable.gguf", backend="native", mtp=False) as plain:
        restored = slm.Session.restore(plain.new_context(n_ctx=256), plain.vocab, mine.dump(), owns_context=True)
        with pytest.raises(SessionError):
            restored.generate(stopping_criteria=[])
        with pytest.raises(InvalidOption, match="does not declare mtp"):
            restored.generate(stopping_criteria=[], speculation=DRAFTS)
        answer = restored.generate(stopping_criteria=[], speculation=Speculation(PromptLookup())).run()
        assert answer.tokens == the_answer(predictable, 24)


def test_refused_without_the_layer(folder: Path) -> None:
    with slm.load(folder / "predictable.gguf", backend="native", mtp=False) as plain:
        opened = session(plain)
        with pytest.raises(InvalidOption, match="no layer for multi-token prediction, or it is not loaded"):
            opened.generate(speculation=DRAFTS)
        with plain.engine(n_ctx=256) as engine, pytest.raises(InvalidOption, match="does not declare mtp"):
            engine.submit(PROMPT, GREEDY, speculation=DRAFTS)


def test_names_of_drafters() -> None:
    assert isinstance(Speculation("mtp").drafter, MtpDrafter)
    assert isinstance(drafter_of({"drafter": "mtp"}), MtpDrafter)
    with pytest.raises(InvalidOption, match="accepted: 'mtp', or a drafter"):
        Speculation("prompt lookup")  # type: ignore[arg-type]
    for settings in ({"drafter": "mtp", "seq_id": 1}, {"drafter": "nothing"}):
        with pytest.raises(InvalidOption):
            drafter_of(settings)
    with pytest.raises(SessionError, match="sessions and engines only"):
        MtpDrafter().draft([1], 2)


def test_in_an_engine(predictable: Model) -> None:
    """Several requests draft in their own sequences."""
    prompts = [[3, 4, start] for start in (10, 77, 200)]
    with predictable.engine(n_ctx=512) as engine:
        streams = [engine.submit(prompt, GREEDY, speculation=DRAFTS) for prompt in prompts]
        answers = [stream.run() for stream in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = [prompt[-1]]
        for _ in range(24):
            expected.append(next_token(expected[-1], predictable.vocab.size))
        assert answer.tokens == tuple(expected[1:])
        assert answer.speculation is not None and answer.speculation.accepted == answer.speculation.drafted > 0


def test_in_a_process_of_its_own(folder: Path, predictable: Model) -> None:
    with slm.load(folder / "predictable.gguf", backend="native", isolated=True) as model:
        answer = session(model).generate(speculation=DRAFTS).run()
        assert answer.tokens == the_answer(predictable, 24)
        assert answer.speculation is not None and answer.speculation.accepted > 0
