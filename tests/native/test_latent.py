"""Latent attention (MLA): the latent of a token is stored once, as key and value."""

from __future__ import annotations

import pytest

from native.exact import exact
from slm_conformance.oracle.families import family_model
from slm_core.errors import InvalidOption
from slm_core.types import ContextOptions, KvType, Pos

WIDTHS = 64 + 16  # the latent, and the part of a key that RoPE rotates
N_LAYERS = 3


@pytest.mark.parametrize(("kv_type", "bytes_of_80"), [(KvType.F32, 320), (KvType.F16, 160), (KvType.BF16, 160)])
def test_a_token_takes_one_latent_per_layer(tmp_path, tier, load, feed, random_tokens, kv_type, bytes_of_80):
    model, sizes = load(family_model(tmp_path, "deepseek2"), tier), []
    with model.new_context(ContextOptions(n_ctx=128, kv_type_k=kv_type, kv_type_v=kv_type)) as context:
        for tokens in (random_tokens(10), random_tokens(20)):
            feed(context, tokens)
            sizes.append(context._memory.export(0, context.length(0)).n_bytes)
    assert sizes == [n * N_LAYERS * bytes_of_80 for n in (10, 30)]
    default = 2 if tier == "cpu" else 4  # bytes per number
    assert model.info.state_bytes_per_token == N_LAYERS * WIDTHS * default


def test_edits_and_dumps_of_latents(tmp_path, tier, load, feed, random_tokens, assert_close):
    tokens, model = random_tokens(100), load(family_model(tmp_path, "deepseek2"), tier)
    options = exact(n_ctx=256, n_seq_max=3)
    with model.new_context(options) as context, model.new_context(options) as other:
        feed(context, tokens)
        context.fork(0, 1, 70)
        assert_close(feed(context, tokens[70:], seq_id=1), feed(other, tokens)[70:], 1e-5)
        context.cut(Pos(0, 20), Pos(0, 45))
        other.restore(1, context.dump(0))
        assert_close(feed(other, tokens[:5], seq_id=1), feed(context, tokens[:5]), 1e-6)


def test_different_types_for_keys_and_values_are_refused(tmp_path, load):
    model = load(family_model(tmp_path, "deepseek2"))
    with pytest.raises(InvalidOption, match="kv_type_k=f16, kv_type_v=f32: this model's values are its keys"):
        model.new_context(ContextOptions(n_ctx=64, kv_type_k=KvType.F16))
