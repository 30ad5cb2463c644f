"""A chat: a list of messages, and a KV cache that follows the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import index as as_index
from typing import TYPE_CHECKING, Protocol, Self, TypedDict, Unpack, cast

from slm_core.chat import chat_dump, picture
from slm_core.chat.messages import to_json
from slm_core.chat.overflow import Overflow, fit, name_of, reserved
from slm_core.chat.prompt import PromptEncoder
from slm_core.chat.session import Session
from slm_core.chat.stream import AnswerStream
from slm_core.chat.toolbox import Toolbox
from slm_core.chat.tools import ChatStream, ToolErrors, ToolUse, Turn, open_calls
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.container import pack
from slm_core.errors import InvalidOption, InvalidSnapshot, SessionError, SlmError
from slm_core.generation import Answer, Event, StoppingCriterion
from slm_core.generation.control import checked_timeout
from slm_core.generation.events import Overflowed
from slm_core.generation.speculation import Speculation
from slm_core.protocols import Constraint, Context, Formatter, Vocab
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel, Message, ModelInfo, PrefillProgress, Role, Tool, ToolCall

if TYPE_CHECKING:
    from slm_core.chat.oracle import Oracle


_UNASKED_CONTEXT = 4096  # a forged dump must not make us reserve the machine's memory
_LEAST_TIME = 1e-3  # seconds for an answer when the timeout of the turn is reached


class ChatModel(Protocol):
    """What ``Chat.restore`` needs of a model: ``slm.load`` returns one."""

    @property
    def info(self) -> ModelInfo:
        """The model's properties."""
        ...

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
    """Options of all answers of a chat.

    Attributes:
        sampling: how to choose tokens.
        tools: tools that the model may call: functions, which the chat runs; JSON schemas and pydantic models, whose
            calls are left to the caller.
        thinking: turn reasoning on or off; None uses the template's default.
        overflow: the policy if messages and answer do not fit; see ``overflow.Overflow``.

    Raises:
        InvalidOption: an unknown policy.
    """

    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        name_of(self.overflow)


class AnswerSteering(TypedDict, total=False):
    """Options of one answer; see ``Session.generate``."""

    constraint: Constraint | Spec
    stopping_criteria: Sequence[StoppingCriterion]
    progress: PrefillProgress
    speculation: Speculation


class Steering(AnswerSteering, total=False):
    """Options of a turn with all its answers.

    ``timeout`` is for all answers together, without the time of tools. ``tools`` replaces the tools of the chat from
    now on, see ``ChatOptions``; for the other options of tools see ``tools.ToolUse``.
    """

    timeout: float
    on_event: Callable[[Event], None]
    tools: Sequence[Tool]
    tool_choice: str
    tool_errors: ToolErrors
    strict_tools: bool
    max_rounds: int


class Chat(Closing):
    """A conversation. After each change all messages are rendered; the longest common prefix stays in the KV cache.

    Args:
        session: the session of the chat; closed with the chat. Its tokens are reused as far as the messages agree.
        formatter: the model's chat format.
        system: content of a first, system message.
        messages: earlier messages.
        options: sampling, tools, thinking; None for the session's sampling.
        n_answers: the number of earlier answers: each answer has its own random stream.

    Raises:
        TemplateError: the chat format refuses the messages.
        ContextFull: the messages do not fit.
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
        self._stream: AnswerStream | None = None
        self._turn: ChatStream | None = None
        self._known_tools = Toolbox(())
        self._prompts = PromptEncoder(session.vocab)
        self._n_answers = n_answers
        self._become((*first, *messages))

    def __repr__(self) -> str:
        return picture.chat_line(self)

    def _repr_html_(self) -> str:
        return picture.chat_page(self)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, with the text so far of a streaming answer; a system message is number 0."""
        if self._stream is None:
            return self._messages
        return (*self._messages, Message(Role.ASSISTANT, self._stream.text))

    # Talking.

    def stream(self, content: str | Message | Sequence[Message], **steering: Unpack[Steering]) -> ChatStream:
        """Send messages (a string is a user's message) and stream the answer.

        If the model calls functions, the chat runs them, and the model answers again. If anything raises, the chat is
        unchanged; side effects of functions remain.

        Raises:
            TemplateError: the chat format refuses the messages.
            ContextFull: no room; nothing changed.
            InvalidOption: an invalid option of tools.
            ToolError: with ``tool_errors="raise"``, a tool raised, or a call is invalid.
        """
        self._settle()
        return self._talk((*self._messages, *_messages(content)), steering)

    def send(self, content: str | Message | Sequence[Message], **steering: Unpack[Steering]) -> Answer:
        """Send messages; returns the whole answer.

        Raises:
            SessionError: a tool has to be awaited.
        """
        return self.stream(content, **steering).run()

    async def asend(self, content: str | Message | Sequence[Message], **steering: Unpack[Steering]) -> Answer:
        """Like ``send``, on an event loop; the model, and tools that are not coroutines, run in threads."""
        return await self.stream(content, **steering).arun()

    def proceed(self, **steering: Unpack[Steering]) -> ChatStream:
        """Continue after the last message: run the calls without results, and stream the answer.

        For a chat that was restored in the middle of a turn, or whose turn was cancelled or reached its limit there.

        Raises:
            SessionError: there is nothing to answer, or a call is left to the caller.
        """
        self._settle()
        if not self._messages or self._messages[-1].role is Role.SYSTEM:
            raise SessionError("there is nothing to answer: send a message first")
        pending = open_calls(self._messages)
        if self._messages[-1].role is Role.ASSISTANT and not pending:
            raise SessionError("there is nothing to answer: the last message is an answer")
        return self._talk(self._messages, steering, pending)

    def regenerate(self, **steering: Unpack[Steering]) -> ChatStream:
        """Remove the last answer and stream another; with a temperature, it is another draw.

        Raises:
            SessionError: there is nothing to answer.
        """
        self._settle()
        messages = self._messages
        while messages and messages[-1].role is Role.ASSISTANT:
            messages = messages[:-1]
        if not messages or messages[-1].role is Role.SYSTEM:
            raise SessionError("there is nothing to answer: send a message first")
        return self._talk(messages, steering)

    def oracle(self) -> Oracle:
        """Questions about this chat that leave no trace in it."""
        from slm_core.chat.oracle import Oracle

        return Oracle(self)

    # Editing.

    def edit(self, i: int, content: str) -> None:
        """Replace the content of message ``i``; later messages are computed again when they are needed."""
        self._settle()
        messages = list(self._messages)
        i = self._checked_index(i)
        messages[i] = replace(messages[i], content=content)
        self._become(tuple(messages))

    def delete(self, i: int) -> None:
        """Remove message ``i``; later messages are computed again when they are needed."""
        self._settle()
        messages = list(self._messages)
        del messages[self._checked_index(i)]
        self._become(tuple(messages))

    def forget(self, i: int) -> EditLevel:
        """Cut message ``i`` out of the KV cache and compute nothing: later tokens keep their values.

        Returns:
            CUT if the message was cut; TRUNCATE or REPLAY if the context or the template only allows ``delete``, for
            example because messages of the template depend on each other.
        """
        self._settle()
        i = self._checked_index(i)
        return self._forget(i, i + 1)

    # Copies.

    def fork(self) -> Chat:
        """An independent copy in another sequence of the same context.

        Raises:
            InvalidSequence: no sequence is free.
            ContextFull: no room for a copy; nothing changed.
        """
        self._settle()
        session = self.session.fork()
        try:
            return Chat(
                session,
                self.formatter,
                options=self.options,
                messages=self._messages,
                n_answers=self._n_answers,
            )
        except BaseException:
            session.close()
            raise

    def dump(self) -> bytes:
        """Dump the chat: messages, options, schemas of tools, and the session with its KV cache.

        A dump between the answers of a turn does not end the turn: ``proceed`` continues it in the restored chat.
        """
        if self._stream is not None:
            self._settle()
        context = self.session.context
        meta = {
            "messages": [to_json(message) for message in self._messages],
            "sampling": self.options.sampling.to_dict(),
            "tools": list(self._toolbox.schemas),
            "thinking": self.options.thinking,
            "overflow": name_of(self.options.overflow),
            "n_answers": self._n_answers,
            "context": [context.n_ctx, context.n_seq_max, context.n_batch],
        }
        return pack("chat", meta, (self.session.dump(),))

    @classmethod
    def restore(
        cls,
        model: ChatModel,
        data: bytes,
        *,
        n_ctx: int | None = None,
        overflow: Overflow | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> Self:
        """A chat that continues a dumped one, in a new context of ``model``, also on another backend.

        Args:
            model: the model of the restored chat.
            data: the dump.
            n_ctx: positions of the new context; None for the number in the dump, up to the longest context that the
                model was trained for, or 4096 if that is more.
            overflow: replaces the dumped policy; required for "summarize", because dumps contain no functions.
            tools: replaces the dumped schemas; required to run functions.

        Raises:
            InvalidOption: the policy's function is missing.
            InvalidSnapshot, SnapshotMismatch: damaged bytes, or a dump of another model.
            ContextFull: no room in ``n_ctx`` positions.
        """
        state = chat_dump.read(data)
        offered: Sequence[Tool] = _checked_tools(state.tools) if tools is None else tools
        policy = state.overflow if overflow is None else overflow
        options = ChatOptions(state.sampling, tuple(offered), state.thinking, policy)
        dumped_n_ctx, n_seq_max, n_batch = state.context
        if n_ctx is None:
            n_ctx = chat_dump.checked_n_ctx(dumped_n_ctx, max(_UNASKED_CONTEXT, model.info.n_ctx_train))
        context = model.new_context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        try:
            session = Session.restore(context, model.vocab, state.session, owns_context=True)
            chat = cls(session, model.formatter, options=options, messages=state.messages, n_answers=state.n_answers)
        except BaseException:
            context.close()
            raise
        return chat

    def close(self) -> None:
        """Close the session, which releases its sequence. Twice is fine."""
        self.session.close()

    @contextmanager
    def scratch_branch(self, question: str, *, thinking: bool | None = None) -> Iterator[Session]:
        """A session after ``question``, where the answer is about to begin; the chat does not change."""
        self._settle()
        messages = (*self._messages, Message(Role.USER, question))
        ids = self._encode(messages, add_generation_prompt=True, thinking=thinking)
        with self.session.scratch_branch() as session:
            session.follow(ids)
            yield session

    # Steps that several calls share.

    def _talk(self, messages: tuple[Message, ...], steering: Steering, pending: Sequence[ToolCall] = ()) -> ChatStream:
        """Start a turn with the conversation ``messages``; the chat changes when the turn begins."""
        before, tokens = (self._messages, self.options, self._n_answers), self.session.tokens

        def undo() -> None:
            self._messages, self.options, self._n_answers = before
            self._stream = self._turn = None
            with suppress(SlmError):  # the cache follows again at the next call; keep the first error
                self.session.follow(tokens)

        use, offered = _tool_use(steering)
        on_event = steering.pop("on_event", None)
        timeout = checked_timeout(steering.pop("timeout", None))
        try:
            if offered is not None:
                self.options = replace(self.options, tools=tuple(offered))
            left = next((call.name for call in pending if self._toolbox.leaves(call)), None)
            if left is not None:
                raise SessionError(f"a call of {left!r} is the caller's to answer: send its result")
            first, later = use.rules(self._toolbox, self.formatter, thinking=self.options.thinking)
            if first is not None and steering.get("constraint") is not None:
                raise InvalidOption("a constraint does not go with tool_choice or strict_tools: both rule the answer")

            def begin(is_first: bool, spent: float) -> AnswerStream:
                left = None if timeout is None else max(timeout - spent, _LEAST_TIME)
                sent = messages if is_first else self._messages
                return self._reply(sent, cast("AnswerSteering", steering), first if is_first else later, left)

            turn = Turn(begin, self._add, undo, self._end_turn)
            if pending:
                self.session.follow(self._encode(messages))
            self._turn = ChatStream(turn, self._toolbox, use, on_event, pending)
        except BaseException:
            undo()
            raise
        return self._turn

    def _reply(
        self, messages: tuple[Message, ...], steering: AnswerSteering, rule: Spec | None, timeout: float | None
    ) -> AnswerStream:
        """Start an answer to the conversation ``messages``."""
        thinking, sampling = self.options.thinking, self.options.sampling
        messages, overflowed = self._make_room(messages)
        self.session.follow(self._encode(messages, add_generation_prompt=True, thinking=thinking))
        self._messages = messages
        self._n_answers += 1

        def finished(message: Message) -> None:
            self._messages = (*messages, message)
            self._stream = None

        sampling = replace(sampling, stop=(*sampling.stop, *self.formatter.stops))
        chain = SamplerChain.for_vocab(sampling, self.session.vocab, stream=self._n_answers)
        options: AnswerSteering = steering if rule is None else {**steering, "constraint": rule}
        generation = self.session.generate(sampling, sampler=chain, special=True, timeout=timeout, **options)
        parser = self.formatter.stream_parser(thinking=thinking, tools=self._toolbox.schemas)
        n_calls = sum(len(message.tool_calls) for message in messages)
        self._stream = AnswerStream(generation, parser, finished, n_calls, overflowed)
        return self._stream

    def _add(self, messages: Sequence[Message]) -> None:
        self._messages = (*self._messages, *messages)

    def _end_turn(self) -> None:
        self._turn = None

    @property
    def _toolbox(self) -> Toolbox:
        if self._known_tools.tools is not self.options.tools:
            self._known_tools = Toolbox(self.options.tools)
        return self._known_tools

    def _make_room(self, conversation: tuple[Message, ...]) -> tuple[tuple[Message, ...], Overflowed | None]:
        """Drop messages by the policy; returns the kept and the dropped messages."""
        context, options = self.session.context, self.options
        room = context.n_free + context.length(self.session.seq_id)

        def count(messages: Sequence[Message]) -> int:
            return len(self._encode(messages, add_generation_prompt=True, thinking=options.thinking))

        fitted = fit(conversation, options.overflow, count, room, reserved(context.n_ctx, options.sampling.max_tokens))
        if not fitted.dropped:
            return conversation, None
        n_tokens = count(conversation) - count(fitted.messages)
        level = min(context.edit_level, EditLevel.TRUNCATE)
        if options.overflow == "shift":
            level = self._forget(fitted.start, fitted.start + len(fitted.dropped))
        dropped = Overflowed(name_of(options.overflow), fitted.dropped, fitted.summary, n_tokens, level)
        return fitted.messages, dropped

    def _forget(self, start: int, end: int) -> EditLevel:
        """Cut messages out of the KV cache; see ``forget``."""
        messages = (*self._messages[:start], *self._messages[end:])
        before, after = self._encode(self._messages), self._encode(messages)
        self.session.follow(before)
        first, last = _removed_span(before, after)
        if last < first or before[:first] + before[last:] != after:
            self._become(messages)
            return min(self.session.context.edit_level, EditLevel.TRUNCATE)
        level = self.session.remove_span(first, last)
        self._messages = messages
        return level

    def _settle(self) -> None:
        """End a turn that is no longer iterated: the text so far becomes the answer."""
        if self._turn is not None:
            self._turn.end()

    def _become(self, messages: tuple[Message, ...]) -> None:
        self.session.follow(self._encode(messages))
        self._messages = messages

    def _encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, thinking: bool | None = None
    ) -> list[int]:
        if not messages:
            return []
        segments = self.formatter.render(
            messages, tools=self._toolbox.schemas, add_generation_prompt=add_generation_prompt, thinking=thinking
        )
        return self._prompts.encode(segments)

    def _checked_index(self, i: int) -> int:
        n = len(self._messages)
        if not -n <= as_index(i) < n:
            raise SessionError(f"there is no message {i} (accepted: 0 to {n - 1})")
        return i % n


def _messages(content: str | Message | Sequence[Message]) -> Sequence[Message]:
    if isinstance(content, str):
        return [Message(Role.USER, content)]
    return [content] if isinstance(content, Message) else content


def _tool_use(steering: Steering) -> tuple[ToolUse, Sequence[Tool] | None]:
    """Remove the options of tools from a turn's options."""
    use = ToolUse(
        steering.pop("tool_choice", "auto"),
        steering.pop("strict_tools", False),
        steering.pop("tool_errors", "tell"),
        steering.pop("max_rounds", 8),
    )
    return use, steering.pop("tools", None)


def _checked_tools(schemas: Sequence[Tool]) -> Sequence[Tool]:
    try:
        return Toolbox(schemas).tools
    except InvalidOption as error:
        raise InvalidSnapshot(f"the dump's tools are malformed: {error}") from error


def _removed_span(before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """The range of ``before`` that is missing in ``after``, if exactly one range is missing."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return start, start + len(before) - len(after)
