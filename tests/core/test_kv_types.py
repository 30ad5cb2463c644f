"""KV types go from every call that makes a context to the context, or are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

import slm_core as slm
from slm_core.generation.scoring import score_windows
from slm_core.types import ContextOptions, KvType

TYPES: dict[str, str] = {"kv_type_k": "q8_0", "kv_type_v": "f16"}
TEXT = "The quick brown fox jumps over the lazy dog."

CALLS: dict[str, Callable[[slm.Model], object]] = {
    "session": lambda model: model.session(**TYPES).close(),
    "chat": lambda model: model.chat(**TYPES).close(),
    "generate": lambda model: model.generate("the", max_tokens=1, **TYPES),
    "engine": lambda model: model.engine(n_ctx=512, **TYPES).close(),
    "drafter": lambda model: model.drafter(model, **TYPES).close(),
    "score": lambda model: model.score("the dog", **TYPES),
}


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native") as model:
        yield model


@pytest.fixture
def asked(model: slm.Model, monkeypatch: pytest.MonkeyPatch) -> list[ContextOptions]:
    """The options of each context that the backend's model makes."""
    options, new_context = [], model.model.new_context

    def recording(requested: ContextOptions) -> slm.Context:
        options.append(requested)
        return new_context(requested)

    monkeypatch.setattr(model.model, "new_context", recording)
    return options


@pytest.mark.parametrize("call", CALLS)
def test_each_call_passes_them_on(model: slm.Model, asked: list[ContextOptions], call: str) -> None:
    CALLS[call](model)
    assert {(options.kv_type_k, options.kv_type_v) for options in asked} == {(KvType.Q8_0, KvType.F16)}


@pytest.mark.parametrize("call", ["session", "chat", "generate", "engine", "score"])
def test_an_unknown_type_is_refused(model: slm.Model, call: str) -> None:
    arguments = {"generate": ("the",), "score": ("the",)}.get(call, ())
    with pytest.raises(slm.InvalidOption, match="unknown KV type 'q9_0'"):
        getattr(model, call)(*arguments, kv_type_v="q9_0")


def test_a_score_is_that_of_a_context_with_these_types(model: slm.Model) -> None:
    tokens = model.vocab.encode(TEXT, add_special=True, parse_special=False)
    with model.new_context(kv_type_k="q4_0", kv_type_v="q4_0") as context:
        expected = score_windows(context, tokens)
    coarse = model.score(TEXT, kv_type_k="q4_0", kv_type_v="q4_0")
    assert coarse.total == expected.total
    assert abs(coarse.total - model.score(TEXT).total) > 1e-4, "four bits are computed as sixteen"


@pytest.mark.parametrize("backend", ["native", "llamacpp", "onnx"])
def test_a_restored_chat_has_the_types_of_its_context_or_those_of_the_call(backend: str) -> None:
    with slm.load(slm.demo_model_path(), backend=backend) as model:
        with model.chat(n_ctx=512, kv_type_k="q8_0", kv_type_v="q8_0") as chat:
            answer, options, dump = (
                chat.send("What is 12 + 30?", temperature=0),
                chat.session.context.options,
                chat.dump(),
            )
        assert answer.text == "12 + 30 = 42"
        with slm.Chat.restore(model, dump) as restored:
            assert restored.session.context.options == options
        with slm.Chat.restore(model, dump, kv_type_k="f32", kv_type_v="f32") as restored:
            expected = dataclasses.replace(options, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
            assert restored.session.context.options == expected
            assert restored.send("What is 20 + 5?", temperature=0).text == "20 + 5 = 25"


def test_a_chat_without_types_is_restored_with_those_of_the_backend() -> None:
    with slm.load(slm.demo_model_path(), backend="native") as model, model.chat(n_ctx=512) as chat:
        dump = chat.dump()
    with slm.load(slm.demo_model_path(), backend="onnx") as model, slm.Chat.restore(model, dump) as restored:
        assert (restored.session.context.options.kv_type_k, restored.session.context.options.kv_type_v) == (None, None)


def test_a_dumped_type_that_a_backend_lacks_is_refused_unless_another_is_given() -> None:
    source = slm.load(slm.demo_model_path(), backend="native")
    with source, source.chat(n_ctx=512, kv_type_k="q4_0", kv_type_v="q4_0") as chat:
        dump = chat.dump()
    with slm.load(slm.demo_model_path(), backend="onnx") as model:
        with pytest.raises(slm.InvalidOption, match="KV type"):
            slm.Chat.restore(model, dump)
        slm.Chat.restore(model, dump, kv_type_k="q8_0", kv_type_v="q8_0").close()


def test_an_isolated_context_knows_what_it_was_asked_for() -> None:
    model = slm.load(slm.demo_model_path(), backend="native", isolated=True)
    with model, model.new_context(n_ctx=64, n_seq_max=2, n_batch=16, kv_type_k="q8_0") as context:
        assert context.options == ContextOptions(64, 2, 16, KvType.Q8_0, None)
