"""Paths that no file can have: each is refused with an error of the project, in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slm_core as slm
from slm_core.diskcache import cache_root
from slm_core.user_paths import exists, expanded

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other limits")

IMPOSSIBLE = {"unknown user": "~nobody-here/x", "NUL": "a\0b", "NUL user": "~a\0b/x", "surrogate": "\ud800"}
TOO_LONG = "x" * 5000


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as loaded:
        yield loaded


def load_tokenizer(path: str) -> None:
    slm.load(slm.demo_model_path(), backend="native", n_threads=1, tokenizer=path)


@pytest.mark.parametrize("path", [*IMPOSSIBLE.values(), TOO_LONG], ids=[*IMPOSSIBLE, "too long"])
def test_the_path_of_a_model_that_no_file_can_have(model: slm.Model, path: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: slm.load(path),
        "load_vocab": lambda: slm.load_vocab(path),
        "supports": lambda: slm.supports(path),
        "formatter": lambda: slm.formatter(model=path),
        "tokenizer": lambda: load_tokenizer(path),
        "adapter": lambda: model.adapters.load(path, "name"),
    }
    kind = slm.ModelFileNotFound if path == IMPOSSIBLE["unknown user"] else slm.InvalidModelFile
    for name, call in calls.items():
        with pytest.raises(kind) as refused:
            call()
        assert type(refused.value) is kind, name
        assert len(str(refused.value).splitlines()) == 1, name


@pytest.mark.parametrize("path", [*IMPOSSIBLE.values(), TOO_LONG, "", "."], ids=[*IMPOSSIBLE, "too long", "empty", "."])
def test_a_file_that_no_path_leads_to_is_neither_written_nor_read(model: slm.Model, path: str) -> None:
    chat = model.chat(n_ctx=64)
    with pytest.raises(slm.InvalidOption, match=r"cannot be written: [^\n]+$"):
        chat.save(path)
    with pytest.raises(slm.InvalidOption, match=r"cannot be read: [^\n]+$"):
        slm.Chat.load(model, path)


@pytest.mark.parametrize("path", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_directory_that_no_path_leads_to(model: slm.Model, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with pytest.raises(slm.InvalidOption, match=r"^cache_dir=[^\n]+: no "):
        model.engine(n_ctx=64, cache_dir=path)
    if "\0" not in path and path != "\ud800":  # an environment variable cannot have these values
        monkeypatch.setenv("SLM_CACHE_DIR", path)
        with pytest.raises(slm.InvalidOption, match=r"^SLM_CACHE_DIR=[^\n]+: no such user"):
            cache_root()


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/x") == tmp_path / "x"
    assert expanded(Path("~") / "x") == tmp_path / "x"
    assert expanded("a/~") == Path("a/~")
    undecodable = os.fsdecode(b"\xff")
    assert expanded(undecodable) == Path(undecodable)


@pytest.mark.parametrize("path", [*IMPOSSIBLE.values(), TOO_LONG, "x" * 256], ids=[*IMPOSSIBLE, "too long", "long"])
def test_nothing_exists_where_nothing_can_be(path: str) -> None:
    assert not exists(path)
    assert exists(".")
