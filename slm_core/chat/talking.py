"""The calls of a chat that make the model answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from slm_core.chat.chatstream import ChatStream
from slm_core.chat.messages import MessageLike, as_messages
from slm_core.chat.steering import Steering
from slm_core.chat.tools import RunningTurn, ToolErrors
from slm_core.constraints import Spec
from slm_core.generation import Answer, Event, StoppingCriterion
from slm_core.generation.speculation import Speculation
from slm_core.interrupts import uninterrupted
from slm_core.keywords import checked_keywords
from slm_core.protocols import Constraint, Sampler
from slm_core.sampling import LogitsProcessor, Sampling
from slm_core.types import Message, PrefillProgress, Tool


class Talking(ABC):
    """Sends messages and streams answers."""

    @checked_keywords
    def stream(
        self,
        content: str | MessageLike | Sequence[MessageLike],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | Spec | None = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        speculation: Speculation | None = None,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        strict_tools: bool = False,
        tool_errors: ToolErrors = "tell",
        max_rounds: int = 8,
    ) -> ChatStream:
        """Send messages and stream the answer.

        If the model calls functions, the chat runs them, and the model answers again. If anything raises, the chat is
        unchanged; side effects of functions remain.

        Args:
            content: a text, which is a user's message; a ``Message``; a mapping such as
                ``{"role": "user", "content": "Hello"}``; or a list of messages.
            sampling: instead of the chat's sampling, for the answers of this turn.
            max_tokens: the largest number of tokens of an answer. If this or one of the next four is None,
                ``sampling`` decides.
            temperature: divides the logits; 0 chooses the likeliest token.
            top_p: keep the likeliest tokens that together reach this probability.
            seed: the seed of the draws.
            stop: texts that end an answer.
            sampler: chooses tokens instead of the chain of ``sampling``, which then only sets length and stops.
            logits_processors: change each row of logits before the chain of ``sampling`` reads it, in order; see
                ``sampling.LogitsProcessor``.
            constraint: restricts the answer.
            stopping_criteria: called in order after each token.
            speculation: drafts for the answer; the answer is the same, or drawn from the same distribution.
            timeout: seconds for all answers of the turn, without the time of tools.
            on_event: called with each event, before the iteration yields it.
            progress: called with the number of decoded prompt tokens, and the number of prompt tokens to decode.
            tools: replaces the tools of the chat from now on; None keeps them.
            tool_choice: "auto", "none", "required", or the name of the tool that the first answer calls.
            strict_tools: enforce the schemas of the tools, also with "auto".
            tool_errors: "tell" the model about invalid calls and raising tools, or "raise" a ``ToolError``.
            max_rounds: the number of answers whose calls are run; later calls are left to the caller.

        Raises:
            TemplateError: the chat format refuses the messages.
            ContextFull: no room; nothing changed.
            InvalidOption: an invalid message or option.
            UnknownOption: an unknown keyword.
            ToolError: with ``tool_errors="raise"``, a tool raised, or a call is invalid.
            ChatBusy: the chat is answering another thread or task.
        """
        steering = Steering(
            sampling=sampling,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            sampler=sampler,
            logits_processors=logits_processors,
            constraint=constraint,
            stopping_criteria=stopping_criteria,
            speculation=speculation,
            timeout=timeout,
            on_event=on_event,
            progress=progress,
            tools=tools,
            tool_choice=tool_choice,
            strict_tools=strict_tools,
            tool_errors=tool_errors,
            max_rounds=max_rounds,
        )
        sent = as_messages(content)
        return self._begun(lambda: self._answered(sent, steering))

    @uninterrupted  # no interrupt comes between the beginning of the turn and ``run``, which can undo it
    @checked_keywords
    def send(
        self,
        content: str | MessageLike | Sequence[MessageLike],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | Spec | None = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        speculation: Speculation | None = None,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        strict_tools: bool = False,
        tool_errors: ToolErrors = "tell",
        max_rounds: int = 8,
    ) -> Answer:
        """Send messages; returns the whole answer. For the arguments and errors see ``stream``.

        Raises:
            SessionError: a tool has to be awaited.
        """
        return self.stream(
            content,
            sampling=sampling,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            sampler=sampler,
            logits_processors=logits_processors,
            constraint=constraint,
            stopping_criteria=stopping_criteria,
            speculation=speculation,
            timeout=timeout,
            on_event=on_event,
            progress=progress,
            tools=tools,
            tool_choice=tool_choice,
            strict_tools=strict_tools,
            tool_errors=tool_errors,
            max_rounds=max_rounds,
        ).run()

    @checked_keywords
    async def asend(
        self,
        content: str | MessageLike | Sequence[MessageLike],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | Spec | None = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        speculation: Speculation | None = None,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        strict_tools: bool = False,
        tool_errors: ToolErrors = "tell",
        max_rounds: int = 8,
    ) -> Answer:
        """Like ``send``, on an event loop; the model, and tools that are not coroutines, run in threads."""
        return await self.stream(
            content,
            sampling=sampling,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            sampler=sampler,
            logits_processors=logits_processors,
            constraint=constraint,
            stopping_criteria=stopping_criteria,
            speculation=speculation,
            timeout=timeout,
            on_event=on_event,
            progress=progress,
            tools=tools,
            tool_choice=tool_choice,
            strict_tools=strict_tools,
            tool_errors=tool_errors,
            max_rounds=max_rounds,
        ).arun()

    @checked_keywords
    def proceed(
        self,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | Spec | None = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        speculation: Speculation | None = None,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        strict_tools: bool = False,
        tool_errors: ToolErrors = "tell",
        max_rounds: int = 8,
    ) -> ChatStream:
        """Continue after the last message: run the calls without results, and stream the answer.

        For a chat that was restored in the middle of a turn, or whose turn was cancelled or reached its limit there.
        For the arguments and other errors see ``stream``.

        Raises:
            SessionError: there is nothing to answer, or a call is left to the caller.
        """
        steering = Steering(
            sampling=sampling,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            sampler=sampler,
            logits_processors=logits_processors,
            constraint=constraint,
            stopping_criteria=stopping_criteria,
            speculation=speculation,
            timeout=timeout,
            on_event=on_event,
            progress=progress,
            tools=tools,
            tool_choice=tool_choice,
            strict_tools=strict_tools,
            tool_errors=tool_errors,
            max_rounds=max_rounds,
        )
        return self._begun(lambda: self._proceed(steering))

    @checked_keywords
    def regenerate(
        self,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        constraint: Constraint | Spec | None = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        speculation: Speculation | None = None,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        strict_tools: bool = False,
        tool_errors: ToolErrors = "tell",
        max_rounds: int = 8,
    ) -> ChatStream:
        """Remove the last answer and stream another; with a temperature, it is another draw.

        For the arguments and other errors see ``stream``.

        Raises:
            SessionError: there is nothing to answer.
        """
        steering = Steering(
            sampling=sampling,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            sampler=sampler,
            logits_processors=logits_processors,
            constraint=constraint,
            stopping_criteria=stopping_criteria,
            speculation=speculation,
            timeout=timeout,
            on_event=on_event,
            progress=progress,
            tools=tools,
            tool_choice=tool_choice,
            strict_tools=strict_tools,
            tool_errors=tool_errors,
            max_rounds=max_rounds,
        )
        return self._begun(lambda: self._regenerate(steering))

    @abstractmethod
    def _begun(self, begin: Callable[[], RunningTurn]) -> ChatStream:
        """The stream of a new turn. The previous turn ends when the new turn begins."""

    @abstractmethod
    def _answered(self, sent: Sequence[Message], steering: Steering) -> RunningTurn: ...

    @abstractmethod
    def _proceed(self, steering: Steering) -> RunningTurn: ...

    @abstractmethod
    def _regenerate(self, steering: Steering) -> RunningTurn: ...
