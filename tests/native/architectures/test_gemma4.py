"""gemma4: the KV caches of its two kinds of layers, and edits of a context with pages for each kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from native.exact import exact
from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import FAMILIES
from slm_core.architectures import read_spec
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidModelFile
from slm_core.gguf import GgufFile
from slm_core.types import ContextOptions, EditLevel, Pos

BOUND = 1e-4  # clause 9 of the contract: float32, relative


def payload(context, seq_id: int) -> bytes:
    """The KV payload of a dump."""
    return SequenceSnapshot.from_bytes(context.dump(seq_id)).payload


def spec_of(folder, family: str):
    with GgufFile.open(family_model(folder, family)) as file:
        return read_spec(file)


def test_layers_store_kv_by_their_heads_and_shared_kv_layers_none(tmp_path, load):
    spec = spec_of(tmp_path, "gemma4")
    assert spec.attention_layers == list(range(5))
    assert [spec.layers[i].kv_layer for i in (5, 6)] == [3, 4]
    assert {shape[:2]: blocks for (shape, _), blocks in spec.kv_groups().items()} == {
        (3, 16): [0, 1, 3],
        (3, 24): [2, 4],
    }
    assert spec.kv_values_per_token == 2 * 3 * (3 * 16 + 2 * 24)
    dense = spec_of(tmp_path, "gemma4_dense")
    assert {shape[:2]: blocks for (shape, _), blocks in dense.kv_groups().items()} == {
        (3, 16): [0, 2, 3],
        (1, 24): [1, 4],
    }
    model = load(family_model(tmp_path, "gemma4"))
    sizes = []
    for n in (8, 16):
        with model.new_context(ContextOptions(n_ctx=32)) as context:
            batch = context.new_batch()
            batch.extend(range(n), Pos(0, 0))
            context.decode(batch)
            sizes.append(len(payload(context, 0)))
    assert sizes == [8 * model.info.state_bytes_per_token, 16 * model.info.state_bytes_per_token]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_dense"])
def test_edits_of_both_kinds_of_pages_equal_the_reference(family, tmp_path, tier, load, feed, assert_close):
    """A cut rotates the keys of each kind with its own RoPE table, which leaves most of the wider heads unrotated."""
    path, rows, dumps = family_model(tmp_path, family), [], []
    for name in ("reference", tier):
        with load(path, name).new_context(exact(n_ctx=512, n_seq_max=3)) as context:
            assert context.edit_level is EditLevel.CUT
            logits = [feed(context, range(100))]
            context.fork(0, 1, 90)
            context.cut(Pos(0, 30), Pos(0, 41))
            logits += [feed(context, range(7)), feed(context, range(100, 130), seq_id=1)]
            dumps.append(context.dump(0))
            context.restore(2, dumps[0])
            logits.append(feed(context, range(20), seq_id=2))
            rows.append(np.concatenate(logits))
    assert_close(rows[1], rows[0], BOUND)


def test_a_cut_at_the_start_leaves_the_first_layer_as_without_the_start(tmp_path, load, feed, assert_close):
    """Keys and values of the first layer do not depend on earlier tokens."""
    path = family_model(tmp_path, "gemma4_dense")
    with load(path).new_context(exact(n_ctx=256, n_seq_max=2)) as context:
        feed(context, range(80))
        context.cut(Pos(0, 0), Pos(0, 33))
        feed(context, range(33, 80), seq_id=1)
        layouts = [store.layout for store in context._memory._pages._stores._stores]
        exported = [payload(context, seq_id) for seq_id in (0, 1)]
    first = next(layout for layout in layouts if 0 in layout.blocks)
    assert layouts[0] is first, "block 0 is in the first group"
    n = 47 * first.n_layers * first.n_kv_heads * first.head_dim
    keys = [np.frombuffer(data, np.float32, n).reshape(47, first.n_layers, -1)[:, 0] for data in exported]
    assert_close(keys[0], keys[1], BOUND)


def test_shared_kv_of_missing_layers_is_refused(tmp_path, monkeypatch):
    family = FAMILIES["gemma4"]
    monkeypatch.setitem(
        FAMILIES, "gemma4", replace(family, metadata={**family.metadata, "attention.shared_kv_layers": 7})
    )
    with pytest.raises(InvalidModelFile, match="7 of 7 blocks read the keys"):
        spec_of(tmp_path, "gemma4")


def test_offloaded_layers_give_the_same_bits(tmp_path, tier, load, feed):
    """With experts next to a dense layer: one matrix of the file is split into gate and up."""
    path, rows = family_model(tmp_path, "gemma4_experts"), []
    with GgufFile.open(path) as file:
        n_bytes = sum(tensor.n_bytes for name, tensor in file.tensors.items() if name.startswith("blk."))
    for options in ({}, {"resident_bytes": n_bytes * 9 // 10}):
        model = load(path, tier, **options)
        with model.new_context(exact(n_ctx=128)) as context:
            rows.append(feed(context, range(80)))
    assert model.offload is not None
    assert model.offload.loads > 0
    np.testing.assert_array_equal(*rows)
