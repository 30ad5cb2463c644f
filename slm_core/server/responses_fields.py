"""The body of OpenAI's Responses, and the conversation in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from slm_core.constraints import JsonSchema, Spec
from slm_core.engine import Conversation
from slm_core.sampling import Sampling
from slm_core.server.errors import ApiError
from slm_core.server.fields import EngineFields, Items, SamplingFields, Strict, Texts
from slm_core.server.requests import GenerationRequest
from slm_core.types import Message, Role, ToolCall

_NO_EFFECT = "Without effect."
LOGPROBS = "message.output_text.logprobs"


class InputText(Strict):
    """A text of the client."""

    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Items[Any] = Field(default_factory=list, description=_NO_EFFECT)
    logprobs: Items[Any] | None = Field(None, description=_NO_EFFECT)


TextPart = Annotated[InputText | OutputText, Field(discriminator="type")]


class Item(Strict):
    """An item of the input."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description=_NO_EFFECT)


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[TextPart]


class CallItem(Item):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]


class ReasoningText(Strict):
    """Reasoning in full."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Items[Any] = Field(default_factory=list, max_length=0)
    content: Items[ReasoningText] | None = None
    encrypted_content: None = None


def _type_of(item: object) -> object:
    """The type of an item; a message may leave it out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="If true, the schemas of all tools are enforced.")


class ChosenTool(Strict):
    """The tool that the answer calls."""

    type: Literal["function"]
    name: str


class AllowedChoice(Strict):
    """The tools that the answer may call, and whether it has to call one; the model reads all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ChosenTool] = Field(min_length=1)


class TextFormat(Strict):
    """An answer in any form."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """An answer that fits a JSON schema; it is always enforced."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, description=_NO_EFFECT)
    strict: bool | None = Field(None, description=_NO_EFFECT)


class TextOptions(Strict):
    """The form of an answer that calls no tool."""

    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=_NO_EFFECT)


class Reasoning(Strict):
    """Whether the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description='"none" turns the model\'s reasoning off, any other value on.'
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Without effect: it is in full.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=_NO_EFFECT)


class StreamOptions(Strict):
    """Options of streams."""

    include_obfuscation: bool = Field(False, description=_NO_EFFECT)


class PromptFields(Strict):
    """The messages that the model reads, and the options of the answer."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    input: str | Items[InputItem]
    instructions: str | None = Field(None, description="The system message; later responses do not inherit it.")
    previous_response_id: str | None = Field(None, description="Continue this response; branches share its cells.")
    tools: Items[FunctionTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[ChosenTool | AllowedChoice, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = Field(None, description="If false, an answer ends after its first call.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None

    def items(self) -> list[InputItem]:
        """The items of the input."""
        if isinstance(self.input, str):
            return [MessageItem.model_validate({"role": "user", "content": self.input})]
        return self.input

    def conversation(self, earlier: Sequence[InputItem]) -> Conversation:
        """The conversation.

        Args:
            earlier: the items before the input.

        Raises:
            ApiError: parameters contradict each other, or there are no items.
        """
        choice, tools = self._tool_choice(), self.tools or []
        if not tools and choice not in ("auto", "none"):
            raise ApiError(400, f"tool_choice {choice!r} needs tools", param="tool_choice")
        effort = None if self.reasoning is None else self.reasoning.effort
        items = [*earlier, *self.items()]
        if not items:
            raise ApiError(400, "input is empty", param="input")
        return Conversation(
            list(_messages(self.instructions, items)),
            tools=[_as_function(tool) for tool in tools],
            tool_choice=choice if tools else "auto",
            strict_tools=any(tool.strict for tool in tools) and choice == "auto",
            allowed_tools=self._allowed_tools(),
            text_format=self._text_format(),
            thinking=None if effort is None else effort != "none",
        )

    def _tool_choice(self) -> str:
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.mode
        return choice.name if isinstance(choice, ChosenTool) else choice or "auto"

    def _allowed_tools(self) -> list[str] | None:
        choice = self.tool_choice
        return [tool.name for tool in choice.tools] if isinstance(choice, AllowedChoice) else None

    def _text_format(self) -> Spec | None:
        how = None if self.text is None else self.text.format
        if how is None or isinstance(how, TextFormat):
            return None
        return JsonSchema({"type": "object"} if isinstance(how, ObjectFormat) else how.schema_)


class ResponsesRequest(SamplingFields, EngineFields, PromptFields):
    """The body of a request."""

    max_output_tokens: int | None = Field(None, ge=1)
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: bool | None = Field(None, description="Keep the response for later requests; true by default.")
    background: bool | None = Field(None, description="Answer at once, and generate without the client.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Texts | None = Field(None, description="Returned with the response.")
    max_tool_calls: int | None = Field(None, description="Without effect: the server runs no tools.")
    user: str | None = Field(None, description=_NO_EFFECT)
    safety_identifier: str | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: str | None = Field(None, description="Without effect: prefixes are always cached.")
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(None, description=_NO_EFFECT)
    service_tier: Literal["auto", "default"] | None = Field(None, description=_NO_EFFECT)

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.store is not False

    def check(self) -> None:
        """Refuse parameters that contradict each other.

        Raises:
            ApiError: some do.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: set stream to true", param="stream_options")
        if self.background and not self.is_stored:
            raise ApiError(400, "a background response has to be stored: set store to true", param="background")
        if self.top_logprobs is not None and LOGPROBS not in (self.include or ()):
            raise ApiError(400, f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")

    def generation(self, earlier: Sequence[InputItem]) -> GenerationRequest:
        """The request to the engine.

        Args:
            earlier: the items before the input.

        Raises:
            ApiError, InvalidOption: parameters contradict each other, or a value is invalid.
        """
        n_logprobs = (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None
        return GenerationRequest(
            model=self.model,
            prompt=self.conversation(earlier),
            sampling=self.sampling(Sampling(), max_tokens=self.max_output_tokens, logprobs=n_logprobs),
            parallel_calls=self.parallel_tool_calls is not False,
            priority=self.priority,
            salt=self.cache_salt or "",
        )


def _as_function(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _is_answer(item: InputItem) -> bool:
    """Whether the model made an item."""
    return isinstance(item, CallItem | ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant")


def _messages(instructions: str | None, items: Sequence[InputItem]) -> Iterator[Message]:
    """The conversation in slm-core's form: items of the model that follow each other are one message."""
    if instructions:
        yield Message(Role.SYSTEM, instructions)
    names = {item.call_id: item.name for item in items if isinstance(item, CallItem)}
    for is_answer, group in groupby(items, _is_answer):
        if is_answer:
            yield _answer(list(group))
            continue
        for item in group:
            if isinstance(item, CallOutputItem):
                text = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                yield Message(Role.TOOL, text, name=names.get(item.call_id), tool_call_id=item.call_id)
            elif isinstance(item, MessageItem):
                yield Message(Role.USER if item.role == "user" else Role.SYSTEM, _text(item))


def _answer(items: Sequence[InputItem]) -> Message:
    reasoning = [part.text for item in items if isinstance(item, ReasoningItem) for part in item.content or ()]
    return Message(
        Role.ASSISTANT,
        "".join(_text(item) for item in items if isinstance(item, MessageItem)),
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=[_call(item) for item in items if isinstance(item, CallItem)],
    )


def _text(item: MessageItem) -> str:
    return item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)


def _call(item: CallItem) -> ToolCall:
    try:
        arguments = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        message = f"the arguments of the call {item.call_id!r:.50} are not the JSON text of an object"
        raise ApiError(400, message, param="input")
    return ToolCall(item.name, arguments, item.call_id)
