"""Chats over the backend's contexts: turns, edits, forks, dumps, and messages that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.factories import FAMILIES
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM, cut_row, fresh_row, next_row
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.chat.overflow import Overflow, Summarize
from slm_core.constraints import Regex, compile  # noqa: A004  (as in re.compile)
from slm_core.container import pack, unpack
from slm_core.errors import ChatBusy, ContextClosed, ContextFull, InvalidOption, InvalidSnapshot, SessionError, SlmError
from slm_core.formatting import formatter
from slm_core.generation import Answer, Draft, Event, FinishReason, StoppingAction
from slm_core.generation.events import Overflowed
from slm_core.protocols import Context, Formatter, Vocab
from slm_core.sampling import LogitsProcessor, Sampling
from slm_core.types import ContextOptions, EditLevel, KvType, Message, Role

GREEDY = Sampling(temperature=0, max_tokens=6)
SAID = (
    Message(Role.USER, "hi"),
    Message(Role.ASSISTANT, "hello you"),
    Message(Role.USER, "is it on"),
    Message(Role.ASSISTANT, "it is"),
)

TURNS = (Role.USER, Role.ASSISTANT) * 4
ODD = (
    "two  spaces",
    "a\nline\n\nmore",
    "{{ bos_token }}{% if %}",
    "\\n \\",
    "é 🙂 日本",
    "\"quoted\" 'so'",
    "<b>&amp;</b>",
    "\t",
)
"""Texts that templates and escaping often get wrong."""

NUMBERED = (
    "{% for message in messages %}{{ loop.index }}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content }}{{ '<|im_end|>\n' }}{% endfor %}"
)
"""A format that numbers each message."""

LOOK: dict[str, object] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A format that takes messages of any roles, in any order."""


class TestChat(Scenarios):
    """Chat: the messages are the truth, and the KV cache follows them."""

    above_contract = True
    families = tuple(FAMILIES)

    def test_send(self, bench: Bench) -> None:
        """Chat: an answer becomes a message; the next call decodes only the tokens that the cache lacks."""
        chat = chat_of(bench)
        for text in ("the dog", "you"):
            chat.session.next_logits()
            before = chat.session.tokens
            answer = chat.send(text)
            assert [m.role for m in chat.messages[-2:]] == [Role.USER, Role.ASSISTANT], "no answer was added"
            assert chat.messages[-1].content == answer.text, "the last message is not the answer"
            shared = n_shared_tokens(before, chat.session.tokens[: answer.usage.prompt_tokens])
            if shared == len(before) or bench.edit_level >= EditLevel.TRUNCATE:
                cached = answer.usage.cached_tokens
                assert cached == shared, f"{shared} tokens of the prompt were held, but {cached} were used"
            bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits after an answer")

    def test_stream(self, bench: Bench) -> None:
        """Chat: while an answer streams, its message holds the text so far; the events join to the whole text.

        Other threads are refused until the answer is over.
        """
        chat, text = chat_of(bench), ""
        observed: list[Event] = []
        stream = chat.stream("the dog", on_event=observed.append)
        assert chat.messages == (*SAID, Message(Role.USER, "the dog"), _says("")), "a turn does not begin with its call"
        assert isinstance(_in_a_thread(chat.fork), ChatBusy), "another thread may use a chat whose turn has begun"
        for event in stream:
            text += event.text
            assert chat.messages[-1] == _says(text), "while an answer streams, the last message is not what was said"
            if not stream.over:
                refusal = _in_a_thread(chat.fork)
                assert isinstance(refusal, ChatBusy), f"a call of another thread meanwhile: {refusal!r}"
                with bench.refused("the whole answer of a stream that is not over", SessionError):
                    _ = stream.answer
        assert stream.answer.text == text == chat.messages[-1].content, "an answer is not what was streamed of it"
        assert "".join(event.text for event in observed) == text, "on_event was called with other events than were read"
        assert len(chat.messages) == len(SAID) + 2, "a call that was refused changed the messages"
        assert _in_a_thread(chat.fork) is None, "a call of another thread after the answer was refused"
        again = chat.regenerate().run().tokens
        prompt = chat.session.tokens[: stream.answer.usage.prompt_tokens]
        bench.same_choices(prompt, stream.answer.tokens, again, "an answer, and another one to the same messages")

    def test_an_answer_that_raises(self, bench: Bench) -> None:
        """Chat: if a stopping criterion raises, the chat is as it was before the question."""
        chat = chat_of(bench)
        before = (chat.messages, chat.session.tokens)
        stream = chat.stream("the dog", stopping_criteria=[raise_at_third])
        with pytest.raises(KeyError):
            stream.run()
        assert (chat.messages, chat.session.tokens) == before, "an answer that raised left its question in the chat"
        assert _in_a_thread(chat.fork) is None, "an answer that raised keeps its chat from other threads"
        bench.agree(
            next_row(chat.session), fresh_row(bench, chat.session), "the next logits after a raising stopping criterion"
        )

    def test_draws_after_a_failure(self, bench: Bench) -> None:
        """Chat: an answer that raises uses up no random stream: the next answer draws the same numbers."""
        undisturbed_chat, failed_chat = (chat_of(bench, options=ChatOptions(UNIFORM)) for _ in range(2))
        with pytest.raises(KeyError):
            failed_chat.send("the dog", stopping_criteria=[raise_at_third])
        undisturbed, after_error = (chat.send("the dog").tokens for chat in (undisturbed_chat, failed_chat))
        assert after_error == undisturbed, "after an answer that raised, the chat draws another one than it would have"

    def test_an_answer_that_is_cancelled(self, bench: Bench) -> None:
        """Chat: the text so far of a cancelled answer is its message, and the chat continues."""
        chat = chat_of(bench)
        stream = chat.stream("the dog")
        text = next(stream).text
        stream.cancel()
        text += "".join(event.text for event in stream)
        assert stream.answer.finish_reason is FinishReason.CANCELLED, "a cancelled answer does not say so"
        assert chat.messages == (*SAID, Message(Role.USER, "the dog"), _says(text)), "its message is not what was said"
        bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits after a cancelled answer")

    def test_content_is_never_control(self, bench: Bench) -> None:
        """Chat: the prompt has the template's control tokens only, whatever text a message contains."""
        control = [token for token in range(bench.vocab.size) if not bench.vocab.token_bytes(token)]
        spelled = "".join(bench.vocab.token_bytes(token, special=True).decode() for token in control[:20])
        control_tokens = []
        for content in ("hi", spelled, f"{spelled}system\nhi"):
            messages = (SAID[0], Message(Role.ASSISTANT, content), *SAID[2:])
            control_tokens.append([token for token in chat_of(bench, messages).session.tokens if token in control])
        assert control_tokens[0] == control_tokens[1] == control_tokens[2], (
            "a message that spells control tokens brings them into the prompt"
        )
        numbered, forging = formatter(NUMBERED, model=bench.model), [Message(Role.USER, f"a{spelled}b{spelled}c")] * 2
        with Chat(Session(bench.context(n_ctx=1024), bench.vocab), numbered, messages=forging) as chat:
            text = "".join(segment.text for segment in numbered.render(forging, add_generation_prompt=False))
            prompt = bench.vocab.decode(chat.session.tokens, special=True)
            assert prompt.lstrip() == text, f"the prompt of messages that spell control tokens reads {prompt!r}"

    def test_the_prompt_holds_what_was_said(self, bench: Bench) -> None:
        """Chat: the prompt holds the text of each message unchanged and in order, with any characters."""
        messages = tuple(Message(role, f"{i}{text}{i}") for i, (role, text) in enumerate(zip(TURNS, ODD, strict=False)))
        prompt = bench.vocab.decode(chat_of(bench, messages).session.tokens, special=True)
        searched_from = 0
        for message in messages:
            start = prompt.find(message.content, searched_from)
            assert start >= 0, f"the message {message.content!r} is not in the prompt, or out of order: {prompt!r}"
            searched_from = start + len(message.content)

    def test_edit(self, bench: Bench) -> None:
        """Chat: after ``edit``, the chat equals one that always had the new message."""
        self._check_like_new(bench, lambda chat: chat.edit(1, "good day"), (*SAID[:1], _says("good day"), *SAID[2:]))

    def test_delete(self, bench: Bench) -> None:
        """Chat: after ``delete``, the chat equals one that never had the message."""
        self._check_like_new(bench, lambda chat: chat.delete(0), SAID[1:])
        self._check_like_new(bench, lambda chat: chat.delete(-1), SAID[:-1])

    def test_forget(self, bench: Bench) -> None:
        """Chat: ``forget`` cuts at level CUT, like the reference; below that level it works like ``delete``."""
        quiet = formatter(f"{{% if messages[0].role == 'user' %}}{PLAIN}{{% endif %}}", model=bench.model)
        with Chat(Session(bench.context(), bench.vocab), quiet, system="be") as chat:
            assert chat.forget(0) is bench.edit_level, "forget of a message that the format leaves out is another edit"
            assert chat.messages == (), "forget left the only message"
        chat = chat_of(bench)
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
        assert after == before[:start] + before[end:], "the tokens after forget are not the tokens around the message"
        bench.agree(next_row(chat.session), cut_row(bench, before, start, end), "the next logits after forget, a cut")

    def test_forget_what_does_not_fit(self, bench: Bench) -> None:
        """Chat: if the format makes messages depend on each other, ``forget`` leaves the tokens of a new chat."""
        numbered = formatter(NUMBERED, model=bench.model)
        session = Session(bench.context(), bench.vocab)
        with Chat(session, numbered, messages=SAID, options=ChatOptions(GREEDY)) as chat:
            session.next_logits()
            level = chat.forget(1)
            assert level < EditLevel.CUT, "forget says that it cut, where the messages that are left read otherwise"
            assert chat.messages == (SAID[0], *SAID[2:]), "forget(1) left other messages"
            rendered = encode_segments(bench.vocab, numbered.render(chat.messages, add_generation_prompt=False))
            assert session.tokens == tuple(rendered), (
                "after forget, the chat's tokens are not the tokens of its messages"
            )
            bench.agree(next_row(session), fresh_row(bench, session), "the next logits after forget, computed again")

    def test_regenerate(self, bench: Bench) -> None:
        """Chat: ``regenerate`` replaces the last answer: greedy answers repeat if they are clear, drawn ones differ.

        The end of the prompt is decoded again, in another batch (clause 16).
        """
        for options in (ChatOptions(GREEDY), ChatOptions(UNIFORM)):
            chat = chat_of(bench, options=options)
            first = chat.send("the dog")
            second = chat.regenerate().run()
            prompt = chat.session.tokens[: second.usage.prompt_tokens]
            if options.sampling.temperature == 0:
                bench.same_choices(prompt, first.tokens, second.tokens, "a greedy answer and the regenerated one")
            else:
                assert second.tokens != first.tokens, "a drawn answer was regenerated with the same draws"
            assert len(chat.messages) == len(SAID) + 2, "regenerate did not take the last answer back"
        plain = formatter(PLAIN, model=bench.model)
        for messages in ((), (Message(Role.SYSTEM, "be"),), (_says("hi"),), (Message(Role.SYSTEM, "be"), _says("hi"))):
            with Chat(Session(bench.context(), bench.vocab), plain, messages=messages) as chat:
                for call in (chat.regenerate, chat.proceed):
                    with bench.refused(f"{call.__name__} after {messages}", SessionError, context=chat.session.context):
                        call()
                assert chat.messages == messages, "what was refused changed the messages"

    def test_overflow(self, bench: Bench) -> None:
        """Chat: if messages and answer do not fit, a policy drops the fewest oldest turns that suffice, and says so.

        The system message and the last turn stay. "shift" cuts at level CUT: then later tokens keep their values.
        """
        plain = formatter(PLAIN, model=bench.model)
        system, question, n_answer = Message(Role.SYSTEM, "be"), Message(Role.USER, "on"), 4
        turns = tuple(Message(role, f"{i} {role}") for i, role in enumerate(TURNS))

        def encoded(*messages: Message, asks: bool = True) -> list[int]:
            return encode_segments(bench.vocab, plain.render(messages, add_generation_prompt=asks))

        n_all = len(encoded(system, *turns, question))
        for named in ("shift", "truncate_middle"):
            with _overflowing(bench, n_all + n_answer, plain, (system, *turns), named) as chat:
                answer = chat.send(question, max_tokens=n_answer)
                assert answer.overflowed is None, f"{named} dropped messages, although they and the answer fit"
        with _overflowing(bench, n_all - 1, plain, (system, *turns), "error") as chat:
            with bench.refused("one position too few", ContextFull):
                chat.send(question)
            assert chat.messages == (system, *turns), "messages that do not fit changed the chat"
        for unknown in ("summarize", "drop"):
            with bench.refused(f"the policy {unknown!r}", InvalidOption):
                ChatOptions(GREEDY, overflow=unknown)
        with bench.refused("a summary that is no function", InvalidOption):
            Summarize("the end")  # type: ignore[arg-type]
        summarize = Summarize(lambda dropped: _says(f"{len(dropped)} of them"))
        cases: tuple[tuple[tuple[Message, ...], Overflow], ...] = (
            ((system,), "shift"),
            ((), "shift"),
            ((system,), "truncate_middle"),
            ((), summarize),
        )
        for first, policy in cases:
            n_ctx = len(encoded(*first, *turns, question)) + n_answer - 1
            most = n_ctx - n_answer if policy == "shift" else n_ctx // 2
            n = next(i for i in (2, 4, 6, 8) if len(encoded(*first, *turns[i:], question)) <= most)
            summary = () if isinstance(policy, str) else (_says(f"{n} of them"),)
            with _overflowing(bench, n_ctx, plain, (*first, *turns), policy) as chat:
                next_row(chat.session)
                before = chat.session.tokens
                answer = chat.send(question, max_tokens=n_answer)
                remaining = (*first, *summary, *turns[n:], question)
                assert chat.messages == (*remaining, _says(answer.text)), f"{policy} kept {chat.messages}"
                level = min(bench.edit_level, EditLevel.CUT if policy == "shift" else EditLevel.TRUNCATE)
                name = policy if isinstance(policy, str) else "summarize"
                n_dropped = len(encoded(*first, *turns, question)) - len(encoded(*remaining))
                report = Overflowed(name, turns[:n], next(iter(summary), None), n_dropped, level)
                assert answer.overflowed == report, f"{policy} reports {answer.overflowed}, not {report}"
                expected = fresh_row(bench, chat.session)
                if level is EditLevel.CUT:
                    after = encoded(*first, *turns[n:], asks=False)
                    start, reference = n_shared_tokens(before, after), bench.reference()
                    reference.decode(before)
                    reference.cut(start, start + len(before) - len(after))
                    expected = reference.decode(chat.session.tokens[len(after) :])[-1:]
                bench.agree(next_row(chat.session), expected, f"the next logits after {name}")
        _check_a_question_that_fills(bench, plain)

    def test_fork(self, bench: Bench) -> None:
        """Chat: a fork and its original do not affect each other."""
        chat = chat_of(bench)
        tokens = chat.session.tokens
        fork = chat.fork()
        fork.send("the cat")
        assert chat.messages == SAID, "what was said in a fork is in the original"
        assert chat.session.tokens == tokens, "what was said in a fork is in the original's tokens"
        assert len(fork.messages) == len(SAID) + 2, "a fork does not begin with the original's messages"
        for either, name in ((chat, "the original"), (fork, "the fork")):
            bench.agree(next_row(either.session), fresh_row(bench, either.session), f"the next logits of {name}")

    def test_a_fork_draws_on(self, bench: Bench) -> None:
        """Chat: a fork has the original's options, and answers with the original's next draws."""
        chat = chat_of(bench, n_ctx=512, options=ChatOptions(UNIFORM))  # room for both, even if forks are copies
        first = chat.send("the dog").tokens
        fork = chat.fork()
        assert fork.options == chat.options, "a fork has other options than its original"
        original_tokens, fork_tokens = (either.send("you").tokens for either in (chat, fork))
        assert fork_tokens == original_tokens, "a fork continues with other draws than its original"
        assert fork_tokens != first, "a fork repeats the draws of an answer that was given before"

    def test_options_of_one_answer(self, bench: Bench) -> None:
        """Chat: each way to answer takes options of the answer, which replace those of the chat this time only."""
        question, rule = Message(Role.USER, "on"), compile(Regex("ab"), bench.vocab)
        ways: dict[str, Callable[..., Answer]] = {
            "send": lambda chat, **options: chat.send(question, **options),
            "stream": lambda chat, **options: chat.stream(question, **options).run(),
            "proceed": lambda chat, **options: chat.proceed(**options).run(),
            "regenerate": lambda chat, **options: chat.regenerate(**options).run(),
        }
        cases: tuple[dict[str, Any], ...] = (
            {"max_tokens": 2, "seed": 7},
            {"max_tokens": 4, "temperature": 0.8, "top_p": 0.3, "timeout": 600.0},
        )
        for name, way in ways.items():
            asked = (*SAID, question) if name in ("proceed", "regenerate") else SAID
            chat, other = (chat_of(bench, asked, options=ChatOptions(UNIFORM)) for _ in range(2))
            for options in cases:
                sampling_options = {option: value for option, value in options.items() if option != "timeout"}
                expected = way(other, sampling=replace(UNIFORM, **sampling_options)).tokens
                tokens = way(chat, **options).tokens
                assert tokens == expected, (
                    f"{name} with {options} draws {tokens}; with one Sampling of them, {expected}"
                )
                for each in (chat, other):
                    _shorten(each, len(asked))
            text = way(chat, max_tokens=2, logits_processors=[_only(bench.vocab, "a")]).text
            assert text == "aa", f"{name} with a logits processor that leaves 'a' alone says {text!r}"
            _shorten(chat, len(asked))
            text = way(chat, constraint=rule).text
            assert text == "ab", f"{name} with a constraint to 'ab' says {text!r}"
            assert chat.options == ChatOptions(UNIFORM), (
                f"options of one answer of {name} changed the options of the chat"
            )

    def test_dump_and_restore(self, bench: Bench) -> None:
        """Chat: a restored dump has the same messages, tokens and draws; its next logits are within tolerance.

        The two decode the prompt in other batches (clause 16).
        """
        chat = chat_of(bench, options=ChatOptions(UNIFORM))
        chat.send("the dog")
        model, path = BenchModel(bench), bench.directory / "chat.slm"
        chat.save(path)
        with Chat.load(model, path, n_ctx=900, overflow="shift", tools=[LOOK]) as restored:
            assert model.requested[-1].n_ctx == 900, f"n_ctx=900 was requested, not {model.requested[-1].n_ctx}"
            options = replace(chat.options, overflow="shift", tools=(LOOK,))
            assert restored.options == options, f"a chat loaded with other options has {restored.options}"
            assert restored.messages == chat.messages, "a loaded chat has other messages"
        assert _is_closed(model.contexts[-1]), "a loaded chat leaves its context open"
        context = bench.context_with(ContextOptions(64, 1, 16))  # with the backend's KV types
        with Chat(Session(context, bench.vocab), model.formatter, options=ChatOptions(GREEDY)) as empty:
            Chat.restore(model, empty.dump()).close()
            assert model.requested[-1] == ContextOptions(64, 1, 16), f"its context is {model.requested[-1]}"
            Chat.restore(model, empty.dump(), kv_type_k=bench.kv_type, kv_type_v=bench.kv_type).close()
            assert model.requested[-1] == ContextOptions(64, 1, 16, bench.kv_type, bench.kv_type), "KV types are lost"
            meta, sections = unpack("chat", empty.dump())
            for types in ((bench.kv_type, None), (None, bench.kv_type)):
                with suppress(SlmError):  # a backend may refuse the types
                    Chat.restore(model, pack("chat", {**meta, "kv_types": types}, sections)).close()
                assert model.requested[-1] == ContextOptions(64, 1, 16, *types), "types of keys and values are swapped"
            for sizes in (
                [64, 0, 16],
                [64, 4097, 16],
                [64, 1, 0],
                [64, 1, 16385],
                [0, 1, 16],
                [10**6, 1, 16],
                [64, 1],
                [],
            ):
                with bench.refused(f"a dump of a chat in a context of {sizes}", InvalidSnapshot):
                    Chat.restore(model, pack("chat", {**meta, "context": sizes}, sections))
            with bench.refused("a dump of a chat with an unknown overflow policy", InvalidSnapshot):
                Chat.restore(model, pack("chat", {**meta, "overflow": "spill"}, sections))
        with bench.refused("a chat in a context that is too small", ContextFull):
            Chat.restore(model, chat.dump(), n_ctx=chat.session.n_tokens - 1)
        assert _is_closed(model.contexts[-1]), "a chat that has no room leaves its context open"
        with Chat.restore(model, chat.dump()) as restored:
            assert restored.messages == chat.messages, "a restored chat has other messages"
            assert restored.options == chat.options, "a restored chat has other options"
            restored_options, original_options = restored.session.context.options, chat.session.context.options
            assert restored_options == original_options, (
                f"a chat in a context of {original_options} is restored in one of {restored_options}"
            )
            rendered = chat_of(bench, chat.messages).session.tokens
            assert restored.session.tokens == rendered, "a restored chat's tokens are not the tokens of its messages"
            bench.agree(
                next_row(restored.session), fresh_row(bench, restored.session), "the next logits of a restored chat"
            )
            original_tokens, restored_tokens = (either.send("you").tokens for either in (chat, restored))
            assert restored_tokens == original_tokens, "a restored chat continues with other draws"

    @staticmethod
    def _check_like_new(bench: Bench, change: Callable[[Chat], None], messages: Sequence[Message]) -> None:
        chat = chat_of(bench)
        chat.session.next_logits()
        change(chat)
        assert chat.messages == tuple(messages), "the chat holds other messages than the edit leaves"
        assert chat.session.tokens == chat_of(bench, messages).session.tokens, "its tokens are others than its messages"
        bench.agree(next_row(chat.session), fresh_row(bench, chat.session), "the next logits after an edit")


class BenchModel:
    """A model for ``Chat.restore``. Its contexts come from the bench and are recorded.

    Attributes:
        contexts: all contexts.
        requested: the options of each.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.info, self.vocab, self.formatter = bench.model.info, bench.vocab, bench.formatter
        self.contexts: list[Context] = []
        self.requested: list[ContextOptions] = []

    def new_context(
        self,
        *,
        n_ctx: int,
        n_seq_max: int,
        n_batch: int,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
    ) -> Context:
        """A context of the bench."""
        kv_types = (None if kind is None else KvType(kind) for kind in (kv_type_k, kv_type_v))
        self.requested.append(ContextOptions(n_ctx, n_seq_max, n_batch, *kv_types))
        self.contexts.append(self._bench.context_with(self.requested[-1]))
        return self.contexts[-1]


def n_shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shorten(chat: Chat, n_messages: int) -> None:
    while len(chat.messages) > n_messages:
        chat.delete(-1)


def _only(vocab: Vocab, letter: str) -> LogitsProcessor:
    """A logits processor that leaves one token, a letter."""
    token = vocab.encode(letter, add_special=False, parse_special=False)[-1]

    def leave(tokens: Sequence[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(np.arange(len(row)) == token, row, np.float32(-np.inf))

    return leave


def raise_at_third(event: Event, draft: Draft) -> StoppingAction:
    """Raise at the third token, or at the end of a shorter answer."""
    if len(draft.tokens) == 3 or event.text == "":
        raise KeyError("a stopping criterion's own error")
    return StoppingAction.NEXT


def chat_of(
    bench: Bench,
    messages: Sequence[Message] = SAID,
    *,
    n_ctx: int = 256,
    n_seq_max: int = 3,
    options: ChatOptions | None = None,
) -> Chat:
    """A chat in a context of its own, with the messages ``SAID`` by default."""
    session = Session(bench.context(n_ctx=n_ctx, n_seq_max=n_seq_max), bench.vocab)
    return Chat(session, bench.formatter, messages=messages, options=options or ChatOptions(GREEDY))


def _is_closed(context: Context) -> bool:
    try:
        context.clear()
    except ContextClosed:
        return True
    return False


def _check_a_question_that_fills(bench: Bench, chat_format: Formatter) -> None:
    """A policy drops all earlier turns for a question that fills the context, and refuses one token more."""
    before: tuple[Message, ...] = SAID[:1]
    question = Message(Role.USER, "on " * 20)
    n_ctx = len(encode_segments(bench.vocab, chat_format.render((question,))))
    for policy in ("shift", "truncate_middle"):
        with _overflowing(bench, n_ctx, chat_format, before, policy) as chat:
            with bench.refused("a question that leaves no room for a token", ContextFull):
                chat.send(question, max_tokens=1)
            assert chat.messages == before, "a question that does not fit changed the chat"
            answer = chat.send(question, max_tokens=0)
            assert answer.overflowed is not None, f"{policy} dropped messages and does not say so"
            assert chat.messages == (question, _says("")), f"{policy} kept {chat.messages}"


def _overflowing(
    bench: Bench, n_ctx: int, chat_format: Formatter, messages: Sequence[Message], policy: Overflow
) -> Chat:
    """A chat in a context of its own; a first, system message is passed as ``system``."""
    session, options = (
        Session(bench.context(n_ctx=n_ctx, n_seq_max=1), bench.vocab),
        ChatOptions(GREEDY, overflow=policy),
    )
    system, *others = messages
    if system.role is not Role.SYSTEM:
        return Chat(session, chat_format, messages=messages, options=options)
    return Chat(session, chat_format, system=system.content, messages=others, options=options)


def _in_a_thread(call: Callable[[], object]) -> Exception | None:
    """What a call raises in another thread; None if it returns."""
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(call).exception()
    assert error is None or isinstance(error, Exception), f"a call in another thread ended it: {error!r}"
    return error


def _says(text: str) -> Message:
    return Message(Role.ASSISTANT, text)
