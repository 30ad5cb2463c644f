"""Cuts, forks and dumps that llama.cpp's own functions would get wrong, against the float64 reference of the suite.

The tolerance is that of clause 9 of the contract for float32: weights, keys and values are float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle import factories
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_core.protocols import Context
from slm_core.types import EditLevel, KvType, Pos
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import error, feed, new_context, some_tokens

TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("no_rebuild")


@pytest.fixture
def context(load: LoadModel, llama_file: Path) -> Context:
    return new_context(load(llama_file))


@pytest.fixture
def reference() -> Reference:
    return Reference(Weights.of(make_tiny_model("llama", "f32")))


def cut(context: Context, start: int, end: int, seq_id: int = 0) -> None:
    context.cut(Pos(seq_id, start), Pos(seq_id, end))


def test_a_cut_does_not_change_a_fork(context: Context, reference: Reference) -> None:
    for engine in (context, reference):
        engine.decode(some_tokens(24)) if engine is reference else feed(context, some_tokens(24))
        engine.fork(0, 1)
    feed(context, some_tokens(6, seed=1))  # now the tail is partly shared
    reference.decode(some_tokens(6, seed=1))
    cut(context, 5, 11)
    reference.cut(5, 11)
    n_free = context.n_free
    for seq_id in (0, 1):
        actual, expected = feed(context, [7, 8, 9], seq_id), reference.decode([7, 8, 9], seq_id)
        assert error(actual, expected) <= TOLERANCE, f"sequence {seq_id} after a cut in shared cells"
    assert n_free == 256 - 24 - 6 - 13, "the cut copied the 13 shared cells after it and freed none"


def test_a_cut_of_a_fork_fits_an_almost_full_cache(load: LoadModel, llama_file: Path) -> None:
    # llama.cpp has 256 cells: no more than the ledger counts.
    context = new_context(load(llama_file), n_ctx=256)
    reference = Reference(Weights.of(make_tiny_model("llama", "f32")))
    feed(context, some_tokens(128))
    reference.decode(some_tokens(128))
    for engine in (context, reference):
        engine.fork(0, 1)
    cut(context, 0, 1)
    reference.cut(0, 1)
    assert context.n_free == 1
    for seq_id in (1, 0):
        if seq_id == 0:
            context.drop(1)
        assert error(feed(context, [3], seq_id), reference.decode([3], seq_id)) <= TOLERANCE


def test_a_dump_after_a_cut_has_rotated_keys(context: Context, reference: Reference) -> None:
    feed(context, some_tokens(20))
    reference.decode(some_tokens(20))
    cut(context, 3, 9)
    reference.cut(3, 9)
    data = context.dump(0)
    context.clear()
    context.restore(2, data)
    assert error(feed(context, [4, 5], 2), reference.decode([4, 5])) <= TOLERANCE


def test_a_dump_after_a_cut_in_a_full_cache(load: LoadModel, llama_file: Path) -> None:
    context = new_context(load(llama_file), n_ctx=256)
    reference = Reference(Weights.of(make_tiny_model("llama", "f32")))
    feed(context, some_tokens(200))
    reference.decode(some_tokens(200))
    context.fork(0, 1)
    cut(context, 100, 144)  # copies of the 56 shared cells after the cut take all free cells
    reference.cut(100, 144)
    assert context.n_free == 0, "there must be no cell for the token that llama.cpp decodes to re-rotate keys"
    data = context.dump(0)
    context.clear()
    context.restore(0, data)
    assert error(feed(context, [6]), reference.decode([6])) <= TOLERANCE


def test_what_forks_do_not_share_is_restored_and_not_decoded_again(context: Context) -> None:
    feed(context, some_tokens(24))
    context.fork(0, 1)
    feed(context, some_tokens(6, seed=1), 1)
    other = new_context(context._model)
    other.restore_context(context.dump_context())
    for seq_id in (0, 1):
        assert error(feed(other, [7, 8, 9], seq_id), feed(context, [7, 8, 9], seq_id)) <= TOLERANCE
    other.clear()
    feed(other, some_tokens(other.n_ctx))  # all cells of the dropped sequences are free again


def test_cuts_forks_and_truncations_before_any_decode(context: Context, reference: Reference) -> None:
    for engine in (context, reference):
        feed(context, some_tokens(30)) if engine is context else reference.decode(some_tokens(30))
    for start, end in ((2, 5), (0, 4), (10, 17)):
        cut(context, start, end)
        reference.cut(start, end)
    context.fork(0, 1)
    reference.fork(0, 1)
    cut(context, 1, 3, 1)
    reference.cut(1, 3, 1)
    context.truncate(Pos(0, 12))
    reference.truncate(12)
    for seq_id in (0, 1):
        assert error(feed(context, [9, 1], seq_id), reference.decode([9, 1], seq_id)) <= TOLERANCE


def test_a_cut_in_a_fork_of_a_fork(context: Context, reference: Reference) -> None:
    feed(context, some_tokens(16))
    reference.decode(some_tokens(16))
    for engine in (context, reference):
        engine.fork(0, 1, 12)
        engine.fork(1, 2, 8)
    cut(context, 2, 4, 1)
    reference.cut(2, 4, 1)
    for seq_id in (0, 1, 2):
        actual, expected = feed(context, [20, 21], seq_id), reference.decode([20, 21], seq_id)
        assert error(actual, expected) <= TOLERANCE, f"sequence {seq_id}"


def test_one_sequence_takes_all_of_n_ctx(load: LoadModel, llama_file: Path) -> None:
    context = new_context(load(llama_file), n_ctx=70, n_seq_max=3)
    reference = Reference(Weights.of(make_tiny_model("llama", "f32")))
    assert error(feed(context, some_tokens(70)), reference.decode(some_tokens(70))) <= TOLERANCE
    assert context.n_free == 0


@pytest.mark.parametrize("head_dim", [64, 32])
def test_quantized_keys_are_cut_only_if_llamacpp_does_not_crash(
    load: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    shape = replace(factories.SHAPES["qwen3"], head_dim=head_dim)
    monkeypatch.setitem(factories.SHAPES, "qwen3", shape)
    tiny = make_tiny_model("qwen3", "f32")
    model = load(tiny.write(tmp_path / "model.gguf"))
    context = new_context(model, kv_type=KvType.Q8_0)
    if head_dim % 64:
        assert context.edit_level is EditLevel.TRUNCATE
        return
    exact, rounded = (Reference(Weights.of(tiny), round_kv=rounding) for rounding in (lambda x: x, _q8_0))
    for engine in (exact, rounded):
        engine.decode(some_tokens(40))
        engine.cut(5, 20)
    feed(context, some_tokens(40))
    cut(context, 5, 20)
    actual = feed(context, some_tokens(16, seed=1))
    expected, with_rounding = (engine.decode(some_tokens(16, seed=1)) for engine in (exact, rounded))
    # llama.cpp rounds keys once more when it re-rotates them: sqrt(2) times the error, and a factor of 2 for chance.
    assert error(actual, expected) <= 2 * np.sqrt(2) * error(with_rounding, expected)
    fresh = Reference(Weights.of(tiny)).decode(some_tokens(40)[:5] + some_tokens(40)[20:] + some_tokens(16, seed=1))
    assert error(actual, fresh[-16:]) > 4 * error(actual, expected), "the cut is not a fresh prefill"


def test_keys_in_bf16_are_not_cut(load: LoadModel, llama_file: Path) -> None:
    assert new_context(load(llama_file), kv_type=KvType.BF16).edit_level is EditLevel.TRUNCATE


def _q8_0(x: np.ndarray) -> np.ndarray:
    """Round to blocks of 32 signed bytes with one scale (ggml type Q8_0)."""
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    return (np.rint(blocks / scale) * scale).reshape(x.shape)
