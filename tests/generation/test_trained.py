"""A warning, once, if a history is longer than the contexts of the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import slm_core as slm
from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Chat, Session

GREEDY = slm.Sampling(temperature=0, max_tokens=4)
QUESTION = [slm.Message("user", "What is 12 + 30?")]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [r.getMessage() for r in caplog.records if "the model was trained with" in r.getMessage()]
    caplog.clear()
    return messages


def session(n_ctx_train: int) -> Session:
    context = ScriptedContext(n_batch=4, n_seq_max=4)
    return Session(context, ByteVocab(), sampling=GREEDY, n_ctx_train=n_ctx_train)


def test_the_first_history_that_is_too_long_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    each = session(12)
    each.append("12 letters..")
    each.next_logits()
    assert warnings(caplog) == []
    each.append("!")
    each.generate().run()
    assert warnings(caplog) == [
        "the history has 13 tokens, but the model was trained with at most 12: answers may get worse"
    ]
    each.generate().run()
    each.fork().generate().run()
    assert warnings(caplog) == []


def test_an_answer_that_becomes_too_long_gives_one(caplog: pytest.LogCaptureFixture) -> None:
    each = session(12)
    each.append("11 letters.")
    each.generate().run()
    assert len(warnings(caplog)) == 1


def test_no_warning_if_the_training_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    each = session(0)
    each.append("some text")
    each.generate().run()
    assert warnings(caplog) == []


@pytest.fixture(params=[6, 4096])
def model(request: pytest.FixtureRequest) -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model:
        model.info = replace(model.info, n_ctx_train=request.param)
        yield model


def test_each_way_to_answer_warns_once(model: slm.Model, caplog: pytest.LogCaptureFixture) -> None:
    n_expected = int(model.info.n_ctx_train == 6)
    model.generate([QUESTION, QUESTION], GREEDY)
    assert len(warnings(caplog)) == n_expected
    with model.engine(n_ctx=256, n_parallel=1) as engine:
        for _ in range(2):
            engine.submit(QUESTION, GREEDY).run()
        assert len(warnings(caplog)) == n_expected
    with model.chat(n_ctx=256, sampling=GREEDY) as chat:
        for text in ("What is 12 + 30?", "And 3 + 4?"):
            chat.send(text)
        assert len(warnings(caplog)) == n_expected
        with Chat.restore(model, chat.dump()) as twin:
            twin.send("And 1 + 1?")
        assert len(warnings(caplog)) == n_expected
