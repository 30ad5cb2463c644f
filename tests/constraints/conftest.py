"""Published vocabularies, and llama.cpp's grammar sampler as a reference implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from constraints.llama_grammars import LlamaGrammars
from slm_core.gguf import GgufFile
from slm_core.tokenization import GgufVocab, build_vocab
from slm_llamacpp import library


@pytest.fixture(scope="session")
def vocab_path(shared_dir: Path) -> Callable[[str], Path]:
    """A function from the name of a published vocabulary to its path."""
    return lambda name: shared_dir / "oracles" / "vocabs" / f"ggml-vocab-{name}.gguf"


@pytest.fixture(scope="session")
def vocab(vocab_path: Callable[[str], Path]) -> Callable[[str], GgufVocab]:
    """A function from the name of a published vocabulary to its object, one per name."""

    @cache
    def build(name: str) -> GgufVocab:
        with GgufFile.open(vocab_path(name)) as gguf:
            return build_vocab(gguf)

    return build


@pytest.fixture(scope="session")
def llama_grammars(vocab_path: Callable[[str], Path]) -> Iterator[Callable[[str], LlamaGrammars]]:
    """A function from the name of a published vocabulary to llama.cpp's grammars over it."""
    lib = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the oracle of this test")
    library.load()  # llama.cpp logs refused grammars: keep its log off stderr
    opened: dict[str, LlamaGrammars] = {}

    def open_(name: str) -> LlamaGrammars:
        if name not in opened:
            opened[name] = LlamaGrammars(lib, vocab_path(name))
        return opened[name]

    yield open_
    for grammars in opened.values():
        grammars.close()
