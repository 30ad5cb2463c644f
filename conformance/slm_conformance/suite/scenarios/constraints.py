"""Constraints over the backend's logits and vocabulary: answers match them for any logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM, next_row
from slm_conformance.suite.scripted import Script
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Session
from slm_core.constraints import Choice, Gbnf, JsonSchema, Lark, Regex, Spec, ToolCalls, Triggered, compile  # noqa: A004
from slm_core.errors import InvalidToken
from slm_core.generation import Answer, Draft, Event, FinishReason, StoppingAction
from slm_core.sampling import Sampling
from slm_core.types import CallFormat

N_PROMPT = 20
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 7, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "parameters": {**PERSON, "required": ["age"]}}
CALLS = CallFormat("<call>", "</call>")


class TestConstraints(Scenarios):
    """Constraints: under a grammar, a random model's answers fit it; text outside the grammar stays free."""

    above_contract = True

    def test_what_is_said_fits(self, bench: Bench) -> None:
        """Constraint: answers under a schema, a regular expression, a choice and two kinds of grammar end, and fit."""
        checks: list[tuple[Spec, Callable[[str], bool]]] = [
            (JsonSchema(PERSON, compact=True), _is_person),
            (Regex("(no|yes){2}[0-9]{3}"), lambda text: bool(re.fullmatch(r"(no|yes){2}[0-9]{3}", text))),
            (Choice(["left", "right", "straight on"]), lambda text: text in ("left", "right", "straight on")),
            (Lark('start: "<" ("a" | "b"){2} ">"'), lambda text: bool(re.fullmatch("<[ab]{2}>", text))),
            (
                Gbnf('root ::= [0-9] op [0-9] "="\nop ::= [+*/-]'),
                lambda text: bool(re.fullmatch("[0-9][-+*/][0-9]=", text)),
            ),
        ]
        for spec, fits in checks:
            for seed in range(3):
                answer = _answer(bench, spec, seed=seed)
                assert answer.finish_reason is FinishReason.CONSTRAINT, (
                    f"an answer under {spec} ended with {answer.finish_reason.value}: {answer.text!r}"
                )
                assert fits(answer.text), f"an answer under {spec} is {answer.text!r}"

    def test_the_end_exactly_when_complete(self, bench: Bench) -> None:
        """Constraint: EOG tokens are allowed exactly where the answer is complete."""
        vocab, rule = bench.vocab, compile(Regex("a{2}(bc?){0,3}"), bench.vocab)
        ends = sorted(vocab.eog_ids)
        row = _session(bench).next_logits()
        assert row is not None, "next_logits() gave nothing, though nobody cancelled"
        for token in (i for text in "aabcbbc" for i in _encoded(bench, text)):
            masked = rule.mask(row)
            answer = vocab.decode(rule.tokens)
            complete = re.fullmatch("a{2}(bc?){0,3}", answer) is not None
            assert rule.is_complete == complete, f"after {answer!r}, the constraint says complete: {rule.is_complete}"
            allowed = np.isfinite(masked[ends])
            assert (allowed == complete).all(), f"after {answer!r}, EOG tokens are allowed: {allowed.tolist()}"
            rule.advance(token)

    def test_what_may_not_follow(self, bench: Bench) -> None:
        """Constraint: logits are -inf exactly for tokens that ``advance`` refuses; a refusal changes nothing."""
        rule = compile(Regex("[0-9]{2}[a-f]+"), bench.vocab)
        for text in ("4", "2", "b"):
            masked = rule.mask(np.zeros(bench.vocab.size, np.float32))
            for token in [*_encoded(bench, "7"), *_encoded(bench, "b"), *_encoded(bench, "x"), *bench.tokens(20)]:
                clone = rule.clone()
                try:
                    clone.advance(token)
                except InvalidToken:
                    assert masked[token] == -np.inf, f"after {rule.tokens}, token {token} is allowed, and then refused"
                    assert clone.state() == rule.state(), f"the refused token {token} changed the constraint"
                else:
                    assert masked[token] == 0.0, f"after {rule.tokens}, token {token} is masked, and then taken"
            rule.advance(_encoded(bench, text)[0])

    def test_what_is_forced_is_one_batch(self, bench: Bench) -> None:
        """Constraint: forced tokens are decoded in one batch, and the next token is drawn from the right logits."""
        spec = Regex("(yes|no), this is all that can be said here: [0-9]{4}")
        session = _session(bench)
        lengths: list[int] = []
        for event in session.generate(Sampling(temperature=0, max_tokens=200), constraint=spec):
            lengths.append(session.context.length(session.seq_id) - N_PROMPT)
            assert event.token is not None, "a token was expected"
        n_tokens, batches = session.n_tokens - N_PROMPT, len(set(lengths))
        assert batches <= n_tokens // 2, f"{n_tokens} tokens, most of them forced, were decoded in {batches} batches"
        rule, tokens = compile(spec, bench.vocab), session.tokens[N_PROMPT:]

        def masked(i: int, row: Rows) -> Rows:
            allowed = rule.mask(row.astype(np.float32))
            rule.advance(tokens[i])
            return allowed

        bench.chosen(session.tokens[:N_PROMPT], tokens, "a greedy answer under a constraint", masked)

    def test_free_text_is_free(self, bench: Bench) -> None:
        """Constraint: before a marker, all text and control tokens are allowed; after it, only those that fit."""
        spec = Triggered(Choice(["left", "right"]), "<go>")
        rule = compile(spec, bench.vocab)
        for text in ("", "well, 3 < "):
            for token in _encoded(bench, text):
                rule.advance(token)
            allowed = np.isfinite(rule.mask(np.zeros(bench.vocab.size, np.float32)))
            free = [i for i in range(bench.vocab.size) if _is_text(bench.vocab.token_bytes(i))]
            missing = [i for i in free if not allowed[i] and i not in bench.vocab.eog_ids]
            assert not missing, f"after {text!r} of free text, tokens {missing[:5]} are not allowed"
        answer = _answer_after(bench, "well <go>", spec)
        assert answer.text in ("well <go>left", "well <go>right"), f"after its marker, it says {answer.text!r}"

    def test_tool_calls(self, bench: Bench) -> None:
        """Constraint: a tool call names a tool of the list, and its arguments fit the tool's schema."""
        answer = _answer_after(bench, "now <call>", ToolCalls([TOOL], CALLS))
        call = re.fullmatch(r"now <call>\s*(.*?)\s*</call>.*", answer.text, re.DOTALL)
        assert call is not None, f"no whole call is in {answer.text!r}"
        value = json.loads(call[1])
        fits = value["name"] == "weather" and value["arguments"]["age"] in range(7, 100)
        assert fits, f"the call is {value!r}"

    def test_dumped_in_mid_grammar(self, bench: Bench) -> None:
        """Session: a dump in the middle of a constrained answer continues in another context with the same draws.

        The next logits are within the tolerance (clause 16): a pause splits a run of forced tokens into other batches.
        """
        spec, sampling = JsonSchema(PERSON, compact=True), replace(UNIFORM, max_tokens=200)
        session = _session(bench)
        uninterrupted, after = session.generate(sampling, constraint=spec).run(), next_row(session)
        for n in (1, 4, len(uninterrupted.tokens) - 1):
            session = _session(bench)
            for _ in session.generate(sampling, constraint=spec, stopping_criteria=[_pause_after(n)]):
                pass
            restored = Session.restore(bench.context(), bench.vocab, session.dump())
            tokens = restored.generate(stopping_criteria=()).run().tokens
            assert tokens == uninterrupted.tokens, (
                f"dumped after {n} tokens, an answer under a constraint has other tokens"
            )
            bench.same(next_row(restored), after, f"the next logits of an answer that was dumped after {n} tokens")


def _is_text(data: bytes) -> bool:
    """Whether the bytes are whole characters, without the marker. Control tokens have no bytes, and count as text."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"<go>" not in data


class _ThenGreedy(Script):
    """A sampler that returns fixed tokens, then the likeliest ones."""

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token."""
        if self._n_sampled < len(self._tokens):
            return super().sample(logits)
        return int(logits.argmax())


def _session(bench: Bench, *, n_ctx: int = 256) -> Session:
    session = Session(bench.context(n_ctx=n_ctx), bench.vocab)
    session.append_tokens(bench.tokens(N_PROMPT))
    return session


def _answer(bench: Bench, spec: Spec, *, seed: int) -> Answer:
    sampling = Sampling(temperature=1.0, seed=seed, max_tokens=200)
    return _session(bench).generate(sampling, constraint=spec).run()


def _answer_after(bench: Bench, text: str, spec: Spec) -> Answer:
    """A greedy answer whose first tokens are those of ``text``."""
    sampler = _ThenGreedy(_encoded(bench, text))
    return _session(bench, n_ctx=512).generate(Sampling(max_tokens=400), sampler=sampler, constraint=spec).run()


def _encoded(bench: Bench, text: str) -> Sequence[int]:
    """The tokens of a text inside a longer text, without a leading space."""
    vocab = bench.vocab
    before = vocab.encode("\n", add_special=False, parse_special=False)
    return vocab.encode("\n" + text, add_special=False, parse_special=False)[len(before) :]


def _is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 6 and value["age"] in range(7, 100)


def _pause_after(n: int) -> Callable[[Event, Draft], StoppingAction]:
    return lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == n else StoppingAction.NEXT
