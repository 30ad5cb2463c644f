"""Chunked prefill, with and without CUDA graphs of whole chunks: the same logits as without chunks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.families import family_model
from slm_core.errors import InvalidOption
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_native.kv import BatchPlan, Run, part_of
from slm_native.kv.tables import PageTables

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.parameters import Scoring  # noqa: E402
from slm_native.kernels.torch.attention import attend, attend_at  # noqa: E402
from slm_native.kernels.torch.graphs import Captured  # noqa: E402

SIZES = ContextOptions(n_ctx=1024, n_seq_max=4, n_batch=256)


class FakeGraph(Captured):
    """A stand-in for a CUDA graph on any device: runs the captured step again on the same inputs."""

    captured_shapes: list[tuple[int, int]]

    def __init__(self, step, inputs) -> None:
        self._step, self._inputs = step, inputs
        (prefill,) = inputs.plans[None].prefills
        self.captured_shapes.append((len(inputs.tokens), len(prefill.pages)))

    def replay(self):
        return self._step(self._inputs)


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(FakeGraph, "captured_shapes", [], raising=False)
    return FakeGraph.captured_shapes


def load(path, profile: str = ""):
    path.with_name("named.toml").write_text(profile)
    options = {"tier": "torch", "profile": str(path.with_name("named.toml"))}
    return NativeBackend().load(path, ModelOptions(device="cpu", backend_options=options))


def with_capture(model):
    """Enable ``prefill.capture`` with graphs that work on any device."""
    kernels = model._transformer._kernels
    kernels._new_capture = lambda: FakeGraph
    kernels._profile = dataclasses.replace(kernels._profile, capture_prefill=True)
    return model


def prompts(context) -> np.ndarray:
    """Logits of long and short prompts, alone, together and interleaved, that request all rows, the last or none."""
    rng, rows = np.random.default_rng(1), []

    def decode(*runs: tuple[int, int, str]) -> None:
        batch = context.new_batch()
        for seq_id, n_tokens, logits in runs:
            start = Pos(seq_id, context.length(seq_id))
            batch.extend(rng.integers(0, 305, n_tokens).tolist(), start, logits=logits)
        rows.append(context.decode(batch).copy())

    decode((0, 200, "none"))
    decode((0, 256, "last"), (1, 0, "none"))
    decode((1, 130, "last"), (2, 50, "all"), (0, 1, "all"))
    decode((2, 64, "none"), (1, 32, "none"))
    batch = context.new_batch()
    for i in range(100):  # interleaved
        for seq_id in (0, 3):
            batch.add(int(rng.integers(305)), Pos(seq_id, context.length(seq_id) + i), logits=i % 30 == 29)
    rows.append(context.decode(batch).copy())
    context.truncate(Pos(1, 33))
    decode((1, 96, "none"))
    decode((0, 1, "all"), (1, 1, "all"), (2, 1, "all"), (3, 1, "all"))
    return np.concatenate(rows)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_do_not_depend_on_the_chunk_size(tmp_path, captures, assert_close, architecture, captured):
    path = make_tiny_model(architecture, "q8_0").write(tmp_path / "tiny.gguf")
    with load(path) as plain, load(path, "[prefill]\nchunk = 32\n") as chunked:
        model = with_capture(chunked) if captured else chunked
        with plain.new_context(SIZES) as plain_context, model.new_context(SIZES) as context:
            # Attention over more keys and products of fewer rows sum in another order in float32.
            assert_close(prompts(context), prompts(plain_context), 1e-5)
            assert [context.tokens(i) for i in range(4)] == [plain_context.tokens(i) for i in range(4)]
    assert sorted(set(captures)) == ([(32, 1), (32, 2), (32, 4), (32, 8)] if captured else [])
    assert len(captures) == len(set(captures)), "a shape was captured again"


def test_forward_passes_have_at_most_chunk_tokens(tmp_path, monkeypatch):
    path, sizes = make_tiny_model("llama").write(tmp_path / "tiny.gguf"), []
    with load(path, "[prefill]\nchunk = 50\n") as model, model.new_context(SIZES) as context:
        run = model._transformer._run

        def recording_run(inputs, *rest, **named):
            sizes.append(len(inputs.tokens))
            return run(inputs, *rest, **named)

        monkeypatch.setattr(model._transformer, "_run", recording_run)
        batch = context.new_batch()
        batch.extend([5] * 130, Pos(0, 0), logits="last")
        assert context.decode(batch).shape == (1, 305)
        batch.clear()
        batch.extend([5] * 120, Pos(0, 130), logits="all")
        assert context.embed(batch).shape[0] == 120
        batch.clear()
        batch.extend([5] * 100, Pos(0, 250), logits="none")
        assert context.decode(batch).shape == (0, 305)
    assert sizes == [50, 50, 30, 50, 50, 20, 50, 50]


def test_embedding_rows_work_in_chunks(tmp_path, assert_close):
    path, rng = make_tiny_model("llama").write(tmp_path / "tiny.gguf"), np.random.default_rng(3)
    embedding_rows, logits = rng.standard_normal((90, 96)).astype(np.float32), []
    for profile in ("", "[prefill]\nchunk = 32\n"):
        with load(path, profile) as model, model.new_context(SIZES) as context:
            batch = context.new_batch()
            batch.extend([7] * 20, Pos(0, 0))
            batch.add_embeddings(embedding_rows, Pos(0, 20))
            batch.extend([9] * 5, Pos(0, 110), logits="all")
            logits.append(context.decode(batch).copy())
    assert_close(logits[1], logits[0], 1e-5)


def test_warm_captures_whole_chunks_for_every_number_of_pages(tmp_path, captures):
    path = make_tiny_model("llama").write(tmp_path / "tiny.gguf")
    with (
        load(path, "[decode]\nwarm = 600\n[prefill]\nchunk = 100\n") as model,
        with_capture(model).new_context(SIZES) as context,
    ):
        assert captures == [(100, 2), (100, 4), (100, 8), (100, 16)]
        batch = context.new_batch()
        batch.extend([5] * 250, Pos(0, 0), logits="last")
        context.decode(batch)
    assert len(captures) == 4, "a warm shape was captured again"


def test_a_part_of_a_batch_has_the_right_rows_and_pages():
    """Sequence 0 has rows 0 to 99, from position 30 on; sequences 1 and 2 alternate in the other rows."""
    alternating = np.arange(100, 160)
    runs = [
        Run(0, slice(0, 100), 30, 130, slice(4, 7)),
        Run(1, alternating[::2], 0, 30, np.array([9])),
        Run(2, alternating[1::2], 64, 94, np.array([3, 8])),
    ]
    plan = BatchPlan(runs, np.arange(160), np.arange(160) % 64, PageTables(10, ((), (), ())))
    expected = {(run.seq_id, row): run.start + i for run in runs for i, row in enumerate(np.arange(160)[run.rows])}
    for size in (1, 33, 64, 159):
        positions = {}
        for start in range(0, 160, size):
            part = part_of(plan, start, start + size)
            n_tokens = len(part.pages)
            assert part.pages.tolist() == list(range(start, min(160, start + size)))
            for run in part.runs:
                rows = np.arange(n_tokens)[run.rows]
                positions |= {(run.seq_id, start + row): run.start + i for i, row in enumerate(rows)}
                assert run.n_held == run.start + len(rows)
                n_pages = len(np.arange(10)[run.pages])
                assert n_pages == -(-run.n_held // 64)
        assert positions == expected


@pytest.mark.parametrize(
    "scoring", [Scoring(), Scoring(window=7), Scoring(softcap=2.0), Scoring(slopes=torch.tensor([0.5, 0.1, 0.0, 1.0]))]
)
def test_attend_at_equals_attend_over_the_last_tokens(monkeypatch, scoring):
    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.standard_normal((5, 4, 8), np.float32))
    k, v = (torch.from_numpy(rng.standard_normal((24, 2, 8), np.float32)) for _ in range(2))
    monkeypatch.setattr("slm_native.kernels.torch.attention._SCORES_AT_A_TIME", 2 * 4 * 24)  # two tokens at a time
    actual = attend_at(torch.arange(12, 17), q, k, v, 0.3, scoring)
    torch.testing.assert_close(actual, attend(q, k[:17], v[:17], 0.3, scoring))


def test_unsupported_profiles_are_refused(tmp_path):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    with pytest.raises(InvalidOption, match="CUDA graphs, and cpu has none"):
        load(path, "[prefill]\nchunk = 64\ncapture = true\n")
    with pytest.raises(InvalidOption, match=r"prefill\.chunk is not supported if .* layers have states"):
        load(family_model(tmp_path, "mamba"), "[prefill]\nchunk = 64\n")


def test_batches_with_bidirectional_blocks_are_not_chunked(tmp_path, captures, assert_close):
    """They do not run as a captured chunk either, because its attention is causal."""
    path, rows = make_tiny_model("llama").write(tmp_path / "tiny.gguf"), []
    tokens = np.random.default_rng(4).integers(0, 305, 150)
    with load(path) as plain, load(path, "[prefill]\nchunk = 32\n") as chunked:
        for model in (plain, with_capture(chunked)):
            with model.new_context(SIZES) as context:
                for first, end, n in ((0, 32, 32), (32, 132, 50), (132, 150, 0)):
                    batch = context.new_batch()
                    batch.extend(tokens[first:end], Pos(0, first), logits="none" if first == 0 else "all")
                    if n:
                        batch.join_block(n)
                    rows.append(context.decode(batch).copy())
    assert_close(np.concatenate(rows[3:]), np.concatenate(rows[:3]), 1e-5)
    assert captures == []


class StaticGraph(Captured):
    """A stand-in for a CUDA graph that, like one, writes each result over the last one."""

    def __init__(self, step, inputs) -> None:
        self._step, self._inputs = step, inputs
        self._result = torch.empty_like(step(inputs))

    def replay(self):
        return self._result.copy_(self._step(self._inputs))


def test_parts_that_replay_one_graph_keep_their_rows(tmp_path, assert_close):
    """Chunks of 16: 16 single tokens, a prompt of 16, and 16 single tokens, which have the graph of the first chunk."""
    path, rows = make_tiny_model("llama").write(tmp_path / "tiny.gguf"), []
    for is_captured in (False, True):
        with load(path, "[decode]\nbuckets = [16]\n[prefill]\nchunk = 16\n") as model:
            kernels = model._transformer._kernels
            if is_captured:
                kernels._new_capture = lambda: StaticGraph
                kernels._profile = dataclasses.replace(kernels._profile, capture=True)
            with model.new_context(ContextOptions(n_ctx=256, n_seq_max=33, n_batch=64)) as context:
                batch = context.new_batch()
                for seq_id in range(16):
                    batch.add(5 + seq_id, Pos(seq_id, 0), logits=True)
                batch.extend(range(100, 116), Pos(16, 0), logits="all")
                for seq_id in range(17, 33):
                    batch.add(100 + seq_id, Pos(seq_id, 0), logits=True)
                rows.append(context.decode(batch).copy())
    assert_close(rows[1], rows[0], 1e-5)
