"""Threads that compute when the program ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WAIT_S = 60
PROGRAM = """
import os, sys, threading, time
import slm_core as slm

class Lingering:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # the end of Python takes longer than a call of the engine

context = slm.load(slm.demo_model_path(), backend=sys.argv[1], n_threads=1).new_context(n_ctx=512, n_batch=512)
batch = context.new_batch()
batch.extend([5] * 512, slm.Pos(0, 0))

def compute():
    while True:
        context.decode(batch)
        context.clear()

threading.Thread(target=compute, daemon=True).start()
is_busy = False
while not is_busy:
    time.sleep(0.05)
    try:
        context.dump_parts(0)
    except slm.ContextBusy:
        is_busy = True  # the thread is in the engine
lingering = Lingering()
"""
FORKED = """
if os.fork() == 0:
    sys.exit()
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def exit_status(program: str, backend: str) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, backend], timeout=WAIT_S, check=False, env=environment
    ).returncode


@pytest.mark.parametrize("backend", ["native", "onnx"])
def test_the_end_of_the_program_waits_for_daemon_threads(backend: str) -> None:
    """A thread that leaves an engine in C++ after the end of Python would abort the process."""
    if backend == "onnx":
        pytest.importorskip("onnxruntime")
    assert exit_status(PROGRAM, backend) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_the_end_of_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    assert exit_status(PROGRAM + FORKED, "native") == 0
