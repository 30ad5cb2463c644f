"""OpenAI's text completions: POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.protocols import Vocab
from slm_core.sampling import Sampling
from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.errors import ApiError, openai_envelope
from slm_core.server.openai_fields import Header, OpenAiFields, finite, token_text, usage_json
from slm_core.server.pieces import Choice, Piece, TokenLogprobs
from slm_core.server.requests import GenerationRequest
from slm_core.server.sse import STREAMED, answer, frame

router = APIRouter(tags=["OpenAI"])
_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""
DONE = b"data: [DONE]\n\n"


class CompletionRequest(OpenAiFields):
    """The body of a request."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        description="A text to continue, or its tokens. A list has one prompt. Control tokens in a text are plain text."
    )
    max_tokens: int | None = Field(None, ge=1, description="16 by default.")
    best_of: int | None = Field(None, ge=1, le=128, description="Generate this many, and return the n likeliest.")
    logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = Field(False, description="Choices have token_ids, the tokens of the answer (as in vLLM).")

    def generation(self) -> GenerationRequest:
        """The request to the engine.

        Raises:
            ApiError, InvalidOption: parameters contradict each other, or a value is invalid.
        """
        self.check_stream()
        if self.best_of is not None and self.stream:
            raise ApiError(400, "best_of does not go with stream", param="best_of")
        return GenerationRequest(
            model=self.model,
            prompt=self._prompt(),
            sampling=self.sampling(
                Sampling(), max_tokens=self.max_tokens or _DEFAULT_MAX_TOKENS, logprobs=self.logprobs
            ),
            n=self.n or 1,
            best_of=self.best_of,
            return_tokens=self.return_token_ids,
            priority=self.priority,
            salt=self.cache_salt or "",
        )

    def _prompt(self) -> str | Sequence[int]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        tokens = [token for token in prompt if isinstance(token, int)]
        if tokens:
            return tokens
        prompts = [each for each in prompt if not isinstance(each, int)]
        if len(prompts) != 1:
            raise ApiError(400, f"prompt is a list of {len(prompts)} prompts (accepted: one)", param="prompt")
        return prompts[0]


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
            "token_logprobs": [finite(each.logprob) for each in tokens],
            "top_logprobs": [
                {token_text(self._vocab, token): finite(logprob) for token, logprob in reversed(each.top)}
                for each in tokens
            ],
            "text_offset": offsets,
        }


def completion(answering: Answering, choices: Sequence[Choice]) -> Mapping[str, object]:
    """The JSON of a whole answer."""
    header, outcomes = Header(answering, "cmpl", "text_completion"), answering.outcomes
    return header.with_choices(
        [_choice(answering, i, choice, outcomes[i].finish_reason) for i, choice in enumerate(choices)],
        usage=usage_json(answering.usage),
    )


def _choice(answering: Answering, index: int, choice: Choice, reason: str) -> Mapping[str, object]:
    logprobs = LogprobsWriter(answering.running.model.vocab).write(choice.logprobs) if answering.has_logprobs else None
    fields = {"index": index, "text": choice.content, "logprobs": logprobs, "finish_reason": reason}
    return {**fields, "token_ids": choice.tokens} if answering.has_tokens else fields


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
        """Nothing."""
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
    return await answer(
        http,
        body.generation(),
        join=completion,
        writer=(lambda answering: ChunkWriter(answering, include_usage=include_usage)) if body.stream else None,
    )
