"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.constraints import JsonSchema, Spec
from slm_core.engine import Conversation
from slm_core.engine.prompts import check_template_kwargs
from slm_core.openai_shapes import answer_message, call_shape, choice_shape
from slm_core.sampling import Sampling
from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.errors import ApiError, openai_envelope
from slm_core.server.fields import EngineFields, Items, Strict, Texts
from slm_core.server.large_bodies import LargeBodyRoute, off_loop
from slm_core.server.openai_fields import Header, OpenAiFields, chat_logprobs, usage_json
from slm_core.server.pieces import CallPiece, Choice, Piece, TokenLogprobs
from slm_core.server.requests import GenerationRequest
from slm_core.server.sse import STREAMED, answer, frame
from slm_core.types import Message, Role, ToolCall

router = APIRouter(tags=["OpenAI"], route_class=LargeBodyRoute)
_NO_EFFECT = "Without effect."
DONE = b"data: [DONE]\n\n"


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


class SystemMessage(Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = Field(None, description=_NO_EFFECT)


class UserMessage(Strict):
    """A message of the user."""

    role: Literal["user"]
    content: Content
    name: str | None = Field(None, description=_NO_EFFECT)


class CalledFunction(Strict):
    """A call's function, with arguments as JSON text."""

    name: str
    arguments: str


class MessageCall(Strict):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description=_NO_EFFECT)


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Items[Any] | None = Field(None, description=_NO_EFFECT)
    tool_calls: Items[MessageCall] | None = None
    name: str | None = Field(None, description=_NO_EFFECT)


class ToolMessage(Strict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = Field(None, description="The tool; by default, of the call with this id.")


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Enforce the schemas of all tools.")


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    """The name of a function."""

    name: str


class ToolChoice(Strict):
    """The tool that the answer calls."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Strict):
    """The tools that the answer may call, and whether it has to call one."""

    mode: Literal["auto", "required"]
    tools: Items[ToolChoice] = Field(min_length=1)


class AllowedChoice(Strict):
    """Some of the tools; the model reads all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class NamedSchema(Strict):
    """A JSON schema; it is always enforced."""

    name: str
    description: str | None = Field(None, description=_NO_EFFECT)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description=_NO_EFFECT)


class TextFormat(Strict):
    """An answer in any form."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Prediction(Strict):
    """A text that the answer is likely to repeat."""

    type: Literal["content"]
    content: Content


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class PromptFields(EngineFields):
    """Fields of the prompt."""

    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[Tool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[ToolChoice | AllowedChoice, Field(discriminator="type")] | None
    ) = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description='"none" turns the model\'s reasoning off, any other value on.'
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    continue_final_message: bool = Field(False, description="Continue the last message, an assistant's.")

    def conversation(self) -> Conversation:
        """The conversation.

        Raises:
            ApiError: parameters contradict each other.
            InvalidOption: a variable of the template that other parameters set.
        """
        choice, tools = self._chosen_tool(), self.tools or []
        if not tools and choice not in ("auto", "none"):
            raise ApiError(400, f"tool_choice {choice!r} needs tools", param="tool_choice")
        kwargs = dict(self.chat_template_kwargs or {})
        check_template_kwargs(kwargs, "chat_template_kwargs")
        return Conversation(
            messages_of(self.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
            tool_choice=choice if tools else "auto",
            strict_tools=any(tool.function.strict for tool in tools) and choice == "auto",
            allowed_tools=self._allowed_tools(),
            thinking=self._thinking(kwargs),
            continue_final_message=self.continue_final_message,
            template_kwargs=kwargs,
        )

    def _chosen_tool(self) -> str:
        """Which tools the answer calls: "auto", "none", "required", or the name of one."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode
        return choice.function.name if isinstance(choice, ToolChoice) else choice or "auto"

    def _allowed_tools(self) -> list[str] | None:
        choice = self.tool_choice
        return (
            [each.function.name for each in choice.allowed_tools.tools] if isinstance(choice, AllowedChoice) else None
        )

    def _thinking(self, kwargs: dict[str, Any]) -> bool | None:
        """Whether to reason; removes the variable from ``kwargs``, because templates name it differently."""
        if "enable_thinking" in kwargs and self.reasoning_effort is not None:
            raise ApiError(400, "reasoning_effort and enable_thinking say the same: give one", param="reasoning_effort")
        thinking = kwargs.pop("enable_thinking", None)
        if thinking is not None and not isinstance(thinking, bool):
            raise ApiError(400, "enable_thinking is a boolean", param="chat_template_kwargs.enable_thinking")
        return thinking if self.reasoning_effort is None else self.reasoning_effort != "none"


class ChatCompletionRequest(OpenAiFields, PromptFields):
    """The body of a request."""

    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool | None = Field(None, description="If false, an answer ends after its first call.")
    response_format: ResponseFormat | None = Field(None, description="The form of an answer that calls no tool.")
    prediction: Prediction | None = Field(
        None, description="A text that the answer is likely to repeat: drafts are made from it, unless --no-lookup."
    )
    modalities: Items[Literal["text"]] | None = Field(None, description=_NO_EFFECT)
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=_NO_EFFECT)
    metadata: Texts | None = Field(None, description=_NO_EFFECT)
    store: Literal[False] | None = Field(None, description="Only false: chat completions are not stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description=_NO_EFFECT)
    safety_identifier: str | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: str | None = Field(None, description="Without effect: prefixes are always cached.")
    prompt_cache_retention: str | None = Field(None, description=_NO_EFFECT)

    def generation(self) -> GenerationRequest:
        """The request to the engine.

        Raises:
            ApiError, InvalidOption: parameters contradict each other, or a value is invalid.
        """
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        return GenerationRequest(
            model=self.model,
            prompt=replace(self.conversation(), text_format=self._text_format()),
            sampling=self.sampling(
                Sampling(),
                max_tokens=self.max_completion_tokens or self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            prediction=self._prediction(),
            n=self.n or 1,
            parallel_calls=self.parallel_tool_calls is not False,
            priority=self.priority,
            salt=self.cache_salt or "",
        )

    def _prediction(self) -> str:
        if self.prediction is not None and (self.n or 1) > 1:
            raise ApiError(400, "prediction goes with one answer (n: 1)", param="prediction")
        return "" if self.prediction is None else _text(self.prediction.content)

    def _text_format(self) -> Spec | None:
        if self.response_format is None or isinstance(self.response_format, TextFormat):
            return None
        if isinstance(self.response_format, ObjectFormat):
            return JsonSchema({"type": "object"})
        return JsonSchema(self.response_format.json_schema.schema_ or {})


def messages_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """The conversation in slm-core's form.

    Raises:
        ApiError: the arguments of a call are not a JSON object.
    """
    names: dict[str, str] = {}
    result = []
    for i, message in enumerate(messages):
        text = _text(message.content)
        if isinstance(message, AssistantMessage):
            calls = [_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(message.tool_calls or ())]
            names |= {call.id: call.name for call in calls if call.id is not None}
            result.append(Message(Role.ASSISTANT, text, reasoning=message.reasoning_content, tool_calls=calls))
        elif isinstance(message, ToolMessage):
            name = message.name or names.get(message.tool_call_id)
            result.append(Message(Role.TOOL, text, name=name, tool_call_id=message.tool_call_id))
        else:
            result.append(Message(Role.USER if message.role == "user" else Role.SYSTEM, text))
    return result


def _text(content: Content | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _call(call: MessageCall, where: str) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{where}.function.arguments"
        raise ApiError(400, f"{param} is not the JSON text of an object", param=param)
    return ToolCall(call.function.name, arguments, call.id)


def completion(answering: Answering, choices: Sequence[Choice]) -> Mapping[str, object]:
    """The JSON of a whole answer."""
    header = Header(answering, "chatcmpl", "chat.completion")
    outcomes = answering.outcomes
    return header.with_choices(
        [_choice(answering, i, choice, outcomes[i].finish_reason) for i, choice in enumerate(choices)],
        usage=usage_json(answering.usage),
    )


def _choice(answering: Answering, index: int, choice: Choice, reason: str) -> Mapping[str, object]:
    calls = [call_shape(call.name, call.arguments, call.id) for call in choice.calls]
    message = answer_message(choice.content, choice.reasoning, calls)
    return choice_shape(index, message, _logprobs(answering, choice.logprobs), reason)


def _logprobs(answering: Answering, tokens: Sequence[TokenLogprobs]) -> Mapping[str, object] | None:
    if not answering.has_logprobs:
        return None
    return chat_logprobs(answering.running.model.vocab, tokens)


class ChunkWriter:
    """Writes the chunks of a stream.

    Args:
        answering: the request.
        include_usage: whether a last chunk has the numbers of tokens.
    """

    def __init__(self, answering: Answering, *, include_usage: bool) -> None:
        self._answering = answering
        self._header = Header(answering, "chatcmpl", "chat.completion.chunk")
        self._include_usage = include_usage

    def begin(self) -> Iterable[bytes]:
        """One chunk for each answer, with its role."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self._answering.n)]

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """One chunk, and another one for each further piece of a call: clients read the first one of a chunk only."""
        delta: dict[str, object] = {}
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        calls = [_call_delta(call) for call in piece.calls]
        if calls:
            delta["tool_calls"] = calls[:1]
        logprobs = None if piece.logprobs is None else _logprobs(self._answering, [piece.logprobs])
        yield self._chunk(piece.index, delta, logprobs)
        yield from (self._chunk(piece.index, {"tool_calls": [call]}) for call in calls[1:])

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The finish reasons, the usage, and the end."""
        yield from (self._chunk(outcome.index, {}, None, outcome.finish_reason) for outcome in outcomes)
        if self._include_usage:
            yield frame(self._header.with_choices([], usage=usage_json(usage)))
        yield DONE

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The error in place of the end."""
        return [frame(openai_envelope(error, ""))]

    def _chunk(self, index: int, delta: Mapping[str, object], logprobs: object = None, reason: object = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self._include_usage:
            return frame(self._header.with_choices([choice], usage=None))
        return frame(self._header.with_choices([choice]))


def _call_delta(call: CallPiece) -> Mapping[str, object]:
    function: dict[str, object] = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
    """Answer a conversation."""
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return await answer(
        http,
        await off_loop(http, body.generation),
        join=completion,
        writer=(lambda answering: ChunkWriter(answering, include_usage=include_usage)) if body.stream else None,
    )
