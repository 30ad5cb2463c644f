"""The torch tier on CUDA: kernels against float64, models against the reference tier, memory and dumps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.chat import Session
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, dequantize, format_of, row_bytes, supported_types
from slm_core.sampling import Sampling
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

SCALES = ("scale", "min_scale", "minimum")
N_IN = 2048


@pytest.fixture
def kernels():
    from slm_native.kernels.select import select_kernels

    return select_kernels("torch", device="cuda", dtype="float32").kernels


def random_tensor(ggml_type: GgmlType, n_out: int) -> QuantizedTensor:
    rng = np.random.default_rng(ggml_type)
    if ggml_type in (GgmlType.F32, GgmlType.F16, GgmlType.BF16):
        bits = rng.standard_normal((n_out, N_IN), np.float32)
        kind = {GgmlType.F32: np.float32, GgmlType.F16: np.float16}.get(ggml_type)
        data = (
            bits.astype(kind).view(np.uint8) if kind else (bits.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        )
        return QuantizedTensor("w", (n_out, N_IN), ggml_type, data.reshape(-1))
    data = rng.integers(0, 256, n_out * row_bytes(ggml_type, N_IN), np.uint8)
    blocks = data.view(format_of(ggml_type).block)
    for name in set(SCALES) & set(blocks.dtype.names or ()):
        blocks[name] = rng.uniform(-2, 2, blocks.shape)
    if "exponent" in (blocks.dtype.names or ()):
        blocks["exponent"] = rng.integers(120, 132, blocks.shape)
    return QuantizedTensor("w", (n_out, N_IN), ggml_type, data)


@pytest.mark.parametrize("ggml_type", [t for t in supported_types() if t is not GgmlType.IQ1_M], ids=lambda t: t.name)
@pytest.mark.parametrize("n_rows", [1, 5, 8, 40, 200])
def test_products(kernels, ggml_type, n_rows):
    """Few rows, many rows and dequantized weights, within the rounding of float32 sums of 2048 products."""
    tensor = random_tensor(ggml_type, 333)
    x = np.random.default_rng(1).standard_normal((n_rows, N_IN), np.float32)
    actual = kernels.to_host(kernels.matmul(kernels.from_host(x), kernels.prepare(tensor)))
    w = dequantize(tensor.data, ggml_type, tensor.shape).astype(np.float64)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w.T)
    worst = np.max(np.abs(actual - x.astype(np.float64) @ w.T) / ((N_IN + 8) * 2.0**-24 * magnitude))
    assert worst <= 1, f"off by {worst:.2f} times the bound of float32 rounding"


def decode(path, device: str, dtype: str, kv_type: KvType, **extra_options: object) -> tuple[np.ndarray, bytes]:
    """Logits of a prefill and of steps of three sequences, and a dump of a sequence after a cut."""
    rng, rows = np.random.default_rng(1), []
    tier = {"tier": "reference"} if device == "cpu" else {}
    options = ModelOptions(device=device, backend_options={"dtype": dtype, **tier, **extra_options})
    with (
        NativeBackend().load(path, options) as model,
        model.new_context(ContextOptions(1024, 3, 256, kv_type, kv_type)) as context,
    ):
        for lengths in [(200, 3, 0), (1, 1, 70), *[(1, 1, 1)] * 20]:
            batch = context.new_batch()
            for seq_id, n in enumerate(lengths):
                batch.extend(rng.integers(0, 305, n).tolist(), Pos(seq_id, context.length(seq_id)), logits="all")
            rows.append(context.decode(batch).copy())
        context.cut(Pos(0, 10), Pos(0, 75))
        return np.concatenate(rows), context.dump(0)


def torch_graph():
    import torch

    return torch.cuda.CUDAGraph


def relative_errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize(("architecture", "weights"), [("llama", "q8_0"), ("llama", "f16"), ("qwen3", "f32")])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 1e-2)])
def test_logits_equal_the_reference(tmp_path, architecture, weights, kv_type, dtype, bound):
    """Rounding may store a key or value as the next code of its KV type. That moves it by no more than storing it does,
    so the logits move by no more than they do from keys and values in float32.
    """
    path = make_tiny_model(architecture, weights).write(tmp_path / "tiny.gguf")
    actual, dump = decode(path, "cuda", dtype, kv_type)
    expected, _ = decode(path, "cpu", "auto", kv_type)
    exact, _ = decode(path, "cpu", "auto", KvType.F32)
    errors, of_storing = relative_errors(actual, expected), relative_errors(expected, exact)
    assert errors.max() < bound + of_storing.max(), f"relative error {errors.max():.1e}"
    assert np.median(errors) < bound + np.median(of_storing), f"median relative error {np.median(errors):.1e}"
    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "reference"})) as model:
        context = model.new_context(ContextOptions(1024, 1, 256, kv_type, kv_type))
        context.restore(0, dump)
        assert context.dump(0) == dump, "restoring the dump changed its bytes"


UNCAPTURED = "[decode]\ncapture = false\n"


@pytest.mark.parametrize("profile", [None, "[decode]\nbuckets = [1, 2, 4]\ncapture = true\nwarm = 64\n"])
def test_captured_steps_give_the_same_logits(tmp_path, monkeypatch, profile):
    """In float32, in which padding changes only the order of sums. Without a profile, steps are captured."""
    replays, replay = [], torch_graph().replay

    def recording_replay(graph):
        replays.append(graph)
        return replay(graph)

    monkeypatch.setattr(torch_graph(), "replay", recording_replay)
    path, options = make_tiny_model("llama", "q8_0").write(tmp_path / "tiny.gguf"), {}
    for name, text in (("captured", profile), ("uncaptured", UNCAPTURED)):
        if text is not None:
            (tmp_path / f"{name}.toml").write_text(text)
            options[name] = {"profile": str(tmp_path / f"{name}.toml")}
    expected, _ = decode(path, "cuda", "float32", KvType.F32, **options["uncaptured"])
    assert not replays
    actual, _ = decode(path, "cuda", "float32", KvType.F32, **options.get("captured", {}))
    assert len(replays) >= 17, "by default, three steps of a shape run before it is captured"
    errors = relative_errors(actual, expected)
    assert errors.max() < 1e-5, f"relative error {errors.max():.1e}"


@pytest.mark.parametrize(
    "profile",
    [
        "[prefill]\nchunk = 64\n",
        "[decode]\nwarm = 256\n[prefill]\nchunk = 64\ncapture = true\n",
        "compile = true\n",
        "tune = true\n[decode]\nbuckets = [1, 2, 4]\ncapture = true\n",
    ],
    ids=["chunk", "captured chunk", "compile", "tune"],
)
def test_profiles_give_the_logits_without_a_profile(tmp_path, monkeypatch, profile):
    monkeypatch.setenv("SLM_CACHE_DIR", str(tmp_path / "cache"))
    path = make_tiny_model("llama", "q8_0").write(tmp_path / "tiny.gguf")
    for name, text in (("p", profile), ("uncaptured", UNCAPTURED)):
        (tmp_path / f"{name}.toml").write_text(text)
    actual, _ = decode(path, "cuda", "float32", KvType.F32, profile=str(tmp_path / "p.toml"))
    expected, _ = decode(path, "cuda", "float32", KvType.F32, profile=str(tmp_path / "uncaptured.toml"))
    errors = relative_errors(actual, expected)
    assert errors.max() < 1e-5, f"relative error {errors.max():.1e}"


def test_whole_chunks_are_captured(tmp_path):
    """Prompts that request only the last logits: graphs run all chunks except the last."""
    path, rows = make_tiny_model("llama", "q8_0").write(tmp_path / "tiny.gguf"), []
    (tmp_path / "p.toml").write_text("[prefill]\nchunk = 64\ncapture = true\n")
    for options in ({}, {"profile": str(tmp_path / "p.toml")}):
        model_options = ModelOptions(device="cuda", backend_options={"dtype": "float32", **options})
        with (
            NativeBackend().load(path, model_options) as model,
            model.new_context(ContextOptions(1024, 1, 512, KvType.F32, KvType.F32)) as context,
        ):
            for first in (0, 300):
                batch = context.new_batch()
                batch.extend([5 + i % 200 for i in range(300)], Pos(0, first), logits="last")
                rows.append(context.decode(batch).copy())
    errors = [np.linalg.norm(rows[i] - rows[i + 2]) / np.linalg.norm(rows[i]) for i in (0, 1)]
    assert max(errors) < 1e-5, f"relative error {max(errors):.1e}"


@pytest.mark.parametrize("options", [{"temperature": 0}, {}], ids=["greedy", "default"])
def test_answers_from_device_top_k_equal_those_from_full_rows(tmp_path, options):
    path = make_tiny_model("qwen3", "q8_0").write(tmp_path / "tiny.gguf")
    with NativeBackend().load(path, ModelOptions(device="cuda")) as model, model.new_context(ContextOptions(256)) as c:
        assert Capability.DEVICE_SAMPLING in c.capabilities
        sampling, answers = Sampling(seed=4, max_tokens=40, **options), []
        for extra_options in ({"logprobs": 1}, {}):  # the first needs full rows of logits
            session = Session(c, model.vocab)
            session.append("The quick brown fox jumps")
            answers.append(session.generate(replace(sampling, **extra_options)).run())
            session.close()
            c.clear()
    assert answers[0].tokens == answers[1].tokens


def test_offloaded_layers_give_the_same_logits(tmp_path):
    path = make_tiny_model("llama", "f32").write(tmp_path / "tiny.gguf")
    expected, _ = decode(path, "cuda", "float32", KvType.F32)
    actual, _ = decode(path, "cuda", "float32", KvType.F32, resident_bytes=800_000)
    assert relative_errors(actual, expected).max() < 1e-5  # captured steps divide attention among more programs


def test_closing_frees_the_memory(tmp_path):
    import torch

    path = make_tiny_model("llama", "f32").write(tmp_path / "tiny.gguf")
    before = torch.cuda.memory_allocated()
    with NativeBackend().load(path, ModelOptions(device="cuda")) as model:
        context = model.new_context(ContextOptions(n_ctx=100_000))
        assert torch.cuda.memory_allocated() - before > 100_000 * 512
        context.close()
    assert torch.cuda.memory_allocated() - before < 1 << 20
