"""Chats and oracles over the backend's contexts; what the demo model knows, and forgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from slm_conformance.bench import Bench, held
from slm_conformance.scenarios.base import Scenarios
from slm_conformance.scenarios.sessions import cut_row, fresh_row, next_row
from slm_core.chat import Chat, ChatOptions, Session
from slm_core.errors import InvalidOption, OracleError
from slm_core.generation import BrakeAction, Draft, Event
from slm_core.loading import LoadedModel
from slm_core.sampling import Sampling
from slm_core.types import EditLevel, Message, Role

GREEDY = Sampling(temperature=0, max_tokens=6)
SAID = (
    Message(Role.USER, "hi"),
    Message(Role.ASSISTANT, "hello you"),
    Message(Role.USER, "is it on"),
    Message(Role.ASSISTANT, "it is"),
)


class TestChat(Scenarios):
    """Chat: the messages are the truth, and the KV cache follows them."""

    def test_send(self, bench: Bench) -> None:
        """Chat: an answer becomes a message; the cache holds what the messages say."""
        chat = _chat(bench)
        answer = chat.send("the dog")
        assert [message.role for message in chat.messages[-2:]] == [Role.USER, Role.ASSISTANT], "no answer was added"
        assert chat.messages[-1].content == answer.text, "the last message is not the answer"
        bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits after an answer")

    def test_edit(self, bench: Bench) -> None:
        """Chat: after ``edit`` the chat is as if the message had always read so."""
        self._like_new(bench, lambda chat: chat.edit(1, "good day"), (*SAID[:1], _says("good day"), *SAID[2:]))

    def test_delete(self, bench: Bench) -> None:
        """Chat: after ``delete`` the chat is as if the message had never been."""
        self._like_new(bench, lambda chat: chat.delete(0), SAID[1:])
        self._like_new(bench, lambda chat: chat.delete(-1), SAID[:-1])

    def test_forget(self, bench: Bench) -> None:
        """Chat: ``forget`` cuts where the level is CUT and equals the reference's cut; below, it is a ``delete``."""
        chat = _chat(bench)
        chat.session.next_logits()
        before = chat.session.tokens
        level = chat.forget(1)
        assert level is bench.edit_level, f"at edit level {bench.edit_level.name}, forget says it was {level.name}"
        assert chat.messages == (SAID[0], *SAID[2:]), "forget(1) left other messages"
        after = chat.session.tokens
        if level is not EditLevel.CUT:
            bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits after forget")
            return
        start = next(i for i, token in enumerate(after) if token != before[i])
        end = start + len(before) - len(after)
        assert after == before[:start] + before[end:], "the tokens after forget are not those around the message"
        bench.agree(next_row(chat.session), cut_row(bench, before, start, end), "the next logits after forget, a cut")

    def test_regenerate(self, bench: Bench) -> None:
        """Chat: the last answer is taken back; a greedy one comes again."""
        chat = _chat(bench)
        first = chat.send("the dog")
        second = chat.regenerate().run()
        assert second.tokens == first.tokens, "regenerate gave another greedy answer"
        assert len(chat.messages) == len(SAID) + 2, "regenerate did not take the last answer back"

    def test_fork(self, bench: Bench) -> None:
        """Chat: a fork and its original go their own ways."""
        chat = _chat(bench)
        twin = chat.fork()
        twin.send("the cat")
        assert chat.messages == SAID, "what was said in a fork is in the original"
        bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits of the original")
        bench.agree(next_row(twin.session), fresh_row(bench, twin.session), "the next logits of the fork")

    def test_dump_and_restore(self, bench: Bench) -> None:
        """Chat: a dump goes on in a new context: messages, tokens and next logits are the same."""
        chat = _chat(bench)
        chat.session.next_logits()
        twin = Chat.restore(LoadedModel(bench.model, bench.formatter, "under test"), chat.dump())
        with twin:
            assert twin.messages == chat.messages, "a restored chat has other messages"
            assert twin.session.tokens == chat.session.tokens, "a restored chat has other tokens"
            # A restored chat has a context of its own, with the backend's own KV type.
            bench.agree(
                next_row(twin.session), fresh_row(bench, twin.session), "a restored chat", bench.default_tolerance
            )

    @staticmethod
    def _like_new(bench: Bench, change: Callable[[Chat], None], messages: Sequence[Message]) -> None:
        chat = _chat(bench)
        chat.session.next_logits()
        change(chat)
        assert chat.messages == tuple(messages), "the chat holds other messages than the edit leaves"
        assert chat.session.tokens == _chat(bench, messages).session.tokens, "its tokens are not those of its messages"
        bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits after an edit")


class TestOracle(Scenarios):
    """Oracle: an answer that leaves no trace, in a fork and, where no sequence is left, in the chat's own."""

    def test_on_success(self, bench: Bench) -> None:
        """Oracle: ``ask`` and ``choose`` leave no trace, and answer the same twice."""

        def ask(chat: Chat) -> None:
            answers = [chat.oracle().ask("the dog", sampling=GREEDY).tokens for _ in range(2)]
            assert answers[0] == answers[1], "the same question got two greedy answers"
            choices = [chat.oracle().choose("is it", ["on", "in the dog"]) for _ in range(2)]
            assert choices[0].value == choices[1].value, "the same choice was made twice, differently"

        self._no_trace(bench, ask)

    def test_on_an_error(self, bench: Bench) -> None:
        """Oracle: nor does a question that fails."""

        def fail(chat: Chat) -> None:
            with bench.refused("choose between one option", InvalidOption):
                chat.oracle().choose("is it", ["on"])
            with pytest.raises(OracleError):
                # A greedy answer of a random model, or one about a dog, holds no such JSON.
                chat.oracle().extract({"type": "object", "required": ["x"], "properties": {"x": {"const": 17}}}, "no")

        self._no_trace(bench, fail)

    def test_on_a_raising_callback(self, bench: Bench) -> None:
        """Oracle: nor does a brake that raises after three tokens."""

        def raise_(event: Event, draft: Draft) -> BrakeAction:
            if len(draft.tokens) == 3 or event.token in bench.vocab.eog_ids:
                raise KeyError("a brake's own error")
            return BrakeAction.NEXT

        def ask(chat: Chat) -> None:
            with pytest.raises(KeyError):
                chat.oracle().ask("the dog", sampling=GREEDY, brakes=[raise_])

        self._no_trace(bench, ask)

    def test_on_cancel(self, bench: Bench) -> None:
        """Oracle: nor does an answer that is stopped as incomplete."""

        def ask(chat: Chat) -> None:
            chat.oracle().ask("the dog", sampling=GREEDY, brakes=[lambda event, draft: BrakeAction.STOP])

        self._no_trace(bench, ask)

    @staticmethod
    def _no_trace(bench: Bench, ask: Callable[[Chat], None]) -> None:
        for n_seq_max, where in ((3, "with sequences to spare"), (1, "with no sequence to spare")):
            chat = _chat(bench, n_seq_max=n_seq_max)
            row = next_row(chat.session)
            before = (chat.messages, chat.session.tokens, held(chat.session.context))
            ask(chat)
            after = (chat.messages, chat.session.tokens, held(chat.session.context))
            assert after == before, f"an oracle {where} changed messages, tokens or lengths"
            bench.agree(next_row(chat.session), row, f"the next logits after an oracle {where}")
            more = bench.tokens(4)
            chat.session.append_tokens(more)
            bench.agree(next_row(chat.session), fresh_row(bench, chat.session), f"4 tokens after an oracle {where}")


class TestMeaning(Scenarios):
    """What it is all for, on the demo model, which answers: told facts are known, and forgotten ones are not."""

    models = ("demo",)

    def test_what_was_told_is_known(self, bench: Bench) -> None:
        """Chat: a fact that was told is told again."""
        chat = self._told(bench)
        answer = chat.send("What is my name?").text
        assert "Ada" in answer, f"told that the name is Ada, the model says {answer!r}"

    def test_what_was_deleted_is_not_known(self, bench: Bench) -> None:
        """Chat: forgetting by recompute makes the model not know."""
        chat = self._told(bench)
        chat.delete(1)
        chat.delete(0)
        answer = chat.send("What is my name?").text
        assert "Ada" not in answer, f"after what it was told was deleted, the model says {answer!r}"

    def test_an_oracle_knows_the_chat(self, bench: Bench) -> None:
        """Oracle: it knows what the chat knows, and the chat does not know that it was asked."""
        chat = self._told(bench)
        choice = chat.oracle().choose("What is my name?", ["Your name is Bob.", "Your name is Ada."])
        assert "Ada" in choice.value, f"asked to choose, the oracle chooses {choice.value!r}"
        assert len(chat.messages) == 2, "the oracle's question is in the chat"

    def test_a_dump_knows_what_was_told(self, bench: Bench) -> None:
        """Chat: what was told is known where a dump goes on."""
        twin = Chat.restore(LoadedModel(bench.model, bench.formatter, "under test"), self._told(bench).dump())
        with twin:
            answer = twin.send("What is my name?").text
        assert "Ada" in answer, f"told before it was dumped that the name is Ada, the model says {answer!r}"

    @staticmethod
    def _told(bench: Bench) -> Chat:
        chat = _chat(bench, (), options=ChatOptions(Sampling(temperature=0, max_tokens=40)))
        chat.send("My name is Ada.")
        return chat


def _chat(
    bench: Bench, messages: Sequence[Message] = SAID, *, n_seq_max: int = 3, options: ChatOptions | None = None
) -> Chat:
    session = Session(bench.context(n_ctx=192, n_seq_max=n_seq_max), bench.vocab)
    return Chat(session, bench.formatter, messages=messages, options=options or ChatOptions(GREEDY))


def _says(text: str) -> Message:
    return Message(Role.ASSISTANT, text)
