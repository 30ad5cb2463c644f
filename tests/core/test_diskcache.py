"""The disk cache: damaged entries are not used, and failed writes do no harm."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from slm_core.diskcache import DiskCache, cache_root, entries

DATA = bytes(range(256)) * 40_000  # more than one read


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(folder: Path) -> None:
    (folder / "data").write_bytes(DATA)
    (folder / "more").write_text("more")


def test_a_written_entry_is_found() -> None:
    cache = DiskCache("engine")
    assert cache.get("key") is None
    folder = cache.put("key", "a model", fill)
    assert folder == cache.get("key")
    assert folder is not None
    assert (folder / "data").read_bytes() == DATA
    (entry,) = entries()
    assert (entry.kind, entry.key, entry.about) == ("engine", "key", "a model")
    assert entry.n_bytes > len(DATA)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing file", "missing manifest", "no JSON", "other JSON"])
def test_a_damaged_entry_is_not_used_but_rebuilt(damage: str) -> None:
    cache = DiskCache("engine")
    folder = cache.put("key", "a model", fill)
    assert folder is not None
    file, manifest = folder / "data", folder / "manifest.json"
    if damage == "flip":
        file.write_bytes(DATA[:5_000_000] + bytes([DATA[5_000_000] ^ 1]) + DATA[5_000_001:])
    elif damage == "cut":
        file.write_bytes(DATA[:-1])
    elif damage == "missing file":
        file.unlink()
    elif damage == "missing manifest":
        manifest.unlink()
    else:
        manifest.write_text("{" if damage == "no JSON" else "[1]")
    assert cache.get("key") is None
    assert cache.put("key", "a model", fill) == folder == cache.get("key")


@pytest.mark.parametrize(("data", "is_sound"), [(DATA, True), (DATA[:-1] + b"x", False)])
def test_a_file_with_another_time_is_read(data: bytes, is_sound: bool) -> None:
    """A copy of the folder may have other modification times; only its content counts."""
    folder = DiskCache("engine").put("key", "a model", fill)
    assert folder is not None
    (folder / "data").write_bytes(data)
    os.utime(folder / "data", (1, 1))
    assert (DiskCache("engine").get("key") is not None) is is_sound


def test_an_unmodified_file_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DiskCache("engine").put("key", "a model", fill)
    monkeypatch.setattr(zlib, "crc32", lambda data, crc=0: pytest.fail("a gigabyte would take a second"))
    assert DiskCache("engine").get("key") == folder


def test_nothing_is_cached_if_the_folder_is_not_writable(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert DiskCache("engine").put("key", "a model", fill) is None
    assert "nothing is kept in the cache" in caplog.text


def test_a_failed_build_leaves_no_entry(root: Path) -> None:
    def fails(folder: Path) -> None:
        fill(folder)
        raise ValueError("of no use")

    with pytest.raises(ValueError, match="of no use"):
        DiskCache("engine").put("key", "a model", fails)
    assert list(root.rglob("*")) == [root / "engine"]
    assert entries() == []


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root().name == "slm-core"
    assert cache_root().is_relative_to(Path.home())


@pytest.mark.parametrize(("hours", "is_there"), [(1, True), (25, False)])
def test_partial_entries_of_killed_processes_are_removed_after_a_day(root: Path, hours: int, is_there: bool) -> None:
    code = (
        "import os, signal; from slm_core.diskcache import DiskCache\n"
        "def fill(folder): (folder / 'manifest.json').write_text('{}'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "DiskCache('engine').put('key', 'a model', fill)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    (partial,) = (root / "engine").iterdir()
    assert entries() == []
    for path in (partial / "manifest.json", partial):
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    DiskCache("engine").put("other", "a model", fill)
    assert partial.exists() is is_there
