"""A workload on engines: concurrent requests, many of them cancelled, each compared with its prompt alone."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from slm_core.engine import Engine, EngineOptions, RequestStream
from slm_core.generation import Answer, FinishReason
from slm_core.sampling import Sampling
from soaking.checks import STRICTEST, require, same_greedy, tolerance
from soaking.site import MODELS, N_SEQ_MAX, Site

_MOST = 24
_CANCELLED = 1 / 3
_CHANCE_DRAWS = 1
"""Number of sampled answers in a round that may differ. An error of 1e-4 of the norm changes less than one in 100
answers: the random number must fall between the shares of two tokens."""


@dataclass(slots=True)
class _Asked:
    prompt: list[int]
    sampling: Sampling
    stream: RequestStream
    n_read: int | None
    """Number of events after which the request is cancelled; None for no cancellation."""


def mixed(site: Site, rng: random.Random) -> None:
    """Each answer equals that of a fresh context, a cancelled one its beginning; positions and threads are freed."""
    name, n_threads = rng.choice(MODELS), threading.active_count()
    options = EngineOptions(n_parallel=rng.randint(1, N_SEQ_MAX), swap_bytes=rng.choice([0, 1 << 24]))
    with _engine(site, name, options) as engine:
        requests = [_ask(site, name, engine, rng) for _ in range(rng.randint(2, _MOST))]
        for request in sorted(rng.sample(requests, len(requests)), key=lambda request: request.n_read is None):
            _read(request)
        stats = engine.stats()
        while stats.n_active or stats.n_waiting:  # a cancelled request ends after the current step
            engine.flush()
            stats = engine.stats()
        require(stats.n_failed == 0, f"{stats.n_failed} of {len(requests)} requests failed")
    require(threading.active_count() == n_threads, "the engine's thread is still there")
    site.counts["requests"] += len(requests)
    n_other = 0
    for request in requests:
        answer = request.stream.answer
        site.counts["cancelled requests"] += answer.finish_reason is FinishReason.CANCELLED
        n_other += not _is_right(site, name, request, answer)
    require(n_other <= _CHANCE_DRAWS, f"{n_other} of {len(requests)} requests drew other tokens than alone")


def _engine(site: Site, name: str, options: EngineOptions) -> Engine:
    model = site.model(name)
    return Engine(site.new_context(name), model.vocab, lambda: model.formatter, options)


def _ask(site: Site, name: str, engine: Engine, rng: random.Random) -> _Asked:
    prompt = _prompt(site, name, rng)
    sampling = Sampling(temperature=0, max_tokens=rng.randint(1, 24))
    if rng.random() < 0.4:
        sampling = Sampling(temperature=0.9, top_k=20, seed=rng.getrandbits(32), max_tokens=rng.randint(1, 24))
    n_read = rng.randint(0, 6) if rng.random() < _CANCELLED else None
    stream = engine.submit(prompt, sampling, priority=rng.choice([0, 0, 1]), key=rng.choice("ab"))
    return _Asked(prompt, sampling, stream, n_read)


def _prompt(site: Site, name: str, rng: random.Random) -> list[int]:
    """Random prompts, half of which share their beginning with others."""
    prompt = site.prompt(name, rng)
    if rng.random() < 0.5:
        shared = random.Random(name)
        prompt = [*site.tokens(name, shared, shared.randint(10, 80)), *prompt[:40]]
    return prompt


def _read(request: _Asked) -> None:
    if request.n_read is None:
        request.stream.run()
        return
    with request.stream as stream:  # leaving it cancels the request
        for _, _event in zip(range(request.n_read), stream, strict=False):
            pass
    request.stream.run()


def _is_right(site: Site, name: str, request: _Asked, answer: Answer) -> bool:
    """Whether an answer equals that of its prompt alone; False for other draws, which may happen by chance.

    Raises:
        Wrong: a greedy answer differs.
    """
    sampling, is_cut_off = request.sampling, answer.finish_reason is FinishReason.CANCELLED
    if is_cut_off:
        sampling = dataclasses.replace(sampling, max_tokens=max(1, len(answer.tokens)))
    expected = _alone(site, name, request.prompt, sampling)
    if is_cut_off and answer.tokens == expected.tokens[: len(answer.tokens)]:
        return True
    if is_cut_off:
        answer = dataclasses.replace(answer, finish_reason=expected.finish_reason)
    if sampling.temperature == 0:
        same_greedy(site, name, request.prompt, answer, expected, "a request among others")
        return True
    return answer.tokens == expected.tokens or tolerance(site, name).row > STRICTEST


def _alone(site: Site, name: str, prompt: Sequence[int], sampling: Sampling) -> Answer:
    with site.fresh_session(name) as session:
        session.append_tokens(prompt)
        return session.generate(sampling).run()
