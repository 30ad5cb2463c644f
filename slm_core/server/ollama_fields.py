"""The bodies of Ollama's API, and the conversation in them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from slm_core.constraints import JsonSchema, Spec
from slm_core.engine import Conversation
from slm_core.generation import Infill
from slm_core.sampling import Sampling
from slm_core.server.errors import ApiError
from slm_core.server.fields import Items, Strict
from slm_core.server.requests import GenerationRequest
from slm_core.types import Message, Role, ToolCall

_NO_EFFECT = "Without effect."
_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
"""Options that have the same name in ``Sampling``."""
_NO_IMAGES = "Only without images."


class Options(Strict):
    """How tokens are chosen. Options of how Ollama runs a model have no effect."""

    num_predict: int | None = Field(None, ge=-2, description="The longest answer, in tokens; -1 and -2 for no limit.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = Field(None, ge=0, description="Tokens that penalties look back.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_ctx: int | None = Field(None, ge=1, description="At most the server's context (slm serve --ctx).")
    num_keep: int | None = Field(None, description=_NO_EFFECT)
    num_batch: int | None = Field(None, description=_NO_EFFECT)
    num_gpu: int | None = Field(None, description=_NO_EFFECT)
    main_gpu: int | None = Field(None, description=_NO_EFFECT)
    num_thread: int | None = Field(None, description=_NO_EFFECT)
    numa: bool | None = Field(None, description=_NO_EFFECT)
    low_vram: bool | None = Field(None, description=_NO_EFFECT)
    f16_kv: bool | None = Field(None, description=_NO_EFFECT)
    use_mmap: bool | None = Field(None, description=_NO_EFFECT)
    use_mlock: bool | None = Field(None, description=_NO_EFFECT)

    def context(self, n_ctx: int) -> int:
        """The longest prompt, in tokens: ``num_ctx``, or all of the server's context.

        Raises:
            ApiError: the server's context is smaller.
        """
        if self.num_ctx is not None and self.num_ctx > n_ctx:
            message = f"num_ctx is {self.num_ctx}, but the server's context has {n_ctx} tokens (slm serve --ctx)"
            raise ApiError(400, message, param="options.num_ctx")
        return self.num_ctx or n_ctx

    def sampling(self, n_ctx: int, n_logprobs: int | None) -> Sampling:
        """The sampling options: the defaults, replaced by the options in the body.

        Args:
            n_ctx: the server's context, in tokens.
            n_logprobs: how many log-probabilities are requested; None for none.

        Raises:
            ApiError, InvalidOption: an invalid value.
        """
        self.context(n_ctx)
        values: dict[str, object] = {name: getattr(self, name) for name in _SAME_NAME}
        values["penalty_window"] = self.repeat_last_n
        values["max_tokens"] = None if (self.num_predict or -1) < 0 else self.num_predict
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        values["logprobs"] = n_logprobs
        given = {name: value for name, value in values.items() if value is not None}
        return Sampling.from_dict({**Sampling().to_dict(), **given})


class CalledFunction(Strict):
    """A call's function, with arguments as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = Field(None, description=_NO_EFFECT)


class MessageCall(Strict):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = Field(None, description=_NO_EFFECT)
    type: Literal["function"] | None = None


class ChatMessage(Strict):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = Field(None, description="The reasoning of an earlier answer.")
    tool_calls: Items[MessageCall] | None = None
    tool_name: str | None = Field(None, description="The tool whose result this is.")
    tool_call_id: str | None = Field(None, description=_NO_EFFECT)
    images: Items[str] | None = Field(None, max_length=0, description=_NO_IMAGES)


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class ModelFields(Strict):
    """Fields of all requests that a model computes."""

    model: str = Field(min_length=1, description='A name from /api/tags; ":latest" may follow.')
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    keep_alive: float | str | None = Field(None, description="0 without a prompt unloads; otherwise without effect.")

    @property
    def model_name(self) -> str:
        """The name of the model in the registry."""
        return self.model.removesuffix(":latest")

    @property
    def unloads(self) -> bool:
        """Whether the request, if it has no prompt, unloads the model instead of loading it."""
        return self.keep_alive in (0, "0", "0s")


class OllamaFields(ModelFields):
    """Fields of both ways to ask."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="A JSON schema, or any JSON object.")
    think: bool | Literal["low", "medium", "high"] | None = Field(None, description="Whether the model reasons.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def thinking(self) -> bool | None:
        """Whether to reason; None for the template's default."""
        return True if isinstance(self.think, str) else self.think

    def text_format(self) -> Spec | None:
        """The constraint of an answer that calls no tool; None for no constraint."""
        if not self.format:
            return None
        return JsonSchema({"type": "object"} if self.format == "json" else self.format)

    def sampling(self, n_ctx: int) -> Sampling:
        """How tokens are chosen; see ``Options.sampling``."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self.options.sampling(n_ctx, (self.top_logprobs or 0) if self.logprobs else None)


class ChatRequest(OllamaFields):
    """The body of a chat."""

    messages: Items[ChatMessage] = Field(default_factory=list, description="None: only load the model.")
    tools: Items[Tool] | None = None

    def generation(self, n_ctx: int) -> GenerationRequest:
        """The request to the engine; ``Options.sampling`` documents ``n_ctx`` and the errors."""
        prompt = Conversation(
            messages_of(self.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            text_format=self.text_format(),
            thinking=self.thinking(),
            continue_final_message=self.messages[-1].role == "assistant",
        )
        return GenerationRequest(model=self.model_name, prompt=prompt, sampling=self.sampling(n_ctx))


class GenerateRequest(OllamaFields):
    """The body of a request with one prompt."""

    prompt: str = Field("", description="The question of the user; with raw, a text to continue. None: load the model.")
    suffix: str = Field("", description="The text after a gap that the answer fills; prompt is before it.")
    system: str | None = None
    raw: bool = Field(False, description="Continue the text; control tokens in it are plain text.")
    images: Items[str] | None = Field(None, max_length=0, description=_NO_IMAGES)

    def generation(self, n_ctx: int) -> GenerationRequest:
        """The request to the engine; ``Options.sampling`` documents ``n_ctx`` and the errors."""
        plain = "raw" if self.raw else "suffix"
        if (self.raw or self.suffix) and (self.system is not None or self.think is not None):
            param = "think" if self.system is None else "system"
            raise ApiError(400, f"{param} does not go with {plain}", param=param)
        prompt: str | Infill | Conversation = self.prompt
        if self.suffix:
            prompt = Infill(self.prompt, self.suffix)
        elif not self.raw:
            system = [Message(Role.SYSTEM, self.system)] if self.system else []
            messages = [*system, Message(Role.USER, self.prompt)]
            prompt = Conversation(messages, text_format=self.text_format(), thinking=self.thinking())
        constraint = None if isinstance(prompt, Conversation) else self.text_format()
        sampling = self.sampling(n_ctx)
        return GenerationRequest(model=self.model_name, prompt=prompt, sampling=sampling, constraint=constraint)


class ShowRequest(Strict):
    """The body of a request for a model's properties."""

    model: str = Field(min_length=1)
    verbose: bool | None = Field(None, description=_NO_EFFECT)

    @property
    def model_name(self) -> str:
        """The name of the model in the registry."""
        return self.model.removesuffix(":latest")


def messages_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """The conversation in slm-core's form.

    Ollama's calls have no ids, but some chat templates need them: they are numbered, and a result belongs to the first
    call of its tool that has none.
    """
    result, unanswered, n_calls = [], defaultdict[str, deque[str]](deque), 0
    for message in messages:
        if message.role == "tool":
            name = message.tool_name or next((name for name, ids in unanswered.items() if ids), None)
            ids = unanswered[name] if name is not None else deque[str]()
            result.append(Message(Role.TOOL, message.content, name=name, tool_call_id=ids.popleft() if ids else None))
            continue
        calls = []
        for call in message.tool_calls or ():
            calls.append(ToolCall(call.function.name, call.function.arguments, f"call{n_calls:05}"))
            unanswered[call.function.name].append(f"call{n_calls:05}")
            n_calls += 1
        result.append(Message(message.role, message.content, reasoning=message.thinking, tool_calls=calls))
    return result
