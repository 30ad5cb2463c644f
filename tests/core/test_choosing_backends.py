"""Backends in order of preference, required capabilities, and hints for paths and names that nobody can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import slm_core as slm
import slm_onnx.context
from slm_core.paths import local


@pytest.fixture(autouse=True)
def no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLM_BACKEND", raising=False)


def load(**options: Any) -> slm.Model:
    return slm.load(slm.demo_model_path(), **options)


def engine_of(model: slm.Model) -> str:
    return model.info.backend.partition(" ")[0]


@pytest.mark.parametrize("names", [["native", "llamacpp"], ["llamacpp", "native"], ("onnx",)])
def test_the_first_backend_of_a_list_that_can_is_used(names: list[str]) -> None:
    with load(backend=names) as model:
        assert engine_of(model).startswith(names[0])
        assert model.info.reason.startswith("number 1 of the caller's list")


def test_a_backend_of_a_list_that_cannot_is_passed_over_and_the_reason_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(slm.UnsupportedModel, match=r"llamacpp: .*; onnx: "):
        slm.load(tmp_path, backend=["llamacpp", "onnx"])
    required = {slm.Capability.EMBEDDING_INPUT, "kv_payload"}
    with load(backend=["onnx", "native"], require=required) as model, model.new_context(n_ctx=64) as context:
        assert {"embedding_input", "kv_payload"} <= context.capabilities


def test_what_is_required_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # All backends have the same capabilities for the demo model, so one backend's contexts lose one here.
    monkeypatch.setattr(slm_onnx.context, "_capabilities", lambda engine, sessions: frozenset({"kv_payload"}))
    with load(backend=["onnx", "native"], require=["shared_fork"]) as model:
        assert engine_of(model).startswith("native")
        assert model.info.reason.startswith("number 2 of the caller's list")
        assert "onnx: has no shared_fork" in model.info.reason
    with load(backend=["onnx", "native"], require=["kv_payload"]) as model:
        assert engine_of(model).startswith("onnx")
    with pytest.raises(
        slm.UnsupportedModel,
        match=r"no backend has all required capabilities .*\(onnx: has no shared_fork\)",
    ):
        load(backend="onnx", require=["shared_fork"])


def test_an_edit_level_is_required() -> None:
    with load(require=[slm.EditLevel.CUT]) as model, model.new_context(n_ctx=64) as context:
        assert context.edit_level is slm.EditLevel.CUT
    assert "ranked" in model.info.reason


@pytest.mark.parametrize(
    ("require", "message"),
    [
        (["kv-payload"], r"require='kv-payload' .*did you mean 'kv_payload'\?"),
        (["cutt"], r"did you mean 'cut'\?"),
        ("kv_payload", "a set of capabilities"),
    ],
)
def test_an_unknown_requirement_is_refused(require: Any, message: str) -> None:
    with pytest.raises(slm.InvalidOption, match=message):
        load(require=require)


@pytest.mark.parametrize("backend", ["llama.cpp", "llama-cpp", "LlamaCpp", ["native", "llama_cpp"]])
def test_a_misspelt_backend_names_the_one_that_was_meant(backend: Any) -> None:
    with pytest.raises(slm.UnknownBackend, match=r"did you mean 'llamacpp'\?\)$"):
        load(backend=backend)


def test_an_empty_list_of_backends_is_refused() -> None:
    with pytest.raises(slm.InvalidOption, match=r"backend=\[\]"):
        load(backend=[])


def test_supports_ranks_the_backends_as_load_does() -> None:
    answers = slm.supports(slm.demo_model_path())
    assert set(answers) == {status.name for status in slm.backends()}
    able = [support.rank for support in answers.values() if support.supported]
    assert able == sorted(able, reverse=True)
    with load() as model:
        assert engine_of(model).startswith(next(iter(answers)))


def test_supports_says_why_a_backend_cannot(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert all(not support.supported and support.reason for support in slm.supports(tmp_path).values())
    with pytest.raises(slm.InvalidModelFile, match="no such file"):
        slm.supports(tmp_path / "absent.gguf")


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("name", ["absent.gguf", "absent", "http://example.com/absent.gguf"])
def test_a_missing_model_is_a_missing_file(isolated: bool, name: str, tmp_path: Path) -> None:
    path = name if name.startswith("http") else str(tmp_path / name)
    for load_it in (slm.supports, slm.load_vocab, lambda path: slm.load(path, backend="native", isolated=isolated)):
        with pytest.raises(FileNotFoundError) as raised:
            load_it(path)
        assert isinstance(raised.value, slm.InvalidModelFile)
        assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


HINTS = [
    ("model.safetensors", "model.safetensors: weights only; give the directory ."),
    ("some/where/model-00001-of-00002.safetensors", "give the directory some/where,"),
    ("Qwen/Qwen3-0.6B", "no such file; for the model of the Hugging Face Hub give hf://Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "give hf://Qwen/Qwen3-0.6B-GGUF:Q8_0"),
    ("https://huggingface.co/Qwen/Qwen3-0.6B", "a URL; give the reference hf://Qwen/Qwen3-0.6B"),
    ("https://huggingface.co/a/b/tree/main", "give the reference hf://a/b"),
    ("https://hf.co/a/b/resolve/v1/c/d.gguf?download=true", "give the reference hf://a/b@v1/c/d.gguf"),
    ("https://example.org/model.gguf", "a URL; download the file, and give its path"),
]


@pytest.mark.parametrize(("path", "message"), HINTS, ids=[path for path, _ in HINTS])
@pytest.mark.parametrize("call", [slm.load, slm.load_vocab, slm.supports], ids=["load", "load_vocab", "supports"])
def test_errors_for_wrong_paths_name_the_right_form(
    call: Any, path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(slm.InvalidModelFile) as raised:
        call(path)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_an_ordinary_path_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("model.gguf", "models/tiny", "models/absent", "a/b/c", "~/x/y.gguf"):
        assert local(path) == Path(path).expanduser()
