"""Opening, closing, sharing and sizing contexts and models."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event, Thread
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.context.batch import TokenBatch
from slm_core.errors import ContextBusy, ContextClosed, InvalidOption, InvalidSequence, ModelClosed
from slm_core.protocols import Context
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, Pos

_Result = TypeVar("_Result")
_LEAST_ROUNDS, _ROUNDS = 4, 100
_MEMORY_N_CTX = 2048
_N_MEASURED, _N_IDLE = 10, 3
_N_WARM, _N_LOADS, _N_TRIES = 20, 24, 3
_N_WARM_ISOLATED, _N_LOADS_ISOLATED = 4, 8
"""Fewer rounds, because each load starts a process. The memory of the model is in that process."""
_FILLED, _FILLED_BYTES = 256, 2**17
"""The smallest number of tokens, and of bytes of keys and values, of contexts that are filled and closed: a leak has to
exceed the growth of a process with a software GPU, up to 25 kB per context."""
_LEAST_TRIES, _LEAST_S = 3, 3.0
_TICK_S = 1e-4
_N_MANY = 256
_LARGE_PAGE = 2 << 20
"""Bytes that the system may commit at the first access to a buffer; full attention and windows have one each."""
_STATM = Path("/proc/self/statm")


class TestClose(Scenarios):
    """Clause 10: ``close`` frees memory at once, and later calls raise."""

    on_one_model = (
        "test_memory_stays_flat",  # a leak shows with any model
        "test_closed_contexts_hold_nothing",
        "test_the_interpreter_ends_with_open_contexts",
    )

    def test_use_after_close(self, bench: Bench) -> None:
        """Clause 10: every call of a closed context raises ``ContextClosed``."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        data, batch = context.dump(0), bench.batch(context, (0, 20, bench.tokens(2)))
        context.close()
        calls: dict[str, Callable[[], object]] = {
            "decode": lambda: context.decode(batch),
            "new_batch": lambda: context.new_batch(),
            "length": lambda: context.length(0),
            "tokens": lambda: context.tokens(0),
            "fork": lambda: context.fork(0, 1),
            "fork_cost": lambda: context.fork_cost(0),
            "drop": lambda: context.drop(0),
            "clear": lambda: context.clear(),
            "dump": lambda: context.dump(0),
            "dump_parts": lambda: context.dump_parts(0),
            "dump_context": lambda: context.dump_context(),
            "restore": lambda: context.restore(0, data),
            "restore_context": lambda: context.restore_context([]),
            "restore_parts": lambda: context.restore_parts(0, [data]),
            "restore_steps": lambda: context.restore_steps(1, [data]),
        }
        if bench.edit_level >= EditLevel.TRUNCATE:
            calls["truncate"] = lambda: context.truncate(Pos(0, 3))
        if bench.edit_level >= EditLevel.CUT:
            calls["cut"] = lambda: context.cut(Pos(0, 3), Pos(0, 5))
        for name, call in calls.items():
            with bench.refused(f"{name} of a closed context", ContextClosed):
                call()

    def test_twice(self, bench: Bench) -> None:
        """Clause 10: contexts and models may be closed twice; ``with`` closes them."""
        with bench.own_model() as model:
            context = bench.context(model=model)
            with context:
                bench.feed(context, bench.tokens(5))
            with bench.refused("length after the with block of a context", ContextClosed):
                context.length(0)
            context.close()
        model.close()
        with bench.refused("a context after the with block of its model", ModelClosed):
            bench.context(model=model)

    def test_of_the_model(self, bench: Bench) -> None:
        """Clause 10: closing a model closes its contexts first; its ``info`` stays readable."""
        model = bench.own_model()
        context, info = bench.context(model=model), model.info
        bench.feed(context, bench.tokens(10))
        model.close()
        with bench.refused("decoding after the model was closed", ContextClosed):
            bench.feed(context, bench.tokens(1))
        with bench.refused("new_context of a closed model", ModelClosed):
            bench.context(model=model)
        assert model.info == info, "the info of a closed model is another than before"

    def test_leaves_other_contexts(self, bench: Bench) -> None:
        """Context: closing a context does not affect other contexts of the model."""
        first, second, tokens = bench.context(), bench.context(), bench.tokens(30)
        bench.feed(second, tokens[:20])
        bench.feed(first, bench.tokens(40, seed=1))
        first.close()
        expected = bench.oracle().decode(tokens)[20:]
        bench.agree(bench.feed(second, tokens[20:]), expected, "a context, after another of its model was closed")

    @pytest.mark.slow
    def test_memory_stays_flat(self, bench: Bench) -> None:
        """Clause 10: closing frees memory: memory does not grow over rounds of load, decode and close."""
        weights = bench.weights()
        kv_bytes = weights.kv_bytes(_MEMORY_N_CTX, 1)  # at least a byte per number
        isolated = bench.workshop.fixtures.isolated
        n_loads = max(_N_LOADS_ISOLATED, bench.workshop.share(_N_LOADS))
        n_warm, n_loads = (_N_WARM_ISOLATED, _N_LOADS_ISOLATED) if isolated else (_N_WARM, n_loads)
        for _ in range(n_warm):  # allocators, caches and thread pools grow to their size
            self._load_and_close(bench)
        # A KV cache or a model that leaks in each round takes four times as much; allocators may take some memory.
        grown, allowed = 0, n_loads * min(kv_bytes, bench.path.stat().st_size) // 4
        for _ in range(_N_TRIES):  # a pool may grow in one try, a leak in each
            before = resident_bytes()
            for _ in range(n_loads):
                self._load_and_close(bench)
            grown = resident_bytes() - before
            if grown <= allowed:
                break
        assert grown <= allowed, (
            f"{n_loads} rounds of load, decode and close took {grown / 2**20:.1f} MiB (allowed:"
            f" {allowed / 2**20:.1f} MiB)"
        )

    @pytest.mark.slow
    def test_closed_contexts_hold_nothing(self, bench: Bench) -> None:
        """Clause 10: ``close`` frees the KV cache even if the context is still referenced."""
        n_rounds = max(10, bench.workshop.share(40)) if Capability.KV_PAYLOAD in bench.capabilities else 10
        weights = bench.weights()
        n_tokens = max(_FILLED, _FILLED_BYTES // weights.kv_bytes(1, 2))
        kv_bytes = weights.kv_bytes(n_tokens, 2)  # at least float16
        with bench.context(n_ctx=n_tokens, n_seq_max=1) as context:
            bench.feed(context, bench.tokens(n_tokens))
            data = context.dump(0)
        closed_contexts = [_filled_and_closed(bench, data, n_tokens) for _ in range(5)]
        grown, allowed = 0, n_rounds * kv_bytes // 4
        working = bench.context(n_ctx=_N_IDLE, n_seq_max=1)
        for _ in range(_N_MEASURED):  # pools grow now and then, a leak grows every time
            before = _idle_bytes(bench, working)
            closed_contexts += [_filled_and_closed(bench, data, n_tokens) for _ in range(n_rounds)]
            grown = _idle_bytes(bench, working) - before
            if grown <= allowed:
                break
        assert grown <= allowed, (
            f"{n_rounds} closed contexts, which are still referred to, take {grown / 2**20:.1f} MiB (allowed:"
            f" {allowed / 2**20:.1f} MiB)"
        )
        del closed_contexts  # referenced until here

    @staticmethod
    def _load_and_close(bench: Bench) -> None:
        with bench.workshop.load(bench.path) as model:
            sizes = ContextOptions(_MEMORY_N_CTX, 1, 16, bench.kv_type, bench.kv_type)
            with model.new_context(sizes) as context:
                bench.feed(context, bench.tokens(4))

    def test_the_interpreter_ends_with_open_contexts(self, bench: Bench) -> None:
        """Clause 10: a program may end with open contexts: no crash, no hang, status 0."""
        bench.in_another_process().check_status()


class TestSizes(Scenarios):
    """Context and Batch: sizes and KV types are as requested, or refused."""

    on_one_model = ("test_many_sequences_take_no_memory",)

    def test_are_as_asked(self, bench: Bench) -> None:
        """Context: a new context is empty and free, and has the requested sizes and options."""
        options = ContextOptions(100, 3, 20, bench.kv_type, bench.kv_type)
        context = bench.context_with(options)
        sizes = (context.n_ctx, context.n_seq_max, context.n_batch, context.n_free)
        assert sizes == (100, 3, 20, 100), f"asked for (100, 3, 20), n_ctx, n_seq_max, n_batch and n_free are {sizes}"
        assert context.options == options, f"asked for {options}, the context's options are {context.options}"
        assert [context.length(seq_id) for seq_id in range(3)] == [0, 0, 0], "a new context holds tokens"
        tokens = bench.tokens(8)
        expected = bench.oracle().decode(tokens)
        for n_ctx in (8, 256):  # fewer positions than sequences, and fewer tokens in a batch
            rows = bench.feed(bench.context(n_ctx=n_ctx, n_seq_max=12, n_batch=4), tokens, seq_id=11)
            bench.agree(rows, expected, f"the last of 12 sequences of a context of {n_ctx}")

    def test_many_sequences_take_no_memory(self, bench: Bench) -> None:
        """Context: 256 unused sequences take no memory except up to 16 tokens each, and large pages."""
        weights, n_contexts = bench.weights(), 4
        grown = []
        for n_seq_max in (1, self._most_sequences(bench)):
            bench.context(n_ctx=1024, n_seq_max=n_seq_max).close()  # the first context may leave buffers
            before = resident_bytes(of_files=False)
            contexts = [bench.context(n_ctx=1024, n_seq_max=n_seq_max) for _ in range(n_contexts)]
            for context in contexts:
                bench.feed(context, bench.tokens(8), seq_id=n_seq_max - 1)
            grown.append(resident_bytes(of_files=False) - before)
            for context in contexts:
                context.close()
        allowed = n_contexts * (n_seq_max * weights.kv_bytes(16, 2) + 2 * _LARGE_PAGE)
        assert grown[1] - grown[0] <= allowed, (
            f"{n_contexts} contexts of {n_seq_max} sequences take {(grown[1] - grown[0]) / 2**20:.1f} MiB more than"
            f" contexts of one (allowed: {allowed / 2**20:.1f} MiB)"
        )

    @staticmethod
    def _most_sequences(bench: Bench) -> int:
        """256, halved while a context refuses it."""
        n = _N_MANY
        while True:
            try:
                bench.context(n_ctx=1024, n_seq_max=n).close()
            except InvalidOption:
                n //= 2
            else:
                break
        if n < _N_MANY:
            bench.note(f"a context has at most {n} to {2 * n - 1} sequences")
        return n

    def test_below_one(self, bench: Bench) -> None:
        """Context: a size below 1 is refused with ``InvalidOption``."""
        for size in (0, -1):
            sized = (ContextOptions(n_ctx=size), ContextOptions(n_seq_max=size), ContextOptions(n_batch=size))
            for name, options in zip(("n_ctx", "n_seq_max", "n_batch"), sized, strict=True):
                with bench.refused(f"a context with {name}={size}", InvalidOption):
                    bench.model.new_context(options)

    def test_too_large(self, bench: Bench) -> None:
        """Context: a size that no context can have is refused with ``InvalidOption``, and takes no memory."""
        before = resident_bytes(of_files=False)
        for size in (1 << 31, 1 << 40, 1 << 62, 1 << 70):
            sized = (ContextOptions(n_ctx=size), ContextOptions(n_seq_max=size), ContextOptions(n_batch=size))
            for name, options in zip(("n_ctx", "n_seq_max", "n_batch"), sized, strict=True):
                with bench.refused(f"a context with {name}={size}", InvalidOption):
                    bench.model.new_context(options)
        grown = resident_bytes(of_files=False) - before
        assert grown < 64 << 20, (
            f"contexts that were refused as too large take {grown / 2**20:.1f} MiB (allowed: 64 MiB)"
        )

    def test_batch_capacity(self, bench: Bench) -> None:
        """Batch: a capacity above ``n_batch`` or below 1 is refused with ``InvalidOption``."""
        context = bench.context(n_batch=20)
        for capacity in (0, 21, -3):
            with bench.refused(f"new_batch({capacity}) where n_batch is 20", InvalidOption):
                context.new_batch(capacity)

    def test_unknown_sequences_have_no_length(self, bench: Bench) -> None:
        """Clause 1: ``length`` and ``tokens`` of an unknown sequence are refused."""
        context = bench.context(n_seq_max=2)
        for seq_id in (2, -1):
            for call in (context.length, context.tokens):
                with bench.refused(f"{call.__name__}({seq_id}) of 2 sequences", InvalidSequence, context=context):
                    call(seq_id)

    def test_kv_types(self, bench: Bench) -> None:
        """Context: a KV type that the backend has works; any other is refused with ``InvalidOption``, not ignored."""
        named = {KvType(name) for name in bench.workshop.fixtures.kv_types} or set(bench.kv_types)
        for kv_type in sorted(set(KvType) - named):
            with bench.refused(f"KV type {kv_type.value}, which is not declared", InvalidOption):
                bench.context(kv_type=kv_type)
        for kv_type in bench.kv_types:
            context = bench.context(kv_type=kv_type)
            bench.feed(context, bench.tokens(8))
            context.close()


class TestThreads(Scenarios):
    """Threads: a context serves one thread at a time, a model serves any number."""

    on_one_model = ("test_others_run_while_a_call_computes",)

    def test_a_busy_context_refuses(self, bench: Bench) -> None:
        """Context: a second thread's call raises ``ContextBusy`` at once, and the first call is not disturbed."""
        context, tokens = bench.context(), bench.tokens(20)
        intruder = _Intruder(lambda: bench.feed(context, bench.tokens(1), seq_id=1))
        batch = _WatchedBatch(20, intruder)
        batch.extend(tokens, Pos(0, 0), logits="all")
        rows = context.decode(batch).copy()
        bench.agree(rows, bench.oracle().decode(tokens), "a prompt, while a second thread tried to decode")
        if not intruder.refused():
            # The batch was read before the call began: only a race can find the context busy.
            assert _race(bench), (
                f"two threads decoded {_ROUNDS} times with one context, and neither was ever told ContextBusy: their"
                " calls are not kept apart (or the engine holds Python's global lock through each call)"
            )

    def test_two_threads_with_one_context(self, bench: Bench) -> None:
        """Context: threads that retry after ``ContextBusy`` get the logits that each gets alone."""
        _race(bench)

    def test_others_run_while_a_call_computes(self, bench: Bench) -> None:
        """Context: a call that computes lets other Python threads run: they wait for at most half of its time."""
        n_tokens, shares, spent = 512, list[float](), 0.0
        context = bench.context(n_ctx=n_tokens, n_seq_max=1, n_batch=n_tokens)
        batch = context.new_batch()
        batch.extend(bench.tokens(n_tokens), Pos(0, 0), logits="last")
        while len(shares) < _LEAST_TRIES or spent < _LEAST_S:  # on a busy machine, the other thread may have to wait
            context.clear()
            with _Ticks() as ticks:
                start = time.perf_counter()
                context.decode(batch)
                end = time.perf_counter()
            shares.append(ticks.longest_pause(start, end) / (end - start))
            spent += end - start
            if shares[-1] <= 0.5:
                return
        pytest.fail(
            f"another Python thread waited for {min(shares):.0%} of a decode of {n_tokens} tokens, or longer, in all"
            f" {len(shares)} decodes: the engine holds Python's global lock while it computes",
            pytrace=False,
        )

    def test_contexts_in_parallel(self, bench: Bench) -> None:
        """Model: three threads with a context each get the logits that each gets alone."""
        runs = [bench.tokens(30, seed=seed) for seed in range(3)]
        contexts = [bench.context() for _ in runs]
        with _quick_switching(), ThreadPoolExecutor(3) as threads:
            jobs = [threads.submit(bench.feed, c, run, 0, 8) for c, run in zip(contexts, runs, strict=True)]
        for job, run in zip(jobs, runs, strict=True):
            bench.agree(job.result(), bench.oracle().decode(run), "one of three contexts in parallel threads")


class _Ticks:
    """Times at which another Python thread was running."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._is_over = Event()
        self._thread = Thread(target=self._tick)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def longest_pause(self, start: float, end: float) -> float:
        """The longest time between ``start`` and ``end`` in which the thread did not run, in seconds."""
        times = [start, *(at for at in self._times if start < at < end), end]
        return max(after - before for before, after in pairwise(times))

    def _tick(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self._times.append(time.perf_counter())


def _filled_and_closed(bench: Bench, data: bytes, n_tokens: int) -> Context:
    """A closed context that was filled from a dump."""
    context = bench.model.new_context(ContextOptions(n_tokens, 1, 64, bench.kv_type, bench.kv_type))
    with context:
        context.restore(0, data)
    return context


def _idle_bytes(bench: Bench, working: Context) -> int:
    """Bytes of this process in memory when its device is idle.

    A device frees the memory of closed contexts when it begins new work after the work that used them. Reading the
    logits of a token waits for that work, and the next tokens are new work.
    """
    working.clear()
    for token in bench.tokens(_N_IDLE):
        bench.feed(working, [token])
    return resident_bytes(of_files=False)


def resident_bytes(*, of_files: bool = True) -> int:
    """Bytes of this process in memory now, after a garbage collection; skips if the system does not say.

    Args:
        of_files: whether pages of mapped files count; the system evicts and reloads them at any time.
    """
    if sys.platform != "linux":
        pytest.skip("the memory of a process is read from /proc/self/statm, which this system does not have")
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc: freed memory that it keeps would hide growth
        ctypes.CDLL(None).malloc_trim(0)
    resident, shared = map(int, _STATM.read_text(encoding="utf-8").split()[1:3])
    return (resident if of_files else resident - shared) * mmap.PAGESIZE


class _Intruder:
    """A call made once, by another thread, while a call of this thread is running."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._job: Future[object] | None = None

    def intrude(self) -> None:
        """Make the call and wait for its end."""
        if self._job is None:
            with ThreadPoolExecutor(1) as thread:
                self._job = thread.submit(self._call)
                wait([self._job], timeout=5)

    def refused(self) -> bool:
        """Whether the call raised ``ContextBusy``."""
        assert self._job is not None, "the batch was decoded, but its tokens were never read"
        try:
            self._job.result(timeout=0)
        except ContextBusy:
            return True
        return False


class _WatchedBatch(TokenBatch):
    """A batch that lets another thread call the context when its tokens are read."""

    def __init__(self, capacity: int, intruder: _Intruder) -> None:
        super().__init__(capacity)
        self._intruder = intruder

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, after the other thread's call."""
        self._intruder.intrude()
        return super().tokens


def _race(bench: Bench) -> int:
    """Two threads decode with one context, a sequence each, until a call is refused; returns the number of refusals."""
    runs = [bench.tokens(40, seed=seq_id) for seq_id in (0, 1)]
    expected = [bench.oracle().decode(run) for run in runs]
    context, start = bench.context(), Barrier(2)
    refusals: list[int] = []

    def decode_again_and_again(seq_id: int) -> None:
        start.wait()
        for n_rounds in range(1, _ROUNDS + 1):
            rows = _retry(lambda: bench.feed(context, runs[seq_id], seq_id), refusals)
            bench.agree(rows, expected[seq_id], "a sequence, while a second thread decoded another")
            _retry(lambda: context.drop(seq_id), [])
            if refusals and n_rounds >= _LEAST_ROUNDS:
                return

    with _quick_switching(), ThreadPoolExecutor(2) as threads:
        for job in [threads.submit(decode_again_and_again, seq_id) for seq_id in (0, 1)]:
            job.result()
    return len(refusals)


def _retry(call: Callable[[], _Result], refusals: list[int]) -> _Result:
    """Repeat a call while another thread uses the context."""
    while True:
        try:
            return call()
        except ContextBusy:
            refusals.append(1)


@contextlib.contextmanager
def _quick_switching() -> Iterator[None]:
    """Let Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
