"""Files that are complete or absent, for every error at every point of the write."""

from __future__ import annotations

import builtins
import os
import stat
from pathlib import Path

import pytest

from slm_core.atomic_write import atomic_file, read_whole, write_whole
from slm_core.errors import InvalidOption

needs_posix = pytest.mark.skipif(os.name == "nt", reason="Windows has neither pipes in folders nor links for everybody")


def test_the_file_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_file(path, mode=0o600) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 or os.name == "nt"
    assert list(tmp_path.iterdir()) == [path]


@needs_posix
@pytest.mark.parametrize("name", ["n" * 255, "\u6f22" * 85], ids=["one byte", "three bytes"])
def test_the_longest_name_of_a_file(tmp_path: Path, name: str) -> None:
    """255 bytes; the name of the temporary file is no longer."""
    write_whole(tmp_path / name, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"new")]


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


@needs_posix
@pytest.mark.parametrize("exists", [True, False], ids=["a file", "no file yet"])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, *, exists: bool) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    target, link, further = tmp_path / "there" / "file", tmp_path / "here" / "link", tmp_path / "here" / "further"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("../there/file")
    further.symlink_to(link)
    write_whole(further, b"new")
    assert target.read_bytes() == read_whole(further) == b"new"
    assert not target.is_symlink()
    assert link.is_symlink()
    assert further.is_symlink()
    assert {path.name for path in tmp_path.rglob("*") if not path.is_dir()} == {"file", "link", "further"}


@needs_posix
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_is_not_regular_is_neither_replaced_nor_read(tmp_path: Path, *, linked: bool) -> None:
    """Opening the pipe would wait for its other end."""
    pipe, path = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    if linked:
        path.symlink_to(pipe)
    else:
        path = pipe
    with pytest.raises(OSError, match="not a regular file"), atomic_file(path):
        pytest.fail("nothing is written")
    with pytest.raises(InvalidOption, match=r"(link|pipe): cannot be written: not a regular file$"):
        write_whole(path, b"new")
    with pytest.raises(InvalidOption, match=r"(link|pipe): cannot be read: not a regular file$"):
        read_whole(path)
    assert pipe.is_fifo()
    assert set(tmp_path.iterdir()) == {pipe, path}


def test_a_directory_is_neither_replaced_nor_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot be written: Is a directory"):
        write_whole(tmp_path, b"new")
    with pytest.raises(InvalidOption, match="cannot be read: Is a directory"):
        read_whole(tmp_path)


@needs_posix
def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(path)
    with pytest.raises(InvalidOption, match="cannot be written: Too many levels of symbolic links"):
        write_whole(path, b"new")
    with pytest.raises(InvalidOption, match="cannot be read: Too many levels of symbolic links"):
        read_whole(path)
