"""Blocks in which handlers of signals wait."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from interrupting import interrupted, n_calls_of
from slm_core import interrupts
from slm_core.context_queue import ContextQueue
from slm_core.engine.notifications import Notifications
from slm_core.engine.streams import EventQueue
from slm_core.interrupts import uninterrupted

INTERRUPT = signal.SIGINT
WAIT_S = 10.0
"""The longest wait for a signal."""


class Expired(Exception):
    """What the handler of an alarm raises."""


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(INTERRUPT, signal.default_int_handler)
    yield
    assert signal.getsignal(INTERRUPT) is signal.default_int_handler, "a block has left its handler"
    signal.signal(INTERRUPT, before)


@pytest.fixture
def handle() -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Sets handlers of signals for one test."""
    before: dict[int, object] = {}

    def set_handler(number: int, handler: Callable[[], None]) -> None:
        before[number] = signal.signal(number, lambda *_: handler())

    yield set_handler
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A postponed signal comes only after 0.2 s: a busy machine may take 20 ms from a block to the next line."""
    monkeypatch.setattr(interrupts, "_SOON_S", 0.2)


def wait() -> None:
    time.sleep(WAIT_S)
    raise AssertionError("the signal is lost")


@pytest.mark.usefixtures("slow")
def test_the_next_block_raises_an_interrupt_that_came_during_a_block() -> None:
    done = []
    with uninterrupted:
        signal.raise_signal(INTERRUPT)
        done.append("the block goes on")
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        done.append("the next block does not begin")
    with uninterrupted:
        done.append("a third block begins")
    assert done == ["the block goes on", "a third block begins"]


@pytest.mark.usefixtures("slow")
def test_without_a_next_block_the_interrupt_comes_soon() -> None:
    with uninterrupted:
        signal.raise_signal(INTERRUPT)
    with pytest.raises(KeyboardInterrupt):
        wait()


def test_a_failed_block_raises_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, uninterrupted:
        signal.raise_signal(INTERRUPT)
        raise ValueError("a failure")
    assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.usefixtures("slow")
def test_the_end_of_an_iteration_is_no_failure() -> None:
    numbers = iter([1])

    @uninterrupted
    def number() -> int:
        signal.raise_signal(INTERRUPT)
        return next(numbers)

    assert number() == 1
    with pytest.raises(KeyboardInterrupt):
        number()
    with pytest.raises(StopIteration):
        number()
    with pytest.raises(KeyboardInterrupt):
        wait()


@pytest.mark.usefixtures("slow")
def test_an_inner_block_does_not_end_the_outer_one() -> None:
    done = []
    with uninterrupted:
        with uninterrupted:
            signal.raise_signal(INTERRUPT)
        with uninterrupted:
            done.append("the next inner block begins")
    assert done
    with pytest.raises(KeyboardInterrupt):
        wait()


def test_a_handler_that_does_not_raise_runs_once_at_the_end(handle: Callable[..., None]) -> None:
    calls = []
    handle(INTERRUPT, lambda: calls.append(time.monotonic()))
    with uninterrupted:
        signal.raise_signal(INTERRUPT)
        assert not calls
    assert len(calls) == 1
    threading.Event().wait(0.2)  # ten times as long as a postponed signal takes
    assert len(calls) == 1
    signal.signal(INTERRUPT, signal.default_int_handler)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM])
def test_other_signals_whose_handlers_raise(number: int, handle: Callable[..., None]) -> None:
    def expire() -> None:
        raise Expired

    handle(number, expire)
    done = []
    with uninterrupted:
        os.kill(os.getpid(), number)
        done.append("the block goes on")
    assert done
    with pytest.raises(Expired):
        wait()


def test_a_check_raises_within_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        uninterrupted.check()
        signal.raise_signal(INTERRUPT)
        uninterrupted.check()
        wait()


def test_a_check_does_not_disturb_the_handling_of_an_exception() -> None:
    undone = []
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        try:
            raise ValueError("a failure")
        except ValueError:
            signal.raise_signal(INTERRUPT)
            uninterrupted.check()
            undone.append(True)
            raise
    assert undone


def test_a_pause_lets_handlers_run_at_any_time() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        try:
            with uninterrupted.paused():
                signal.raise_signal(INTERRUPT)
                done.append("not reached")
        finally:
            assert signal.getsignal(INTERRUPT) is not signal.default_int_handler, "the block does not go on"
    assert not done


def test_a_pause_begins_with_the_signals_before_it() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        signal.raise_signal(INTERRUPT)
        with uninterrupted.paused():
            done.append("not reached")
    assert not done


@pytest.mark.usefixtures("slow")
def test_a_hook_is_called_while_a_block_waits() -> None:
    """It gets the number of the signals, and ends a wait in the main thread."""
    counts, gate = [], threading.Lock()
    gate.acquire()

    def count(n: int) -> None:
        counts.append(n)
        if n == 2:
            gate.release()

    def send_two() -> None:
        for n in (1, 2):
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
            while len(counts) < n:
                time.sleep(0.001)

    sender = threading.Thread(target=send_two)
    with uninterrupted, uninterrupted.calling(count):
        sender.start()
        assert gate.acquire(timeout=WAIT_S)
    assert counts == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        wait()


def test_blocks_of_other_threads_change_no_handler() -> None:
    def block() -> None:
        with uninterrupted, uninterrupted.paused(), uninterrupted.calling(lambda n: None):
            inside.wait(WAIT_S)
            leave.wait(WAIT_S)

    inside, leave = threading.Barrier(2), threading.Event()
    thread = threading.Thread(target=block)
    thread.start()
    inside.wait(WAIT_S)
    assert signal.getsignal(INTERRUPT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INTERRUPT)
    leave.set()
    thread.join()


def test_a_forked_process_is_in_no_block() -> None:
    with uninterrupted:
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(INTERRUPT) is signal.default_int_handler else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("slow")
def test_closing_begins_also_if_an_interrupt_is_due() -> None:
    closed = []
    with uninterrupted:
        signal.raise_signal(INTERRUPT)
    with uninterrupted.closing():
        closed.append(True)
    assert closed
    with pytest.raises(KeyboardInterrupt):
        wait()


def test_no_interrupt_leaves_a_block_behind() -> None:
    def nested() -> None:
        with uninterrupted:
            with uninterrupted:
                uninterrupted.check()
            with uninterrupted.paused():
                with uninterrupted, uninterrupted.closing():
                    pass
                with uninterrupted.paused():  # in no block
                    pass
            with uninterrupted.paused():
                pass

    n_calls = n_calls_of(nested)
    for stop in range(1, n_calls + 1):
        interrupted(nested, stop)
        gc.collect()
        assert signal.getsignal(INTERRUPT) is signal.default_int_handler, f"after call {stop} of {n_calls}"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INTERRUPT)


def test_a_wait_for_an_event_ends_with_a_signal_that_came_before_it() -> None:
    events: EventQueue[int] = EventQueue(Notifications())
    assert_ended(events.get, waits=lambda: len(events._changed._waiters) > 0, wake=events.end)


def test_a_wait_for_a_context_ends_with_a_signal_that_came_before_it() -> None:
    turn, may_end = ContextQueue(), threading.Event()

    def hold() -> None:
        with turn:
            entered.set()
            may_end.wait(3 * WAIT_S)

    entered = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(WAIT_S)
    assert_ended(turn.__enter__, waits=lambda: turn.n_waiting > 0, wake=may_end.set)
    holder.join()


def assert_ended(block: Callable[[], object], waits: Callable[[], bool], wake: Callable[[], None]) -> None:
    """An interrupt ends a wait. ``interrupt_main`` wakes no thread, like a signal that comes just before the wait."""
    ended, gave_up = threading.Event(), threading.Event()

    def interrupt() -> None:
        while not waits():
            time.sleep(0.001)
        _thread.interrupt_main()
        if not ended.wait(WAIT_S):
            gave_up.set()
        wake()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        block()
    ended.set()
    other.join()
    assert not gave_up.is_set(), "the wait ended later than the interrupt"
