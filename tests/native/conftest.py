"""What the tests of the native engine share: loading, decoding, and llama.cpp as a second opinion."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_core.protocols import Context
from slm_core.types import ModelOptions, Pos
from slm_native import _extension
from slm_native.backend import NativeBackend
from slm_native.model import NativeModel

Rows = NDArray[np.floating]
LlamaCppLogits = Callable[[Path, Sequence[int]], Rows]


@pytest.fixture(params=["reference", "cpu"])
def tier(request: pytest.FixtureRequest) -> str:
    """Every tier; one whose extension is not built is skipped by name."""
    if request.param == "cpu" and (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the cpu tier is not tested, as the C++ extension is missing: {missing}")
    return str(request.param)


@pytest.fixture
def load() -> Iterator[Callable[..., NativeModel]]:
    """Loads a model; it is closed when the test is over."""
    models: list[NativeModel] = []

    def load_model(path: Path, tier: str = "reference", **options: object) -> NativeModel:
        backend_options = {"tier": tier, **options}
        models.append(NativeBackend().load(path, ModelOptions(backend_options=backend_options)))
        return models[-1]

    yield load_model
    for model in models:
        model.close()


@pytest.fixture(scope="session")
def feed() -> Callable[..., Rows]:
    """Decodes tokens at the end of a sequence and returns the logits after each."""

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
    """Token ids below ``n_vocab``."""
    return lambda n, n_vocab=256, seed=0: np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


@pytest.fixture(scope="session")
def synth_gguf(shared_dir: Path) -> ModuleType:
    """The writer of models with a published model's shape and random weights."""
    path = shared_dir / "tools" / "synth_gguf.py"
    spec = importlib.util.spec_from_file_location("synth_gguf", path)
    if spec is None or spec.loader is None or not path.is_file():
        pytest.skip(f"no writer of synthetic models: {path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def llama_cpp_logits() -> LlamaCppLogits:
    """What llama.cpp makes of some tokens: the logits after each. Keys and values are float32, without flash attention,
    whose kernel rounds queries to float16."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle: pip install llama-cpp-python")
    silent = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()

    def logits(path: Path, tokens: Sequence[int]) -> Rows:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False  # repacked weights crash on some AMX machines, and compute otherwise
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert model, f"llama.cpp cannot load {path}"
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = max(64, len(tokens))
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.n_threads = settings.n_threads_batch = 1
        context = llama_cpp.llama_init_from_model(model, settings)
        assert context, f"llama.cpp cannot make a context for {path}"
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
            batch.logits[i] = 1
        assert llama_cpp.llama_decode(context, batch) == 0
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        flat = llama_cpp.llama_get_logits(context)
        rows = np.ctypeslib.as_array(flat, shape=(len(tokens), n_vocab)).copy()
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
        return rows

    logits.keep_alive = silent  # type: ignore[attr-defined]  # llama.cpp calls it as long as it lives
    return logits


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., float]:
    """Compares rows of logits: the relative L2 error of each, and the greedy choice where the error leaves it open."""

    def check(found: Rows, wanted: Rows, bound: float) -> float:
        assert found.shape == wanted.shape, f"rows of shape {found.shape}, not {wanted.shape}"
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
        errors = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert errors.max() <= bound, f"relative error {errors.max():.2e} in row {errors.argmax()} (bound {bound:.0e})"
        top2 = np.sort(np.partition(wanted, -2, axis=1)[:, -2:], axis=1)
        decided = top2[:, 1] - top2[:, 0] > 2 * np.abs(found - wanted).max(axis=1)
        same = found.argmax(axis=1) == wanted.argmax(axis=1)
        assert (same | ~decided).all(), f"another greedy choice in row {np.flatnonzero(decided & ~same)[0]}"
        return float(errors.max())

    return check
