"""Results of llama.cpp are checked, and failed calls leave the context unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slm_conformance.oracle.broken import with_broken_token
from slm_conformance.oracle.families import family_model
from slm_core.errors import ContextFull, DecodeFailed, InvalidOption, UnsupportedEdit
from slm_core.protocols import Context
from slm_core.types import ContextOptions, EditLevel, KvType, Pos
from slm_llamacpp.context import can_rotate, check_key_type
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import error, feed, new_context, some_tokens
from tests.llamacpp.models import recurrent_model

EXACT = 1e-6  # relative; float32 sums of the same numbers in another order


class PatchedApi:
    """The low-level API with some functions replaced."""

    def __init__(self, api: Any, **replaced: Callable[..., Any]) -> None:
        self._api = api
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)


@pytest.fixture
def context(load: LoadModel, llama_file: Path) -> Context:
    return new_context(load(llama_file))


def patch_api(context: Any, **replaced: Callable[..., Any]) -> Any:
    """Replace functions of one context; returns the original ones."""
    original = context._api
    context._api = context._memory._api = PatchedApi(original, **replaced)
    return original


def restore_api(context: Any, original: Any) -> None:
    context._api = context._memory._api = original


@pytest.mark.parametrize(("code", "words"), [(1, "no room"), (2, "aborted"), (-1, "invalid"), (-3, "code -3")])
def test_a_failed_decode_changes_nothing(context: Any, code: int, words: str) -> None:
    before = some_tokens(10)
    feed(context, before)
    feed(context, before[:4], 1)
    batch = context.new_batch()
    for seq_id in (0, 1):
        batch.extend([5, 6, 7], Pos(seq_id, context.length(seq_id)), logits="all")

    def decode_and_fail(pointer: int, llama_batch: Any) -> int:
        assert api.llama_decode(pointer, llama_batch) == 0, "as if the first of several micro-batches succeeded"
        return code

    api = patch_api(context, llama_decode=decode_and_fail)
    with pytest.raises(DecodeFailed, match=words):
        context.decode(batch)
    restore_api(context, api)
    assert (context.length(0), context.length(1)) == (10, 4)
    expected = new_context(context._model)
    feed(expected, before)
    assert error(feed(context, [5, 6, 7]), feed(expected, [5, 6, 7])) <= EXACT


def test_an_interrupt_after_a_decode_changes_nothing(context: Any) -> None:
    feed(context, some_tokens(10))

    def decode_and_interrupt(pointer: int, llama_batch: Any) -> int:
        api.llama_decode(pointer, llama_batch)
        raise KeyboardInterrupt

    api = patch_api(context, llama_decode=decode_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        feed(context, [5, 6, 7])
    restore_api(context, api)
    expected = new_context(context._model)
    feed(expected, some_tokens(10))
    assert error(feed(context, [5, 6, 7]), feed(expected, [5, 6, 7])) <= EXACT


def test_an_interrupt_between_llamacpp_and_the_ledger_is_repaired(context: Any) -> None:
    feed(context, some_tokens(12))
    context.cut(Pos(0, 2), Pos(0, 4))
    context._memory.remove(0, 7)  # as if a truncate was interrupted before the ledger changed
    assert context.length(0) == 10
    expected = new_context(context._model)
    feed(expected, some_tokens(12))
    expected.cut(Pos(0, 2), Pos(0, 4))
    assert error(feed(context, [5, 6, 7]), feed(expected, [5, 6, 7])) <= EXACT


@pytest.mark.parametrize("code", [2, -3])
def test_a_dump_fails_if_keys_cannot_be_rotated(context: Any, code: int) -> None:
    feed(context, some_tokens(12))
    context.cut(Pos(0, 2), Pos(0, 4))
    api = patch_api(context, llama_decode=lambda pointer, llama_batch: code)
    for _ in range(2):
        with pytest.raises(DecodeFailed, match=f"could not re-rotate keys .code {code}"):
            context.dump(0)
    restore_api(context, api)
    restored = new_context(context._model)
    restored.restore(0, context.dump(0))
    assert error(feed(restored, [5, 6]), feed(context, [5, 6])) <= EXACT


def test_a_repaired_sequence_is_dumped_with_rotated_keys(context: Any) -> None:
    restored, expected = new_context(context._model), new_context(context._model)
    for each in (context, expected):
        feed(each, some_tokens(12))
        each.cut(Pos(0, 2), Pos(0, 4))
        feed(each, [1, 2])
        each.cut(Pos(0, 5), Pos(0, 6))
        feed(each, [3])
    context._memory.remove(0, 7)  # as if a truncate was interrupted before the ledger changed
    restored.restore(0, context.dump(0))
    assert error(feed(restored, [5, 6, 7]), feed(expected, [5, 6, 7])) <= EXACT


EDITS: dict[str, Callable[[Any], object]] = {
    "decode": lambda context: feed(context, [8, 9]),
    "fork": lambda context: context.fork(0, 1, 9),
    "truncate": lambda context: context.truncate(Pos(0, 9)),
    "cut": lambda context: context.cut(Pos(0, 1), Pos(0, 3)),
    "dump": lambda context: context.restore(1, context.dump(0)),
    "dump of a context": lambda context: b"".join(context.dump_context()),
    "drop": lambda context: context.drop(0),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("has_more", [False, True])
def test_a_call_after_an_interrupt_repairs_the_sequence(context: Any, name: str, has_more: bool) -> None:
    """Before the call, llama.cpp holds fewer or more tokens than the ledger, as an interrupt may leave it."""
    expected = new_context(context._model)
    for each in (context, expected):
        feed(each, some_tokens(12))
        each.cut(Pos(0, 2), Pos(0, 4))
        each.fork(0, 2, 8)
        feed(each, [1])
    if has_more:
        zeros, positions = np.zeros(3, np.int32), np.arange(11, 14)
        context._run(context._buffers.fill(zeros, zeros, positions, np.zeros(3, np.bool_)))
    else:
        context._memory.remove(0, 5)
    for each in (context, expected):
        EDITS[name](each)
    if name == "dump of a context":
        dumps = [b"".join(each.dump_context()) for each in (context, expected)]
        for each, data in zip((context, expected), dumps, strict=True):
            each.clear()
            each.restore_context([data])
    for seq_id in range(3):
        assert context.tokens(seq_id) == expected.tokens(seq_id)
        assert error(feed(context, [5, 6, 7], seq_id), feed(expected, [5, 6, 7], seq_id)) <= EXACT


def test_missing_logits_are_a_failure(context: Any) -> None:
    feed(context, some_tokens(3))
    api = patch_api(context, llama_get_logits=lambda pointer: None)
    with pytest.raises(DecodeFailed, match="no rows"):
        feed(context, [1])
    restore_api(context, api)
    assert context.length(0) == 3
    feed(context, [1])


def test_a_failed_copy_of_cells_changes_neither_sequence(context: Any) -> None:
    feed(context, some_tokens(10))
    context.fork(0, 1)
    api = patch_api(context, llama_state_seq_set_data_ext=lambda *_: 0)
    with pytest.raises(DecodeFailed, match="shares"):
        context.cut(Pos(0, 1), Pos(0, 4))
    restore_api(context, api)
    assert context.n_free == 256 - 10
    expected = new_context(context._model)
    feed(expected, some_tokens(10))
    rows = feed(expected, [5, 6])
    for seq_id in (0, 1):
        assert error(feed(context, [5, 6], seq_id), rows) <= EXACT


def test_a_refused_removal_is_reported(context: Any) -> None:
    feed(context, some_tokens(10))
    api = patch_api(context, llama_memory_seq_rm=lambda *_: False)
    with pytest.raises(DecodeFailed, match="refused to forget"):
        context.truncate(Pos(0, 4))
    restore_api(context, api)
    assert context.length(0) == 10


class TestRecurrent:
    """Mamba: only decoding again can undo anything."""

    @pytest.fixture
    def context(self, load: LoadModel, tmp_path: Path) -> Context:
        return new_context(load(recurrent_model(tmp_path / "mamba.gguf")))

    def test_declared_edit_level(self, context: Context) -> None:
        assert context.edit_level is EditLevel.REPLAY
        feed(context, some_tokens(8))
        with pytest.raises(UnsupportedEdit):
            context.truncate(Pos(0, 4))
        with pytest.raises(UnsupportedEdit, match="fork all of it"):
            context.fork(0, 1, 4)
        assert context.length(1) == 0

    def test_forks_diverge(self, context: Context) -> None:
        feed(context, some_tokens(8))
        context.fork(0, 1)
        first = feed(context, [3, 4, 5])
        second = feed(context, [6, 7], 1)
        for tokens, rows in (([*some_tokens(8), 3, 4, 5], first), ([*some_tokens(8), 6, 7], second)):
            expected = feed(context, tokens, 2)
            context.drop(2)
            assert error(rows, expected[8:]) <= EXACT

    def test_a_dump_replays(self, context: Context) -> None:
        feed(context, some_tokens(8))
        data = context.dump(0)
        context.restore(1, data)
        assert error(feed(context, [3], 1), feed(context, [3])) <= EXACT

    def test_a_failed_decode_is_repaired_by_decoding_again(self, context: Any) -> None:
        feed(context, some_tokens(8))
        failing = True

        def fail_once(pointer: int, llama_batch: Any) -> int:
            nonlocal failing
            code, failing = (-3, False) if failing else (0, False)
            return api.llama_decode(pointer, llama_batch) or code

        api = patch_api(context, llama_decode=fail_once)
        with pytest.raises(DecodeFailed, match="code -3"):
            feed(context, [5, 6, 7])
        restore_api(context, api)
        expected = feed(context, [*some_tokens(8), 9], 1)[8:]
        assert error(feed(context, [9]), expected) <= EXACT


class TestContextOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (ContextOptions(n_seq_max=256), r"n_seq_max=256 \(accepted by llama.cpp for this model: 1 to 255\)"),
            (ContextOptions(kv_type_k=KvType.Q8_0), r"heads are 16 wide \(accepted: f32, f16, bf16\)"),
            (ContextOptions(kv_type_v=KvType.Q8_0), "does not divide n_embd_head_v=16"),
            (ContextOptions(kv_type_k=KvType.Q6_0), r"unknown KV type 'q6_0' \(accepted: f32, "),
            (ContextOptions(kv_type_k="q3"), r"unknown KV type 'q3' \(accepted: f32, "),  # type: ignore[arg-type]
            (ContextOptions(n_ctx=2**31 - 1), r"n_ctx=2147483647 \(accepted by llama.cpp: 1 to 2147483392\)"),
            (ContextOptions(n_ctx=2**31 - 256, kv_type_k=KvType.F32), r"takes 1152 GiB of keys and values"),
        ],
    )
    def test_unsupported_context_options_are_refused(
        self, load: LoadModel, qwen2_file: Path, options: ContextOptions, words: str
    ) -> None:
        with pytest.raises(InvalidOption, match=words) as caught:
            load(qwen2_file).new_context(options)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("gpus", "offload_kv", "counts"), [((), None, True), (("0",), False, True), (("0",), None, False)]
    )
    def test_the_memory_of_the_machine_counts_unless_a_gpu_has_the_keys_and_values(
        self, context: Any, gpus: tuple[str, ...], offload_kv: bool | None, counts: bool
    ) -> None:
        device, options = SimpleNamespace(gpus=gpus), SimpleNamespace(offload_kv=offload_kv)
        sizes = ContextOptions(n_ctx=2**31 - 256)
        refused = pytest.raises(InvalidOption, match="GiB of keys and values")
        with context._model._handle.use() as pointer, refused if counts else contextlib.nullcontext():
            context._check_memory(pointer, sizes, SimpleNamespace(device=device, options=options))

    def test_quantized_keys_need_heads_of_whole_blocks(self) -> None:
        for kv_type in (KvType.Q8_0, KvType.Q5_0, KvType.Q4_0):
            check_key_type(kv_type, 64)
            with pytest.raises(InvalidOption, match="heads are 48 wide"):
                check_key_type(kv_type, 48)
            with pytest.raises(InvalidOption, match="heads are of several widths"):
                check_key_type(kv_type, None)
        for kv_type in (KvType.F32, KvType.F16, KvType.BF16):
            check_key_type(kv_type, None)
            check_key_type(kv_type, 48)

    def test_which_keys_llamacpp_can_rotate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert all(can_rotate(kv_type, width) for kv_type in (KvType.F32, KvType.F16) for width in (None, 48, 64))
        assert not can_rotate(KvType.BF16, 64)
        assert [can_rotate(KvType.Q8_0, width) for width in (None, 32, 64, 96, 128)] == [
            False,
            False,
            True,
            False,
            True,
        ]
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
        assert (can_rotate(KvType.Q8_0, 64), can_rotate(KvType.F16, 64)) == (False, True)

    def test_quantized_values_without_flash_attention(self, load: LoadModel, llama_file: Path) -> None:
        with pytest.raises(InvalidOption, match="needs flash attention"):
            load(llama_file, flash_attention=False).new_context(ContextOptions(kv_type_v=KvType.Q8_0))

    def test_quantized_values_turn_flash_attention_on(self, load: LoadModel, llama_file: Path) -> None:
        model = load(llama_file)
        exact, quantized = (
            feed(new_context(model, kv_type=kv_type), some_tokens(40)) for kv_type in (KvType.F32, KvType.Q8_0)
        )
        # A value errs by half a step, 1/254 of the largest of 32: about 1/127 relative, less in sums.
        assert 0 < error(quantized, exact) < 0.1

    def test_a_batch_larger_than_the_context(self, load: LoadModel, llama_file: Path) -> None:
        with load(llama_file).new_context(ContextOptions(n_ctx=8, n_batch=2**31 - 1)) as context:
            batch = context.new_batch(9)
            batch.extend(list(range(9)), Pos(0, 0))
            with pytest.raises(ContextFull):
                context.decode(batch)
            batch.clear()
            batch.extend(list(range(8)), Pos(0, 0), logits="all")
            assert context.decode(batch).shape == (8, 305)

    def test_the_most_sequences(self, load: LoadModel, llama_file: Path) -> None:
        context = new_context(load(llama_file), n_seq_max=255)
        assert np.isfinite(feed(context, [1], 254)).all()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "falcon_h1", "qwen2vl"])
def test_nan_of_a_failed_call_spoils_no_sequence(tmp_path: Path, load: LoadModel, family: str) -> None:
    """Kinds of caches: one, one with windows, states, M-RoPE positions. llama.cpp masks cells after reading them."""
    path, tokens = family_model(tmp_path, family), [1, 2, 3, 4, 6, 7, 8, 9]
    expected = feed(new_context(load(path)), tokens)
    context = new_context(load(with_broken_token(path, 5, tmp_path / "broken.gguf")))
    feed(context, tokens[:4], 1)
    context.fork(1, 2)
    feed(context, tokens[4:6], 2)
    n_free = context.n_free
    with pytest.raises(DecodeFailed, match="sequence 0: the model computed NaN"):
        feed(context, [1, 5, 2])
    assert (context.length(0), context.n_free) == (0, n_free)
    rows = [feed(context, tokens[6:], 2), feed(context, tokens[4:], 1), feed(context, tokens)]
    for row, first in zip(rows, (6, 4, 0), strict=True):
        assert error(row, expected[first:]) < 10 * EXACT


def test_sequences_that_were_decoded_again_still_share_cells(tmp_path: Path, load: LoadModel) -> None:
    path, tokens = family_model(tmp_path, "qwen3"), [token for token in some_tokens(230) if token != 5]
    expected = feed(new_context(load(path)), tokens)
    context = new_context(load(with_broken_token(path, 5, tmp_path / "broken.gguf")), n_ctx=256)  # two would not fit
    feed(context, tokens[:200], 1)
    context.fork(1, 2)
    with pytest.raises(DecodeFailed):
        feed(context, [5] * 20)
    assert error(feed(context, tokens[200:210], 2), expected[200:210]) < 10 * EXACT
    assert error(feed(context, tokens[200:210], 1), expected[200:210]) < 10 * EXACT
