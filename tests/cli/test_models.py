"""``slm list``, ``slm pull`` and ``slm rm`` on a cache in the layout of ``huggingface_hub``, without a network."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core import hub
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.hub_cache import cached_models
from tests.terminal_emulator import terminal

OLD, NEW = "a" * 40, "b" * 40


class Cache:
    """A cache of the Hub: files are links to blobs, which have the names of their hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, repo: str, commit: str, ref: str | None, files: dict[str, bytes]) -> None:
        home = self.folder / f"models--{repo.replace('/', '--')}"
        for name, data in files.items():
            blob = home / "blobs" / hashlib.sha256(data).hexdigest()
            link = home / "snapshots" / commit / name
            for path in (blob, link):
                path.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(data)
            link.symlink_to(blob)
        if ref is not None:
            (home / "refs").mkdir(exist_ok=True)
            (home / "refs" / ref).write_text(commit)

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*/blobs/*"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = Cache(tmp_path)
    q8, f32 = (model_bytes(tmp_path, kind) for kind in ("q8_0", "f32"))
    cache.add("somebody/tiny", OLD, None, {"tiny-Q8_0.gguf": q8, "README.md": b"old"})
    cache.add("somebody/tiny", NEW, "main", {"tiny-Q8_0.gguf": q8, "tiny-f32.gguf": f32, "README.md": b"new"})
    parts = {f"big-Q4_K_M-0000{i}-of-00002.gguf": bytes(1000 * i) for i in (1, 2)}
    cache.add("else/many", NEW.replace("b", "c"), "main", {**parts, "x-chat.gguf": b"x", "a-Q8_0.gguf": b"1"})
    cache.add("else/many", NEW.replace("b", "c"), "v1", {"b-Q8_0.gguf": b"22"})
    cache.add("else/folder", NEW.replace("b", "d"), "v2", {"config.json": b"{}", "model.safetensors": bytes(5000)})
    cache.add("else/text", NEW.replace("b", "e"), "main", {"README.md": b"no model"})
    cache.add("gpt2", NEW.replace("b", "f"), "main", {"config.json": b"{}"})
    return cache


def model_bytes(folder: Path, kind: str) -> bytes:
    path = folder / "model.gguf"
    make_tiny_model("qwen3", kind).write(path)
    data = path.read_bytes()
    path.unlink()
    return data


EXPECTED = {
    "hf://somebody/tiny:Q8_0": "Q8_0",
    "hf://somebody/tiny:F32": "F32",
    f"hf://somebody/tiny@{OLD}:Q8_0": "Q8_0",
    "hf://else/many:Q4_K_M": "Q4_K_M",
    "hf://else/many/x-chat.gguf": "GGUF",
    "hf://else/many/a-Q8_0.gguf": "Q8_0",
    "hf://else/many/b-Q8_0.gguf": "Q8_0",
    "hf://else/folder@v2": "directory",
}


def test_the_list_has_references_that_the_loader_understands(run, cache: Cache) -> None:
    listed = json.loads(run("list", "--json").out)
    assert {model["reference"]: model["kind"] for model in listed} == EXPECTED
    assert [model["reference"] for model in listed] == sorted(EXPECTED)
    for model in listed:
        assert Path(model["path"]) == hub.fetch(model["reference"])
        files = [Path(file) for file in model["files"]]
        assert model["n_bytes"] == sum(file.stat().st_size for file in files)
        assert model["last_used"] == max(file.stat().st_atime for file in files)
    assert len(next(model for model in listed if "Q4_K_M" in model["reference"])["files"]) == 2
    shown = run("list")
    assert re.search(r"^hf://else/many:Q4_K_M +Q4_K_M +2\.9 KiB +20\d\d-\d\d-\d\d *$", shown.out, re.MULTILINE)
    assert re.search(rf"8 models, .* in {cache.folder} \(HF_HUB_CACHE", shown.err)


def test_a_damaged_repository_is_left_out_and_named(run, cache: Cache) -> None:
    (cache.folder / "models--some--thing").mkdir()
    outcome = run("list")
    assert outcome.code == 0
    assert re.search(r"^\(left out: .*models--some--thing", outcome.err, re.MULTILINE)


@pytest.fixture(params=["of the library", "of slm"])
def removal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of the library cannot remove single files."""
    if request.param == "of slm":
        monkeypatch.delattr(huggingface_hub.HFCacheInfo, "delete_files", raising=False)


@pytest.mark.usefixtures("removal")
def test_one_of_several_models_is_removed(run, cache: Cache) -> None:
    before, size = cache.n_bytes, hub.fetch("hf://somebody/tiny:F32").stat().st_size
    outcome = run("rm", "hf://somebody/tiny:f32", "--yes")
    assert (outcome.code, outcome.out) == (0, "")
    assert before - cache.n_bytes == size
    assert outcome.err == f"(hf://somebody/tiny:F32 is removed, {size / 1024:.1f} KiB freed)\n"
    assert {model.reference for model in cached_models().models} == set(EXPECTED) - {"hf://somebody/tiny:F32"}
    with slm.load("hf://somebody/tiny:Q8_0", backend="native") as model:
        assert model.info.quantization == "Q8_0"


@pytest.mark.usefixtures("removal")
def test_bytes_that_another_revision_uses_are_not_freed(run, cache: Cache) -> None:
    before = cache.n_bytes
    assert run("rm", "hf://somebody/tiny@main:Q8_0", "--yes").err.endswith("is removed, 0 bytes freed)\n")
    assert cache.n_bytes == before
    assert hub.fetch(f"hf://somebody/tiny@{OLD}:Q8_0").exists()
    freed = run("rm", f"hf://somebody/tiny@{OLD}:Q8_0", "--yes").err
    assert "0 bytes" not in freed and cache.n_bytes < before


def test_the_last_model_takes_its_repository_with_it(run, cache: Cache) -> None:
    before = cache.n_bytes
    assert run("rm", "hf://else/folder@v2", "--yes").code == 0
    assert before - cache.n_bytes == 5002
    assert not (cache.folder / "models--else--folder").exists()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_removing_asks(run, cache: Cache, answer: str, code: int) -> None:
    outcome = run("rm", "hf://else/many:Q4_K_M", input=answer)
    assert outcome.code == code
    assert "Remove hf://else/many:Q4_K_M, 2 files, 2.9 KiB? [y/N]" in outcome.err
    assert ("hf://else/many:Q4_K_M" in {model.reference for model in cached_models().models}) == (code == 1)


def test_ctrl_c_at_the_question(cache: Cache) -> None:
    with terminal("rm", "hf://else/many:Q4_K_M", HF_HUB_CACHE=str(cache.folder), HF_HUB_OFFLINE="1") as tty:
        tty.wait_for(r"\[y/N\]")
        assert tty.interrupt() == 130
    assert "hf://else/many:Q4_K_M" in {model.reference for model in cached_models().models}


def test_a_file_that_stays_is_an_error(run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library only logs that it cannot remove a file."""
    strategy = type(huggingface_hub.scan_cache_dir(cache.folder).delete_revisions())
    monkeypatch.setattr(strategy, "execute", lambda self: None)
    outcome = run("rm", "hf://else/folder@v2", "--yes")
    assert outcome.code == 1
    assert re.fullmatch(r"error: [^\n]+ could not be removed\n", outcome.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rm", "hf://some/other:Q8_0"), "hf://some/other:Q8_0: not in the cache, "),
        (("rm", "hf://somebody/tiny@v9"), "not in the cache, "),
        (("rm", "hf://somebody/tiny:Q2_K"), "no GGUF file of type Q2_K (there are: tiny-Q8_0.gguf, tiny-f32.gguf)"),
        (("rm", "hf://else/text"), "not in the cache, "),
        (("rm", "tiny"), "'tiny' is not a reference to the Hub (accepted: hf://user/repo"),
        (("pull", "tiny"), "'tiny' is not a reference to the Hub (accepted: hf://user/repo"),
        (("pull", "hf://some/other"), "not in the cache ("),
    ],
)
def test_an_error_is_one_line(run, cache: Cache, arguments: tuple[str, ...], message: str) -> None:
    before = cache.n_bytes
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", outcome.err), outcome.err
    assert message in outcome.err
    assert cache.n_bytes == before


def test_pull_prints_the_path(run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("pull", "hf://somebody/tiny:Q8_0").out == f"{hub.fetch('hf://somebody/tiny:Q8_0')}\n"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    files = [SimpleNamespace(rfilename=name) for name in ("new-Q4_0.gguf", "new-Q8_0.gguf")]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: SimpleNamespace(siblings=files))

    def download(repo: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert (repo, revision, local_files_only) == ("some/new", None, False)
        cache.add("some/new", OLD, "main", dict.fromkeys(allow_patterns, b"data"))
        return str(cache.folder / "models--some--new" / "snapshots" / OLD)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    outcome = run("pull", "hf://some/new:Q4_0")
    assert Path(outcome.out.rstrip("\n")).read_bytes() == b"data"
    assert "hf://some/new:Q4_0" in {model.reference for model in cached_models().models}


def test_a_hub_out_of_reach_is_one_line(run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    outcome = run("pull", "hf://some/other:Q8_0")
    assert (outcome.code, outcome.out) == (1, "")
    assert re.search(r"^error: [^\n]+the Hub cannot be reached\n\Z", outcome.err, re.MULTILINE)


def test_an_empty_cache_has_no_models(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        outcome = run("list")
        assert (outcome.code, outcome.out) == (0, "")
        assert outcome.err.startswith("0 models, 0 bytes in ")
        assert json.loads(run("list", "--json").out) == []


def test_without_the_extra_the_error_names_the_package(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for arguments in (("list",), ("rm", "hf://a/b"), ("pull", "hf://a/b")):
        assert 'pip install "slm-core[hub]"' in run(*arguments).err


def test_find_takes_every_name_of_a_revision(cache: Cache) -> None:
    paths = {cached_models().find(f"hf://else/many{suffix}").path for suffix in (":Q4_K_M", "@main", "@v1", "")}
    assert len(paths) == 1, "of several files, the one of type Q4_K_M"
    with pytest.raises(UnsupportedModel, match="2 GGUF files of type Q8_0"):
        cached_models().find("hf://else/many:Q8_0")
    with pytest.raises(InvalidModelFile, match="not in the cache"):
        cached_models().find("hf://else/folder")
