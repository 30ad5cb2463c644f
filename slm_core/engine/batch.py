"""Batch generation: answers to a list of prompts, computed together in the thread of the caller."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypedDict, TypeVar, cast

from slm_core.argument_checks import check_flag, check_kind
from slm_core.chat.answers import own_constraint
from slm_core.chat.chat import ChatModel
from slm_core.constraints import Spec
from slm_core.display.notebook import NotebookProgressBar, in_notebook
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.prompts import EncodedPrompt, Prompt, check_prompts, encode, is_prompt
from slm_core.engine.requests import Request
from slm_core.errors import ContextFull, RequestsFailed, SlmError
from slm_core.generation.control import checked_timeout
from slm_core.generation.events import Answer
from slm_core.generation.speculation import Speculation
from slm_core.generation.stopping import StoppingCriterion
from slm_core.generation.trained import TrainedLength
from slm_core.keywords import checked_keywords
from slm_core.protocols import Adapters, Constraint
from slm_core.sampling import LogitsProcessor, Sampling
from slm_core.types import KvType

Advance = Callable[[int], None]
"""Called with the number of requests that are over."""
UNLIMITED = 1024
"""Tokens of an answer that a context has room for, if ``max_tokens`` is None."""
LARGEST = 32768
"""The largest default context, in positions, unless one prompt needs more."""
_LEAST_TIME = 1e-9
"""The timeout of a request whose time was over before it began, in seconds."""
_A = TypeVar("_A")
_B = TypeVar("_B")


class GenerateOptions(TypedDict, total=False):
    """Options of ``Model.generate``.

    Attributes:
        max_tokens, temperature, top_p, seed, stop: replace these options of ``sampling``; None keeps them.
        constraint: restricts the answers; each answer has a copy.
        speculation: drafts for the answers, while they pay; see ``Engine.submit``.
        stopping_criteria: called in order after each token of each answer; PAUSE fails a request.
        logits_processors: change each row of logits of each answer before it is sampled; see
            ``sampling.LogitsProcessor``.
        thinking: turn reasoning on or off; None uses the template's default. Messages only.
        special: whether control tokens other than EOG become text; with messages they always do.
        adapters: adapters (LoRA) of the model by name, with their scales; None for none.
        timeout: seconds from the call on after which answers end as cancelled; None for no limit.
        n_ctx: positions of the context; None for room for ``n_parallel`` prompts with their answers, 32,768 at most.
        n_batch: the largest number of tokens of a step.
        kv_type_k: storage type of keys; None for the backend's default.
        kv_type_v: storage type of values; None for the backend's default.
        n_parallel: the largest number of prompts that are computed together.
        progress: whether to show a progress bar; None shows it on a terminal (standard error) and in a notebook.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    constraint: Constraint | Spec | None
    speculation: Speculation | None
    stopping_criteria: Sequence[StoppingCriterion]
    logits_processors: Sequence[LogitsProcessor]
    thinking: bool | None
    special: bool
    adapters: Mapping[str, float] | None
    timeout: float | None
    n_ctx: int | None
    n_batch: int
    kv_type_k: KvType | str | None
    kv_type_v: KvType | str | None
    n_parallel: int
    progress: bool | None


class _Model(ChatModel, Protocol):
    @property
    def adapters(self) -> Adapters: ...


@checked_keywords
def generate(
    model: _Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    constraint: Constraint | Spec | None = None,
    speculation: Speculation | None = None,
    stopping_criteria: Sequence[StoppingCriterion] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
    thinking: bool | None = None,
    special: bool = False,
    adapters: Mapping[str, float] | None = None,
    timeout: float | None = None,
    n_ctx: int | None = None,
    n_batch: int = 512,
    kv_type_k: KvType | str | None = None,
    kv_type_v: KvType | str | None = None,
    n_parallel: int = 16,
    progress: bool | None = None,
) -> Answer | list[Answer]:
    """See ``Model.generate``."""
    began = time.monotonic()
    if not is_prompt(prompts):
        check_prompts(prompts)
    prompt_list = [cast("Prompt", prompts)] if is_prompt(prompts) else cast("Sequence[Prompt]", prompts)
    if not prompt_list:
        return []
    options = EngineOptions(n_parallel)
    check_kind("sampling", sampling, Sampling)
    check_kind("speculation", speculation, Speculation)
    check_flag("progress", progress)
    sampling = (sampling if sampling is not None else Sampling()).override(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )
    scales = adapters or {}
    loaded = model.adapters if scales else None
    rule, seconds = own_constraint(constraint, model.vocab), checked_timeout(timeout)

    def request_of(prompt: EncodedPrompt) -> Request:
        return Request(
            model.vocab,
            prompt.tokens,
            prompt.sampling(sampling),
            constraint=own_constraint(prompt.constraint(rule), model.vocab),
            speculation=speculation,
            stopping_criteria=stopping_criteria,
            logits_processors=logits_processors,
            special=special or prompt.formatter is not None,
            timeout=None if seconds is None else max(began + seconds - time.monotonic(), _LEAST_TIME),
            adapters=scales,
            loaded=loaded,
        )

    encoded = _of_each(prompt_list, lambda prompt: encode(model.vocab, lambda: model.formatter, prompt, thinking))
    TrainedLength(model.info.n_ctx_train).check(max(len(prompt.tokens) for prompt in encoded))
    if n_ctx is None:
        n_ctx = n_ctx_for(encoded, sampling.max_tokens, n_parallel)
    requests = _of_each(encoded, request_of)
    for request in requests:
        request.loop.show_events(False)
    n_parallel = min(n_parallel, len(requests))
    with model.new_context(
        n_ctx=n_ctx, n_seq_max=2 * n_parallel, n_batch=n_batch, kv_type_k=kv_type_k, kv_type_v=kv_type_v
    ) as context:
        _compute(EngineCore(context, options), requests, progress)
    if is_prompt(prompts):
        return encoded[0].read(requests[0].answer)
    return _answers(encoded, requests)


def _of_each(prompts: Sequence[_A], function: Callable[[_A], _B]) -> list[_B]:
    """The result of a function for each prompt. If there are several prompts, an error names its prompt."""
    results = []
    for i, prompt in enumerate(prompts):
        try:
            results.append(function(prompt))
        except SlmError as error:
            if len(prompts) > 1:
                error.args = (f"prompt {i}: {error}",)
            raise
    return results


def n_ctx_for(prompts: Sequence[EncodedPrompt], max_tokens: int | None, n_parallel: int) -> int:
    """Positions for the longest ``n_parallel`` prompts and their answers, at most ``LARGEST`` unless one needs more."""
    n_answer = UNLIMITED if max_tokens is None else max_tokens
    lengths = sorted((len(prompt.tokens) + n_answer + 1 for prompt in prompts), reverse=True)
    return max(lengths[0], min(sum(lengths[:n_parallel]), LARGEST))


def _compute(core: EngineCore, requests: Sequence[Request], progress: bool | None) -> None:
    for request in requests:
        try:
            core.add(request)
        except ContextFull as error:
            request.error = error
    with _bar(len(requests), progress) as advance:
        while core.step():
            advance(sum(request.over for request in requests))
        advance(len(requests))


def _answers(prompts: Sequence[EncodedPrompt], requests: Sequence[Request]) -> list[Answer]:
    answers: list[Answer | None] = []
    errors: dict[int, BaseException] = {}
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        if request.error is not None:
            errors[i] = request.error
        answers.append(None if request.error is not None else prompt.read(request.answer))
    if errors:
        raise RequestsFailed(answers, errors)
    return [answer for answer in answers if answer is not None]


def _bar(total: int, shown: bool | None) -> AbstractContextManager[Advance]:
    """A progress bar, in a notebook or on standard error; or a null context."""
    if shown is None:
        shown = total > 1 and (sys.stderr.isatty() or in_notebook())
    if not shown:
        return nullcontext(lambda n: None)
    if in_notebook():
        return NotebookProgressBar(total)
    from slm_core.engine.progressbar import ProgressBar

    return ProgressBar(total)
