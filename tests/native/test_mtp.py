"""Multi-token prediction: drafts of the native engine against llama.cpp, after decodes, edits, forks and dumps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.families import family_model
from slm_core.adapters import write_control_vector
from slm_core.errors import (
    ContextFull,
    DecodeFailed,
    InvalidOption,
    InvalidPosition,
    InvalidSequence,
    InvalidToken,
    UnsupportedOutput,
)
from slm_core.protocols import BackendModel, Context
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos, TopLogits
from slm_native.backend import NativeBackend
from slm_native.kernels.reference import ReferenceKernels
from slm_native.memory import ContextMemory
from slm_native.mtp import MtpLayer

llama_mtp = pytest.importorskip("llama_mtp", reason="the oracle is llama.cpp: pip install llama-cpp-python")

N_DRAFT = 4
BOUND = 1e-4
"""The relative error of clause 9 for float32, in which llama.cpp computes, too."""
TOKENS = np.random.default_rng(0).integers(0, 250, 150).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model(tmp_path_factory.mktemp("mtp"), "deepseek3_mtp")


@pytest.fixture(scope="module", params=["cpu", "torch"])
def model(path: Path, request: pytest.FixtureRequest) -> Iterator[BackendModel]:
    options = ModelOptions(device="cpu", backend_options={"tier": request.param})
    if request.param == "torch":
        torch = pytest.importorskip("torch", reason="the torch tier needs torch")
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # waiting threads of torch would slow down the other tests
        request.addfinalizer(lambda: torch.set_num_threads(before))
    with NativeBackend().load(path, options) as loaded:
        yield loaded


@pytest.fixture
def context(model: BackendModel) -> Iterator[Context]:
    with new_context(model) as context:
        yield context


def new_context(model: BackendModel) -> Context:
    return model.new_context(ContextOptions(300, 3, 100, KvType.F32, KvType.F32))


def feed(context: Context, tokens: Sequence[int], seq_id: int = 0) -> None:
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="last")
    context.decode(batch)


def rows_of(top: TopLogits) -> NDArray[np.float32]:
    """Whole rows [n, V] from the logits of all tokens."""
    rows = np.empty_like(top.logits)
    np.put_along_axis(rows, top.tokens, top.logits, axis=1)
    return rows


def check(context: Context, path: Path, history: Sequence[int], token: int, seq_id: int = 0) -> None:
    """Require the drafts of llama.cpp after a fresh decode of the history; and that drafting changes nothing."""
    before = context.n_free, context.tokens(seq_id)
    assert before[1] == tuple(history)
    with llama_mtp.LlamaMtp(path) as oracle:
        oracle.decode(history)
        expected = oracle.draft(token, N_DRAFT)
    rows = rows_of(context.draft(seq_id, token, N_DRAFT, context_vocab(context)))
    errors = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= BOUND, f"drafts after {len(history)} tokens differ from llama.cpp's by {errors}"
    assert (context.n_free, context.tokens(seq_id)) == before


def context_vocab(context: Context) -> int:
    with pytest.raises(InvalidOption, match="accepted: 1 to") as refused:
        context.draft(0, 0, 1, 10**6)
    return int(str(refused.value).split("1 to ")[1].split(",")[0])


def test_declared(model: BackendModel, context: Context) -> None:
    assert Capability.MTP in context.capabilities
    assert model.info.n_layers == 3, "three layers, and one for multi-token prediction"


def test_after_batches_and_single_tokens(context: Context, path: Path) -> None:
    feed(context, TOKENS[:70])
    check(context, path, TOKENS[:70], TOKENS[70])
    feed(context, TOKENS[70:71])
    check(context, path, TOKENS[:71], TOKENS[71])
    feed(context, TOKENS[71:130])
    check(context, path, TOKENS[:130], TOKENS[130])


def test_of_glm(tmp_path: Path) -> None:
    """GLM 4.5: its layer has grouped-query attention, a dense block comes before the routed ones."""
    path = family_model(tmp_path, "glm4moe_mtp")
    options = ModelOptions(device="cpu", backend_options={"tier": "cpu"})
    with NativeBackend().load(path, options) as model, new_context(model) as context:
        feed(context, TOKENS[:70])
        feed(context, TOKENS[70:71])
        check(context, path, TOKENS[:71], TOKENS[71])


def test_of_the_first_token(context: Context) -> None:
    """A draft for an empty sequence is the one whose state before is zero, as after a first decode of llama.cpp."""
    assert context.draft(0, TOKENS[0], 2).tokens.shape == (2, 1)
    assert context.n_free == 300


def test_after_truncate(context: Context, path: Path) -> None:
    feed(context, TOKENS[:90])
    for length in (85, 10, 1):  # within the states that are kept, and before them
        context.truncate(Pos(0, length))
        check(context, path, TOKENS[:length], TOKENS[100])
    feed(context, TOKENS[100:120])
    check(context, path, TOKENS[:1] + TOKENS[100:120], TOKENS[5])


def test_decoding_after_truncate(context: Context, path: Path) -> None:
    """The layer's keys of the next tokens depend on the state before them, which has to be computed again."""
    feed(context, TOKENS[:95])
    context.truncate(Pos(0, 12))
    feed(context, TOKENS[20:60])
    check(context, path, TOKENS[:12] + TOKENS[20:60], TOKENS[60])


def test_forks(context: Context, path: Path) -> None:
    feed(context, TOKENS[:80])
    context.fork(0, 1)
    context.fork(0, 2, 9)
    check(context, path, TOKENS[:80], TOKENS[80], seq_id=1)
    check(context, path, TOKENS[:9], TOKENS[80], seq_id=2)
    feed(context, TOKENS[81:90])
    feed(context, TOKENS[100:103], seq_id=2)
    context.drop(1)
    check(context, path, TOKENS[:80] + TOKENS[81:90], TOKENS[90])
    check(context, path, TOKENS[:9] + TOKENS[100:103], TOKENS[80], seq_id=2)
    feed(context, TOKENS[:5], seq_id=1)
    check(context, path, TOKENS[:5], TOKENS[80], seq_id=1)


def test_sequences_in_one_batch(context: Context, path: Path) -> None:
    batch, others = context.new_batch(), TOKENS[60:100]
    for i in range(40):  # interleaved
        batch.add(TOKENS[i], Pos(0, i), logits=i == 39)
        batch.add(others[i], Pos(1, i), logits=False)
    context.decode(batch)
    check(context, path, TOKENS[:40], TOKENS[40])
    check(context, path, others, TOKENS[40], seq_id=1)


def test_after_a_sequence_with_adapters(model: BackendModel, context: Context, path: Path, tmp_path: Path) -> None:
    """The state of a restored sequence is computed again, without the adapters of the sequence before."""
    direction = 30 * np.random.default_rng(1).standard_normal(model.info.n_embd).astype(np.float32)
    write_control_vector({1: direction}, tmp_path / "vector.gguf")
    model.adapters.load(tmp_path / "vector.gguf", "vector")
    feed(context, TOKENS[:20], seq_id=2)
    context.restore(0, context.dump(2))
    context.set_adapters(1, {"vector": 1.0})
    feed(context, TOKENS[:9], seq_id=1)
    check(context, path, TOKENS[:20], TOKENS[20])
    model.adapters.unload("vector")


def test_drafts_do_not_disturb_shared_pages(context: Context, path: Path) -> None:
    feed(context, TOKENS[:70])
    context.fork(0, 1)
    context.draft(1, TOKENS[99], 30)
    feed(context, TOKENS[70:75])
    check(context, path, TOKENS[:75], TOKENS[75])
    check(context, path, TOKENS[:70], TOKENS[75], seq_id=1)


def test_a_draft_that_fails_names_its_sequence(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise DecodeFailed("the device is gone")

    feed(context, TOKENS[:20])
    context.fork(0, 2)
    monkeypatch.setattr(context, "_engine_draft", fail)
    with pytest.raises(DecodeFailed, match="sequence 2: the device is gone"):
        context.draft(2, TOKENS[20], 1)


def test_drafts_give_back_their_pages(context: Context) -> None:
    """Each sequence drafts as far as the context reaches; together they would need more pages than there are."""
    for seq_id in (0, 1, 2):
        assert context.draft(seq_id, TOKENS[seq_id], 300).tokens.shape == (300, 1)
    feed(context, TOKENS[:100])
    assert context.n_free == 200


def test_states_of_the_last_batch_are_kept(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers with drafts run no token twice: a truncate takes back a part of the last batch only."""

    def replay(*_: object) -> None:
        pytest.fail("a token ran again")

    monkeypatch.setattr(ContextMemory, "replay", replay)
    feed(context, TOKENS[:90])
    feed(context, TOKENS[90:99])
    context.draft(0, TOKENS[99], 2)
    context.truncate(Pos(0, 92))
    context.fork(0, 1)
    feed(context, TOKENS[100:101])
    feed(context, TOKENS[101:103], seq_id=1)


def test_dumps(model: BackendModel, context: Context, path: Path) -> None:
    feed(context, TOKENS[:75])
    feed(context, TOKENS[30:105], seq_id=1)  # its states must not outlive it
    context.restore(1, context.dump(0))
    check(context, path, TOKENS[:75], TOKENS[75], seq_id=1)
    with new_context(model) as other:
        other.restore_context(context.dump_context())
        check(other, path, TOKENS[:75], TOKENS[75], seq_id=1)
        feed(other, TOKENS[75:80], seq_id=1)
        check(other, path, TOKENS[:80], TOKENS[80], seq_id=1)


def test_dumps_without_the_layer(model: BackendModel, context: Context, path: Path) -> None:
    """A dump of a model without its MTP layer is decoded again; and the other way round."""
    options = ModelOptions(device="cpu", backend_options={"tier": "reference", "mtp": False})
    with NativeBackend().load(path, options) as plain, new_context(plain) as other:
        assert Capability.MTP not in other.capabilities
        with pytest.raises(UnsupportedOutput, match="mtp"):
            other.draft(0, 1, 1)
        feed(other, TOKENS[:60])
        context.restore(0, other.dump(0))
        check(context, path, TOKENS[:60], TOKENS[60])
        other.restore(1, context.dump(0))
        assert other.tokens(1) == tuple(TOKENS[:60])


def test_after_a_cut(context: Context) -> None:
    """After a cut of the tail, drafts equal those before the tail; the layer's keys are cut like other layers' keys."""
    feed(context, TOKENS[:70])
    expected = context.draft(0, TOKENS[70], N_DRAFT)
    feed(context, TOKENS[70:80])
    context.cut(Pos(0, 70), Pos(0, 80))
    after = context.draft(0, TOKENS[70], N_DRAFT)
    assert np.array_equal(expected.tokens, after.tokens)
    context.cut(Pos(0, 3), Pos(0, 9))
    n_free = context.n_free
    assert context.draft(0, TOKENS[70], N_DRAFT).tokens.shape == (N_DRAFT, 1)
    assert (context.length(0), context.n_free) == (64, n_free)


def test_failed_decodes(context: Context, path: Path) -> None:
    feed(context, TOKENS[:50])
    batch = context.new_batch()
    batch.extend(TOKENS[:3], Pos(0, 51))
    with pytest.raises(InvalidPosition):
        context.decode(batch)
    check(context, path, TOKENS[:50], TOKENS[50])


def test_failed_layer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that fails in the MTP layer, after all others have run: nothing has changed."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    options = ModelOptions(device="cpu", backend_options={"tier": "reference"})
    with NativeBackend().load(path, options) as model, new_context(model) as context:
        feed(context, TOKENS[:50])
        with monkeypatch.context() as patch:
            patch.setattr(MtpLayer, "run", fail)
            patch.setattr(ReferenceKernels, "failures", (MemoryError,))
            for call in (lambda: feed(context, TOKENS[50:60]), lambda: context.draft(0, TOKENS[50], 2)):
                with pytest.raises(DecodeFailed):
                    call()
        check(context, path, TOKENS[:50], TOKENS[50])
        feed(context, TOKENS[50:60])
        check(context, path, TOKENS[:60], TOKENS[60])


def test_refusals(context: Context) -> None:
    feed(context, TOKENS[:60])
    n_vocab = context_vocab(context)
    for error, arguments in (
        (InvalidToken, (0, n_vocab, 1)),
        (InvalidToken, (0, -1, 1)),
        (InvalidSequence, (3, 1, 1)),
        (InvalidOption, (0, 1, 0)),
        (InvalidOption, (0, 1, 1, 0)),
        (ContextFull, (0, 1, 241)),
    ):
        with pytest.raises(error):
            context.draft(*arguments)
    assert context.draft(0, 1, 240).tokens.shape == (240, 1)
    assert context.n_free == 240


@pytest.mark.parametrize("options", [{"resident_bytes": 10**8}, {}])
def test_loading(path: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """The layer is left out where it does not work; asked for, it is refused."""
    source = path if options else family_model(tmp_path, "small_mla")
    with (
        NativeBackend().load(source, ModelOptions(device="cpu", backend_options=options)) as model,
        new_context(model) as context,
    ):
        assert Capability.MTP not in context.capabilities
    with pytest.raises(InvalidOption, match="mtp=True is not supported"):
        NativeBackend().load(source, ModelOptions(device="cpu", backend_options={**options, "mtp": True}))
