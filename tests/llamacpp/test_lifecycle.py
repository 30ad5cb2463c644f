"""Closing frees memory in any order, and the interpreter may exit at any time."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from slm_core.errors import ContextBusy, ContextClosed, ModelClosed
from slm_core.protocols import BackendModel
from slm_core.types import ContextOptions
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import feed, new_context, some_tokens
from tests.llamacpp.models import wide_model

MIB = 2**20
START = (
    "import gc, sys, threading; from pathlib import Path; from slm_core.types import *;"
    "from slm_llamacpp.backend import LlamaCppBackend;"
    "model = LlamaCppBackend().load(Path(sys.argv[1]), ModelOptions(n_threads=1));"
    "context = model.new_context(ContextOptions(n_ctx=256)); batch = context.new_batch();"
    "batch.extend(list(range(3, 99)), Pos(0, 0), logits='last');"
)


MEMORY_PROGRAM = """
import sys
from pathlib import Path
from slm_core.types import ContextOptions, ModelOptions
from slm_llamacpp.backend import LlamaCppBackend

def load(**options):
    return LlamaCppBackend().load(Path(sys.argv[1]), ModelOptions(n_threads=1, backend_options=options))

def measure():
    print(4096 * int(Path("/proc/self/statm").read_text().split()[1]))

load().close()  # excludes memory that llama.cpp allocates only once
measure()
model = load(use_mmap=False)
measure()
context = model.new_context(ContextOptions(n_ctx=2**15))
measure()
context.close()
measure()
model.close()
measure()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured with /proc")
def test_close_frees_memory_now(tmp_path: Path) -> None:
    """Measured in a new process: this one could reuse freed memory, and nothing would grow."""
    n_ff = 2**16
    weights = 9 * 96 * n_ff * 2  # nine matrices of f16
    cells = 2**15 * 3 * 2 * 64 * 2  # layers, keys and values, width, bytes of f16
    path = wide_model(tmp_path / "wide.gguf", n_ff)
    before, loaded, with_context, without, closed = map(int, run(MEMORY_PROGRAM, path).split())
    assert loaded - before > 0.9 * weights
    assert with_context - loaded > 0.9 * cells
    assert with_context - without > 0.9 * cells
    assert loaded - closed > 0.9 * weights


def test_closing_a_model_closes_its_contexts_first(load: LoadModel, llama_file: Path) -> None:
    model = load(llama_file)
    contexts = [new_context(model) for _ in range(2)]
    model.close()
    model.close()
    for context in contexts:
        with pytest.raises(ContextClosed):
            feed(context, [1])
        context.close()
    with pytest.raises(ModelClosed):
        model.new_context(ContextOptions())
    assert model.info.architecture == "llama"


def test_a_context_keeps_its_model_alive(load: LoadModel, llama_file: Path) -> None:
    model = load(llama_file)
    context: Any = new_context(model)
    model_reference = weakref.ref(context._model)
    del model
    gc.collect()
    assert model_reference() is not None
    assert feed(context, [1]).shape == (1, 305)


def test_unreferenced_models_and_contexts_are_freed(llama_file: Path) -> None:
    # In a new process, because fixtures here reference the model.
    script = START + (
        "freed = []; api = context._api; handle = model._handle; free = handle._free;"
        "handle._free = lambda pointer: freed.append('model') or free(pointer);"
        "import weakref; weakref.finalize(context, freed.append, 'context');"
        "del model; gc.collect(); assert freed == [], freed; del context; gc.collect(); print(freed)"
    )
    assert run(script, llama_file) == "['context', 'model']\n"


@pytest.mark.parametrize(
    "ending",
    [
        "context.decode(batch)",
        "context.decode(batch); context.fork",
        "model.close()",
        "context.close()",
        "del model; context.decode(batch)",
        "del context",
        "cycle = [context, model]; cycle.append(cycle); del context, model",
        "context.owner = context; model.owner = model",
        "running = threading.Event();"
        "work = lambda: [(context.clear(), context.decode(batch), running.set()) for _ in iter(int, 1)];"
        "threading.Thread(target=work, daemon=True).start(); running.wait()",
        "sys.exit(0)",
    ],
)
def test_the_interpreter_may_exit(llama_file: Path, ending: str) -> None:
    assert run(START + ending, llama_file) == ""


def test_a_model_with_a_busy_context_cannot_be_closed(load: LoadModel, llama_file: Path) -> None:
    model = load(llama_file)
    context: Any = new_context(model)
    entered, may_continue = threading.Event(), threading.Event()
    original = context._memory

    class Slow:
        def __getattr__(self, name: str) -> Any:
            entered.set()
            may_continue.wait(30)
            return getattr(original, name)

    context._memory = Slow()
    thread = threading.Thread(target=feed, args=(context, [1, 2]))
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ContextBusy):
        model.close()
    new_context(model).close()  # a close that raises leaves the model open
    may_continue.set()
    thread.join()
    model.close()
    with pytest.raises(ContextClosed):
        context.length(0)
    with pytest.raises(ModelClosed):
        model.new_context(ContextOptions())


def test_threads_may_share_a_model(load: LoadModel, llama_file: Path) -> None:
    model: BackendModel = load(llama_file)
    expected = feed(new_context(model), some_tokens(30))
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        with new_context(model) as context:
            results[number] = feed(context, some_tokens(30))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[number] == expected).all() for number in range(4))


def test_logits_outlive_their_context(load: LoadModel, llama_file: Path) -> None:
    with new_context(load(llama_file)) as context:
        rows = feed(context, some_tokens(30))
        copy = rows.copy()
    assert (rows == copy).all()


def run(script: str, path: Path) -> str:
    process = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout
