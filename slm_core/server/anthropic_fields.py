"""The body of Anthropic's messages API, and the conversation in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from slm_core.constraints import JsonSchema, Spec
from slm_core.engine import Conversation
from slm_core.sampling import Sampling
from slm_core.server.errors import ApiError
from slm_core.server.fields import EngineFields, Items, SamplingFields, Strict
from slm_core.server.requests import GenerationRequest
from slm_core.types import Message, Role, ToolCall

_NO_EFFECT = "Without effect."
_BETWEEN_BLOCKS = "\n\n"
"""Separates the text blocks of a message, because a chat template takes one text."""


class CacheControl(Strict):
    """Without effect: prefixes are always cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    """A block of a message."""

    cache_control: CacheControl | None = Field(None, description="Without effect: prefixes are always cached.")


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Strict):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description=_NO_EFFECT)


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description=_NO_EFFECT)


class ToolResultBlock(Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] = ""
    is_error: bool | None = Field(None, description="Without effect: the content says it.")


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Strict):
    """A message of the user."""

    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantMessage(Strict):
    """An earlier answer; as the last message, the beginning of the answer."""

    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


AnyMessage = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class ClientTool(Block):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Enforce the schemas of all tools.")


class ToolChoice(Strict):
    """Which tools the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description='The tool, with type "tool".')
    disable_parallel_tool_use: bool | None = Field(None, description="If true, an answer ends after its first call.")


class Thinking(Strict):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description='"adaptive": the default of the chat template.'
    )
    budget_tokens: int | None = Field(None, ge=1, description="Without effect: reasoning counts for max_tokens.")
    display: Literal["summarized"] | None = Field(None, description="Without effect: reasoning is shown in full.")


class SchemaFormat(Strict):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The form of an answer that calls no tool."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(None, description=_NO_EFFECT)
    format: SchemaFormat | None = None


class Metadata(Strict):
    """Who asks."""

    user_id: str | None = Field(None, description=_NO_EFFECT)


class PromptFields(EngineFields):
    """Fields of the prompt."""

    messages: Items[AnyMessage] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description="Without effect: prefixes are always cached.")
    speed: Literal["standard"] | None = Field(None, description=_NO_EFFECT)

    def conversation(self) -> Conversation:
        """The conversation.

        Raises:
            ApiError: parameters contradict each other.
        """
        tools, choice = self.tools or [], self._tool_choice()
        if not tools and choice not in ("auto", "none"):
            raise ApiError(400, f"tool_choice {choice!r} needs tools", param="tool_choice")
        return Conversation(
            list(_messages(self.system, self.messages)),
            tools=[_as_function(tool) for tool in tools],
            tool_choice=choice if tools else "auto",
            strict_tools=any(tool.strict for tool in tools) and choice == "auto",
            text_format=self._text_format(),
            thinking=self._thinking(),
            continue_final_message=isinstance(self.messages[-1], AssistantMessage),
        )

    def _text_format(self) -> Spec | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return JsonSchema(self.output_config.format.schema_)

    def _tool_choice(self) -> str:
        choice = self.tool_choice
        if choice is None:
            return "auto"
        if (choice.type == "tool") != (choice.name is not None):
            raise ApiError(400, 'tool_choice.name goes with the type "tool"', param="tool_choice.name")
        return choice.name or {"any": "required"}.get(choice.type, choice.type)

    def _thinking(self) -> bool | None:
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        return self.thinking.type == "enabled"


class CountRequest(PromptFields):
    """The body of a request for the number of tokens."""


class MessagesRequest(SamplingFields, PromptFields):
    """The body of a request."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = Field(None, description="Texts that end the answer.")
    stream: bool | None = None
    metadata: Metadata | None = Field(None, description=_NO_EFFECT)
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=_NO_EFFECT)

    def generation(self) -> GenerationRequest:
        """The request to the engine.

        Raises:
            ApiError, InvalidOption: parameters contradict each other, or a value is invalid.
        """
        if self.stop is not None:
            raise ApiError(400, "stop is called stop_sequences in this API", "unknown_parameter", "stop")
        stops = None if self.stop_sequences is None else tuple(self.stop_sequences)
        return GenerationRequest(
            model=self.model,
            prompt=self.conversation(),
            sampling=self.sampling(Sampling(), max_tokens=self.max_tokens, stop=stops),
            parallel_calls=self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use,
            priority=self.priority,
            salt=self.cache_salt or "",
        )


def _as_function(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _messages(system: str | list[TextBlock] | None, messages: Sequence[AnyMessage]) -> Iterator[Message]:
    """The conversation in slm-core's form. Messages of one role that follow each other are one, as Anthropic says."""
    if system:
        yield Message(Role.SYSTEM, _text(system))
    names: dict[str, str] = {}
    for role, group in groupby(messages, lambda message: message.role):
        blocks = [block for message in group for block in _blocks(message.content)]
        names |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
        yield from [_answer(blocks)] if role == "assistant" else _questions(blocks, names)


def _blocks(content: str | list[Any]) -> list[Any]:
    return [TextBlock(type="text", text=content, cache_control=None)] if isinstance(content, str) else content


def _answer(blocks: Sequence[Any]) -> Message:
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        Role.ASSISTANT,
        _text([block for block in blocks if isinstance(block, TextBlock)]),
        reasoning=_BETWEEN_BLOCKS.join(reasoning) if reasoning else None,
        tool_calls=[ToolCall(block.name, block.input, block.id) for block in blocks if isinstance(block, ToolUseBlock)],
    )


def _questions(blocks: Sequence[Any], names: dict[str, str]) -> Iterator[Message]:
    """The messages of a user: each tool result is a message, and so are the texts between."""
    for is_text, group in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            yield Message(Role.USER, _text(list(group)))
            continue
        for block in group:
            name = names.get(block.tool_use_id)
            yield Message(Role.TOOL, _text(block.content), name=name, tool_call_id=block.tool_use_id)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else _BETWEEN_BLOCKS.join(block.text for block in content)
