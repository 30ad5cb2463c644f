"""Adapters above the contract: sessions, chats, engines, generate, isolated models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from slm_core.adapters import write_control_vector
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.requests import Request
from slm_core.errors import ContextFull, InvalidOption, SnapshotMismatch, UnsupportedInput

GREEDY = slm.Sampling(temperature=0, max_tokens=12)
TEXT = "<|im_start|>user\nMy dog is called Rex. What is my dog called?<|im_end|>\n<|im_start|>assistant\n"


FILES = {"a": slm.demo_adapter_path(), "b": Path(__file__).with_name("polite.gguf")}
"""Trained adapters of the demo model: "Arr! ..." and "Hello! ..." (tools/demo_model/adapter.py)."""


@pytest.fixture(scope="module", params=["native", "llamacpp", "onnx"])
def model(request) -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend=request.param, n_threads=1) as loaded:
        for name, path in FILES.items():
            loaded.adapters.load(path, name)
        yield loaded


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return slm.load_vocab(slm.demo_model_path()).encode(TEXT, add_special=True, parse_special=True)


@pytest.fixture(scope="module")
def alone(model, prompt) -> dict[str, str]:
    """The answer of each adapter, each from a context of its own."""
    answers = {}
    for name in ("", "a", "b"):
        with model.session(n_ctx=128, adapters={name: 1.0} if name else None) as session:
            session.append_tokens(prompt)
            answers[name] = session.generate(GREEDY).run().text
    assert len(set(answers.values())) == 3, "the adapters change nothing"
    return answers


class TestSessions:
    def test_other_adapters_midway(self, model, alone, prompt) -> None:
        """The history is decoded again, so nothing of the earlier adapters remains."""
        with model.session(n_ctx=256) as session:
            session.append_tokens(prompt)
            start = session.mark()
            for name in ("", "a", "b", ""):
                session.set_adapters({name: 1.0} if name else {})
                assert session.generate(GREEDY).run().text == alone[name]
                session.rollback(start)
            assert session.adapters == {}

    def test_known_logits_are_forgotten(self, model, prompt) -> None:
        with model.session(n_ctx=128) as session:
            session.append_tokens(prompt)
            before = session.next_logits().copy()
            session.set_adapters({"a": 1.0})
            assert np.abs(session.next_logits() - before).max() > 0.1

    def test_the_same_adapters_keep_the_cache(self, model, prompt) -> None:
        with model.session(n_ctx=128, adapters={"a": 0.5}) as session:
            session.append_tokens(prompt)
            session.next_logits()
            session.set_adapters({"a": 0.5, "b": 0.0})
            assert session.n_pending == 0

    def test_forks_dumps_and_branches(self, model, alone, prompt) -> None:
        with model.session(n_ctx=512, adapters={"a": 1.0}) as session:
            session.append_tokens(prompt)
            with session.fork() as twin:
                twin.set_adapters({"b": 1.0})
                assert twin.generate(GREEDY).run().text == alone["b"]
            with session.scratch_branch() as branch:
                assert branch.generate(GREEDY).run().text == alone["a"]
            data = session.dump()
            assert session.generate(GREEDY).run().text == alone["a"]
            with model.new_context(n_ctx=128) as context, slm.Session.restore(context, model.vocab, data) as again:
                assert again.adapters == {"a": 1.0}
                assert again.generate(GREEDY).run().text == alone["a"]

    def test_a_later_session_of_the_context_has_none(self, model, alone, prompt) -> None:
        """Sequences are used again; their adapters are not."""
        with model.new_context(n_ctx=256, n_seq_max=2) as context:
            with slm.Session(context, model.vocab, adapters={"a": 1.0}) as first:
                first.append_tokens(prompt)
                first.completions(1, GREEDY).run()  # in the other sequence
            for _ in range(2):
                with slm.Session(context, model.vocab) as session:
                    session.append_tokens(prompt)
                    assert session.generate(GREEDY).run().text == alone[""]

    def test_refusals_change_nothing(self, model, alone, prompt) -> None:
        with model.session(n_ctx=128, adapters={"a": 1.0}) as session:
            session.append_tokens(prompt)
            for scales in ({"c": 1.0}, {"a": float("nan")}, {"a": "1"}, ["a"]):
                with pytest.raises(InvalidOption):
                    session.set_adapters(scales)
            assert session.adapters == {"a": 1.0}
            assert session.generate(GREEDY).run().text == alone["a"]
        with pytest.raises(InvalidOption, match="unknown adapter 'c'"):
            model.session(adapters={"c": 1.0})

    def test_no_room_to_decode_again(self, model, prompt) -> None:
        """A fork shares the positions, so that dropping the sequence frees none."""
        n_tokens = len(prompt)
        with model.session(n_ctx=n_tokens + 4) as session:
            session.append_tokens(prompt)
            session.prefill()
            with session.fork() as twin:
                with pytest.raises(ContextFull):
                    twin.set_adapters({"a": 1.0})
                assert twin.adapters == {} and twin.n_pending == 0


class TestChats:
    def test_a_chat(self, model) -> None:
        with (
            model.chat(n_ctx=512, sampling=GREEDY) as plain,
            model.chat(n_ctx=512, sampling=GREEDY, adapters={"a": 1.0}) as chat,
        ):
            question = "My dog is called Rex."
            answer = chat.send(question).text
            assert answer != plain.send(question).text
            chat.session.set_adapters({})
            assert chat.regenerate().run().text == plain.messages[-1].content
            chat.session.set_adapters({"a": 1.0})
            assert chat.regenerate().run().text == answer
            with slm.Chat.restore(model, chat.dump()) as again:
                assert again.session.adapters == {"a": 1.0}
                assert again.regenerate().run().text == answer

    def test_a_dump_needs_its_adapter(self, model) -> None:
        with model.chat(n_ctx=256, adapters={"a": 1.0}) as chat:
            data = chat.dump()
        backend = model.info.backend.split()[0]
        with slm.load(slm.demo_model_path(), backend=backend, n_threads=1) as other:
            with pytest.raises(SnapshotMismatch, match="is not loaded"):
                slm.Chat.restore(other, data)
            assert len(other.adapters) == 0


class TestEngines:
    def test_generate(self, model, alone, prompt) -> None:
        for name, expected in alone.items():
            answers = model.generate([prompt, prompt], GREEDY, adapters={name: 1.0} if name else None)
            assert [answer.text for answer in answers] == [expected] * 2

    def test_requests_with_different_adapters_together(self, model, alone, prompt) -> None:
        """Neither rows of a step nor kept prefixes mix: the second round finds the prefixes of the first."""
        with model.engine(n_ctx=2048, n_parallel=4) as engine:
            for _ in range(3):
                streams = {
                    name: engine.submit(prompt, GREEDY, adapters={name: 1.0} if name else None)
                    for name in ("a", "", "b")
                }
                assert {name: stream.run().text for name, stream in streams.items()} == alone
            assert engine.stats().cached_tokens > 0

    def test_scales_have_prefixes_of_their_own(self, model, prompt) -> None:
        with model.engine(n_ctx=2048, n_parallel=2) as engine:

            def usage(scale: float) -> int:
                return engine.submit(prompt, GREEDY, adapters={"a": scale}).run().usage.cached_tokens

            assert [usage(1.0), usage(0.5)] == [0, 0]
            assert usage(1.0) > 0 and usage(0.5) > 0

    def test_no_salt_stands_for_adapters(self, model, alone, prompt) -> None:
        """Salts come from clients, and fingerprints are no secret: no salt reaches the prefixes of an adapter."""
        ends = [f"{model.adapters[name].fingerprint} 1.0" for name in ("a", "b")]
        salts = [text for end in ends for text in (end, f"\0{end}", f"{end}\0")]
        with model.engine(n_ctx=4096) as engine:
            for salt in salts:
                for name in ("", "b"):
                    engine.submit(prompt, GREEDY, salt=salt, adapters={name: 1.0} if name else None).run()
            for names in (["a"], ["b"], ["a", "b"]):
                answer = engine.submit(prompt, GREEDY, adapters=dict.fromkeys(names, 1.0)).run()
                assert answer.usage.cached_tokens == 0
                assert len(names) > 1 or answer.text == alone[names[0]]

    def test_a_new_adapter_of_the_same_name(self, model, alone, prompt) -> None:
        """The prefix of the former adapter is not used: prefixes depend on an adapter's numbers."""
        with model.engine(n_ctx=2048, n_parallel=2) as engine:
            model.adapters.load(FILES["a"], "changing")
            assert engine.submit(prompt, GREEDY, adapters={"changing": 1.0}).run().text == alone["a"]
            model.adapters.unload("changing")
            model.adapters.load(FILES["b"], "changing")
            assert engine.submit(prompt, GREEDY, adapters={"changing": 1.0}).run().text == alone["b"]
            model.adapters.unload("changing")
            with pytest.raises(InvalidOption, match="unknown adapter"):
                engine.submit(prompt, GREEDY, adapters={"changing": 1.0})

    def test_replaced_while_it_waits(self, model, alone, prompt) -> None:
        """A request fails if another adapter took the name of its adapter: it never gets the other one."""
        with model.new_context(n_ctx=256, n_seq_max=2) as context:
            core = EngineCore(context, EngineOptions())
            errors = []
            for other in (None, FILES["b"]):
                model.adapters.load(FILES["a"], "waiting")
                request = Request(model.vocab, prompt, GREEDY, adapters={"waiting": 1.0}, loaded=model.adapters)
                core.add(request)
                model.adapters.unload("waiting")
                if other is not None:
                    model.adapters.load(other, "waiting")
                while core.step():
                    pass
                assert isinstance(request.error, InvalidOption)
                errors.append(str(request.error))
                assert context.n_free == 256
            assert "unknown adapter" in errors[0]
            assert errors[1] == "the adapters waiting were replaced before the request began"
            request = Request(model.vocab, prompt, GREEDY, adapters={"waiting": 1.0}, loaded=model.adapters)
            core.add(request)
            while core.step():
                pass
            assert request.answer.text == alone["b"]
        model.adapters.unload("waiting")

    def test_replaced_while_it_is_preempted(self, model, prompt) -> None:
        """The error does not say that the request had not begun."""
        model.adapters.load(FILES["a"], "waiting")
        with model.new_context(n_ctx=256, n_seq_max=2) as context:
            core = EngineCore(context, EngineOptions())
            request = Request(model.vocab, prompt, GREEDY, adapters={"waiting": 1.0}, loaded=model.adapters)
            core.add(request)
            while not request.begun:
                core.step()
            core._preempt(request)
            model.adapters.unload("waiting")
            model.adapters.load(FILES["b"], "waiting")
            core.step()
            assert str(request.error) == "the adapters waiting were replaced while the request was preempted"
        model.adapters.unload("waiting")

    def test_on_disk(self, model, alone, tmp_path, prompt) -> None:
        """The first request of an engine reads its prefix, however long that takes; later ones only if it pays."""
        for cached in (False, True):
            for name in ("a", "b"):
                with model.engine(n_ctx=1024, n_parallel=2, cache_dir=tmp_path) as engine:
                    answer = engine.submit(prompt, GREEDY, adapters={name: 1.0}).run()
                    assert answer.text == alone[name]
                    assert (answer.usage.cached_tokens > 0) == cached
                    assert engine.flush()

    def test_completions(self, model, alone, prompt) -> None:
        with model.engine(n_ctx=1024, n_parallel=2) as engine:
            completions = engine.completions(prompt, 2, GREEDY, adapters={"b": 1.0}).run()
            assert [completion.answer.text for completion in completions] == [alone["b"]] * 2


@pytest.mark.parametrize("backend", ["native", "llamacpp", "onnx"])
def test_freed_without_close(backend: str) -> None:
    """A model and its context that nobody uses are freed at once, in the right order."""
    with slm.load(slm.demo_model_path(), backend=backend, n_threads=1) as used:
        used.adapters.load(FILES["a"], "a")
        loaded = slm.load(slm.demo_model_path(), backend=backend, n_threads=1)
        loaded.adapters.load(FILES["a"], "a")
        context = loaded.new_context(n_ctx=64)
        context.set_adapters(0, {"a": 1.0})
        batch = context.new_batch()
        batch.add(5, slm.Pos(0, 0), logits=True)
        context.decode(batch)
        model_ref, context_ref = weakref.ref(loaded.model), weakref.ref(context)
        gc.disable()
        try:
            del loaded, context, batch
            assert model_ref() is None and context_ref() is None
        finally:
            gc.enable()
        with used.session(n_ctx=64, adapters={"a": 1.0}) as session:
            session.append("Hello")
            assert np.isfinite(session.next_logits()).all()


def test_isolated(tmp_path) -> None:
    """Adapters of a model in a process of its own."""
    vector = tmp_path / "vector.gguf"
    write_control_vector({layer: np.ones(192, np.float32) for layer in range(1, 6)}, vector)
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1, isolated=True) as model:
        info = model.adapters.load(FILES["a"], "a")
        assert (info.name, info.rank, list(model.adapters)) == ("a", 2, ["a"])
        assert "a" in model.adapters and "b" not in model.adapters
        with pytest.raises(InvalidOption, match="already"):
            model.adapters.load(FILES["b"], "a")
        with model.session(n_ctx=128, adapters={"a": 0.5}) as session:
            assert session.adapters == {"a": 0.5}
            with pytest.raises(InvalidOption):
                session.set_adapters({"b": 1.0})
        assert model.adapters.load(vector, "v", layers=(2, 3)).layers == (2, 3)
        with pytest.raises(InvalidOption, match="accepted: the first and the last layer"):
            model.adapters.load(vector, "w", layers=(3, 2))
        model.adapters.unload("v")
        for name in ("A", ["a"]):
            with pytest.raises(InvalidOption, match=r"^unknown adapter .* \(loaded: a; did you mean 'a'\?\)"):
                model.adapters[name]
        model.adapters.unload("a")
        with pytest.raises(InvalidOption, match="unknown adapter"):
            model.session(adapters={"a": 1.0})


def test_without_the_capability() -> None:
    """A backend without the capability says so."""
    from slm_conformance.toy.backend import PlainToyBackend
    from slm_core.types import ContextOptions, ModelOptions

    with PlainToyBackend().load(slm.demo_model_path(), ModelOptions()) as model:
        context = model.new_context(ContextOptions(64, 1, 64))
        with pytest.raises(UnsupportedInput):
            slm.Session(context, model.vocab, adapters={"a": 1.0})
        with slm.Session(context, model.vocab) as session:  # the sequence is free again
            with pytest.raises(UnsupportedInput):
                session.set_adapters({"a": 1.0})
            assert session.adapters == {}
