"""Decode steps padded to a bucket, with and without CUDA graphs: the same logits as without padding."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import InvalidOption, UnknownOption
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_native.profile import CAPTURED, PROFILE_VARIABLE, Profile, find_profile, read_profile

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch.graphs import Captured, StepGraphs  # noqa: E402
from slm_native.kernels.torch.staging import StepUploader  # noqa: E402

BUCKETS = "[decode]\nbuckets = [1, 2, 4, 8]\n"


class FakeGraph(Captured):
    """A stand-in for a CUDA graph on any device: runs the captured step again on the captured inputs."""

    def __init__(self, step, inputs) -> None:
        self._step, self._inputs = step, inputs
        self.n_replays = 0

    def replay(self):
        self.n_replays += 1
        return self._step(self._inputs)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request, tmp_path_factory):
    return make_tiny_model(request.param, "q8_0").write(tmp_path_factory.mktemp("shapes") / "tiny.gguf")


def enable_capture(kernels, capture) -> None:
    """Enable ``decode.capture`` on a device without graphs."""
    kernels._new_capture, kernels._profile = lambda: capture, dataclasses.replace(kernels._profile, capture=True)


def load(path, profile: str | None = None):
    options = {"tier": "torch"}
    if profile is not None:
        options["profile"] = str(path.with_name("named.toml"))
        path.with_name("named.toml").write_text(profile)
    return NativeBackend().load(path, ModelOptions(device="cpu", backend_options=options))


def run_session(context) -> list[np.ndarray]:
    """Logits of a session: prefills, decode steps of 1 to 7 sequences across page boundaries, and edits in between."""
    rng, rows = np.random.default_rng(1), []

    def decode(seq_ids, n_tokens=1, logits="all") -> None:
        batch = context.new_batch()
        for seq_id in seq_ids:
            start = Pos(seq_id, context.length(seq_id))
            batch.extend(rng.integers(0, 305, n_tokens).tolist(), start, logits=logits)
        rows.append(context.decode(batch).copy())

    decode([0], 60)
    decode([1], 3)
    for _ in range(8):  # across a page boundary
        decode([0, 1])
    decode([3, 5, 6])  # empty sequences
    decode([2], 130)
    context.fork(2, 4, 129)
    decode(range(7))
    context.cut(Pos(2, 10), Pos(2, 75))
    decode([6, 2, 0, 4, 1])
    decode([0, 1], logits="none")
    decode([0])
    decode([7])
    return rows


@pytest.mark.parametrize("captured", [False, True])
def test_logits_do_not_depend_on_the_bucket(path, captured, assert_close):
    sizes = ContextOptions(n_ctx=1024, n_seq_max=8, n_batch=256)
    with load(path) as plain, load(path, BUCKETS) as model:
        kernels = model._transformer._kernels
        if captured:
            enable_capture(kernels, FakeGraph)
        with plain.new_context(sizes) as plain_context, model.new_context(sizes) as context:
            actual, expected = run_session(context), run_session(plain_context)
            assert [len(rows) for rows in actual] == [len(rows) for rows in expected]
            # Attention over more keys and products of more rows sum in another order in float32.
            assert_close(np.concatenate(actual), np.concatenate(expected), 1e-5)
            for seq_id in range(7):
                assert context.tokens(seq_id) == plain_context.tokens(seq_id)


def test_graphs_are_freed_with_their_context(path):
    class ResultGraph(Captured):
        """Like a CUDA graph, it keeps its result but not the step."""

        def __init__(self, step, inputs) -> None:
            self._result = step(inputs)

        def replay(self):
            return self._result

    with load(path, BUCKETS) as model:
        kernels = model._transformer._kernels
        enable_capture(kernels, ResultGraph)
        with (
            model.new_context(ContextOptions(n_ctx=64)) as context,
            model.new_context(ContextOptions(n_ctx=64)) as other,
        ):
            for each in (context, other):
                batch = each.new_batch()
                batch.add(7, Pos(0, 0), logits=True)
                each.decode(batch)
            assert len(kernels._graphs) == 2, (
                "contexts must not share graphs, because a graph reads the pages of one context"
            )
        gc.collect()
        assert not len(kernels._graphs)


def test_batches_are_padded_to_the_next_bucket(path, monkeypatch):
    shapes = []
    with load(path, BUCKETS) as model, model.new_context(ContextOptions(n_ctx=512, n_seq_max=8)) as context:
        run = model._transformer._run

        def recording_run(inputs, layers, **named):
            shapes.append(
                (
                    len(inputs.tokens),
                    tuple(inputs.plans[None].decodes.tables.shape) if inputs.plans[None].decodes else None,
                )
            )
            return run(inputs, layers, **named)

        monkeypatch.setattr(model._transformer, "_run", recording_run)
        run_session(context)
    assert [n for n, _ in shapes] == [60, 3, *[2] * 8, 4, 130, 8, 8, 2, 1, 1]
    assert {tables[1] for n, tables in shapes if tables and n > 1} <= {1, 2, 4}, (
        "the number of pages is padded to a power of two"
    )


def test_one_graph_serves_all_lengths_of_a_shape(path):
    captures = []

    def capture(step, inputs):
        captures.append(FakeGraph(step, inputs))
        return captures[-1]

    with load(path, BUCKETS) as model:
        enable_capture(model._transformer._kernels, capture)
        with model.new_context(ContextOptions(n_ctx=512, n_seq_max=8)) as context:
            for _ in range(70):
                batch = context.new_batch()
                for seq_id in range(3):
                    batch.add(7, Pos(seq_id, context.length(seq_id)), logits=True)
                context.decode(batch)
    assert [each.n_replays for each in captures] == [64, 6], "one shape for up to 64 tokens, another for up to 128"


def test_warm_captures_every_bucket_when_a_context_is_created(path):
    captures = []

    def capture(step, inputs):
        captures.append(tuple(inputs.plans[None].decodes.tables.shape))
        return FakeGraph(step, inputs)

    with load(path, BUCKETS + "warm = 150\n") as model:
        enable_capture(model._transformer._kernels, capture)
        with model.new_context(ContextOptions(n_ctx=512, n_seq_max=8)) as context:
            assert captures == [(1, 4), (2, 4), (4, 4), (8, 4)]
            batch = context.new_batch()
            batch.extend([5] * 140, Pos(0, 0))
            context.decode(batch)
            batch.clear()
            batch.add(7, Pos(0, 140), logits=True)
            context.decode(batch)
    assert len(captures) == 4, "a warm shape was captured again"


def test_the_least_recently_used_graph_is_evicted():
    captured_sizes = []

    def capture(step, inputs):
        captured_sizes.append(len(inputs[0]))
        return FakeGraph(step, inputs)

    graphs = StepGraphs(capture, 2, StepUploader(torch.device("cpu")))
    for n in (1, 2, 1, 3, 1, 2):
        result = graphs.run(lambda inputs: inputs[0] * inputs[1], [torch.full((n,), float(n)), torch.ones(n) * 2])
        assert result.tolist() == [2.0 * n] * n
    assert captured_sizes == [1, 2, 3, 2]
    assert [shape[0] for shape in graphs.shapes] == [(1,), (2,)]


def test_a_shape_may_run_uncaptured_at_first():
    captured_sizes = []

    def capture(step, inputs):
        captured_sizes.append(len(inputs[0]))
        return FakeGraph(step, inputs)

    graphs = StepGraphs(capture, 2, StepUploader(torch.device("cpu")), n_uncaptured=2)
    for n, n_captured in ((1, 0), (2, 0), (1, 0), (1, 1), (2, 1), (1, 1), (2, 2)):
        result = graphs.run(lambda inputs: inputs[0] * 3, [torch.full((n,), float(n))])
        assert result.tolist() == [3.0 * n] * n and len(captured_sizes) == n_captured
    assert captured_sizes == [1, 2]


def test_profiles_are_found_by_option_then_environment_then_model_folder(tmp_path, monkeypatch):
    model = tmp_path / "m.Q4_0.gguf"
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    assert find_profile(model, None) is None
    (tmp_path / "m.Q4_0.profile.toml").write_text("[decode]\nbuckets = [4, 1]\n")
    assert find_profile(model, None) == Profile(buckets=(1, 4))
    (tmp_path / "e.toml").write_text('dtype = "bfloat16"')
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path / "e.toml"))
    assert find_profile(model, None) == Profile(dtype="bfloat16")
    (tmp_path / "n.toml").write_text("[decode]\ngraphs = 3\nwarm = 64\nbuckets = [2]")
    assert find_profile(model, str(tmp_path / "n.toml")) == Profile(graphs=3, warm=64, buckets=(2,))
    with pytest.raises(InvalidOption, match=r"profile .*gone\.toml: .*No such file"):
        find_profile(model, str(tmp_path / "gone.toml"))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "dtpye = 'float16'",
            UnknownOption,
            r"'dtpye' \(accepted: dtype, compile, tune, decode, prefill\)",
        ),
        ("[decode]\nbucket = [1]", UnknownOption, r"unknown key 'decode.bucket' \(accepted: decode.buckets, "),
        ("[decode]\nbuckets = [0]", InvalidOption, r"decode.buckets=\[0\] \(accepted: sizes of batches from 1 to 1024"),
        ("[decode]\nbuckets = []", InvalidOption, "sizes of batches"),
        ("[decode]\nbuckets = 'all'", InvalidOption, "sizes of batches"),
        ("[decode]\nbuckets = [true]", InvalidOption, "sizes of batches"),
        ("[decode]\ngraphs = 0", InvalidOption, r"decode.graphs=0 \(accepted: 1 to 1024\)"),
        ("[decode]\ncapture = 1", InvalidOption, "true or false"),
        ("[decode]\ncapture = true", InvalidOption, "needs decode.buckets"),
        ("[prefill]\nchunk = 8", InvalidOption, r"prefill.chunk=8 \(accepted: tokens, 16 or more\)"),
        ("[prefill]\ncapture = true", InvalidOption, "needs prefill.chunk"),
        ("prefill = 3", InvalidOption, r"prefill=3 \(accepted: a table\)"),
        ("decode = 3", InvalidOption, r"decode=3 \(accepted: a table\)"),
        ("compile = 1", InvalidOption, r"compile=1 \(accepted: true or false\)"),
        ("dtype = 16", InvalidOption, "bfloat16"),
        ("dtype = ", InvalidOption, r"profile .*p\.toml: "),
        ("\x00", InvalidOption, r"profile .*p\.toml: "),
    ],
)
def test_wrong_keys_and_values_of_profiles_are_refused(tmp_path, text, error, message):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(error, match=message) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


def test_profiles_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidOption, match=r"p\.toml: "):
        read_profile(tmp_path / "p.toml")


def test_profiles_that_the_device_does_not_support_are_refused(path, tmp_path):
    with pytest.raises(InvalidOption, match="CUDA graphs, and cpu has none"):
        load(path, BUCKETS + "capture = true\n")
    with pytest.raises(InvalidOption, match="tune=true on cpu: Triton kernels are for CUDA"):
        load(path, "tune = true\n")
    with pytest.raises(InvalidOption, match="unknown dtype 'float8'"):
        load(path, "dtype = 'float8'")
    profile = tmp_path / "p.toml"
    profile.write_text(BUCKETS)
    options = {"tier": "reference", "profile": str(profile)}
    with pytest.raises(InvalidOption, match="a profile is for the torch tier"):
        NativeBackend().load(path, ModelOptions(backend_options=options))


@pytest.mark.parametrize("profile", [None, Profile(buckets=(1,), capture=True)], ids=["default", "asked for"])
def test_capture_of_offloaded_layers(tmp_path, monkeypatch, profile):
    """On any device: a graph cannot contain the loading of layers. What a profile asks for is refused."""
    from slm_native.kernels.torch.kernels import TorchKernels

    monkeypatch.setattr(TorchKernels, "__init__", as_if_capturing(TorchKernels.__init__, profile))
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    options = ModelOptions(backend_options={"tier": "torch", "resident_bytes": 1 << 30})
    if profile is not None:
        with pytest.raises(InvalidOption, match="capture is not supported if layers are streamed"):
            NativeBackend().load(path, options)
        return
    with NativeBackend().load(path, options) as model, model.new_context(ContextOptions(n_ctx=64)) as context:
        assert "steps not captured as layers are streamed" in model._transformer._kernels.describe()
        batch = context.new_batch()
        batch.add(7, Pos(0, 0), logits=True)
        assert context.decode(batch).shape == (1, 305)


def as_if_capturing(create, profile):
    def init(self, *args, **named) -> None:
        create(self, *args, **named)
        self.captures, self._may_forgo_capture = True, profile is None
        self._new_capture, self._profile = (lambda: FakeGraph), CAPTURED if profile is None else profile

    return init


def test_options_override_the_profile(path):
    with load(path, "dtype = 'bfloat16'") as model:
        assert "bfloat16" in model._transformer._kernels.describe()
    options = {"tier": "torch", "dtype": "float32", "profile": str(path.with_name("named.toml"))}
    with NativeBackend().load(path, ModelOptions(backend_options=options)) as model:
        assert "float32" in model._transformer._kernels.describe()
