"""Tools of a chat: a called function runs, and the model answers to its result."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import fresh_row, next_row
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.formatting import formatter
from slm_core.generation import Draft, Event, StoppingAction
from slm_core.sampling import Sampling
from slm_core.types import Role

TEMPLATE = """
{%- for tool in tools or [] %}<|im_start|>system
{{ tool.function.name }}<|im_end|>
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A short question, for slow contexts."""


class TestTools(Scenarios):
    """Chat: the loop of tool calls, results and answers; a grammar forces the call."""

    above_contract = True

    def test_a_call_is_run(self, bench: Bench) -> None:
        """Chat: a called function runs, its result becomes a message, and the model answers to it."""
        picked: list[str] = []

        def pick(colour: Literal["red", "blue"]) -> str:
            """Pick a colour.

            Args:
                colour: which
            """
            picked.append(colour)
            return f"you have {colour}"

        session = Session(bench.context(n_ctx=384), bench.vocab)
        with Chat(session, formatter(TEMPLATE, model=bench.model), options=_options(bench)) as chat:
            answer = chat.send("which", tools=[pick], tool_choice="pick", max_rounds=1)
            messages = [(message.role, message.content) for message in chat.messages]
            assert len(picked) == 1, f"a model that must call a tool once says {chat.messages[1]}"
            expected = [(Role.TOOL, f"you have {colour}") for colour in picked]
            assert messages[2:-1] == expected, f"after its call, what the model was told is {messages[2:-1]}"
            assert messages[-1] == (Role.ASSISTANT, answer.text), "the last message is not the answer"
            rendered = encode_segments(bench.vocab, chat.formatter.render(chat.messages[:-1], tools=[pick]))
            prompt = session.tokens[: answer.usage.prompt_tokens]
            assert list(prompt) == rendered, "the answer was not made from the messages, the result among them"
            bench.agree(next_row(session), fresh_row(bench, session), "the next logits after an answer to a result")

    def test_tools_after_a_failure(self, bench: Bench) -> None:
        """Chat: after an answer that raised, its new tools are gone, and earlier tools stay."""
        before = (_tool("look"),)
        session = Session(bench.context(n_ctx=384), bench.vocab)
        options = replace(_options(bench), tools=before)
        with Chat(session, formatter(TEMPLATE, model=bench.model), options=options) as chat:
            for tools in ((_tool("turn"),), ()):
                with pytest.raises(KeyError):
                    chat.send("which", tools=tools, stopping_criteria=[_raise])
                assert chat.options.tools == before, f"after an answer that raised, the tools are {chat.options.tools}"
            answer = chat.send("which")
            rendered = encode_segments(bench.vocab, chat.formatter.render(chat.messages[:-1], tools=before))
            assert list(session.tokens[: answer.usage.prompt_tokens]) == rendered, "the next prompt has other tools"


def _tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def _raise(event: Event, draft: Draft) -> StoppingAction:
    raise KeyError("a stopping criterion's own error")


def _options(bench: Bench) -> ChatOptions:
    """Greedy and without white space, with which a random model would fill its answer."""
    blank = [i for i in range(bench.vocab.size) if (data := bench.vocab.token_bytes(i)) and not data.strip()]
    return ChatOptions(Sampling(temperature=0, max_tokens=64, logit_bias=dict.fromkeys(blank, -1000.0)))
