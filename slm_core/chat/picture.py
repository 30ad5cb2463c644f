"""How sessions, chats and their answers show themselves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from slm_core.chat.prompt import encode_messages
from slm_core.chat.toolbox import Toolbox
from slm_core.context.inputs import text_tokens
from slm_core.display import Html, count, preview, signature
from slm_core.display.blocks import Bubble, bubble
from slm_core.display.html import card, note
from slm_core.errors import SlmError
from slm_core.types import Message

if TYPE_CHECKING:
    from slm_core.chat.chat import Chat
    from slm_core.chat.session import Session

_SHOWN = 40
"""The largest number of messages of a chat that are shown: the last ones."""


def session_line(session: Session) -> str:
    """One line: tokens, and the end of the text."""
    if session.closed:
        return signature(session, "closed")
    tail = session.vocab.decode(text_tokens(session.inputs[-16:]), special=True)
    return signature(
        session,
        f"sequence {session.seq_id}",
        f"{count(session.n_tokens, 'token')} ({session.n_pending:,} pending)",
        preview(tail),
    )


def chat_line(chat: Chat) -> str:
    """One line: messages and tokens, and the last message."""
    if chat.session.closed:
        return signature(chat, "closed")
    messages = chat.messages
    last = [f"{message.role}: {preview(message.content)}" for message in messages[-1:]]
    return signature(chat, count(len(messages), "message"), count(chat.session.n_tokens, "token"), *last)


def chat_page(chat: Chat) -> Html:
    """The messages as bubbles. A dashed border: the next answer computes the message, for example after an edit."""
    if chat.session.closed:
        return card("Chat", "closed")
    messages, session = chat.messages, chat.session
    first = max(0, len(messages) - _SHOWN)
    computed = _computed(chat, messages)
    bubbles = [bubble(_bubble(messages[i], i, computed[i])) for i in range(first, len(messages))]
    hidden = [note(f"{count(first, 'earlier message')} not shown")] if first else []
    n_held, context = session.n_tokens - session.n_pending, session.context
    cached = f"{count(session.n_tokens, 'token')}, {n_held:,} of them in the KV cache"
    free = f"{context.n_free:,} of {count(context.n_ctx, 'position')} free"
    return card(f"Chat: {count(len(messages), 'message')}", *hidden, *bubbles, note(f"{cached}; {free}"))


def _bubble(message: Message, number: int, computed: bool | None) -> Bubble:
    calls = [repr(call) for call in (*message.tool_calls, *message.malformed_calls)]
    return Bubble(str(message.role), message.content, message.reasoning or "", calls, number, computed)


def _computed(chat: Chat, messages: Sequence[Message]) -> list[bool | None]:
    """Whether the KV cache contains each message; None if the template does not show where messages end."""
    ends: list[int] = []
    with suppress(SlmError):  # a template may refuse an unfinished answer
        schemas = Toolbox(chat.options.tools).schemas
        segments = chat.formatter.render(messages, tools=schemas, add_generation_prompt=False, thinking=None)
        _, ends = encode_messages(chat.session.vocab, segments)
    if len(ends) != len(messages):
        return [None] * len(messages)
    n_held = chat.session.n_tokens - chat.session.n_pending
    return [end - 1 <= n_held for end in ends]
