"""Restores between the steps of an engine: other requests get their tokens, and a failure leaves nothing behind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.engine import store
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.plan import restore_seconds
from slm_core.engine.recorder import Recorder
from slm_core.engine.requests import Request
from slm_core.engine.restores import Restores, timed
from slm_core.errors import DecodeFailed
from slm_core.generation import FinishReason
from slm_core.protocols import Batch
from slm_core.sampling import Sampling
from slm_core.types import Logits

VOCAB = ByteVocab()
TEXT = list(b"a conversation that is long enough to be worth keeping, and to be restored in many parts")
ENDLESS = Sampling(temperature=0, max_tokens=60, logit_bias={257: -1e9})
SHORT = Sampling(temperature=0, max_tokens=5, logit_bias={257: -1e9})
DECODE_S, PART_S, STEP_S = 0.01, 0.03, 0.1
N_CTX = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 100 bytes, so that the dump of a short text has many."""
    monkeypatch.setattr(store, "PART_BYTES", 100)
    monkeypatch.setattr("slm_core.engine.swap.PART_BYTES", 100)


class SlowContext(ScriptedContext):
    """A clock that moves with decodes and parts of restores. Part ``breaks_at`` of all restored parts fails."""

    def __init__(self, **options: object) -> None:
        super().__init__(n_ctx=N_CTX, n_seq_max=6, n_batch=64, **options)  # type: ignore[arg-type]
        self.now = 0.0
        self.n_parts = 0
        self.breaks_at: int | None = None

    def _engine_decode(self, batch: Batch) -> Logits:
        self.now += DECODE_S
        return super()._engine_decode(batch)

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> object:  # type: ignore[override]
        return super().restore_parts(seq_id, self._slowly(parts))

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        return super().restore_steps(seq_id, self._slowly(parts))

    def _slowly(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        for part in parts:
            if self.n_parts == self.breaks_at:
                raise DecodeFailed("the device is gone")
            self.now += PART_S
            self.n_parts += 1
            yield part


def engine_on(directory: Path | None, **options: object) -> tuple[EngineCore, SlowContext]:
    context = SlowContext()
    settings = EngineOptions(step_ms=STEP_S * 1e3, cache_dir=directory, **options)  # type: ignore[arg-type]
    return EngineCore(context, settings, Recorder(lambda: context.now)), context


def saved(directory: Path) -> list[int]:
    """Store an answered text in a directory; returns a prompt that continues it."""
    engine, _ = engine_on(directory)
    with engine:
        request = Request(VOCAB, TEXT, SHORT)
        engine.add(request)
        run(engine)
    return [*TEXT, *request.answer.tokens, *b" and more"]


def run(engine: EngineCore) -> None:
    for _ in range(5000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def tokens_alone(tokens: list[int], sampling: Sampling) -> tuple[int, ...]:
    with Session(ScriptedContext(n_ctx=N_CTX), VOCAB) as session:
        session.append_tokens(tokens)
        return session.generate(sampling).run().tokens


def decoding(engine: EngineCore, context: SlowContext, n: int = 2) -> list[Request]:
    """Requests that are decoding; their times are those of the context's clock."""
    requests = [Request(VOCAB, list(f"{i} is decoding".encode()), ENDLESS, clock=lambda: context.now) for i in range(n)]
    for request in requests:
        engine.add(request)
    while not all(len(request.times.tokens) > 8 for request in requests):
        engine.step()
    return requests


def gaps(request: Request, since: float) -> list[float]:
    times = [since, *(time for time in request.times.tokens if time > since)]
    return [after - before for before, after in itertools.pairwise(times)]


def test_decoding_requests_get_tokens_between_parts(tmp_path: Path) -> None:
    """No gap between two tokens is longer than a step, although the whole restore takes many steps."""
    prompt = saved(tmp_path)
    engine, context = engine_on(tmp_path)
    with engine:
        others, since = decoding(engine, context), context.now
        restored = Request(VOCAB, prompt, SHORT)
        engine.add(restored)
        run(engine)
        assert context.n_parts * PART_S > 5 * STEP_S, "the test restores too little"
        assert engine.totals.disk_tokens == len(TEXT) + len(restored.answer.tokens) - 1
        for other in others:
            assert max(gaps(other, since)) <= STEP_S + 1e-9
            assert other.answer.tokens == tokens_alone(list(other.history.tokens[: other.n_prompt]), ENDLESS)
        assert restored.answer.tokens == tokens_alone(prompt, SHORT)


def test_a_prompt_and_a_restore_share_the_step(tmp_path: Path) -> None:
    """A prompt of many pieces and a restore advance in the same steps, and neither waits for the other."""
    prompt = saved(tmp_path)
    engine, context = engine_on(tmp_path)
    with engine:
        others, since = decoding(engine, context), context.now
        long, restored = Request(VOCAB, list(b"x" * 500), SHORT), Request(VOCAB, prompt, SHORT)
        engine.add(restored)
        engine.add(long)
        progress = set()
        while engine.step():
            if engine._restores and long.seq_id is not None:
                progress.add((context.n_parts, context.length(long.seq_id)))
        assert len({n_parts for n_parts, _ in progress}) > 5
        assert len({length for _, length in progress}) > 5
        assert all(max(gaps(other, since)) <= STEP_S + 2 * DECODE_S for other in others)
        assert [request.answer.tokens for request in (long, restored)] == [
            tokens_alone(list(b"x" * 500), SHORT),
            tokens_alone(prompt, SHORT),
        ]


def test_a_preempted_request_is_restored_between_steps() -> None:
    engine, context = engine_on(None, prefix_cache=False)
    engine._swap.seconds = lambda n: 0.0  # type: ignore[method-assign]  # dumps are fast
    with engine:
        others = decoding(engine, context)
        victim = Request(VOCAB, TEXT, ENDLESS)
        engine.add(victim)
        while len(victim.times.tokens) < 8:
            engine.step()
        engine._preempt(victim)
        since = context.now
        run(engine)
        assert context.n_parts * PART_S > 5 * STEP_S, "the test restores too little"
        for other in others:
            assert max(gaps(other, since)) <= STEP_S + 1e-9
        n_decoded = sum(request.n_prompt + len(request.answer.tokens) - 1 for request in (*others, victim))
        assert engine.totals.computed_tokens == n_decoded, "no token was computed twice"
        assert engine._swap.held_bytes == 0
        assert victim.answer.tokens == tokens_alone(list(victim.history.tokens[: victim.n_prompt]), ENDLESS)


def test_a_broken_part_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At every part: the prompt is computed, the others get their tokens, and all positions are free at the end."""
    n_parts = whole_restore(tmp_path)
    for breaks_at in range(n_parts):
        directory = tmp_path / str(breaks_at)
        prompt = saved(directory)
        engine, context = engine_on(directory)
        context.breaks_at = breaks_at
        with caplog.at_level(logging.WARNING), engine:
            others = decoding(engine, context)
            request = Request(VOCAB, prompt, SHORT)
            engine.add(request)
            run(engine)
            assert "the device is gone" in caplog.text
            assert (context.n_parts, engine.totals.disk_tokens) == (breaks_at, 0)
            check_nothing_remains(engine, context, [*others, request])
        caplog.clear()


def test_a_damaged_byte_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checksum is compared at the last part, wherever the damage is; the file is removed."""
    n_parts = whole_restore(tmp_path)
    for damaged in range(n_parts):
        directory = tmp_path / str(damaged)
        prompt = saved(directory)
        (file,) = directory.glob("*.dump")
        data = bytearray(file.read_bytes())
        data[min(100 * damaged + 50, len(data) - 1)] ^= 1
        file.write_bytes(data)
        engine, context = engine_on(directory)
        with caplog.at_level(logging.WARNING), engine:
            others = decoding(engine, context)
            request = Request(VOCAB, prompt, SHORT)
            engine.add(request)
            run(engine)
            assert "computed again" in caplog.text
            assert not file.exists()
            assert engine.totals.disk_tokens == 0
            check_nothing_remains(engine, context, [*others, request])
        caplog.clear()


@pytest.mark.parametrize("ends_by", ["cancel", "timeout"])
def test_a_request_that_ends_during_its_restore_leaves_nothing_behind(tmp_path: Path, ends_by: str) -> None:
    n_parts = whole_restore(tmp_path)
    prompt = saved(tmp_path)
    for n_made in range(n_parts - 1):
        engine, context = engine_on(tmp_path)
        with engine:
            others = decoding(engine, context)
            request = Request(VOCAB, prompt, SHORT, timeout=1e6)
            engine.add(request)
            while context.n_parts <= n_made:
                engine.step()
            if not engine._restores:
                break
            if ends_by == "cancel":
                request.loop.cancel()
            else:
                request.loop._countdown._ends_at = 0.0
            engine.step()
            assert request.answer.finish_reason is FinishReason.CANCELLED
            assert not engine._restores
            run(engine)
            check_nothing_remains(engine, context, others)


def test_a_restore_gives_its_room_to_decoding_requests(tmp_path: Path) -> None:
    """It begins again later; both requests get their tokens."""
    prompt = saved(tmp_path)
    engine, context = engine_on(tmp_path)
    with engine:
        others = decoding(engine, context)
        request = Request(VOCAB, prompt, SHORT)
        engine.add(request)
        while request.seq_id is None or not context.n_exclusive(request.seq_id):
            engine.step()
        assert context.length(request.seq_id) == 0, "it is being restored"
        context._ledger.reserve(5, context.n_free)  # no position is left
        engine.step()
        assert (request.seq_id, engine.n_waiting) == (None, 1)
        context.drop(5)
        run(engine)
        check_nothing_remains(engine, context, [*others, request])


def test_two_prompts_with_one_stored_prefix_read_it_once(tmp_path: Path) -> None:
    """The second prompt waits for the first, and forks its sequence."""
    n_parts = whole_restore(tmp_path)
    prompt = saved(tmp_path)
    engine, context = engine_on(tmp_path)
    with engine:
        requests = [Request(VOCAB, [*prompt, *text], SHORT) for text in (b" for one", b" for two")]
        for request in requests:
            engine.add(request)
        run(engine)
        assert context.n_parts == n_parts
        check_nothing_remains(engine, context, requests)


def check_nothing_remains(engine: EngineCore, context: SlowContext, requests: list[Request]) -> None:
    """All requests have their tokens, and no sequence but the cached ones holds positions."""
    for request in requests:
        sampling = request.sampling
        assert request.answer.tokens == tokens_alone(list(request.history.tokens[: request.n_prompt]), sampling)
    positions = engine.positions()
    assert (positions.own, positions.cached + positions.shared + positions.free) == (0, N_CTX)
    cached = engine._sequences._kept.seq_ids
    assert all(not context.length(seq_id) for seq_id in range(context.n_seq_max) if seq_id not in cached)
    for seq_id in cached:
        engine.context.drop(seq_id)
    assert context.n_free == N_CTX


def whole_restore(tmp_path: Path) -> int:
    """The number of parts of a whole restore."""
    prompt = saved(tmp_path / "whole")
    engine, context = engine_on(tmp_path / "whole")
    with engine:
        engine.add(Request(VOCAB, prompt, SHORT))
        run(engine)
    assert context.n_parts > 10
    return context.n_parts


@pytest.mark.parametrize(
    ("decode_s", "has_prompts", "expected"),
    [(0.0, False, 0.1), (0.04, False, 0.06), (0.04, True, 0.03), (0.1, False, 0.0), (0.3, True, 0.0)],
)
def test_the_share_of_a_step(decode_s: float, has_prompts: bool, expected: float) -> None:
    assert restore_seconds(0.1, decode_s, has_prompts=has_prompts) == pytest.approx(expected)


def test_restores_stop_before_a_step_that_would_be_too_long() -> None:
    """At least one step runs; an error ends only the request whose step raised it."""
    now, advanced = [0.0], list[str]()

    def steps(name: str, n: int, error: Exception | None = None) -> Iterator[None]:
        for _ in range(n):
            now[0] += 1
            advanced.append(name)
            yield
        if error is not None:
            raise error

    restores = Restores(lambda: now[0])
    a, b = Request(VOCAB, [1], SHORT), Request(VOCAB, [2], SHORT)
    failure = DecodeFailed("no")
    restores.add(a, steps("a", 4, failure))
    restores.add(b, steps("b", 2))
    assert list(restores.advance(0.0)) == []
    assert advanced == ["a"]
    assert list(restores.advance(2.5)) == []
    assert advanced == ["a"] * 3
    assert list(restores.advance(10.0)) == [(a, failure), (b, None)]
    assert (advanced, len(restores)) == (["a"] * 4 + ["b"] * 2, 0)


def test_time_between_steps_does_not_count() -> None:
    now = [0.0]

    def steps() -> Iterator[None]:
        for _ in range(3):
            now[0] += 1
            yield
        now[0] += 0.5

    running, n_yields = timed(steps(), lambda: now[0]), 0
    while True:
        try:
            next(running)
        except StopIteration as end:
            assert end.value == pytest.approx(3.5)
            break
        n_yields += 1
        now[0] += 100
    assert n_yields == 3
