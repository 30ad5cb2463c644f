"""Files that are complete or absent, for every error at every point of the write."""

from __future__ import annotations

import builtins
import os
import stat
from pathlib import Path

import pytest

from slm_core.atomic_write import atomic_file


def test_the_file_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_file(path, mode=0o600) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 or os.name == "nt"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_an_error_in_the_body_keeps_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_file(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_opening_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = builtins.open

    def interrupted(*arguments, **options):
        opened(*arguments, **options).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == []
