"""Engines at the end of Python and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WAIT_S = 60
# The first handler of atexit is the last to run: it sees what the end of the program has left.
AT_EXIT = """
import atexit, threading
def report():
    threads = [thread.name for thread in threading.enumerate()]
    print("slm-engine" in threads, [type(stream_error).__name__ for stream_error in map(error_of, streams)])
atexit.register(report)

import slm_core as slm
def error_of(stream):
    try:
        for _ in stream: pass
    except Exception as error:
        return error

model = slm.load(slm.demo_model_path())
engine = model.engine(n_ctx=1024)
streams = [engine.submit("Hello", slm.Sampling(max_tokens=900, min_tokens=900)) for _ in range(4)]
next(iter(streams[0]))  # the engine is at work
"""
AFTER_FORK = """
import asyncio, os, slm_core as slm
model = slm.load(slm.demo_model_path())
engine = model.engine(n_ctx=256)
stream = engine.submit("Hello", slm.Sampling(max_tokens=4))
if os.fork() == 0:
    for call in (lambda: engine.submit("Hello"), stream.run, lambda: asyncio.run(stream.arun())):
        try:
            call()
        except slm.EngineClosed as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
list(stream)
print(len(stream.answer.tokens))
"""
ASYNC_AFTER_FORK = """
import asyncio, os, signal, slm_core as slm
model = slm.load(slm.demo_model_path())

async def ask():
    with model.engine(n_ctx=256) as engine:
        return len([event async for event in engine.generate("Hello", slm.Sampling(max_tokens=4))])

print(asyncio.run(ask()), flush=True)
if os.fork() == 0:
    signal.alarm(20)
    print(asyncio.run(ask()), flush=True)
    os._exit(0)
os.wait()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.mark.parametrize(("options", "end"), [("", ""), ("", "raise SystemExit"), (", isolated=True", "")])
def test_an_engine_that_is_open_at_the_end_is_closed(options: str, end: str) -> None:
    """A thread that leaves native code after the end of Python would abort the process."""
    ended = run(AT_EXIT.replace("demo_model_path()", f"demo_model_path(){options}") + end)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["False", *str(["EngineClosed"] * 4).split()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_is_told_that_the_engine_is_not_its_own() -> None:
    ended = run(AFTER_FORK)
    assert ended.stderr == ""
    error = "the engine was made before this process was forked; make it after the fork"
    assert ended.stdout.splitlines() == [error, error, error, "4"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_reads_answers_of_its_own_engine_on_an_event_loop() -> None:
    """The thread that wakes event loops is not forked."""
    ended = run(ASYNC_AFTER_FORK)
    assert (ended.stdout.splitlines(), ended.stderr) == (["4", "4"], "")
