"""Reference implementations and generators for the tests of vocabularies."""

# ruff: noqa: RUF001  (characters that look alike are among the texts)

from __future__ import annotations

import ctypes
import random
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slm_core.gguf import GgufFile
from slm_core.tokenization import GgufVocab, build_vocab
from slm_core.types import InfillTokens

WORDS = [
    "hello",
    "world",
    "don't",
    "I'LL",
    "it's",
    "we've",
    "The",
    "QUICK",
    "brown",
    "Fox",
    "Jumps",
    "1234567",
    "42",
    "3.14",
    "foo_bar",
    "camelCase",
    "HTTPServer",
    "！",
    "中文",
    "日本語",
    "нещо",
    "на",
    "Български",
    "émigré",
    "naïve",
    "½",
    "x²",
    "①",
    "▁",
    "▁▁",
    "\u200d",
    "\xa0",
    "\u3000",
    "'",
    "''",
    "'s",
    "'S",
    "…",
    "—",
    "“quote”",
    "/path/to/x.py",
    "</a><b>",
    "🚀",
    "😶\u200d🌫️",
    "✅",
    "🦙🦙",
    "កាន់តែ",
    "------=======",
    "''''''",
    "```",
    "!!!!!!???",
    "Führer",
    "Cửa",
    "Việt",
    "\U0010fffd",
    "�",
]
IN_WORDS = frozenset("".join(WORDS))
SPACES = " \t\n\r\x0b\x0c\x85\u3000"
# Ranges of code points to draw from, with ASCII most often.
SCRIPTS = [(0x20, 0x7E)] * 6 + [
    *((0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x97F), (0xE01, 0xE5B)),
    *((0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x2000, 0x206F), (0x300, 0x36F)),
    *((0, 0x1F), (0xFF00, 0xFFEF), (0x20000, 0x2A6D6), (0xE000, 0xF8FF)),
]


def same_category_everywhere(character: str) -> bool:
    """Whether the category is the same in every version of Unicode since 3.2, so that no table differs."""
    category = unicodedata.category(character)
    return category == unicodedata.ucd_3_2_0.category(character) and category not in ("Cn", "Cs")


def make_texts(
    n: int, seed: int, *, only: Callable[[str], bool] = lambda _: True, spelled: Sequence[str] = ()
) -> list[str]:
    """Draw texts with words, white space, digits and characters of many scripts.

    Args:
        n: number of texts.
        seed: seed of the generator.
        only: filter for characters.
        spelled: additional words.
    """
    draw = random.Random(seed)
    words = [*WORDS, *spelled]

    def part() -> str:
        kind = draw.random()
        if kind < 0.5:
            return draw.choice(words)
        if kind < 0.6:
            return draw.choice(SPACES) * draw.randint(1, 9)
        if kind < 0.66:
            return "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 14)))
        first, last = draw.choice(SCRIPTS)
        return "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 6)))

    texts = []
    for _ in range(n):
        drawn = "".join(part() + draw.choice(["", " "]) for _ in range(draw.randint(0, 12)))
        texts.append("".join(c for c in drawn if only(c) and (c in IN_WORDS or same_category_everywhere(c))))
    return texts


class LlamaVocab:
    """A vocabulary as llama.cpp reads it."""

    def __init__(self, llama_cpp: Any, path: Path) -> None:
        self._lib = llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp cannot load {path}"
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.bos = self._or_none(llama_cpp.llama_vocab_bos(self._vocab))
        self.eos = self._or_none(llama_cpp.llama_vocab_eos(self._vocab))

    @staticmethod
    def _or_none(token: int) -> int | None:
        return None if token < 0 else token

    def close(self) -> None:
        self._lib.llama_model_free(self._model)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        data = text.encode()
        capacity = 4 * len(data) + 16
        tokens = (self._lib.llama_token * capacity)()
        n = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, capacity, add_special, parse_special)
        assert n >= 0, f"llama.cpp needs room for {-n} tokens, there is room for {capacity}"
        return tokens[:n]

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(4096)
        n = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        assert n >= 0, f"llama.cpp needs room for {-n} bytes"
        return buffer.raw[:n]

    @property
    def infill(self) -> InfillTokens | None:
        names = ("fim_pre", "fim_suf", "fim_mid", "fim_sep", "fim_rep")
        tokens = [self._or_none(getattr(self._lib, f"llama_vocab_{name}")(self._vocab)) for name in names]
        return None if None in tokens[:3] else InfillTokens(*tokens)

    def eog_ids(self) -> set[int]:
        return {i for i in range(self.size) if self._lib.llama_vocab_is_eog(self._vocab, i)}


@pytest.fixture(scope="session")
def llama_vocab():
    """A function that opens a file with llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the oracle of this test")
    llama_cpp.llama_backend_init()
    opened: dict[Path, LlamaVocab] = {}

    def open_(path: Path) -> LlamaVocab:
        if path not in opened:
            opened[path] = LlamaVocab(llama_cpp, path)
        return opened[path]

    yield open_
    for vocab in opened.values():
        vocab.close()


@pytest.fixture(scope="session")
def published(shared_dir):
    """A function from the name of a published vocabulary to its path."""
    return lambda name: shared_dir / "oracles" / "vocabs" / f"ggml-vocab-{name}.gguf"


@pytest.fixture(scope="session")
def open_vocab():
    """A function that builds the vocabulary of a file, one object per path."""
    built: dict[Path, GgufVocab] = {}

    def open_(path: Path) -> GgufVocab:
        if path not in built:
            with GgufFile.open(path) as gguf:
                built[path] = build_vocab(gguf)
        return built[path]

    return open_


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory):
    """A function that writes a file with only metadata; keys without a dot get the prefix ``tokenizer.ggml.``."""
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the files of this test")
    folder = tmp_path_factory.mktemp("vocabs")

    def write(**metadata: Any) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
        for key, value in metadata.items():
            name = key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif value is not None:
                writer.add_array(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session", name="make_texts")
def make_texts_fixture():
    """The function ``make_texts``, because test modules cannot import it."""
    return make_texts
