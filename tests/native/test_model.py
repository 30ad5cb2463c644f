"""The native backend and its models: options, lifetime, memory, and calls that fail midway."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from native.exact import exact
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import (
    BackendUnavailable,
    ContextBusy,
    ContextClosed,
    InvalidModelFile,
    InvalidOption,
    ModelClosed,
    UnknownOption,
    UnsupportedModel,
)
from slm_core.gguf import GgufFile
from slm_core.plugins import Registry
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos
from slm_native import _extension, plugin
from slm_native import backend as native_backend
from slm_native.backend import NativeBackend
from slm_native.kernels.select import ISA_VARIABLE

MIB = 1 << 20


@pytest.fixture
def path(tmp_path) -> Path:
    return make_tiny_model("llama", "q8_0").write(tmp_path / "m.gguf")


@pytest.fixture
def backend() -> NativeBackend:
    return NativeBackend()


def resident_bytes() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("memory is measured with /proc, which only Linux has")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_backend_is_registered(backend):
    assert isinstance(Registry({"native": plugin}).backend("native"), NativeBackend)
    assert backend.name == "native"


def test_status_reports_the_tier_and_the_reason(backend):
    status = backend.status()
    assert status.installed
    assert status.version
    assert (status.devices[0].name, status.devices[0].available) == ("cpu", True)
    assert status.reason.startswith(("tier reference: ", "tier cpu: "))
    assert "tier torch" in status.reason
    assert {device.name.partition(":")[0] for device in status.devices} == {"cpu", "cuda", "xpu", "mps"}


def test_without_kernels_only_an_explicit_reference_tier_loads(backend, path, monkeypatch):
    monkeypatch.setattr("slm_native._extension.why_missing", lambda: None)
    monkeypatch.setitem(sys.modules, "slm_native._native", None)  # an import of it fails
    status = backend.status()
    assert status.installed
    assert "the C++ extension is there but does not load" in status.reason
    assert "tier='reference'" in status.hint
    with pytest.raises(BackendUnavailable, match="does not load"):
        backend.load(path, ModelOptions())
    backend.load(path, ModelOptions(backend_options={"tier": "reference"})).close()


def test_the_status_names_a_forced_but_missing_instruction_set(backend, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    assert "sse9" in backend.status().reason


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_supported_architectures_and_devices(tmp_path, backend, architecture, device):
    support = backend.supports(make_tiny_model(architecture).write(tmp_path / "m.gguf"), device)
    assert support.supported
    assert support.rank > 0, "a rank of 0 would disable the backend"


@pytest.mark.parametrize(("isa", "preferred"), [("avx2", True), ("scalar", False), (None, False)])
def test_the_backend_is_preferred_if_its_kernels_are_fast(path, backend, monkeypatch, isa, preferred):
    """An ordinary optimised engine has rank 50. Kernels count as fast on instruction sets that were measured."""
    if isa is None:
        monkeypatch.setattr(_extension, "why_missing", lambda: "no compiler")
    elif isa not in _extension.load().available_isas():
        pytest.skip(f"this machine or build has no {isa}")
    else:
        monkeypatch.setenv(ISA_VARIABLE, isa)
    support = backend.supports(path)
    assert (support.supported, support.rank > 50) == (True, preferred)


def test_the_backend_is_not_preferred_for_weights_without_kernels(path, backend, monkeypatch):
    with GgufFile.open(path) as file:
        types = frozenset(tensor.ggml_type for tensor in file.tensors.values())
    assert len(types) > 1
    for tuned in (types, *(types - {one} for one in types)):
        monkeypatch.setattr(native_backend, "tuned_types", lambda device, tuned=tuned: tuned)
        assert (backend.supports(path).rank > 50) == (tuned == types)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_supports_creates_no_kernel_set(path, device):
    """A kernel set starts threads, and that of the torch tier takes GPU memory."""
    code = (
        "import pathlib, sys; from slm_native.backend import NativeBackend; from slm_native.kernels import cpu;"
        "cpu.CpuKernels = None;"
        f"NativeBackend().supports(pathlib.Path({str(path)!r}), {device!r});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unsupported_devices_and_models_are_named(tmp_path, backend, path):
    support = backend.supports(path, "warp:7")
    assert not support.supported
    assert "device 'warp:7'" in support.reason
    tiny = make_tiny_model("llama")
    tiny.metadata["llama.attention.causal"] = False
    support = backend.supports(tiny.write(tmp_path / "encoder.gguf"))
    assert not support.supported
    assert "'llama.attention.causal' is False" in support.reason
    with pytest.raises(InvalidModelFile):
        backend.supports(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (ModelOptions(device="warp:7"), BackendUnavailable, "device 'warp:7'"),
        (ModelOptions(device="cuda", backend_options={"tier": "cpu"}), InvalidOption, "'cpu' computes on the CPU"),
        (
            ModelOptions(backend_options={"tier": "cpu", "dtype": "bfloat16"}),
            InvalidOption,
            "not compute in 'bfloat16'",
        ),
        (ModelOptions(backend_options={"dtype": 16}), InvalidOption, "dtype=16"),
        (
            ModelOptions(n_threads=2, backend_options={"tier": "reference"}),
            InvalidOption,
            "n_threads=2.*OMP_NUM_THREADS",
        ),
        (ModelOptions(backend_options={"teir": "cpu"}), UnknownOption, "'teir'.*accepted: tier, expanded_bytes, dtype"),
        (ModelOptions(backend_options={"tier": "gpu"}), InvalidOption, "'gpu' .accepted: auto, reference, cpu, torch"),
        (ModelOptions(backend_options={"tier": 3}), InvalidOption, "tier=3"),
        (ModelOptions(backend_options={"expanded_bytes": 1.5}), InvalidOption, "expanded_bytes=1.5"),
        (ModelOptions(backend_options={"expanded_bytes": True}), InvalidOption, "expanded_bytes=True"),
        (ModelOptions(backend_options={"expanded_bytes": -1}), InvalidOption, "expanded_bytes"),
    ],
)
def test_wrong_options_are_refused(backend, path, options, error, message):
    with pytest.raises(error, match=message):
        backend.load(path, options)


def test_every_load_option_is_described_and_works(backend, path):
    names = {
        "tier",
        "expanded_bytes",
        "dtype",
        "resident_bytes",
        "pinned_layers",
        "profile",
        "device_map",
        "swa_full",
        "mtp",
    }
    assert set(backend.load_options) == names
    backend_options = {"tier": "reference", "expanded_bytes": 4096, "dtype": "float32"}
    options = ModelOptions(device="cpu", backend_options=backend_options)
    with backend.load(path, options) as model:
        assert (model.info.backend, model.info.device) == ("native (reference)", "cpu")


def test_progress_rises_from_0_to_1_and_may_cancel(backend, path):
    shares: list[float] = []
    backend.load(path, ModelOptions(progress=shares.append)).close()
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)
    assert len(shares) > 2

    def cancel(share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.load(path, ModelOptions(progress=cancel))


def test_a_vocabulary_that_differs_from_the_embedding_is_refused(tmp_path, backend):
    tiny = make_tiny_model("llama")
    for key in ("tokens", "token_type"):
        tiny.metadata[f"tokenizer.ggml.{key}"] = tiny.metadata[f"tokenizer.ggml.{key}"][:-1]
    with pytest.raises(InvalidModelFile, match=r"\d+ tokens in the vocabulary, but \d+ rows in the embedding"):
        backend.load(tiny.write(tmp_path / "m.gguf"), ModelOptions())


@pytest.mark.parametrize("kv_type", ["q3", "q4_1"])
def test_unknown_kv_types_are_refused(backend, path, kv_type):
    with backend.load(path, ModelOptions()) as model:
        for name in ("kv_type_k", "kv_type_v"):
            with pytest.raises(InvalidOption, match=r"unknown KV type .* \(accepted: f32, f16, bf16, .*, f8_e4m3\)"):
                model.new_context(ContextOptions(**{name: kv_type}))


@pytest.mark.skipif(_extension.why_missing() is not None, reason="the cpu tier is not tested: no C++ extension")
def test_the_cpu_tier_lists_its_kv_types(load, path):
    with (
        load(path, "cpu") as model,
        pytest.raises(InvalidOption, match=r"this tier has no KV type f8_e4m3 \(accepted: f32, .*, q4_0\)"),
    ):
        model.new_context(ContextOptions(kv_type_v=KvType.F8_E4M3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ContextOptions(n_ctx=0), "n_ctx=0"),
        (ContextOptions(n_batch=-1), "n_batch=-1"),
        (ContextOptions(n_ctx=(1 << 31) - 1), "smaller n_ctx"),
        (ContextOptions(n_ctx=1 << 31), "accepted: an integer from 1 to 2147483647"),
    ],
)
def test_impossible_context_sizes_are_refused(backend, path, options, message):
    with backend.load(path, ModelOptions()) as model, pytest.raises(InvalidOption, match=message):
        model.new_context(options)


def test_after_close_only_info_works(backend, path):
    model = backend.load(path, ModelOptions())
    context = model.new_context(ContextOptions(n_ctx=64))
    model.close()
    model.close()
    assert model.info.architecture == "llama"
    for use in (lambda: model.vocab, lambda: model.new_context(ContextOptions())):
        with pytest.raises(ModelClosed):
            use()
    with pytest.raises(ContextClosed):
        context.length(0)
    context.close()


def test_close_frees_weights_and_file_although_a_context_is_referenced(backend, path):
    model = backend.load(path, ModelOptions())
    context = model.new_context(ContextOptions(n_ctx=64))
    transformer = weakref.ref(context._transformer)
    mapped = f"{path}\n"
    if sys.platform.startswith("linux"):
        assert mapped in Path("/proc/self/maps").read_text()
    model.close()
    gc.collect()
    assert transformer() is None
    if sys.platform.startswith("linux"):
        assert mapped not in Path("/proc/self/maps").read_text()
    assert context.n_ctx == 64


def test_a_dump_grows_by_state_bytes_per_token(backend, path):
    with backend.load(path, ModelOptions()) as model:
        context, sizes = model.new_context(ContextOptions(n_ctx=64)), []
        for length in (8, 16):
            batch = context.new_batch()
            batch.extend(np.full(8, 5), Pos(0, length - 8))
            context.decode(batch)
            sizes.append(context._memory.export(0, length).n_bytes)
        assert sizes[1] - sizes[0] == 8 * model.info.state_bytes_per_token
        assert sizes[0] == 8 * model.info.state_bytes_per_token + model.info.state_bytes_per_sequence


def test_a_model_with_a_busy_context_cannot_be_closed(backend, path, monkeypatch):
    model = backend.load(path, ModelOptions())
    context = model.new_context(ContextOptions(n_ctx=64))
    entered, may_continue = threading.Event(), threading.Event()
    forward = context._transformer.forward

    def slow_forward(*args, **options):
        entered.set()
        assert may_continue.wait(30)
        return forward(*args, **options)

    monkeypatch.setattr(context._transformer, "forward", slow_forward)
    batch = context.new_batch()
    batch.extend([1, 2, 3], Pos(0, 0))
    thread = threading.Thread(target=context.decode, args=(batch,))
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ContextBusy):
        model.close()
    may_continue.set()
    thread.join()
    assert context.length(0) == 3
    assert model.vocab.size > 0
    model.close()


def test_threads_may_share_a_model(backend, path, feed, random_tokens):
    with backend.load(path, ModelOptions(backend_options={"expanded_bytes": 50_000})) as model:
        rows = {}

        def run(seed: int) -> None:
            with model.new_context(ContextOptions(n_ctx=64)) as context:
                rows[seed] = feed(context, random_tokens(30, seed=seed % 2))

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in (0, 1):
            np.testing.assert_allclose(rows[seed], rows[seed + 2], rtol=1e-4, atol=1e-4)


def test_a_large_context_takes_memory_on_use_and_frees_it_on_close(backend, path):
    with backend.load(path, ModelOptions()) as model:
        before = resident_bytes()
        context = model.new_context(exact(n_ctx=100_000))
        n_bytes = 3 * 2 * 32 * 4 * 2 * 100_000  # layers, heads, width, float32, keys and values: 146 MiB
        # The ledger takes 40 bytes per position in a list, and 4 in an array.
        assert resident_bytes() - before < 60 * 100_000 < n_bytes / 20
        context._memory._pages._stores._stores[0]._pages[...] = 1
        used = resident_bytes()
        assert used - before > 0.95 * n_bytes
        context.close()
        assert used - resident_bytes() > 0.95 * n_bytes


class Interruption:
    """A kernel that works for ``n_calls`` calls and then raises."""

    def __init__(self, kernel, n_calls: int, error: type[BaseException]) -> None:
        self.kernel, self.n_calls, self.error = kernel, n_calls, error

    def __call__(self, *args):
        self.n_calls -= 1
        if self.n_calls < 0:
            raise self.error
        return self.kernel(*args)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("n_calls", [0, 1, 5, 8])
@pytest.mark.parametrize("kernel", ["matmul", "attention"])
def test_a_decode_that_fails_midway_changes_nothing(
    backend, path, feed, random_tokens, monkeypatch, error, n_calls, kernel
):
    with backend.load(path, ModelOptions(backend_options={"tier": "reference"})) as model:
        context, untouched = (model.new_context(ContextOptions(n_ctx=512, n_seq_max=3)) for _ in range(2))
        for each in (context, untouched):
            feed(each, random_tokens(100))
            each.fork(0, 1, 70)
            feed(each, random_tokens(60, seed=1), seq_id=2)
        tables = context._memory._pages.tables
        batch = context.new_batch()
        for seq_id in (0, 1, 2):
            batch.extend(random_tokens(50, seed=7), Pos(seq_id, context.length(seq_id)))
        kernels = context._transformer._kernels
        with monkeypatch.context() as patch:
            patch.setattr(kernels, kernel, Interruption(getattr(kernels, kernel), n_calls, error))
            with pytest.raises(error):
                context.decode(batch)
        assert context._memory._pages.tables is tables
        for seq_id in (0, 1, 2):
            assert context.tokens(seq_id) == untouched.tokens(seq_id)
            more = random_tokens(30, seed=8)
            np.testing.assert_array_equal(feed(context, more, seq_id), feed(untouched, more, seq_id))


def test_an_interrupted_decode_ends_before_its_next_layer(backend, path, feed, random_tokens, monkeypatch):
    with backend.load(path, ModelOptions(backend_options={"tier": "reference"})) as model:
        context = model.new_context(ContextOptions(n_ctx=512))
        feed(context, random_tokens(20))
        kernels, layers = context._transformer._kernels, []
        attention = kernels.attention

        def interrupted(*args):
            layers.append(len(layers))
            signal.raise_signal(signal.SIGINT)
            return attention(*args)

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "attention", interrupted)
            with pytest.raises(KeyboardInterrupt):
                feed(context, random_tokens(20, seed=1))
        assert len(layers) == 1 < context._transformer.spec.n_layers
        assert context.length(0) == 20


def test_a_cut_that_fails_midway_changes_nothing(backend, path, feed, random_tokens, monkeypatch):
    with backend.load(path, ModelOptions(backend_options={"tier": "reference"})) as model:
        context = model.new_context(ContextOptions(n_ctx=512))
        feed(context, random_tokens(400))
        before = context.dump(0)
        kernels = context._transformer._kernels
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "rope", Interruption(kernels.rope, 1, MemoryError))
            with pytest.raises(MemoryError):
                context.cut(Pos(0, 1), Pos(0, 2))
        assert context.dump(0) == before


def test_unsupported_files_are_refused_and_closed(tmp_path, backend):
    tiny = make_tiny_model("qwen3")
    tiny.metadata["qwen3.attention.sliding_window"] = 512
    path = tiny.write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match=r"'qwen3\.attention\.sliding_window' is 512"):
        backend.load(path, ModelOptions())
    gc.collect()
    if sys.platform.startswith("linux"):
        assert f"{path}\n" not in Path("/proc/self/maps").read_text()
