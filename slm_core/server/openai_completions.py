"""OpenAI's text completions: POST /v1/completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.generation import Infill
from slm_core.generation.scoring import Score, score_tokens
from slm_core.openai_shapes import finite
from slm_core.protocols import Vocab
from slm_core.sampling import Sampling
from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.errors import ApiError, openai_envelope
from slm_core.server.fields import Items, Tokens
from slm_core.server.large_bodies import LargeBodyRoute, off_loop
from slm_core.server.openai_fields import Header, OpenAiFields, token_text, usage_json
from slm_core.server.pieces import Choice, Piece, TokenLogprobs
from slm_core.server.registry import Leased
from slm_core.server.requests import GenerationRequest
from slm_core.server.sse import STREAMED, frame, stream_answer, total_usage, whole_answers

router = APIRouter(tags=["OpenAI"], route_class=LargeBodyRoute)
_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""
_MOST_PROMPTS = 128
Json = Mapping[str, Any]
DONE = b"data: [DONE]\n\n"


class CompletionRequest(OpenAiFields):
    """The body of a request."""

    prompt: str | Tokens | Items[str] | Items[Tokens] = Field(
        description="A text to continue, or its tokens, or several of both. Control tokens in a text are plain text."
    )
    suffix: str | None = Field(
        None,
        description="The text after a gap that the answer fills; prompt is before it. Not for every model.",
    )
    max_tokens: int | None = Field(None, ge=0, description="16 by default.")
    echo: bool = Field(False, description="The answer begins with the prompt, its log-probabilities included.")
    best_of: int | None = Field(None, ge=1, le=128, description="Generate this many, and return the n likeliest.")
    logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = Field(False, description="Choices have token_ids, the tokens of the answer (as in vLLM).")

    def generations(self) -> list[GenerationRequest]:
        """The requests to the engine, one for each prompt.

        Raises:
            ApiError, InvalidOption: parameters contradict each other, or a value is invalid.
        """
        self.check_stream()
        prompts = self.prompts()
        for param, is_given in (("best_of", self.best_of is not None), ("echo", self.echo)):
            if self.stream and is_given:
                raise ApiError(400, f"{param} does not go with stream", param=param)
        if self.suffix is not None and (self.echo or not all(isinstance(prompt, str) for prompt in prompts)):
            raise ApiError(400, "suffix goes with a prompt that is a text, without echo", param="suffix")
        if self.stream and len(prompts) > 1:
            raise ApiError(400, f"prompt is a list of {len(prompts)} prompts (a stream has one)", param="prompt")
        return [self._generation(prompt) for prompt in prompts]

    def _generation(self, prompt: str | Sequence[int]) -> GenerationRequest:
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.suffix is None or not isinstance(prompt, str):
            request_prompt: str | Sequence[int] | Infill = prompt
        else:
            request_prompt = Infill(prompt, self.suffix)
        return GenerationRequest(
            model=self.model,
            prompt=request_prompt,
            sampling=self.sampling(Sampling(), max_tokens=max_tokens, logprobs=self.logprobs),
            n=self.n or 1,
            best_of=self.best_of,
            return_tokens=self.return_token_ids,
            priority=self.priority,
            salt=self.cache_salt or "",
        )

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts.

        Raises:
            ApiError: there are too many, or none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        prompts = [tokens] if tokens else [each for each in self.prompt if not isinstance(each, int)]
        if not 0 < len(prompts) <= _MOST_PROMPTS:
            message = f"prompt is a list of {len(prompts)} prompts (accepted: 1 to {_MOST_PROMPTS})"
            raise ApiError(400, message, param="prompt")
        return prompts


class LogprobsWriter:
    """Log-probabilities in the form of text completions: lists with one entry for each token.

    Args:
        vocab: the model's vocabulary.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._offset = 0

    def write(self, tokens: Sequence[TokenLogprobs]) -> Mapping[str, object]:
        """The next tokens of the answer."""
        texts = [token_text(self._vocab, each.token) for each in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if math.isnan(each.logprob) else finite(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprobs) -> Mapping[str, float] | None:
        """The likeliest tokens; None for the first token of a prompt, which nothing predicts."""
        if math.isnan(token.logprob):
            return None
        # Clients compare the token's log-probability with the top ones to see whether it is the likeliest: its entry
        # among them has to be the same number.
        top = [(each, token.logprob if each == token.token else logprob) for each, logprob in token.top]
        return {token_text(self._vocab, each): finite(logprob) for each, logprob in reversed(top)}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the beginning of its answers.

    Attributes:
        text: its text.
        tokens: its tokens with their log probabilities; () if log probabilities were not requested.
    """

    text: str = ""
    tokens: Sequence[TokenLogprobs] = ()


def completion(
    answerings: Sequence[Answering], echoes: Sequence[Echo], choices_by_prompt: Sequence[Sequence[Choice]]
) -> Json:
    """The JSON of a whole answer: the choices of each prompt, numbered throughout."""
    header = Header(answerings[0], "cmpl", "text_completion")
    choices = [
        _choice(answering, echo, choice, outcome.finish_reason)
        for answering, echo, choices in zip(answerings, echoes, choices_by_prompt, strict=True)
        for choice, outcome in zip(choices, answering.outcomes, strict=True)
    ]
    return header.with_choices(
        [{"index": i, **choice} for i, choice in enumerate(choices)], usage=usage_json(total_usage(answerings))
    )


def _choice(answering: Answering, echo: Echo, choice: Choice, reason: str) -> Json:
    logprobs = None
    if answering.has_logprobs:
        logprobs = LogprobsWriter(answering.running.model.vocab).write([*echo.tokens, *choice.logprobs])
    fields = {"text": echo.text + choice.content, "logprobs": logprobs, "finish_reason": reason}
    return {**fields, "token_ids": choice.tokens} if answering.has_tokens else fields


async def _echo(running: Leased, prompt: str | Sequence[int], logprobs: int | None) -> Echo:
    """A prompt with its log-probabilities, which are computed in a separate context."""
    vocab = running.model.vocab
    if isinstance(prompt, str):
        text, tokens = prompt, vocab.encode(prompt, add_special=True, parse_special=False)
    else:
        text, tokens = vocab.decode(prompt, special=True), list(prompt)
    if logprobs is None or not tokens:
        return Echo(text)

    def score() -> Score:
        with running.model.new_context(n_ctx=len(tokens), n_batch=min(len(tokens), 512)) as context:
            if running.adapters:
                context.set_adapters(0, running.adapters)
            return score_tokens(context, 0, tokens, None, top=logprobs)

    async with running.apart:
        scored = await to_thread.run_sync(score)
    tops = scored.top or [()] * len(tokens)
    return Echo(text, [TokenLogprobs(*each) for each in zip(tokens, scored.logprobs, tops, strict=True)])


class ChunkWriter:
    """Writes the chunks of a stream.

    Args:
        answering: the request.
        include_usage: whether a last chunk has the numbers of tokens.
    """

    def __init__(self, answering: Answering, *, include_usage: bool) -> None:
        self._header = Header(answering, "cmpl", "text_completion")
        self._include_usage = include_usage
        self._has_tokens = answering.has_tokens
        self._logprobs = [LogprobsWriter(answering.running.model.vocab) for _ in range(answering.n)]

    def begin(self) -> Iterable[bytes]:
        """No frames."""
        return ()

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """One chunk."""
        logprobs = None
        if piece.logprobs is not None:
            logprobs = self._logprobs[piece.index].write([piece.logprobs])
        return [self._chunk(piece.index, piece.content, logprobs, tokens=[] if piece.token is None else [piece.token])]

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The finish reasons, the usage, and the end."""
        yield from (self._chunk(outcome.index, "", None, outcome.finish_reason) for outcome in outcomes)
        if self._include_usage:
            yield frame(self._header.with_choices([], usage=usage_json(usage)))
        yield DONE

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The error in place of the end."""
        return [frame(openai_envelope(error, ""))]

    def _chunk(
        self, index: int, text: str, logprobs: object = None, reason: object = None, tokens: Sequence[int] = ()
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._has_tokens:
            choice["token_ids"] = tokens
        if self._include_usage:
            return frame(self._header.with_choices([choice], usage=None))
        return frame(self._header.with_choices([choice]))


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue a text."""
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    requests = await off_loop(http, body.generations)
    if body.stream:
        return await stream_answer(
            http, requests[0], lambda answering: ChunkWriter(answering, include_usage=include_usage)
        )

    async def collect(answerings: Sequence[Answering]) -> Json:
        choices = [await answering.choices() for answering in answerings]
        echoes = [Echo()] * len(answerings)
        if body.echo:
            running = answerings[0].running
            echoes = [await _echo(running, prompt, body.logprobs) for prompt in body.prompts()]
        return completion(answerings, echoes, choices)

    return await whole_answers(http, requests, collect)
