"""Fixtures for all tests."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.protocols import Context
from slm_core.types import Pos
from slm_llamacpp import library

# Triton reads this variable at import: GPU kernels run in its interpreter here.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background makes them ignore SIGINT, and their subprocesses would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Rows = NDArray[np.floating]
LlamaCppLogits = Callable[[Path, Sequence[int]], Rows]


LONGEST = (
    "native/test_sanitizers.py",
    "conformance/test_onnx_webgpu.py",
    "server/cluster/test_ray.py",
    "conformance/test_llamacpp.py",
    "conformance/test_onnx.py",
    "conformance/test_native.py",
    "native/torch/test_triton_compiles.py",
    "core/tokenization/test_exported.py",
    "soak/test_soak.py",
    "server/test_page.py",
    "server/test_serve.py",
)
"""Modules that take half a minute or more, and slow ones at the end of the alphabet. They start first, so that no
worker waits for them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker of pytest-xdist, and the processes that it starts, a share of the cores.

    Engines start a thread for each core of their process. If all workers used all cores, threads would spin while
    they wait for threads without a core: some tests took four times as long.
    """
    worker: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores, n_workers = sorted(os.sched_getaffinity(0)), worker["workercount"]
    first = int(worker["workerid"].removeprefix("gw")) % len(cores)
    os.sched_setaffinity(0, cores[first::n_workers])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest modules first; see ``make test``, which keeps the order."""
    folder = Path(__file__).parent
    rank = {folder / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Freeze the collected tests, a million objects, so that ``gc.collect`` in tests does not traverse them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of published vocabularies, templates and grammars: $SLM_SHARED, or ``shared`` next to the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("SLM_SHARED", default))
    if not (folder / "oracles").is_dir():
        pytest.skip(f"no test data: {folder / 'oracles'} is not a folder (set SLM_SHARED to the folder that holds it)")
    return folder


@pytest.fixture(scope="session")
def feed() -> Callable[..., Rows]:
    """A function that decodes tokens at the end of a sequence and returns the logits after each token."""

    def feed_tokens(context: Context, tokens: Sequence[int], seq_id: int = 0, chunk: int | None = None) -> Rows:
        rows = []
        chunk = chunk or context.n_batch
        for first in range(0, len(tokens), chunk):
            batch = context.new_batch()
            batch.extend(tokens[first : first + chunk], Pos(seq_id, context.length(seq_id)), logits="all")
            rows.append(context.decode(batch).copy())
        return np.concatenate(rows)

    return feed_tokens


@pytest.fixture(scope="session")
def random_tokens() -> Callable[..., list[int]]:
    """A function that draws ``n`` token ids below ``n_vocab``."""
    return lambda n, n_vocab=256, seed=0: np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


@pytest.fixture(scope="session")
def synth_gguf(shared_dir: Path) -> ModuleType:
    """The module that writes models of a published shape with random weights."""
    path = shared_dir / "tools" / "synth_gguf.py"
    spec = importlib.util.spec_from_file_location("synth_gguf", path)
    if spec is None or spec.loader is None or not path.is_file():
        pytest.skip(f"no writer of synthetic models: {path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def llama_cpp_logits() -> LlamaCppLogits:
    """The logits of llama.cpp after each token. The KV cache is float32, and flash attention is off, because its kernel
    rounds queries to float16."""
    llama_cpp = _oracle()
    return lambda path, tokens: _llama_cpp_rows(llama_cpp, path, tokens, hidden=False)


@pytest.fixture(scope="session")
def llama_cpp_states() -> LlamaCppLogits:
    """The hidden states of llama.cpp for each token, with the settings of ``llama_cpp_logits``."""
    llama_cpp = _oracle()
    return lambda path, tokens: _llama_cpp_rows(llama_cpp, path, tokens, hidden=True)


def _oracle() -> ModuleType:
    llama_cpp: ModuleType = pytest.importorskip("llama_cpp", reason="the oracle: pip install llama-cpp-python")
    library.load()  # redirects the log of llama.cpp from stderr to logging
    return llama_cpp


def _llama_cpp_rows(llama_cpp: Any, path: Path, tokens: Sequence[int], *, hidden: bool) -> Rows:
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False  # repacked weights crash on some AMX machines, and give other numbers
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"llama.cpp cannot load {path}"
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = max(64, len(tokens))
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.n_threads = settings.n_threads_batch = 1
    settings.embeddings, settings.pooling_type = hidden, llama_cpp.LLAMA_POOLING_TYPE_NONE
    context = llama_cpp.llama_init_from_model(model, settings)
    assert context, f"llama.cpp cannot make a context for {path}"
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
        batch.logits[i] = 1
    assert llama_cpp.llama_decode(context, batch) == 0
    if hidden:
        width, flat = llama_cpp.llama_model_n_embd_out(model), llama_cpp.llama_get_embeddings(context)
    else:
        width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        flat = llama_cpp.llama_get_logits(context)
    rows = np.ctypeslib.as_array(flat, shape=(len(tokens), width)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return rows


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., float]:
    """Compares rows of logits: the relative L2 error of each row, and its argmax if the error cannot change it."""

    def check(actual: Rows, expected: Rows, bound: float) -> float:
        assert actual.shape == expected.shape, f"rows of shape {actual.shape}, not {expected.shape}"
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert errors.max() <= bound, f"relative error {errors.max():.2e} in row {errors.argmax()} (bound {bound:.0e})"
        top2 = np.sort(np.partition(expected, -2, axis=1)[:, -2:], axis=1)
        decided = top2[:, 1] - top2[:, 0] > 2 * np.abs(actual - expected).max(axis=1)
        same = actual.argmax(axis=1) == expected.argmax(axis=1)
        assert (same | ~decided).all(), f"another greedy choice in row {np.flatnonzero(decided & ~same)[0]}"
        return float(errors.max())

    return check


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory, synth_gguf: ModuleType) -> Callable[[str], Path]:
    """A tiny llama, quantized by llama.cpp; its widths are multiples of the blocks of K-quants."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the quantizer: pip install llama-cpp-python")
    folder = tmp_path_factory.mktemp("quantized")
    source, vocab = folder / "f16.gguf", make_tiny_model("llama").write(folder / "vocab.gguf")
    synth_gguf.write_f16(source, "tiny-llama", str(vocab), 0)

    def quantize(weight_type: str) -> Path:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = {**synth_gguf.FTYPES, "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16}[weight_type], 2
        path: Path = folder / f"{weight_type}.gguf"
        if path.exists():
            return path
        assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
        return path

    return quantize
