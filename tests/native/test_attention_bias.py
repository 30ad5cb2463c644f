"""Attention biases in kinds of attention that the suite's models lack, on both tiers that add them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from native.exact import exact
from slm_conformance.oracle.families import family_model
from slm_core.protocols import Context
from slm_core.types import Capability, ContextOptions, KvType, Pos

FAMILIES = ("gemma2", "gpt_oss", "bloom", "llama4", "falcon", "gemma3n", "gemma4", "deepseek2", "qwen3moe")
"""Windows and soft caps, sinks, ALiBi, temperatures, parallel layers, residual streams, latents, experts."""
ABSENT = ("lfm2", "falcon_h1", "mamba2", "rwkv7", "bert")
"""Recurrent layers, and an encoder."""
BOUND = 1e-4  # clause 9 of the contract: float32, relative
TOKENS = np.random.default_rng(0).integers(0, 250, 24).tolist()
PADDING = 5


@pytest.fixture(params=["reference", "cpu"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows(context: Context, n: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(0, 1, (n, context.n_embd)).astype(np.float32)


def relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float((np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())


def padded(context: Context, seq_id: int, bias: float) -> NDArray[np.float32]:
    """The logits of a text after padding with this bias, prefilled and then decoded token by token."""
    batch = context.new_batch()
    batch.add_embeddings(rows(context, PADDING), Pos(seq_id, 0), bias=np.full(PADDING, bias, np.float32))
    batch.extend(TOKENS[:16], Pos(seq_id, PADDING), logits="all")
    logits = [context.decode(batch).copy()]
    for i, token in enumerate(TOKENS[16:], start=PADDING + 16):
        batch.clear()
        batch.add(token, Pos(seq_id, i), logits=True)
        logits.append(context.decode(batch).copy())
    return np.concatenate(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_after_masked_padding_is_as_alone(family: str, tier: str, tmp_path: Path, load: Any) -> None:
    """Positions are relative, so padding that no query attends to only moves the text."""
    with load(family_model(tmp_path, family), tier).new_context(exact(n_ctx=128, n_seq_max=3, n_batch=64)) as context:
        assert Capability.ATTENTION_BIAS in context.capabilities
        batch = context.new_batch()
        batch.extend(TOKENS, Pos(0, 0), logits="all")
        alone = context.decode(batch).copy()
        assert relative_error(padded(context, 1, -np.inf), alone) < BOUND
        assert relative_error(padded(context, 2, 0.0), alone) > 0.1, "padding that is not masked changes the logits"


@pytest.mark.parametrize("family", ABSENT)
def test_recurrent_layers_and_encoders_do_not_declare_it(family: str, tmp_path: Path, load: Any) -> None:
    with load(family_model(tmp_path, family)).new_context(exact(n_ctx=32)) as context:
        assert Capability.ATTENTION_BIAS not in context.capabilities


def test_windowed_caches_and_torch_do_not_declare_it(tmp_path: Path, load: Any) -> None:
    path = family_model(tmp_path, "gemma2")
    with load(path, swa_full=False).new_context(exact(n_ctx=128)) as context:
        assert Capability.ATTENTION_BIAS not in context.capabilities
    pytest.importorskip("torch", reason="the torch tier needs torch")
    with load(path, "torch").new_context(exact(n_ctx=128)) as context:
        assert Capability.ATTENTION_BIAS not in context.capabilities


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.BF16])
def test_the_tiers_agree_across_pages(kv_type: KvType, tmp_path: Path, load: Any) -> None:
    """150 positions on three pages, with stored keys and values: both tiers read the same numbers."""
    path, bias = family_model(tmp_path, "gemma2"), np.tile(np.float32([2, -np.inf, 0, -1, 0.5]), 30)
    logits = []
    for tier in ("reference", "cpu"):
        options = ContextOptions(256, 2, 150, kv_type, kv_type)
        with load(path, tier).new_context(options) as context:
            batch = context.new_batch()
            batch.add_embeddings(rows(context, 150), Pos(0, 0), bias=bias, logits="last")
            first = context.decode(batch).copy()
            batch.clear()
            batch.extend(TOKENS, Pos(0, 150), logits="all")
            batch.extend(TOKENS, Pos(1, 0), logits="last")
            logits.append(np.concatenate([first, context.decode(batch)]))
    assert relative_error(logits[1], logits[0]) < 1e-2  # clause 9: 16 bit


def test_drafts_add_biases(tmp_path: Path, tier: str, load: Any) -> None:
    """The first of two masked rows changes no draft: the MTP layer masks it, too. A bias of 0 lets it change them."""
    model, drafts = load(family_model(tmp_path, "deepseek3_mtp"), tier), {}
    for bias in (-np.inf, 0.0):
        for factor in (1, 3):
            with model.new_context(exact(n_ctx=64, n_batch=32)) as context:
                two = rows(context, 2)
                two[0] *= factor
                batch = context.new_batch()
                batch.extend(TOKENS[:4], Pos(0, 0))
                batch.add_embeddings(two, Pos(0, 4), bias=np.full(2, bias, np.float32))
                batch.extend(TOKENS[4:10], Pos(0, 6))
                context.decode(batch)
                before = context.draft(0, 7, 3, 5).logits
                context.truncate(Pos(0, 8))
                context.restore(0, context.dump(0))  # the state of the last token is computed again
                drafts[bias, factor] = np.concatenate([before, context.draft(0, 9, 3, 5).logits])
    assert relative_error(drafts[-np.inf, 3], drafts[-np.inf, 1]) < BOUND
    assert relative_error(drafts[0.0, 3], drafts[0.0, 1]) > 100 * BOUND


@pytest.mark.parametrize("other", [KvType.F32, KvType.F16])
def test_a_dump_of_a_context_keeps_the_biases_of_shared_rows(other: KvType, tmp_path: Path, load: Any) -> None:
    """Two sequences share rows with biases. With another KV type, the dump is decoded again."""
    model = load(family_model(tmp_path, "gemma2"), "cpu")
    with (
        model.new_context(exact(n_ctx=64, n_seq_max=3)) as context,
        model.new_context(ContextOptions(64, 3, 64, other, other)) as restored,
    ):
        batch = context.new_batch()
        batch.add_embeddings(rows(context, 6), Pos(0, 0), bias=np.float32([2, -np.inf, 0, 1.5, -2, 3]))
        context.decode(batch)
        context.fork(0, 2, 5)
        restored.restore_context(context.dump_context())
        assert restored.n_free == context.n_free
        logits = []
        for each in (context, restored):
            batch.clear()
            batch.extend(TOKENS[:4], Pos(2, 5), logits="all")
            batch.extend(TOKENS[:4], Pos(0, 6), logits="all")
            logits.append(each.decode(batch).copy())
    assert relative_error(logits[1], logits[0]) < (BOUND if other is KvType.F32 else 1e-2)


def test_hidden_states_add_biases(tier: str, tmp_path: Path, load: Any) -> None:
    """The states of a text after masked padding, at the end and after each layer, are those of the text alone."""
    with load(family_model(tmp_path, "llama"), tier).new_context(exact(n_ctx=128, n_seq_max=4)) as context:
        batch, states = context.new_batch(), []
        for seq_id, padding in enumerate([rows(context, 0), rows(context, PADDING)]):
            batch.clear()
            batch.add_embeddings(padding, Pos(seq_id, 0), bias=np.full(len(padding), -np.inf, np.float32))
            batch.extend(TOKENS, Pos(seq_id, len(padding)), logits="all")
            of_layers = context.layer_states(batch, [1, 0])
            context.drop(seq_id)
            states.append(np.concatenate([of_layers, context.embed(batch)[None]]))
    assert relative_error(states[1], states[0]) < BOUND
