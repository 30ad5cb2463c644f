"""References to models of the Hub: the files that they mean, and the cache without a network."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core import hub
from slm_core.errors import InvalidModelFile, UnsupportedModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = [
    "README.md",
    "model-Q4_K_M.gguf",
    "model-Q8_0.gguf",
    "model.Q6_K-00001-of-00002.gguf",
    "model.Q6_K-00002-of-00002.gguf",
    "BF16/model-00001-of-00002.gguf",
    "BF16/model-00002-of-00002.gguf",
    "mmproj-model-F16.gguf",
    "sub/other-f32.gguf",
]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache with a repository of two models, without downloads."""
    home = tmp_path / "models--somebody--tiny"
    folder = home / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    for name in ("tiny-Q8_0.gguf", "tiny-f32.gguf"):
        make_tiny_model("qwen3", name.removeprefix("tiny-").removesuffix(".gguf").lower()).write(folder / name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://a/b", ["model-Q4_K_M.gguf"]),
        ("hf:/a/b", ["model-Q4_K_M.gguf"]),
        ("hf://a/b:q8_0", ["model-Q8_0.gguf"]),
        ("hf://a/b@main:Q8_0", ["model-Q8_0.gguf"]),
        ("hf://a/b:Q6_K", ["model.Q6_K-00001-of-00002.gguf", "model.Q6_K-00002-of-00002.gguf"]),
        ("hf://a/b:bf16", ["BF16/model-00001-of-00002.gguf", "BF16/model-00002-of-00002.gguf"]),
        ("hf://a/b/sub/other-f32.gguf", ["sub/other-f32.gguf"]),
        (
            "hf://a/b/BF16/model-00002-of-00002.gguf",
            ["BF16/model-00001-of-00002.gguf", "BF16/model-00002-of-00002.gguf"],
        ),
    ],
)
def test_a_reference_is_resolved_to_files(text, expected):
    assert hub.choose(hub.Reference.parse(text), FILES) == expected


def test_a_repository_without_gguf_files_is_a_directory():
    assert hub.choose(hub.Reference.parse("hf://a/b"), ["config.json", "model.safetensors"]) == []
    assert hub.choose(hub.Reference.parse("hf://a/b"), ["only.gguf", "config.json"]) == ["only.gguf"]


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        ("hf://a/b:Q2_K", FILES, "no GGUF file of type Q2_K.*model-Q8_0"),
        ("hf://a/b:K_M", FILES, "no GGUF file of type K_M"),
        ("hf://a/b:F16", FILES, "no GGUF file of type F16"),
        ("hf://a/b", ["x-Q8_0.gguf", "x-Q6_K.gguf"], "no GGUF file of type Q4_K_M"),
        ("hf://a/b", ["x-Q4_K_M.gguf", "y-Q4_K_M.gguf"], "2 GGUF files of type Q4_K_M"),
        ("hf://a/b/none.gguf", FILES, "there is no such file"),
        ("hf://a/b", ["README.md"], "neither GGUF files nor a config.json"),
    ],
)
def test_missing_files_are_named(text, files, message):
    with pytest.raises(UnsupportedModel, match=message):
        hub.choose(hub.Reference.parse(text), files)


@pytest.mark.parametrize(
    "text", ["hf://", "hf://a", "hf://a/b/c", "hf://a/../b", "hf://a/b:", "hf://a/b@/x.gguf", "hf:///b"]
)
def test_invalid_references_are_refused(text):
    with pytest.raises(InvalidModelFile, match="not a reference"):
        slm.load(text)


@pytest.mark.parametrize("reference", ["hf://somebody/tiny:Q8_0", Path("hf://somebody/tiny/tiny-Q8_0.gguf")])
def test_a_model_in_the_cache_loads_offline(cache, reference):
    with slm.load(reference, backend="native") as model:
        assert model.info.path == cache / "tiny-Q8_0.gguf"
        assert model.info.quantization == "Q8_0"
    assert slm.load_vocab(reference).size == model.info.n_vocab


@pytest.fixture
def online(cache, monkeypatch) -> Path:
    """The cache of ``cache``, with permission to ask the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    return cache


def test_without_a_connection_the_cache_is_used_or_the_error_is_one_line(online, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is tried again"))
    assert hub.fetch("hf://somebody/tiny:Q8_0") == online / "tiny-Q8_0.gguf"
    assert "cannot be reached" in caplog.text
    with pytest.raises(InvalidModelFile, match="not in the cache") as caught:
        hub.fetch("hf://somebody/else:Q8_0")
    assert "\n" not in str(caught.value)


def test_a_hub_that_never_answers_is_given_up(online, monkeypatch, caplog):
    """The kernel accepts the connection; nobody reads the request."""
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.fetch("hf://somebody/tiny:Q8_0") == online / "tiny-Q8_0.gguf"
    assert "cannot be reached" in caplog.text


def test_a_name_server_that_never_answers_is_given_up(online, monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.1")
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait() and [])
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")
    try:
        assert hub.fetch("hf://somebody/tiny:Q8_0") == online / "tiny-Q8_0.gguf"
    finally:
        over.set()
    assert "no answer within 0.1 s" in caplog.text


def test_the_hub_has_three_seconds(online, monkeypatch):
    waited = []

    def refuse(self, repo, *, revision, timeout):
        waited.append(timeout)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    hub.fetch("hf://somebody/tiny:Q8_0")
    assert waited == [3.0]


def test_a_hub_that_answers_is_believed(online, monkeypatch):
    files = [SimpleNamespace(rfilename=name) for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf")]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: SimpleNamespace(siblings=files))
    assert hub._listed(huggingface_hub, hub.Reference.parse("hf://somebody/tiny")) == (
        ["tiny-Q4_0.gguf", "tiny-Q8_0.gguf"],
        True,
    )


@pytest.mark.parametrize("reference", ["hf://somebody/else:Q8_0", "hf://somebody/tiny@v2:Q8_0"])
def test_a_model_missing_in_the_cache_is_an_error_offline(cache, reference):
    with pytest.raises(InvalidModelFile, match="not in the cache"):
        slm.load(reference)


def test_the_librarys_variables_are_respected(cache):
    """In a subprocess, because the library reads the variables when it is imported."""
    code = "from slm_core import hub; print(hub.fetch('hf://somebody/tiny:f32'))"
    variables = {"HF_HUB_CACHE": str(cache.parents[2]), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(cache / "tiny-f32.gguf")


def test_without_the_extra_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedModel, match=r'pip install "slm-core\[hub\]"'):
        slm.load("hf://somebody/tiny")


def test_a_directory_is_fetched_with_all_files_that_are_read():
    read = ["config.json", "model-00001-of-00002.safetensors", "1_Pooling/config.json", "chat_template.jinja"]
    read += ["tokenizer.json", "rwkv_vocab_v20230424.txt"]
    others = ["README.md", "pytorch_model.bin", "hf_rwkv_tokenizer.py", "LICENSE.txt"]
    fetched = huggingface_hub.utils.filter_repo_objects([*read, *others], allow_patterns=list(hub._DIRECTORY))
    assert list(fetched) == read
