"""A conversation: a chat that changes its engine, its context and its options, and shows its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from slm_core.chat import Chat, ChatStream
from slm_core.chat.tools import open_calls
from slm_core.cli.constraints import after_reasoning, check_tools
from slm_core.cli.copies import Copies, Copy
from slm_core.cli.drafts import Drafts
from slm_core.cli.streaming import View, stream_answer, summary
from slm_core.cli.terminal import PrefillBar, note
from slm_core.constraints import Spec
from slm_core.constraints import compile as compile_constraint
from slm_core.errors import SessionError, SlmError
from slm_core.generation import Answer, FinishReason
from slm_core.model import Model
from slm_core.types import Message, Role, ToolCall

FULL = "/clear begins anew; /undo and /forget make room; /set ctx N is larger; /set overflow shift drops old messages"


class Conversation:
    """A chat with an engine that can be exchanged. It owns the model and the chat.

    Args:
        load_on: loads the same model on another backend, by name.
        loaded: the model.
        chat: the chat.
        view: returns the view of the next answer.
        drafts: provides the speculation of answers; closed with the conversation. None for no speculation.

    Attributes:
        loaded: the model.
        chat: the chat.
        copies: the copies to which the conversation can go back.
        constraint: the constraint of all answers, or None.
        shows_stats: whether tokens and seconds follow each answer.
        last: the last answer, or None.
    """

    def __init__(
        self,
        load_on: Callable[[str], Model],
        loaded: Model,
        chat: Chat,
        view: Callable[[], View],
        *,
        drafts: Drafts | None = None,
        shows_stats: bool = False,
    ) -> None:
        self._drafts = Drafts() if drafts is None else drafts
        self._load_on = load_on
        self._view = view
        self._results: list[Message] = []
        self.loaded = loaded
        self.chat = chat
        self._owner = chat  # owns the context: it is closed after its forks
        self.copies = Copies()
        self.constraint: Spec | None = None
        self.shows_stats = shows_stats
        self.last: Answer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_chats()
        self._drafts.close()
        self.loaded.close()

    # The state.

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the chat."""
        return self.chat.messages

    @property
    def n_used(self) -> int:
        """Tokens of the chat in the KV cache."""
        return self.chat.session.context.length(self.chat.session.seq_id)

    @property
    def n_ctx(self) -> int:
        """Tokens that the context holds."""
        return self.chat.session.context.n_ctx

    @property
    def waiting_call(self) -> ToolCall | None:
        """The next tool call whose result the user has to give."""
        calls = open_calls(self.messages)
        if len(self._results) >= len(calls):
            self._results.clear()  # the conversation was edited
        return calls[len(self._results)] if calls else None

    @property
    def remedies(self) -> str:
        """The actions that make room in a full context."""
        return f"{FULL}; /fork off drops the copies" if self.copies.names else FULL

    def last_question(self) -> int:
        """The index of the user's last message.

        Raises:
            SessionError: there is none.
        """
        indices = [i for i, message in enumerate(self.messages) if message.role is Role.USER]
        if not indices:
            raise SessionError("you have not said anything yet")
        return indices[-1]

    def status(self, n_new: int = 0, tokens_per_second: float | None = None) -> str:
        """The line of status: the engine, how full the context is, the speed.

        Args:
            n_new: tokens of an answer that streams.
            tokens_per_second: its speed; None for the last answer's.
        """
        info, used = self.loaded.info, self.n_used
        parts = [info.path.name, info.backend, f"context {used}/{self.n_ctx} ({100 * used // self.n_ctx} %)"]
        if tokens_per_second is None and self.last is not None:
            tokens_per_second = self.last.tokens_per_second
        if tokens_per_second:
            parts.append(f"{tokens_per_second:.0f} tokens/s")
        if n_new:  # the end of the line is missing on a narrow terminal
            parts = ["Ctrl-C stops", f"{n_new} tokens", *reversed(parts)]
        return " · ".join(parts)

    # Talking.

    def say(self, text: str) -> None:
        """Send the user's text, or the result of the waiting tool call, and show the answer."""
        call = self.waiting_call
        if call is None:
            self._answer(text)
            return
        results = [*self._results, Message(Role.TOOL, text, name=call.name, tool_call_id=call.id)]
        if len(results) == len(open_calls(self.messages)):
            self._answer(results)
            results = []
        self._results = results

    def regenerate(self) -> None:
        """Answer the last question again."""
        question = self.last_question()
        self._again(self.messages[question].content, question)

    def say_instead(self, text: str) -> None:
        """Replace the last question by another, and answer it."""
        self._again(text, self.last_question())

    def _again(self, text: str, question: int) -> None:
        """Ask in place of the messages from ``question`` on; if that fails, they come back."""
        before = self.messages
        try:
            self.drop_from(question)
            self._answer(text)
        except BaseException:
            if self.messages != before:
                self.replace_messages(before)
            raise

    def _answer(self, content: str | Sequence[Message]) -> None:
        with PrefillBar() as bar:
            stream = self._stream(content, bar)
            if stream.overflowed is not None:
                note(f"(to make room, the {len(stream.overflowed.messages)} oldest messages were dropped)")
            answer = stream_answer(stream, self._view())
        self.last = answer
        if self.shows_stats:
            note(summary(answer))
        if answer.finish_reason is FinishReason.CANCELLED:
            note("(stopped)")
        elif answer.finish_reason is FinishReason.LENGTH:
            limit = self.chat.options.sampling.max_tokens
            reached = limit is not None and answer.usage.completion_tokens >= limit
            full = f"(the context is full: {self.remedies})"
            note(f"(cut off after {limit} tokens: /set max_tokens N)" if reached else full)

    def _stream(self, content: str | Sequence[Message], bar: PrefillBar) -> ChatStream:
        """Start an answer; a constraint begins after the reasoning, if the template begins with reasoning."""
        options = self.chat.options
        check_tools(self.constraint, has_tools=bool(options.tools))
        return self.chat.stream(
            content,
            progress=bar,
            constraint=after_reasoning(self.constraint, self.chat.formatter, thinking=options.thinking),
            speculation=self._drafts.speculation(self.loaded, self.n_ctx, options.sampling),
        )

    # Changing.

    def drop_from(self, i: int) -> None:
        """Remove message ``i`` and all later messages."""
        for each in reversed(range(i, len(self.messages))):
            self.chat.delete(each)

    def set_constraint(self, spec: Spec | None) -> None:
        """Constrain all answers; None removes the constraint.

        Raises:
            InvalidOption: the model may call tools, which a constrained answer cannot do.
            ConstraintError: the constraint is invalid, or cannot be enforced.
        """
        check_tools(spec, has_tools=bool(self.chat.options.tools))
        if spec is not None:
            compile_constraint(spec, self.loaded.vocab)
        self.constraint = spec

    def set_options(self, **changes: object) -> None:
        """Change options of the chat (``ChatOptions``); the next message is rendered with them."""
        self.chat.options = dataclasses.replace(self.chat.options, **changes)  # type: ignore[arg-type]  # their names

    def restore(self, data: bytes, n_ctx: int | None = None) -> None:
        """Replace the chat by a dumped one, which gets the current tools: dumps contain no functions."""
        tools = self.chat.options.tools or None
        self._become(Chat.restore(self.loaded, data, n_ctx=n_ctx or self.n_ctx, tools=tools))

    def move(self, backend: str) -> None:
        """Continue on another backend. If the chat cannot be dumped, its messages are computed again."""
        loaded = self._load_on(backend)
        try:
            try:
                chat = Chat.restore(loaded, self.chat.dump(), n_ctx=self.n_ctx, tools=self.chat.options.tools or None)
            except SlmError:
                chat = self._fresh(loaded, self.messages)
        except BaseException:
            loaded.close()
            raise
        before = self.loaded
        self._become(chat)
        self.loaded = loaded
        before.close()

    def replace_messages(self, messages: Sequence[Message]) -> None:
        """Continue with other messages, in a context of the same size."""
        self._become(self._fresh(self.loaded, messages))

    def _fresh(self, loaded: Model, messages: Sequence[Message]) -> Chat:
        context, options = self.chat.session.context.options, self.chat.options
        return loaded.chat(
            messages=messages,
            n_ctx=context.n_ctx,
            n_seq_max=context.n_seq_max,
            n_batch=context.n_batch,
            kv_type_k=context.kv_type_k,
            kv_type_v=context.kv_type_v,
            sampling=options.sampling,
            tools=options.tools,
            thinking=options.thinking,
            overflow=options.overflow,
            adapters=self.chat.session.adapters,
        )

    def _become(self, chat: Chat) -> None:
        self._close_chats()
        self.chat = self._owner = chat
        self._results.clear()

    def _close_chats(self) -> None:
        """Close the context with all chats in it; copies keep their messages."""
        self.copies.drop_forks("the context is another one")
        self.chat.close()
        self._owner.close()

    # Copies.

    def fork(self, name: str = "") -> str:
        """Keep a copy of the current conversation; it replaces a copy with the same name. "" for the next number.

        Returns:
            The name of the copy.
        """
        return self.copies.keep(name, Copy.of(self.chat))

    def go_back(self, name: str) -> None:
        """Continue from a copy, and keep the copy; options, tools and the constraint do not change.

        Raises:
            InvalidOption: there is no such copy.
        """
        copy = self.copies[name]
        if copy.chat is None:
            self.replace_messages(copy.messages)
            return
        left, again = self.chat, Copy.of(copy.chat)
        if left is self._owner:
            left.session.follow(())
        else:
            left.close()
        copy.chat.options = left.options
        self.chat = copy.chat
        self.copies.replace(name, again)
        self._results.clear()
