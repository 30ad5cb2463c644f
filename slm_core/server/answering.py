"""Answers a ``GenerationRequest``: with the pieces of a stream, or with joined choices."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
from anyio import to_thread

from slm_core.engine import CompletionsStream, RequestMetrics
from slm_core.generation import Completion, FinishReason
from slm_core.generation.speculation import prompt_lookup
from slm_core.server.errors import ApiError
from slm_core.server.keys import Limits
from slm_core.server.pieces import Choice, Piece, PieceReader, finish_reason
from slm_core.server.registry import Leased, ModelRegistry
from slm_core.server.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of all answers to a request.

    Attributes:
        drafts: the accepted and the rejected tokens of drafts, of an answer with a prediction; None without one.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    drafts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one answer.

    Attributes:
        index: its number.
        finish_reason: "stop", "length" or "tool_calls".
        stop: the stop text of the request that ended it; None if none did.
    """

    index: int
    finish_reason: str
    stop: str | None = None


class Answering:
    """A request while it is answered. Use it with ``async with``: leaving the block cancels unfinished streams.

    Args:
        registry: the models.
        limits: the limits of keys.
        request: the request.
        key: the client, for fair shares.
        request_id: the request's id in the engine's metrics and logs.
        begun: answers of the same HTTP request that have begun. Their model cannot be unloaded before they end, so this
            request shares their lease: a new lease could wait for an unload, which would wait for these answers.
        n_places: the number of requests that it counts as for the limits; None for one for each answer.

    Attributes:
        running: the model.
        request_id: the request's id.
        load_s: seconds that it waited for the model.
    """

    running: Leased

    def __init__(
        self,
        registry: ModelRegistry,
        limits: Limits,
        request: GenerationRequest,
        *,
        key: str,
        request_id: str,
        begun: Sequence[Answering] = (),
        n_places: int | None = None,
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._request = request
        self._key = key
        self._begun = begun
        self.request_id = request_id
        self.load_s = 0.0
        self._stack = AsyncExitStack()
        self._stream: CompletionsStream | None = None
        logprobs = request.sampling.logprobs is not None
        n = request.n_answers
        self._n_places = n if n_places is None else n_places
        tokens, single_call = request.return_tokens, not request.parallel_calls
        self._readers = [PieceReader(i, logprobs=logprobs, tokens=tokens, single_call=single_call) for i in range(n)]

    async def __aenter__(self) -> Self:
        try:
            priority = self._limits.priority(self._key, self._request.priority)
            self._limits.check_answers(self._key, self._n_places, "n")
            self._stack.enter_context(self._limits.place(self._key, self._n_places))
            began = time.perf_counter()
            lease = nullcontext(self._begun[0].running) if self._begun else self._registry.lease(self._request.model)
            self.running = await self._stack.enter_async_context(lease)
            self.load_s = time.perf_counter() - began
            with anyio.CancelScope(shield=True):  # a submitted request must not be lost
                self._stream = stream = await to_thread.run_sync(self._submit, priority)
            self._stack.callback(stream.close)
            n, max_tokens = len(self._readers), self._request.sampling.max_tokens
            n_begun = sum(answering.n_cells for answering in self._begun)
            self._stack.enter_context(self._limits.cells(self._key, stream.n_prompt, n, max_tokens, n_begun=n_begun))
            await anyio.lowlevel.checkpoint()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def n(self) -> int:
        """The number of answers."""
        return self._request.n

    @property
    def n_cells(self) -> int:
        """The positions of the KV cache that it may take; without ``max_tokens``, the positions of the prompt."""
        return self._submitted.n_prompt + len(self._readers) * (self._request.sampling.max_tokens or 0)

    @property
    def has_logprobs(self) -> bool:
        """Whether pieces carry log-probabilities."""
        return self._request.sampling.logprobs is not None

    @property
    def has_tokens(self) -> bool:
        """Whether pieces carry tokens."""
        return self._request.return_tokens

    def _submit(self, priority: float) -> CompletionsStream:
        request = self._request
        return self.running.engine.completions(
            request.prompt,
            request.n,
            request.sampling,
            best_of=request.best_of,
            constraint=request.constraint,
            speculation=prompt_lookup(request.sampling, self.running.lookup, self._expected()),
            priority=priority,
            key=self._key,
            salt=request.salt,
            adapters=self.running.adapters,
            request_id=self.request_id,
        )

    def _expected(self) -> list[int]:
        """The tokens of the prediction, as many as the longest answer has."""
        if not self._request.prediction:
            return []
        tokens = self.running.model.vocab.encode(self._request.prediction, add_special=False, parse_special=False)
        return tokens[: self.running.engine.stats().n_ctx]

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all answers, as they come; pieces without content are left out.

        Raises:
            SlmError: the request failed.
        """
        async for completion in self._submitted:
            reader = self._readers[completion.index]
            if reader.over:
                continue
            piece = reader.read(completion.event)
            if reader.over:
                self._submitted.cancel(completion.index)
            if piece:
                yield piece

    async def choices(self) -> Sequence[Choice]:
        """The joined answers; with ``best_of``, the best ones, best first and numbered anew."""
        choices = [Choice(i) for i in range(len(self._readers))]
        async for piece in self.pieces():
            choices[piece.index].add(piece)
        return [choices[completion.index] for completion in self._submitted.answers]

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """How the answers ended, in the order of ``choices``; when they are over.

        Raises:
            ApiError: the server cancelled an answer.
        """
        return [self._outcome(completion) for completion in self._submitted.answers]

    def _outcome(self, completion: Completion) -> Outcome:
        reason, reader = completion.answer.finish_reason, self._readers[completion.index]
        if reason is FinishReason.CANCELLED and not reader.over:
            raise ApiError(503, "the server cancelled the answer", "cancelled")
        stop = completion.answer.stop
        requested = stop if stop in self._request.sampling.stop else None  # not a stop of the chat format
        return Outcome(completion.index, finish_reason(reason, reader), requested)

    @property
    def usage(self) -> TokenUsage:
        """Tokens of all answers, so far. The prompt counts once. Tokens after the end of a cut answer do not count."""
        metrics = self._submitted.metrics
        return TokenUsage(
            self._submitted.n_prompt,
            sum(
                reader.n_tokens if reader.over else each.completion_tokens
                for reader, each in zip(self._readers, metrics, strict=True)
            ),
            metrics[0].cached_tokens,
            sum(reader.n_reasoning for reader in self._readers),
            self._drafts,
        )

    @property
    def _drafts(self) -> tuple[int, int] | None:
        if not self._request.prediction:
            return None
        accepted = sum(drafts.accepted for drafts in self._submitted.drafts)
        return accepted, sum(drafts.drafted for drafts in self._submitted.drafts) - accepted

    @property
    def shifted_tokens(self) -> int:
        """Cached tokens of a complete answer that depend on removed tokens; see ``reuse="cut"``."""
        return self._submitted.answers[0].answer.usage.shifted_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """The times of the first answer, so far."""
        return self._submitted.metrics[0]

    @property
    def _submitted(self) -> CompletionsStream:
        assert self._stream is not None
        return self._stream
