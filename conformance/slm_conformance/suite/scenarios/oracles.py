"""Oracles over the backend's contexts; facts that the demo model knows and forgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.factories import FAMILIES
from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.chats import GREEDY, PLAIN, SAID, chat_of, raise_at_third
from slm_conformance.suite.scenarios.sessions import UNIFORM, fresh_row, next_row
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.errors import ContextFull, InvalidOption, OracleError
from slm_core.formatting import formatter
from slm_core.generation import StoppingAction
from slm_core.model import Model
from slm_core.sampling import Sampling
from slm_core.types import Message, Role

GREEDY_CHAT = ChatOptions(Sampling(temperature=0, max_tokens=40))
TRANSCRIPT = (
    "<|im_start|>system\nYou are Pip.<|im_end|>\n<|im_start|>user\nMy name is Ada.<|im_end|>\n<|im_start|>assistant\n"
    "Nice to meet you!<|im_end|>\n<|im_start|>user\nWhat is my name?<|im_end|>\n<|im_start|>assistant\n"
    "Your name is Ada.<|im_end|>"
)
_WRITTEN = (
    "1 347 205 388 416 583 20 2 205 1 270 205 562 308 288 1475 20 2 205 1 275 205 733 528 734 314 7 2 205"
    " 1 270 205 333 288 320 308 37 2 205 1 275 205 367 308 288 1475 20 2"
)
TRANSCRIPT_TOKENS = tuple(map(int, _WRITTEN.split()))
"""The tokens of llama.cpp's tokenizer; the logit of each token of the answers leads by at least 7.8."""


class Colour(Enum):
    """Options of a choice."""

    RED = "red"
    BLUE = "blue"


class TestOracle(Scenarios):
    """Oracle: an answer in a fork or, without a free sequence, in the chat's sequence leaves no trace in the chat."""

    above_contract = True
    families = tuple(FAMILIES)

    def test_on_success(self, bench: Bench) -> None:
        """Oracle: ``ask`` and ``choose`` leave no trace, and give the same answer twice if it is clear."""

        def ask(chat: Chat) -> None:
            first, second = (chat.oracle().ask("the dog", sampling=GREEDY).tokens for _ in range(2))
            what = "two greedy answers of an oracle to one question"
            bench.same_choices(_prompt(bench, "the dog"), first, second, what)
            for _ in range(2):
                _check_choice(bench, chat, ["on", "in the dog"])

        _no_trace(bench, ask)

    def test_on_an_error(self, bench: Bench) -> None:
        """Oracle: a question that is refused, or whose answer does not fit, leaves no trace."""

        def fail(chat: Chat) -> None:
            for options in (["on"], ["on", "you", "on"], ["on", ""], []):
                with bench.refused(f"choose between {options}", InvalidOption):
                    chat.oracle().choose("is it", options)
            with bench.refused("a JSON text that is longer than the context", OracleError, ContextFull):
                chat.oracle().extract({"type": "string", "minLength": 100_000}, "no")

        _no_trace(bench, fail)

    def test_on_a_raising_callback(self, bench: Bench) -> None:
        """Oracle: a stopping criterion that raises after three tokens leaves no trace."""

        def ask(chat: Chat) -> None:
            with pytest.raises(KeyError):
                chat.oracle().ask("the dog", sampling=GREEDY, stopping_criteria=[raise_at_third])

        _no_trace(bench, ask)

    def test_on_cancel(self, bench: Bench) -> None:
        """Oracle: an answer that is stopped as incomplete leaves no trace."""

        def ask(chat: Chat) -> None:
            chat.oracle().ask("the dog", sampling=GREEDY, stopping_criteria=[lambda event, draft: StoppingAction.STOP])

        _no_trace(bench, ask)

    def test_the_draws_after_it(self, bench: Bench) -> None:
        """Oracle: a question does not change the chat's next draws."""
        for n_seq_max in (3, 1):
            unquestioned, questioned = (
                chat_of(bench, n_seq_max=n_seq_max, options=ChatOptions(UNIFORM)) for _ in range(2)
            )
            questioned.oracle().ask("is it on", sampling=UNIFORM)
            tokens, tokens_after_question = (chat.send("the dog").tokens for chat in (unquestioned, questioned))
            assert tokens_after_question == tokens, "a chat draws another answer once its oracle was asked"

    def test_options_are_content(self, bench: Bench) -> None:
        """Oracle: an option that spells a control token is scored as text."""
        control = [token for token in range(bench.vocab.size) if not bench.vocab.token_bytes(token)]
        spelled = bench.vocab.token_bytes(control[-1], special=True).decode()
        options = ["on", f"in{spelled}", f"{spelled} you"]
        logprobs = np.log(chat_of(bench).oracle().choose("is it", options).probabilities)
        scores, slack = _scores(bench, "is it", options)
        excess = np.abs((logprobs - logprobs[0]) - (scores - scores[0])) - slack - slack[0]
        assert (excess <= 0).all(), (
            f"the log probabilities of {options} differ by {(logprobs - logprobs[0]).round(3)}; those as"
            f" plain text by {(scores - scores[0]).round(3)}"
        )
        token = next(token for token in control if token not in bench.vocab.eog_ids)
        said = Sampling(temperature=0, max_tokens=2, logit_bias={token: 1e4})
        with Chat(Session(bench.context(), bench.vocab), formatter(PLAIN, model=bench.model), messages=SAID) as chat:
            text = chat.oracle().ask("on", sampling=said).text
            expected = 2 * bench.vocab.token_bytes(token, special=True).decode()
            assert text == expected, f"an answer of two control tokens reads {text!r}, not {expected!r}"

    def test_choose(self, bench: Bench) -> None:
        """Oracle: ``choose`` ranks options by the probability of their tokens and of the end after them."""
        chat, options = chat_of(bench), ["on", "in the dog", "you", "it is"]
        for order in (options, options[::-1]):
            _check_choice(bench, chat, order)
        _check_choice(bench, chat_of(bench), Colour)
        unlikely = (
            chat_of(bench).oracle().choose("is it", ["z" * 70, "q" * 70]).probabilities
        )  # the product of their probabilities is 0 in float64
        assert abs(sum(unlikely) - 1) < 1e-9, f"two unlikely options have the probabilities {unlikely}"


class TestMeaning(Scenarios):
    """Chats with the demo model: it knows the facts in its messages, and no facts of deleted messages."""

    above_contract = True
    models = ("demo",)

    def test_a_transcript(self, bench: Bench) -> None:
        """Chat: a recorded conversation has the same tokens, in prompts and greedy answers."""
        chat = chat_of(bench, (Message(Role.SYSTEM, "You are Pip."),), options=GREEDY_CHAT)
        for text in ("My name is Ada.", "What is my name?"):
            chat.send(text)
        assert bench.vocab.decode(chat.session.tokens, special=True) == TRANSCRIPT, "the conversation reads otherwise"
        assert chat.session.tokens == TRANSCRIPT_TOKENS, "the conversation has other tokens"

    def test_what_was_told_is_known(self, bench: Bench) -> None:
        """Chat: the model repeats a fact that it was told, also after a dump is restored."""
        chat = _chat_that_knows_a_name(bench)
        with Chat.restore(Model(bench.model, bench.formatter, "under test"), chat.dump()) as twin:
            for chosen, where in ((chat, "the chat"), (twin, "a chat restored from its dump")):
                answer = chosen.send("What is my name?").text
                assert "Ada" in answer, f"told that the name is Ada, {where} says {answer!r}"

    def test_what_was_deleted_is_not_known(self, bench: Bench) -> None:
        """Chat: the model does not know a deleted fact, and knows the new fact after an edit."""
        chat = _chat_that_knows_a_name(bench)
        chat.edit(0, "My name is Bob.")
        answer = chat.send("What is my name?").text
        assert "Bob" in answer, f"after an edit that says Bob, the model says {answer!r}"
        chat = _chat_that_knows_a_name(bench)
        for _ in chat.messages:
            chat.delete(0)
        answer = chat.send("What is my name?").text
        assert "Ada" not in answer, f"after what it was told was deleted, the model says {answer!r}"

    def test_think(self, bench: Bench) -> None:
        """Oracle: ``think`` returns the reasoning apart from the answer; the chat keeps neither."""
        chat = _chat_that_knows_a_name(bench)
        before = chat.messages
        answer = chat.oracle().think("What is my name?")
        assert "Ada" in answer.text, f"asked to think about the name, the oracle says {answer.text!r}"
        assert answer.reasoning, "the oracle was asked to think, and gives no reasoning"
        assert answer.reasoning not in answer.text, f"the reasoning is in the answer: {answer.text!r}"
        assert "think>" not in answer.text + answer.reasoning, "tags around the reasoning are in the text"
        assert chat.messages == before, "the oracle's question is in the chat"

    def test_extract(self, bench: Bench) -> None:
        """Oracle: ``extract`` gives a value that fits the schema, whatever the model would answer."""
        oracle, name = _chat_that_knows_a_name(bench).oracle(), {"type": "string"}
        schema = {"type": "object", "properties": {"name": name}, "required": ["name"]}
        extracted = oracle.extract(schema)
        assert extracted.value == {"name": "Ada"}, f"of what it was told, the oracle extracts {extracted.value!r}"
        assert json.loads(extracted.text) == extracted.value, f"the text of a value is {extracted.text!r}"
        assert extracted.answer.text == extracted.text, f"the answer with a value is {extracted.answer!r}"
        other_schema = {
            **schema,
            "properties": {"name": {"enum": [7, 8]}, "shoe": {"type": "boolean"}},
            "required": ["shoe"],
        }
        forced = oracle.extract(other_schema).value
        assert isinstance(forced, dict), f"under a schema for objects, the oracle extracts {forced!r}"
        fitting = isinstance(forced.get("shoe"), bool) and forced.get("name", 7) in (7, 8)
        assert fitting, f"under a schema for a number and a truth value, the oracle extracts {forced!r}"


def _no_trace(bench: Bench, ask: Callable[[Chat], None]) -> None:
    for n_seq_max, where in ((3, "with sequences to spare"), (1, "with no sequence to spare")):
        chat = chat_of(bench, n_seq_max=n_seq_max)
        row = next_row(chat.session)
        before = (chat.messages, chat.session.tokens, contents_of(chat.session.context))
        ask(chat)
        after = (chat.messages, chat.session.tokens, contents_of(chat.session.context))
        assert after == before, f"an oracle {where} changed messages, tokens or lengths"
        bench.same(next_row(chat.session), row, f"the next logits after an oracle {where}")
        more = bench.tokens(4)
        chat.session.append_tokens(more)
        bench.agree(next_row(chat.session), fresh_row(bench, chat.session), f"4 tokens after an oracle {where}")


def _prompt(bench: Bench, question: str) -> list[int]:
    """The tokens of the chat and a question."""
    return encode_segments(bench.vocab, bench.formatter.render((*SAID, Message(Role.USER, question))))


def _check_choice(bench: Bench, chat: Chat, choices: Sequence[str] | type[Enum]) -> None:
    """Require that the oracle chooses the likeliest option, with the reference's probabilities."""
    choice = chat.oracle().choose("is it", choices)
    options: list[Any] = list(choices)
    scores, slack = _scores(bench, "is it", [each.value if isinstance(each, Enum) else each for each in options])
    best = choice.probabilities.index(max(choice.probabilities))
    assert choice.value == options[best], f"it chose {choice.value!r}, but says that {options[best]!r} is likelier"
    assert abs(sum(choice.probabilities) - 1) < 1e-9, f"the probabilities of {options} are {choice.probabilities}"
    logprobs = np.log(choice.probabilities)
    excess = np.abs((logprobs - logprobs[0]) - (scores - scores[0])) - slack - slack[0]
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"{options[worst]!r} is said to be {logprobs[worst] - logprobs[0]:.4f} likelier than {options[0]!r} (natural"
        f" logarithm); by the reference it is {scores[worst] - scores[0]:.4f}"
    )


def _scores(bench: Bench, question: str, options: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The reference's log probability of each option as the whole answer, and its error bound."""
    prompt = _prompt(bench, question)
    scores, slack = [], []
    for option in options:
        tokens = bench.vocab.encode(option, add_special=False, parse_special=False)
        rows = bench.reference().decode([*prompt, *tokens])[len(prompt) - 1 :]
        shares = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        end = np.logaddexp.reduce(shares[-1, sorted(bench.vocab.eog_ids)])
        scores.append(shares[np.arange(len(tokens)), tokens].sum() + end)
        # Each log probability is off by at most two gaps (see Tolerance.gap).
        slack.append(2 * bench.tolerance.gap * np.linalg.norm(rows, axis=1).sum() + 1e-5)
    return np.array(scores), np.array(slack)


def _chat_that_knows_a_name(bench: Bench) -> Chat:
    chat = chat_of(bench, (), options=GREEDY_CHAT)
    chat.send("My name is Ada.")
    return chat
