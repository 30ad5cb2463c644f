"""Directories with a real vocabulary, and the GGUF files that they become."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.exporting import write_gguf
from slm_core.gguf import GgufFile
from slm_core.tokenization.export import tokenizer_files


@functools.cache
def _vocabulary() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, _tiny_model(Path(folder)) as gguf:
        return tokenizer_files(gguf, 2048)


def _tiny_model(folder: Path) -> GgufFile:
    return GgufFile.open(make_tiny_model("qwen2").write(folder / "tiny.gguf"))


def with_vocabulary(folder: Path, target: Path) -> Path:
    """A copy of a directory, made of links, with a byte-level vocabulary of as many tokens."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    for name, text in _vocabulary().items():
        (target / name).unlink(missing_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    return target


def export(folder: Path, target: Path) -> Path:
    """Write a directory as a GGUF file; progress never falls, and ends at 1."""
    shares = [0.0]
    write_gguf(folder, target, shares.append)
    assert shares == sorted(shares)
    assert abs(shares[-1] - 1) < 1e-9
    return target
