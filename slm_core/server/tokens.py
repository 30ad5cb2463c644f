"""Tokens of texts: POST /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.chat.toolbox import Toolbox
from slm_core.engine import Conversation
from slm_core.engine.prompts import encode
from slm_core.model import Model
from slm_core.server.errors import ApiError
from slm_core.server.fields import Items, Strict, Tokens
from slm_core.server.large_bodies import LargeBodyRoute, off_loop
from slm_core.server.openai_chat import ChatMessage, PromptFields
from slm_core.server.sse import json_response, registry_of

router = APIRouter(tags=["Tokens"], route_class=LargeBodyRoute)


class TokenizeRequest(PromptFields):
    """The body of a request for tokens: of a text, or of the prompt of a conversation."""

    content: str | None = Field(None, description="The text.")
    prompt: str | None = Field(None, description="Another name of content.")
    messages: Items[ChatMessage] = Field(default_factory=list, description="The conversation, instead of a text.")
    add_special: bool = Field(False, description="Add the special tokens that the model has around a text.")
    add_special_tokens: bool = Field(False, description="Another name of add_special.")
    parse_special: bool = Field(False, description="Whether texts of control tokens become control tokens.")
    with_pieces: bool = Field(False, description="Each token with its text, or its bytes if they are not UTF-8.")

    def encode(self, model: Model) -> list[int]:
        """The tokens.

        Raises:
            ApiError: not one of content, prompt and messages.
        """
        texts = [text for text in (self.content, self.prompt) if text is not None]
        if len(texts) + bool(self.messages) != 1:
            raise ApiError(400, "give one of content, prompt and messages", param="content")
        if not texts:
            return list(encode(model.vocab, lambda: model.formatter, self.conversation(), None).tokens)
        add_special = self.add_special or self.add_special_tokens
        return model.vocab.encode(texts[0], add_special=add_special, parse_special=self.parse_special)


class DetokenizeRequest(Strict):
    """The body of a request for a text."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    tokens: Tokens


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> Response:
    """The tokens of a text or a conversation."""
    async with registry_of(http).lease(body.model) as running:
        n_ctx = running.engine.stats().n_ctx

        def answer() -> Response:
            tokens = body.encode(running.model)
            shown = [_piece(running.model, token) for token in tokens] if body.with_pieces else tokens
            return json_response({"tokens": shown, "count": len(tokens), "max_model_len": n_ctx})

        return await to_thread.run_sync(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
    """The text of tokens, control tokens included. Bytes that are not UTF-8 become U+FFFD."""
    async with registry_of(http).lease(body.model) as running:
        vocab = running.model.vocab
        text = await to_thread.run_sync(lambda: vocab.decode(body.tokens, special=True))
    return json_response({"content": text, "prompt": text})


class TemplateRequest(PromptFields):
    """The body of a request for a prompt."""

    add_generation_prompt: bool = Field(True, description="End with the beginning of the assistant's message.")

    def render(self, model: Model, conversation: Conversation) -> str:
        """The prompt of a conversation.

        Raises:
            TemplateError: the model has no chat format, or it refuses the messages.
        """
        segments = model.formatter.render(
            conversation.messages,
            tools=Toolbox(conversation.tools).schemas,
            add_generation_prompt=self.add_generation_prompt and not conversation.continue_final_message,
            continue_final_message=conversation.continue_final_message,
            thinking=conversation.thinking,
            **conversation.template_kwargs,
        )
        return "".join(segment.text for segment in segments)


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, http: Request) -> Response:
    """The prompt of a conversation, with control tokens as text."""
    conversation = await off_loop(http, body.conversation)
    async with registry_of(http).lease(body.model) as running:
        text = await to_thread.run_sync(body.render, running.model, conversation)
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request, model: str | None = None) -> Response:
    """What clients need to render prompts themselves: the chat template, and the texts of BOS and EOS."""
    async with registry_of(http).lease(model) as running:
        vocab, info = running.model.vocab, running.model.info
        ends = {"bos_token": vocab.bos, "eos_token": vocab.eos}
        texts = {name: None if token is None else vocab.decode([token], special=True) for name, token in ends.items()}
    return json_response({**texts, "pad_token": None, "chat_template": info.chat_template})


def _piece(model: Model, token: int) -> Mapping[str, Any]:
    """A token; ``special`` is true for a control token."""
    data = model.vocab.token_bytes(token, special=True)
    fields = {"id": token, "special": bool(data) and not model.vocab.token_bytes(token)}
    try:
        return {**fields, "piece": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {**fields, "piece": list(data)}
