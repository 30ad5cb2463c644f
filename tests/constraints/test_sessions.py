"""Constraints in sessions: valid answers; pauses, copies and dumps within a grammar."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from scripted import END, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import AnyJson, Choice, Gbnf, JsonSchema, Lark, Regex, Spec, Triggered, compile  # noqa: A004
from slm_core.errors import InvalidSnapshot, InvalidToken, SessionError
from slm_core.generation import FinishReason, StoppingAction
from slm_core.protocols import Advance, Forward
from slm_core.sampling import Sampling

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WARM = Sampling(temperature=1.0, seed=7, max_tokens=400)


def begin(**options: object) -> Session:
    session = Session(ScriptedContext(n_ctx=1000, **options), ByteVocab(), sampling=WARM)
    session.append("prompt>")
    return session


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        (JsonSchema(PERSON, compact=True), lambda text: json.loads(text)["age"] in range(151)),
        (Regex(r"(foo|bar){2}\d{3}"), lambda text: re.fullmatch(r"(foo|bar){2}\d{3}", text)),
        (Choice(["left", "right", 'a "quoted"/slashed\\one\n']), lambda text: text[0] in "lra"),
        (Lark('start: "<" inner ">"\ninner: "" | "(" inner ")"'), lambda text: re.fullmatch(r"<\(*\)*>", text)),
    ],
    ids=lambda value: value.kind if isinstance(value, Spec) else "",
)
def test_answers_of_random_logits_fit(spec: Spec, fits: object) -> None:
    """The logits are noise: without the constraint, no answer would fit."""
    for seed in range(5):
        answer = begin().generate(Sampling(temperature=1.0, seed=seed, max_tokens=400), constraint=spec).run()
        assert answer.finish_reason in (FinishReason.CONSTRAINT, FinishReason.STOP)
        assert fits(answer.text), f"{answer.text!r} does not fit {spec}"


def test_forced_tokens_are_not_sampled() -> None:
    answer = begin().generate(WARM, constraint=Regex("abc[xy]defgh")).run()
    assert answer.text in ("abcxdefgh", "abcydefgh")
    context = begin().context
    n_before = context.n_decoded
    session = Session(context, ByteVocab(), sampling=WARM)
    session.append(">")
    batches: list[int] = []
    context.on_decode = lambda: batches.append(1)
    session.generate(WARM, constraint=Regex("abc[xy]defgh")).run()
    assert len(batches) == 3, "the prompt; abc; the sampled token with defgh"
    assert context.n_decoded - n_before == 10


def test_the_callers_constraint_does_not_advance() -> None:
    rule = compile(Choice(["one"]), ByteVocab())
    for _ in range(2):
        assert begin().generate(WARM, constraint=rule).run().text == "one"
    assert rule.tokens == ()


def test_an_early_eog_is_refused_and_changes_nothing() -> None:
    session = begin(script=lambda history: None)

    class Ends:
        def sample(self, logits: np.ndarray) -> int:
            return END

        def set_history(self, tokens: object) -> None: ...

    before = session.tokens
    generation = session.generate(Sampling(max_tokens=5), sampler=Ends(), constraint=Choice(["one", "two"]))
    with pytest.raises(InvalidToken, match="not complete"):
        generation.run()
    assert session.tokens == before


@pytest.mark.parametrize("n_steps", [0, 1, 3, 12, 25])
def test_a_dump_within_a_grammar_continues_with_the_same_tokens(n_steps: int) -> None:
    spec = Triggered(JsonSchema(PERSON), "{")  # random tokens contain this soon
    whole = begin().generate(WARM, constraint=spec).run()
    session = begin()
    steps = iter(range(n_steps))
    generation = session.generate(
        WARM,
        constraint=spec,
        stopping_criteria=[lambda e, d: StoppingAction.NEXT if next(steps, None) else StoppingAction.PAUSE],
    )
    if n_steps:
        for _ in generation:
            pass
    twin = Session.restore(ScriptedContext(n_ctx=1000), ByteVocab(), session.dump())
    assert twin.generate(stopping_criteria=[]).run().tokens == whole.tokens


def test_a_dump_with_another_constraint_is_refused() -> None:
    def paused(spec: Spec) -> Session:
        session = begin()
        for _ in session.generate(WARM, constraint=spec, stopping_criteria=[lambda e, d: StoppingAction.PAUSE]):
            pass
        return session

    session = paused(Regex("[ab]{9}"))
    session._generation._constraint = paused(Regex("[cd]{9}"))._generation.constraint
    with pytest.raises(InvalidSnapshot, match="contradicts"):
        Session.restore(ScriptedContext(), ByteVocab(), session.dump())


def test_a_custom_constraint_works_but_cannot_be_dumped() -> None:
    class OnlyVowels:
        is_complete = True

        def mask(self, logits: np.ndarray) -> np.ndarray:
            row = np.full_like(logits, -np.inf)
            row[list(b"aeiou")] = logits[list(b"aeiou")]
            return row

        def advance(self, token: int) -> Advance:
            return Forward()

        def clone(self) -> OnlyVowels:
            return OnlyVowels()

    session = begin()
    for _ in session.generate(WARM, constraint=OnlyVowels(), stopping_criteria=[lambda e, d: StoppingAction.PAUSE]):
        pass
    assert bytes(session.tokens[-1:]) in b"aeiou"
    with pytest.raises(SessionError, match="OnlyVowels cannot be dumped"):
        session.dump()


def test_beams_obey_the_constraint() -> None:
    from slm_core.generation import Beams

    answer = begin().beam_search(Beams(width=3, max_tokens=60), constraint=Choice(["left", "right", "up"]))
    assert {hypothesis.text for hypothesis in answer.hypotheses} <= {"left", "right", "up"}


def test_specs_compare_by_value() -> None:
    assert JsonSchema(PERSON) == JsonSchema(json.dumps(PERSON))
    assert len({AnyJson(), AnyJson(), Gbnf('root ::= "a"'), Choice(["a"]), Choice(("a",))}) == 3
