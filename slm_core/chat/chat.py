"""A chat: a list of messages is the truth, and the KV cache follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import nan
from operator import index as as_index
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from slm_core.chat.messages import from_json, to_json
from slm_core.chat.prompt import encode_segments
from slm_core.chat.session import Session
from slm_core.chat.session_dump import read_sampling
from slm_core.errors import InvalidSnapshot, SessionError, SlmError
from slm_core.generation import Answer, Brake, Event, FinishReason, Generation
from slm_core.protocols import Context, Formatter, StreamParser, Vocab
from slm_core.sampling import SamplerChain, Sampling
from slm_core.snapshot import is_count, pack, unpack
from slm_core.types import Delta, EditLevel, Message, Role

if TYPE_CHECKING:
    from slm_core.chat.oracle import Oracle


# n_ctx, n_seq_max, n_batch: a forged dump must not make us reserve the machine's memory.
_LARGEST_CONTEXT = (2**22, 2**12, 2**16)


class ChatModel(Protocol):
    """What ``Chat.restore`` needs of a model: ``slm.load`` returns one."""

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        ...

    @property
    def formatter(self) -> Formatter:
        """The model's chat format."""
        ...

    def new_context(self, *, n_ctx: int, n_seq_max: int, n_batch: int) -> Context:
        """A new context."""
        ...


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What stays the same for all answers of a chat.

    Attributes:
        sampling: how to choose tokens.
        tools: JSON schemas of the tools that the model may call.
        thinking: ask for reasoning, or for none; None leaves it to the template.
    """

    sampling: Sampling
    tools: tuple[Mapping[str, object], ...] = ()
    thinking: bool | None = None


class ChatStream(Iterator[Event]):
    """An answer of a chat in the making: iterate for its events, then ask for ``answer``.

    Attributes:
        said: its content so far.
    """

    def __init__(
        self,
        generation: Generation,
        parser: StreamParser,
        finished: Callable[[Message], None],
        failed: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._parser = parser
        self._finished = finished
        self._failed = failed
        self._answer: Answer | None = None
        self.said = ""

    @property
    def answer(self) -> Answer:
        """The whole answer, its reasoning and tool calls told apart.

        Raises:
            SessionError: it is not over yet.
        """
        return self._answer if self._answer is not None else self._generation.answer

    @property
    def over(self) -> bool:
        """Whether the answer is whole."""
        return self._answer is not None

    def cancel(self) -> None:
        """End it as soon as possible, from any thread; what was said so far becomes the answer."""
        self._generation.cancel()

    @property
    def paused(self) -> bool:
        """Whether a brake paused it."""
        return self._generation.paused

    def resume(self, brakes: Sequence[Brake] | None = None) -> Self:
        """Go on after a pause, as if there had been none; with the same brakes unless others are given."""
        self._generation.resume(brakes)
        return self

    def run(self) -> Answer:
        """Iterate to the end; returns the answer."""
        for _ in self:
            pass
        return self.answer

    def __next__(self) -> Event:
        if self._answer is not None or self.paused:
            raise StopIteration
        try:
            event = next(self._generation, None)
        except BaseException:
            self._failed()
            raise
        deltas = [] if event is None else self._parser.feed(event.text)
        if self._generation.finished:
            deltas += self._end()
        if event is None and not deltas:
            raise StopIteration
        token, logprob = (None, nan) if event is None else (event.token, event.logprob)
        text = _joined(deltas, "content")
        self.said += text
        return Event(token, text, logprob, _joined(deltas, "reasoning"))

    def _end(self) -> list[Delta]:
        deltas, message = self._parser.finish()
        raw = self._generation.answer
        called = message.tool_calls and raw.finish_reason is FinishReason.STOP
        self._answer = replace(
            raw,
            text=message.content,
            reasoning=message.reasoning,
            tool_calls=message.tool_calls,
            finish_reason=FinishReason.TOOL_CALLS if called else raw.finish_reason,
        )
        self._finished(message)
        return deltas


class Chat:
    """A conversation. After each change all messages are rendered, and what the KV cache shares with that is kept.

    Args:
        session: holds the tokens; closed with the chat. What it holds already is kept as far as the messages agree.
        formatter: the model's chat format.
        system: content of a first, system message.
        messages: what was said before.
        options: sampling, tools, thinking; the session's sampling where None.
        n_answers: answers given before: each one draws from a stream of its own.

    Raises:
        TemplateError: the chat format refuses the messages.
        ContextFull: they do not fit.
    """

    def __init__(
        self,
        session: Session,
        formatter: Formatter,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        options: ChatOptions | None = None,
        n_answers: int = 0,
    ) -> None:
        self.session = session
        self.formatter = formatter
        self.options = options if options is not None else ChatOptions(session.sampling)
        first = () if system is None else (Message(Role.SYSTEM, system),)
        self._messages: tuple[Message, ...] = ()
        self._stream: ChatStream | None = None
        self._n_answers = n_answers
        self._become((*first, *messages))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, with what was said so far of an answer that streams; a system message is number 0."""
        if self._stream is None:
            return self._messages
        return (*self._messages, Message(Role.ASSISTANT, self._stream.said))

    # Talking.

    def stream(self, content: str | Message, *, brakes: Sequence[Brake] = ()) -> ChatStream:
        """Say something (a string is a user's message) and stream the answer.

        If the answer raises, the chat is as it was before.

        Raises:
            TemplateError: the chat format refuses the message.
            ContextFull: no room; nothing changed.
        """
        self._settle()
        said = Message(Role.USER, content) if isinstance(content, str) else content
        return self._reply((*self._messages, said), brakes)

    def send(self, content: str | Message, *, brakes: Sequence[Brake] = ()) -> Answer:
        """Say something; returns the whole answer."""
        return self.stream(content, brakes=brakes).run()

    def regenerate(self, *, brakes: Sequence[Brake] = ()) -> ChatStream:
        """Take the last answer back and stream another; with temperature, another draw.

        Raises:
            SessionError: there is nothing to answer.
        """
        self._settle()
        asked = self._messages
        while asked and asked[-1].role is Role.ASSISTANT:
            asked = asked[:-1]
        if not asked or asked[-1].role is Role.SYSTEM:
            raise SessionError("there is nothing to answer: send a message first")
        return self._reply(asked, brakes)

    def oracle(self) -> Oracle:
        """Questions about this chat that leave no trace in it."""
        from slm_core.chat.oracle import Oracle

        return Oracle(self)

    # Editing.

    def edit(self, i: int, content: str) -> None:
        """Replace the content of message ``i``; what follows is computed again when it is needed."""
        self._settle()
        messages = list(self._messages)
        i = self._checked_index(i)
        messages[i] = replace(messages[i], content=content)
        self._become(tuple(messages))

    def delete(self, i: int) -> None:
        """Take message ``i`` out; what follows is computed again when it is needed."""
        self._settle()
        messages = list(self._messages)
        del messages[self._checked_index(i)]
        self._become(tuple(messages))

    def forget(self, i: int) -> EditLevel:
        """Take message ``i`` out of the KV cache without computing anything again: what follows keeps what it saw.

        Returns:
            CUT where that was done; TRUNCATE or REPLAY where the context, or a template in which messages depend
            on each other, leaves only what ``delete`` does.
        """
        self._settle()
        messages = list(self._messages)
        before = self._encode(messages)
        del messages[self._checked_index(i)]
        after = self._encode(messages)
        self.session.follow(before)
        start, end = _removed_span(before, after)
        if end < start or before[:start] + before[end:] != after:
            self._become(tuple(messages))
            return min(self.session.context.edit_level, EditLevel.TRUNCATE)
        level = self.session.remove_span(start, end)
        self._messages = tuple(messages)
        return level

    # Copies.

    def fork(self) -> Chat:
        """An independent copy in another sequence of the same context."""
        self._settle()
        return Chat(
            self.session.fork(),
            self.formatter,
            options=self.options,
            messages=self._messages,
            n_answers=self._n_answers,
        )

    def dump(self) -> bytes:
        """Everything: messages, options, and the session with its KV cache."""
        self._settle()
        context = self.session.context
        meta = {
            "messages": [to_json(message) for message in self._messages],
            "sampling": self.options.sampling.to_dict(),
            "tools": list(self.options.tools),
            "thinking": self.options.thinking,
            "n_answers": self._n_answers,
            "context": [context.n_ctx, context.n_seq_max, context.n_batch],
        }
        return pack("chat", meta, (self.session.dump(),))

    @classmethod
    def restore(cls, model: ChatModel, data: bytes) -> Self:
        """A chat that goes on where a dumped one stood, in a new context of ``model``; on another backend, too.

        Raises:
            InvalidSnapshot, SnapshotMismatch: damaged bytes, or of another model.
        """
        state = _read_dump(data)
        n_ctx, n_seq_max, n_batch = state.context
        context = model.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        try:
            session = Session.restore(context, model.vocab, state.session, owns_context=True)
            chat = cls(
                session, model.formatter, options=state.options, messages=state.messages, n_answers=state.n_answers
            )
        except BaseException:
            context.close()
            raise
        return chat

    def close(self) -> None:
        """Forget everything and give the sequence back. Twice is fine."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def detour(self, question: str, *, thinking: bool | None = None) -> Iterator[Session]:
        """A session in which ``question`` was asked and the answer is about to begin; leaves no trace in the chat."""
        self._settle()
        asked = (*self._messages, Message(Role.USER, question))
        ids = self._encode(asked, add_generation_prompt=True, thinking=thinking)
        with self.session.detour() as session:
            session.follow(ids)
            yield session

    # Steps that several calls share.

    def _reply(self, asked: tuple[Message, ...], brakes: Sequence[Brake]) -> ChatStream:
        """Stream an answer to ``asked``; the chat takes it over as it begins."""
        before = self._messages
        self.session.follow(self._encode(asked, add_generation_prompt=True, thinking=self.options.thinking))
        self._messages = asked
        self._n_answers += 1

        def finished(message: Message) -> None:
            self._messages = (*asked, message)
            self._stream = None

        def failed() -> None:
            self._messages = before
            self._stream = None
            with suppress(SlmError):  # the cache follows again at the next call; the first error is the one to show
                self.session.follow(self._encode(before))

        sampling = replace(self.options.sampling, stop=(*self.options.sampling.stop, *self.formatter.stops))
        chain = SamplerChain(sampling, stream=self._n_answers)
        generation = self.session.generate(sampling, brakes=brakes, sampler=chain, special=True)
        parser = self.formatter.stream_parser(thinking=self.options.thinking)
        self._stream = ChatStream(generation, parser, finished, failed)
        return self._stream

    def _settle(self) -> None:
        """An answer that nobody iterates any more ends here: what was said so far becomes the answer."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream.resume().run()

    def _become(self, messages: tuple[Message, ...]) -> None:
        self.session.follow(self._encode(messages))
        self._messages = messages

    def _encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, thinking: bool | None = None
    ) -> list[int]:
        if not messages:
            return []
        segments = self.formatter.render(
            messages, tools=self.options.tools, add_generation_prompt=add_generation_prompt, thinking=thinking
        )
        return encode_segments(self.session.vocab, segments)

    def _checked_index(self, i: int) -> int:
        n = len(self._messages)
        if not -n <= as_index(i) < n:
            raise SessionError(f"there is no message {i} (accepted: 0 to {n - 1})")
        return i % n


@dataclass(frozen=True, slots=True)
class _ChatState:
    messages: tuple[Message, ...]
    options: ChatOptions
    n_answers: int
    context: tuple[int, int, int]
    session: bytes


def _read_dump(data: bytes) -> _ChatState:
    meta, sections = unpack("chat", data)
    names = {"messages", "sampling", "tools", "thinking", "n_answers", "context"}
    if set(meta) != names or len(sections) != 1:
        raise InvalidSnapshot("the dump of a chat lacks a part")
    messages, tools, thinking, n_answers, sizes = (
        meta[name] for name in ("messages", "tools", "thinking", "n_answers", "context")
    )
    if not isinstance(messages, list) or not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise InvalidSnapshot("the dump's messages or tools are malformed")
    if thinking not in (None, True, False) or not isinstance(n_answers, int) or not is_count(n_answers):
        raise InvalidSnapshot("the dump's chat options are malformed")
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(is_count(n) for n in sizes):
        raise InvalidSnapshot("the dump's context sizes are malformed")
    if not all(0 < n <= limit for n, limit in zip(sizes, _LARGEST_CONTEXT, strict=True)):
        raise InvalidSnapshot(f"the dump's context sizes {sizes} are beyond {_LARGEST_CONTEXT}")
    options = ChatOptions(read_sampling(meta["sampling"]), tuple(tools), thinking)
    said = tuple(from_json(message) for message in messages)
    return _ChatState(said, options, n_answers, (sizes[0], sizes[1], sizes[2]), sections[0])


def _joined(deltas: Sequence[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


def _removed_span(before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """Where ``before`` has what ``after`` lacks, if it is one span."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return start, start + len(before) - len(after)
