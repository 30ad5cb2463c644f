"""A chat: a list of messages, and a KV cache that follows the list."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from slm_core.argument_checks import check_flag, check_function, check_kind, check_text, refused
from slm_core.atomic_write import read_whole, write_whole
from slm_core.chat import chat_dump, picture
from slm_core.chat.answers import check_processors
from slm_core.chat.chatstream import ChatStream
from slm_core.chat.guard import Guard
from slm_core.chat.messages import MessageLike, as_messages, to_json
from slm_core.chat.overflow import Overflow, fit, name_of, reserved
from slm_core.chat.row_prompts import RowPromptEncoder, with_placeholders
from slm_core.chat.session import Session
from slm_core.chat.steering import Steering
from slm_core.chat.stream import AnswerStream
from slm_core.chat.talking import Talking
from slm_core.chat.toolbox import Toolbox, checked_tools
from slm_core.chat.tools import RunningTurn, Turn, open_calls
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.container import pack
from slm_core.context.inputs import Held, block_boundary
from slm_core.embedding_rows import EmbeddingRows, joined_parts
from slm_core.errors import ChatBusy, InvalidOption, InvalidSnapshot, SessionError, SlmError
from slm_core.generation.control import checked_timeout
from slm_core.generation.events import Overflowed
from slm_core.interrupts import uninterrupted
from slm_core.numerics import as_integer, common_prefix, shown
from slm_core.protocols import Context, Formatter, Vocab
from slm_core.sampling import Sampling, chain_for
from slm_core.types import EditLevel, KvType, Message, ModelInfo, Role, Tool, ToolCall

if TYPE_CHECKING:
    from slm_core.chat.oracle import Oracle


_UNASKED_CONTEXT = 4096  # positions without ``n_ctx=``: a forged dump must not reserve the machine's memory
_LEAST_TIME = 1e-3  # seconds for an answer when the timeout of the turn is reached


class ChatModel(Protocol):
    """The part of a model that ``Chat.restore`` needs; ``slm.load`` returns a whole one."""

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

    def new_context(
        self,
        *,
        n_ctx: int,
        n_seq_max: int,
        n_batch: int,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
    ) -> Context:
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
        InvalidOption: an unknown policy, or a value of the wrong type.
    """

    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        name_of(self.overflow)
        if not isinstance(self.sampling, Sampling):
            raise refused("sampling", self.sampling, "Sampling")
        check_flag("thinking", self.thinking)
        if not isinstance(self.tools, tuple):
            object.__setattr__(self, "tools", checked_tools(self.tools))


class Chat(Talking, Closing):
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
        messages: Sequence[MessageLike] = (),
        options: ChatOptions | None = None,
        n_answers: int = 0,
    ) -> None:
        self.session = session
        self.formatter = formatter
        self.options = options if options is not None else ChatOptions(session.sampling)
        check_kind("system", system, str)
        first = () if system is None else (Message(Role.SYSTEM, system),)
        self._messages: tuple[Message, ...] = ()
        self._stream: AnswerStream | None = None
        self._turn: RunningTurn | None = None
        self._reader: Callable[[], ChatStream | None] = lambda: None
        self._guard = Guard("chat", ChatBusy)
        self._known_tools = Toolbox(self.options.tools)
        self._prompts = RowPromptEncoder(session.vocab)
        self._n_answers = n_answers
        self._become((*first, *as_messages(messages)))

    def __repr__(self) -> str:
        return picture.chat_line(self)

    def _repr_html_(self) -> str:
        return picture.chat_page(self)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, with the text so far of a streaming answer; a system message is number 0."""
        messages, stream = self._messages, self._stream  # read once: another thread may end the answer
        return messages if stream is None else (*messages, Message(Role.ASSISTANT, stream.text))

    # Talking.

    def _answered(self, sent: Sequence[Message], steering: Steering) -> RunningTurn:
        return self._talk((*self._messages, *sent), steering)

    def _proceed(self, steering: Steering) -> RunningTurn:
        if not self._messages or self._messages[-1].role is Role.SYSTEM:
            raise SessionError("there is nothing to answer: send a message first")
        pending = open_calls(self._messages)
        if self._messages[-1].role is Role.ASSISTANT and not pending:
            raise SessionError("there is nothing to answer: the last message is an answer")
        return self._talk(self._messages, steering, pending)

    def _regenerate(self, steering: Steering) -> RunningTurn:
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

    def edit(self, i: int, content: str | Sequence[str | EmbeddingRows]) -> None:
        """Replace the content of message ``i``; later messages are computed again when they are needed.

        Args:
            i: the index of the message.
            content: a text, or a list of texts and embedding rows.
        """
        with self._settled():
            messages = list(self._messages)
            i = self._checked_index(i)
            text, rows = (content, []) if isinstance(content, str) else joined_parts(content)
            messages[i] = replace(messages[i], content=text, rows=rows)
            self._become(tuple(messages))

    def delete(self, i: int) -> None:
        """Remove message ``i``; later messages are computed again when they are needed."""
        with self._settled():
            messages = list(self._messages)
            del messages[self._checked_index(i)]
            self._become(tuple(messages))

    def forget(self, i: int) -> EditLevel:
        """Cut message ``i`` out of the KV cache and compute nothing: later tokens keep their values.

        Returns:
            CUT if the message was cut; TRUNCATE or REPLAY if the context or the template only allows ``delete``, for
            example because messages of the template depend on each other.
        """
        with self._settled():
            i = self._checked_index(i)
            return self._forget(i, i + 1)

    # Copies.

    def fork(self) -> Chat:
        """An independent copy in another sequence of the same context.

        Raises:
            InvalidSequence: no sequence is free.
            ContextFull: no room for a copy; nothing changed.
        """
        with self._settled():
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
        with self._guard.block():
            self._check_free(tools_may_run=self._stream is None)
            if self._stream is not None:
                self._settle()
            context, sections = self.session.context.options, list[bytes]()
            meta = {
                "messages": [to_json(message, sections) for message in self._messages],
                "sampling": self.options.sampling.to_dict(),
                "tools": list(self._toolbox.schemas),
                "thinking": self.options.thinking,
                "overflow": name_of(self.options.overflow),
                "n_answers": self._n_answers,
                "context": [context.n_ctx, context.n_seq_max, context.n_batch],
                "kv_types": [context.kv_type_k, context.kv_type_v],
            }
            return pack("chat", meta, (self.session.dump(), *sections))

    @classmethod
    def restore(
        cls,
        model: ChatModel,
        data: bytes,
        *,
        n_ctx: int | None = None,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        overflow: Overflow | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> Self:
        """A chat that continues a dumped one, in a new context of ``model``, also on another backend.

        Args:
            model: the model of the restored chat.
            data: the dump.
            n_ctx: positions of the new context; None for the number in the dump, up to the longest context that the
                model was trained for, or 4096 if that is more.
            kv_type_k: storage type of keys; None for the type in the dump, or for the backend's default if the dumped
                chat left it out.
            kv_type_v: storage type of values; None as for keys.
            overflow: replaces the dumped policy; required for "summarize", because dumps contain no functions.
            tools: replaces the dumped schemas; required to run functions.

        Raises:
            InvalidOption: the policy's function is missing; the backend does not support a KV type.
            InvalidSnapshot, SnapshotMismatch: damaged bytes, or a dump of another model.
            ContextFull: no room in ``n_ctx`` positions.
        """
        state = chat_dump.read(data)
        offered: Sequence[Tool] = _checked_tools(state.tools) if tools is None else tools
        policy = state.overflow if overflow is None else overflow
        options = ChatOptions(state.sampling, checked_tools(offered), state.thinking, policy)
        dumped_n_ctx, n_seq_max, n_batch = state.context
        if n_ctx is None:
            n_ctx = chat_dump.checked_n_ctx(dumped_n_ctx, max(_UNASKED_CONTEXT, model.info.n_ctx_train))
        context = model.new_context(
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            kv_type_k=state.kv_types[0] if kv_type_k is None else kv_type_k,
            kv_type_v=state.kv_types[1] if kv_type_v is None else kv_type_v,
        )
        try:
            session = Session.restore(
                context, model.vocab, state.session, owns_context=True, n_ctx_train=model.info.n_ctx_train
            )
            chat = cls(session, model.formatter, options=options, messages=state.messages, n_answers=state.n_answers)
        except BaseException:
            context.close()
            raise
        return chat

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``dump()`` to a file, whole or not at all.

        Raises:
            InvalidOption: the file cannot be written.
        """
        data = self.dump()
        write_whole(path, data)

    @classmethod
    def load(
        cls,
        model: ChatModel,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
        overflow: Overflow | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> Self:
        """A chat that continues one that ``save`` wrote; for arguments and other errors see ``restore``.

        Raises:
            InvalidOption: the file cannot be read.
        """
        data = read_whole(path)
        return cls.restore(
            model, data, n_ctx=n_ctx, kv_type_k=kv_type_k, kv_type_v=kv_type_v, overflow=overflow, tools=tools
        )

    def close(self) -> None:
        """Close the session, which releases its sequence. A second call does nothing."""
        self.session.close()

    @contextmanager
    def scratch_branch(self, question: str, *, thinking: bool | None = None) -> Iterator[Session]:
        """A session after ``question``, where the answer is about to begin; the chat does not change."""
        check_text("question", question)
        with self._settled():
            messages = (*self._messages, Message(Role.USER, question))
            ids = self._encode(messages, add_generation_prompt=True, thinking=thinking)
            with self.session.scratch_branch() as session:
                session.follow(ids)
                yield session

    # Steps that several calls share.

    def _begun(self, begin: Callable[[], RunningTurn]) -> ChatStream:
        """The stream of a new turn. The previous turn ends when the new turn begins."""

        def settle_and_begin() -> RunningTurn:
            self._settle()
            return begin()

        with self._guard.block():
            self._check_free()
            stream = ChatStream(settle_and_begin, self._guard)
            self._reader = weakref.ref(stream)
            return stream

    def _talk(self, messages: tuple[Message, ...], steering: Steering, pending: Sequence[ToolCall] = ()) -> RunningTurn:
        """Start a turn with the conversation ``messages``; the chat changes when the turn begins."""
        before, inputs = (self._messages, self.options, self._n_answers), self.session.inputs

        def undo() -> None:
            with uninterrupted.closing():
                self._messages, self.options, self._n_answers = before
                self._stream = self._turn = None
                with suppress(SlmError):  # the cache follows again at the next call; keep the first error
                    self.session.follow(inputs)

        use, sampling = steering.tool_use, steering.sampling_over(self.options.sampling)
        timeout = checked_timeout(steering.timeout)
        check_function("on_event", steering.on_event)
        try:
            if steering.tools is not None:
                self.options = replace(self.options, tools=checked_tools(steering.tools))
            left = next((call.name for call in pending if self._toolbox.leaves(call)), None)
            if left is not None:
                raise SessionError(f"a call of {left!r} is the caller's to answer: send its result")
            first, later = use.rules(self._toolbox, self.formatter, thinking=self.options.thinking)
            if first is not None and steering.constraint is not None:
                raise InvalidOption("a constraint does not go with tool_choice or strict_tools: both rule the answer")

            def begin(is_first: bool, spent: float) -> AnswerStream:
                left = None if timeout is None else max(timeout - spent, _LEAST_TIME)
                sent = messages if is_first else self._messages
                return self._reply(sent, steering, sampling, first if is_first else later, left)

            turn = Turn(begin, self._add, undo, self._end_turn)
            if pending:
                self.session.follow(self._encode(messages))
            self._turn = RunningTurn(turn, self._toolbox, use, steering.on_event, pending)
        except BaseException:
            undo()
            raise
        return self._turn

    def _reply(
        self,
        messages: tuple[Message, ...],
        steering: Steering,
        sampling: Sampling,
        rule: Spec | None,
        timeout: float | None,
    ) -> AnswerStream:
        """Start an answer to the conversation ``messages``."""
        thinking = self.options.thinking
        messages, overflowed = self._make_room(messages, sampling)
        self.session.follow(self._encode(messages, add_generation_prompt=True, thinking=thinking))
        self._messages = messages
        self._n_answers += 1

        def finished(message: Message) -> None:
            self._messages = (*messages, message)
            self._stream = None

        sampling = replace(sampling, stop=(*sampling.stop, *self.formatter.stops))
        sampler = steering.sampler
        check_processors(steering.logits_processors, sampler)
        if sampler is None:
            sampler = chain_for(sampling, self.session.vocab, steering.logits_processors, stream=self._n_answers)
        generation = self.session.generate(
            sampling,
            sampler=sampler,
            special=True,
            constraint=steering.constraint if rule is None else rule,
            stopping_criteria=steering.stopping_criteria,
            speculation=steering.speculation,
            timeout=timeout,
            progress=steering.progress,
        )
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

    def _make_room(
        self, conversation: tuple[Message, ...], sampling: Sampling
    ) -> tuple[tuple[Message, ...], Overflowed | None]:
        """Drop messages by the policy; returns the kept and the dropped messages."""
        context, options = self.session.context, self.options
        room = context.n_free + context.length(self.session.seq_id)

        def count(messages: Sequence[Message]) -> int:
            return len(self._encode(messages, add_generation_prompt=True, thinking=options.thinking))

        fitted = fit(conversation, options.overflow, count, room, reserved(context.n_ctx, sampling.max_tokens))
        if not fitted.dropped:
            return conversation, None
        n_tokens = count(conversation) - count(fitted.messages)
        level = min(context.edit_level, EditLevel.TRUNCATE)
        if options.overflow == "shift":
            level = self._forget(fitted.start, fitted.start + len(fitted.dropped))
        dropped = Overflowed(name_of(options.overflow), fitted.dropped, fitted.summary, n_tokens, level)
        return fitted.messages, dropped

    @uninterrupted
    def _forget(self, start: int, end: int) -> EditLevel:
        """Cut messages out of the KV cache; see ``forget``."""
        messages = (*self._messages[:start], *self._messages[end:])
        before, after = self._encode(self._messages), self._encode(messages)
        self.session.follow(before)
        first, last = _removed_range(before, after)
        if last < first or before[:first] + before[last:] != after:
            self._become(messages)
            return min(self.session.context.edit_level, EditLevel.TRUNCATE)
        level = self.session.remove_span(first, last)
        self._messages = messages
        return level

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Keep other callers out of the chat, and end a turn that is no longer iterated."""
        with self._guard.block():
            self._check_free()
            self._settle()
            yield

    def _check_free(self, *, tools_may_run: bool = False) -> None:
        if self._turn is not None and self._turn.runs_tools and not tools_may_run:
            raise ChatBusy("a tool of the chat is running: a tool cannot change the chat that calls it")
        if self._turn is not None and self._turn.steps:
            raise ChatBusy("a callback of the chat is running: a callback cannot change the chat that calls it")
        reader = self._reader()
        if reader is not None and reader.held_by_another:
            raise ChatBusy(
                "this chat is busy: another thread or task reads its answer (wait until it is over, or give each"
                " caller a fork of the chat)"
            )

    def _settle(self) -> None:
        """End a turn that is no longer iterated: the text so far becomes the answer."""
        if self._turn is not None:
            self._turn.end()

    @uninterrupted
    def _become(self, messages: tuple[Message, ...]) -> None:
        self.session.follow(self._encode(messages))
        self._messages = messages

    def _encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, thinking: bool | None = None
    ) -> list[Held]:
        if not messages:
            return []
        texts, rows = with_placeholders(messages)
        segments = self.formatter.render(
            texts, tools=self._toolbox.schemas, add_generation_prompt=add_generation_prompt, thinking=thinking
        )
        return self._prompts.encode(segments, rows)

    def _checked_index(self, i: int) -> int:
        n = len(self._messages)
        if n == 0:
            raise SessionError(f"there is no message {i}: the chat is empty")
        index = as_integer(i)
        if index is None or not -n <= index < n:
            raise SessionError(f"there is no message {shown(i)} (accepted: 0 to {n - 1})")
        return index % n


def _checked_tools(schemas: Sequence[Tool]) -> Sequence[Tool]:
    try:
        return Toolbox(schemas).tools
    except InvalidOption as error:
        raise InvalidSnapshot(f"the dump's tools are malformed: {error}") from error


def _removed_range(before: Sequence[Held], after: Sequence[Held]) -> tuple[int, int]:
    """The range of ``before`` that is missing in ``after``, if exactly one range is missing."""
    start = block_boundary(before, common_prefix(before, after))
    return start, start + len(before) - len(after)
