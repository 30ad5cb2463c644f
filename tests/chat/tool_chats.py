"""Chats over a scripted context whose model calls tools, and their tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

import slm_core as slm
from scripted import ByteVocab, ScriptedContext, says
from slm_core.chat import Chat, Session, encode_segments
from slm_core.chat.toolbox import Toolbox
from slm_core.sampling import Sampling

GREEDY = Sampling(temperature=0)
TEMPLATE = """
{%- if tools %}<|start|>system:{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant:{% endif %}"""
FORMATTER = slm.formatter(template=TEMPLATE, eos_token="<|end|>")


def call_text(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(why: str) -> str:
    """Fail.

    Args:
        why: the reason
    """
    raise KeyError(why)


async def later(a: int) -> int:
    """Double a number, later.

    Args:
        a: the number
    """
    await asyncio.sleep(0)
    return 2 * a


class Person(BaseModel):
    """Note a person."""

    name: str
    age: int = Field(ge=0)


LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


def new_chat(*answers: str, formatter: Any = FORMATTER, **options: Any) -> Chat:
    context = ScriptedContext(says(*answers), n_ctx=options.pop("n_ctx", 8000), n_batch=512, **options)
    return Chat(Session(context, ByteVocab(), sampling=GREEDY, owns_context=True), formatter)


def roles_and_contents(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role.value, message.content) for message in chat.messages]


def state(chat: Chat) -> tuple[object, ...]:
    return chat.messages, chat.options, chat.session.tokens


def check_cache(chat: Chat) -> None:
    """Assert that the next logits equal those of a new session that receives all messages at once."""
    schemas = Toolbox(chat.options.tools).schemas
    ids = encode_segments(ByteVocab(), FORMATTER.render(chat.messages, tools=schemas))
    fresh = Session(ScriptedContext(chat.session.context.script, n_ctx=9000), ByteVocab())
    fresh.append_tokens(ids)
    chat.session.follow(ids)
    np.testing.assert_array_equal(chat.session.next_logits(), fresh.next_logits())
