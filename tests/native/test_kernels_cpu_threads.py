"""The thread pool of the C++ kernels: equal results, concurrent callers, forked processes, the end of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from random_matrices import random_matrix
from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType
from slm_native import _extension
from slm_native.kernels.cpu import CpuKernels

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

native = _extension.load()
BEST = native.available_isas()[-1]
MATRIX = random_matrix(GgmlType.Q4_K, 300, 2048)  # some hundred KiB: enough for one task per thread


def activations(n_tokens: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n_tokens, MATRIX.shape[1]), np.float32)


def multiply(n_threads: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
    kernels = native.Kernels(BEST, n_threads)
    product: NDArray[np.float32] = kernels.matmul(x, kernels.matrix(MATRIX.data, MATRIX.ggml_type, *MATRIX.shape))
    return product


@pytest.mark.parametrize("n_tokens", [1, 8, 9, 70])
def test_the_result_is_bitwise_equal_for_any_number_of_threads(n_tokens: int) -> None:
    """Threads divide the rows; each sum is computed by one thread."""
    x = activations(n_tokens)
    one = multiply(1, x)
    for n_threads in (2, 3, 5, 16):
        np.testing.assert_array_equal(multiply(n_threads, x), one)


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_concurrent_callers_get_their_own_results(n_threads: int) -> None:
    """Three threads call the same pool many times, each with different activations."""
    kernels = native.Kernels(BEST, n_threads)
    weights = kernels.matrix(MATRIX.data, MATRIX.ggml_type, *MATRIX.shape)
    inputs = [activations(n, seed=n) for n in (1, 9, 33)]
    expected = [multiply(1, x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(60):
            if not np.array_equal(kernels.matmul(inputs[i], weights), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def status_of_forked_child(work: object) -> int:
    """The exit status of a child that runs ``work``: 0 if it returns true, 142 (SIGALRM) if it hangs, 1 otherwise."""
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(60)
        status = 1
        try:
            status = 0 if callable(work) and work() else 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) + 128 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_compute() -> None:
    """The child starts new threads, even if the parent was computing; so does its own child. The parent continues."""
    kernels = native.Kernels(BEST, 3)
    weights = kernels.matrix(MATRIX.data, MATRIX.ggml_type, *MATRIX.shape)
    x = activations(9)
    expected = multiply(1, x)
    stop = threading.Event()

    def is_right() -> bool:
        return all(np.array_equal(kernels.matmul(x, weights), expected) for _ in range(5))

    def keep_busy() -> None:
        while not stop.is_set():
            kernels.matmul(x, weights)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        statuses = [status_of_forked_child(is_right) for _ in range(5)]
        statuses.append(status_of_forked_child(lambda: is_right() and status_of_forked_child(is_right) == 0))
    finally:
        stop.set()
        busy.join()
    assert statuses == [0] * 6
    assert is_right()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_may_call_from_many_threads_and_free_the_pool() -> None:
    kernels = [native.Kernels(BEST, 4)]
    weights = kernels[0].matrix(MATRIX.data, MATRIX.ggml_type, *MATRIX.shape)
    x = activations(9)
    expected = kernels[0].matmul(x, weights)

    def work() -> bool:
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda: results.append(np.array_equal(kernels[0].matmul(x, weights), expected)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kernels.clear()  # frees the pool, because this was its last user
        return results == [True] * 4

    assert status_of_forked_child(work) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_end_with_their_last_user() -> None:
    def n_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = n_threads()
    first, second = native.Kernels(BEST, 7), native.Kernels("scalar", 7)
    assert n_threads() == before + 6
    del first
    assert n_threads() == before + 6
    del second
    assert n_threads() == before


@pytest.mark.parametrize("n_threads", [0, -1, 513, 10**12])
def test_numbers_of_threads_out_of_range_are_refused(n_threads: int) -> None:
    with pytest.raises(InvalidOption, match=rf"n_threads={n_threads} \(accepted: an integer from 1 to 512\)"):
        CpuKernels(BEST, n_threads, 0)


def test_the_gil_is_released() -> None:
    """With a switch interval of 1000 s, this thread runs during the product only if the product releases the GIL."""
    matrix = random_matrix(GgmlType.Q8_0, 64, 4096)
    kernels = native.Kernels("scalar", 1)
    weights = kernels.matrix(np.tile(matrix.data, 200), matrix.ggml_type, 64 * 200, 4096)
    x = np.ones((8, 4096), np.float32)
    started, finished = threading.Event(), threading.Event()

    def multiply_long() -> None:
        started.set()
        kernels.matmul(x, weights)
        finished.set()

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=multiply_long)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        started.wait()
        ran_meanwhile = not finished.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert ran_meanwhile


OUT_OF_MEMORY = """
import resource, sys
import numpy as np
from slm_native import _extension

n_in = 1 << 19
kernels = _extension.load().Kernels(sys.argv[1], 2)
w = np.ones(33 * n_in, np.float32)  # two panels: one for each thread
weights, x = kernels.matrix(w.view(np.uint8), 0, 33, n_in), np.ones((40, n_in), np.float32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# The limit allows the interleaved activations (80 to 96 MiB), but not a panel of 32 rows (64 MiB) as well.
resource.setrlimit(resource.RLIMIT_AS, (used + (110 << 20), resource.RLIM_INFINITY))
try:
    kernels.matmul(x, weights)
except MemoryError:
    print("refused")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(kernels.matmul(x, weights)[39, 32] == n_in)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize("isa", native.available_isas())
def test_a_thread_out_of_memory_raises_and_the_pool_still_works(isa: str) -> None:
    process = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY, isa], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout.split()) == (0, ["refused", "True"]), process.stderr
