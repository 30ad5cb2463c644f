"""``slm demo``: its output, and the error if engines disagree."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import slm_core as slm
from slm_core.cli import demo


@pytest.fixture
def two_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The native engine under two names, and an engine that is not installed."""
    statuses = [
        slm.BackendStatus(name, installed=name != "absent", reason="why not", hint="pip install x[y]")
        for name in ("one", "two", "absent")
    ]
    monkeypatch.setattr(demo, "backends", lambda: statuses)
    monkeypatch.setattr(demo, "_load", lambda name: slm.load(slm.demo_model_path(), backend="native"))


def answers(output: str, name: str) -> list[str]:
    return re.findall(rf"^ +{name}  (\S.*?)(?:   .*)?$", output, re.MULTILINE)


@pytest.mark.usefixtures("two_engines")
def test_every_step_is_shown_with_its_changes(run) -> None:
    outcome = run("demo")
    assert outcome.code == 0, outcome.out + outcome.err
    questions = list(demo.CONVERSATION)
    chat = slm.load(slm.demo_model_path(), backend="native").chat(sampling=demo.GREEDY, n_ctx=demo.N_CTX)
    expected = [chat.send(question) for question in questions]
    assert answers(outcome.out, "you")[: len(questions)] == questions
    assert answers(outcome.out, "one")[: len(questions)] == [answer.text for answer in expected]
    assert answers(outcome.out, "two")[: len(questions)] == [answer.text for answer in expected]
    assert f"the same {sum(len(answer.tokens) for answer in expected)} tokens on 2 engines" in outcome.out

    for step, before, after in re.findall(
        r"^(Truncate|Cut).*\n.*KV cache (\d+) -> (\d+) tokens", outcome.out, re.MULTILINE
    ):
        assert int(after) < int(before), f"{step} must shorten the cache"
    assert "takes 0 new places" in outcome.out
    assert re.search(r"kB from one into a new context of two", outcome.out)
    assert re.search(r"kB from two into a new context of one", outcome.out)
    assert re.search(r"^absent +- .*why not \(to get it: pip install x\[y\]\)", outcome.out, re.MULTILINE)
    assert "All engines agree." in outcome.out


def test_a_single_engine_is_reported(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "backends", lambda: [slm.BackendStatus("native", installed=True)])
    outcome = run("demo")
    assert outcome.code == 0
    assert "on the same engine: no other is installed" in outcome.out
    assert "One engine ran: install another to compare." in outcome.out


@pytest.mark.usefixtures("two_engines")
def test_engines_that_disagree_are_an_error(run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = slm.Chat.stream, []

    def other_on_the_second(self: slm.Chat, content: str, **options: object) -> slm.ChatStream:
        calls.append(content)
        return honest(self, "Hello!" if calls.count(content) == 2 else content, **options)

    monkeypatch.setattr(slm.Chat, "stream", other_on_the_second)
    outcome = run("demo")
    assert outcome.code == 1
    assert "DIFFER" in outcome.out
    assert "The engines do not agree" in outcome.out


@pytest.mark.usefixtures("two_engines")
def test_an_engine_that_fails_to_load_is_an_error(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> slm.Model:
        if name == "two":
            raise slm.SlmError("out of order")
        return slm.load(slm.demo_model_path(), backend="native")

    monkeypatch.setattr(demo, "_load", load)
    outcome = run("demo")
    assert outcome.code == 1
    assert re.search(r"^two .*out of order", outcome.out, re.MULTILINE)


def test_no_engine_at_all_is_an_error(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "backends", list)
    outcome = run("demo")
    assert (outcome.code, outcome.err) == (1, "error: no engine can run the demo model (none is installed)\n")
