"""Text to token ids and back."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.errors import InvalidOption, InvalidToken
from slm_core.gguf import GgufFile
from slm_core.protocols import Vocab
from slm_core.tokenization import GgufVocab, build_vocab

TEXTS = (
    "",
    " ",
    "hello you, the dog",
    "Hello\n\n  world\t42.5%",
    "naïve café, Straße, ŒUVRE",
    "Привет, мир! 你好，世界。こんにちは",  # noqa: RUF001  (a full-width comma, on purpose)
    "👩‍👩‍👧‍👦 🇩🇪 🏽 é",
    "a\0b\0",
    "don't I'll we've THEY'RE",
    "x" * 300,
    " " * 50 + "\r\n" * 20,
    "<|im_start|>user\nhi<|im_end|>",
    "<think>why</think>",
    "<|im_start",
)
N_RANDOM_STRINGS = 10_000
"""The number of strings, divided among the adopter's models; each model gets different strings."""

_ALPHABETS = (
    *((first, last) for first, last in ((0x20, 0x7E), (0x61, 0x7A), (0x30, 0x39), (0x00, 0x1F), (0x80, 0x24F))),
    *((first, last) for first, last in ((0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xE7F))),
    *((first, last) for first, last in ((0x1100, 0x11FF), (0x2000, 0x206F), (0x3000, 0x30FF), (0x4E00, 0x9FFF))),
    *((first, last) for first, last in ((0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFE00, 0xFFFF), (0x1F300, 0x1FAFF))),
    (0, 0x10FFFF),
)
"""First and last code point of the alphabets of random strings."""

_UNUSUAL = (" ", "\n", "\u200d", "\ud800", "\udc00", "\0", "<|im_end|>", "\ufffd", "'s", "\r\n")
UNPAIRED = ("\ud800", "a\udfffb", "\udc00\ud800 end")


class TestVocabulary(Scenarios):
    """Vocab: the model's own vocabulary."""

    def test_equals_the_reference(self, bench: Bench) -> None:
        """Vocab: token ids follow from the file's rules, with and without special tokens."""
        with GgufFile.open(bench.path) as file:
            reference = build_vocab(file)
        for text in (*TEXTS, *UNPAIRED):
            for add_special, parse_special in ((False, False), (True, False), (False, True), (True, True)):
                ids, expected = (
                    vocab.encode(text, add_special=add_special, parse_special=parse_special)
                    for vocab in (bench.vocab, reference)
                )
                assert list(ids) == expected, (
                    f"{text[:40]!r} with add_special={add_special}, parse_special={parse_special} is {ids[:12]}...,"
                    f" the file's rules say {expected[:12]}..."
                )

    def test_special_tokens_are_the_files(self, bench: Bench) -> None:
        """Vocab: size, BOS, EOS and EOG tokens, and those of text with a gap, are the file's; EOS ends an answer."""
        with GgufFile.open(bench.path) as file:
            reference = build_vocab(file)
        vocab = bench.vocab
        properties = (vocab.size, vocab.bos, vocab.eos, vocab.eog_ids, vocab.infill)
        expected = (reference.size, reference.bos, reference.eos, reference.eog_ids, reference.infill)
        assert properties == expected, f"size, bos, eos, eog_ids and infill are {properties}, the file says {expected}"
        assert vocab.eos is None or vocab.eos in vocab.eog_ids, f"eos, {vocab.eos}, is not among {vocab.eog_ids}"

    def test_random_strings(self, bench: Bench) -> None:
        """Vocab: the ids of 10,000 random strings follow from the file's rules, and their bytes join to the text.

        If the vocabulary under test is slm-core's, its ids are not compared, because the reference would be the same
        code; 1,000 strings are enough for the other checks.
        """
        reference = None
        if not isinstance(bench.vocab, GgufVocab):
            with GgufFile.open(bench.path) as file:
                reference = build_vocab(file)
        models = bench.workshop.fixtures.models
        n_strings = N_RANDOM_STRINGS if reference is not None else N_RANDOM_STRINGS // 10
        n = -(-bench.workshop.share(n_strings) // len(models))
        for text in (*TEXTS, *UNPAIRED, *_random_strings(n, seed=17 + models.index(bench.name))):
            ids = bench.vocab.encode(text, add_special=False, parse_special=False)
            assert bool(ids) == bool(text), f"{text!r} gives {len(ids)} tokens"
            if reference is not None:
                expected = reference.encode(text, add_special=False, parse_special=False)
                assert list(ids) == expected, f"{text!r} is {ids[:12]}..., the file's rules say {expected[:12]}..."
            back = bench.vocab.decode(ids, special=True)
            joined = b"".join(bench.vocab.token_bytes(token, special=True) for token in ids)
            assert _composed(back) == _composed(text), f"{text!r} comes back as {back!r}"
            assert joined.decode().removeprefix(" ") == back.removeprefix(" "), f"bytes of {text!r} join to {joined!r}"

    def test_control_tokens_are_parsed_or_not(self, bench: Bench) -> None:
        """Vocab: with ``parse_special``, spelled-out control tokens become tokens; without, they are text."""
        token, text = _control_token(bench.vocab)
        parsed = bench.vocab.encode(text, add_special=False, parse_special=True)
        assert list(parsed) == [token], f"{text!r} with parse_special is {parsed}, not [{token}]"
        plain = bench.vocab.encode(text, add_special=False, parse_special=False)
        assert token not in plain, f"{text!r} without parse_special holds the control token {token}"
        assert bench.vocab.decode(plain) == text, f"{text!r} as plain text comes back as {bench.vocab.decode(plain)!r}"

    def test_control_tokens_are_no_text(self, bench: Bench) -> None:
        """Vocab: a control token has no bytes unless ``special``."""
        token, text = _control_token(bench.vocab)
        assert bench.vocab.token_bytes(token) == b"", f"control token {token} has bytes without special"
        assert bench.vocab.token_bytes(token, special=True).decode() == text, "with special it is another text"
        assert bench.vocab.decode([token]) == "", f"decode gives control token {token} as text without special"

    def test_ids_outside(self, bench: Bench) -> None:
        """Vocab: ids outside raise ``InvalidToken``; arguments that are no text or no list raise ``InvalidOption``."""
        no_integers: tuple[Any, ...] = (1.0, "1", None)
        for bad in (bench.vocab.size, -1, 2**31, *no_integers):
            with bench.refused(f"token_bytes({bad}) of {bench.vocab.size}", InvalidToken):
                bench.vocab.token_bytes(bad)
            with bench.refused(f"decode([{bad}]) of {bench.vocab.size}", InvalidToken):
                bench.vocab.decode([bad])
        others: tuple[Any, ...] = (5, None, b"ab")
        for other in others:
            with bench.refused(f"encode({other!r})", InvalidOption):
                bench.vocab.encode(other, add_special=False, parse_special=False)
            with bench.refused(f"decode({other!r})", InvalidOption):
                bench.vocab.decode(other)

    def test_broken_utf8_is_replaced(self, bench: Bench) -> None:
        """Vocab: ``decode`` turns bytes that are not UTF-8 into U+FFFD."""
        vocab = bench.vocab
        ids = vocab.encode("é", add_special=False, parse_special=False)
        pieces = [vocab.token_bytes(token) for token in ids]
        halves = [token for token, piece in zip(ids, pieces, strict=True) if piece in (b"\xc3", b"\xa9")]
        for token in halves:
            assert vocab.decode([token]) == "\ufffd", f"half a character decodes to {vocab.decode([token])!r}"


def _random_strings(n: int, seed: int) -> list[str]:
    """Strings of one to four runs; a run has an alphabet of its own, or repeats one string."""
    random = np.random.default_rng(seed)

    def run() -> str:
        length = int(random.choice([1, 2, 5, 12, 200], p=[0.3, 0.3, 0.25, 0.14, 0.01]))
        if random.random() < 0.3:
            return _UNUSUAL[random.integers(len(_UNUSUAL))] * length
        first, last = _ALPHABETS[random.integers(len(_ALPHABETS))]
        return "".join(map(chr, random.integers(first, last + 1, length)))

    return ["".join(run() for _ in range(random.integers(1, 5))) for _ in range(n)]


def _composed(text: str) -> str:
    """Text as some models' tokenizers normalize it; a surrogate pair becomes its character, other surrogates U+FFFD."""
    return unicodedata.normalize("NFC", text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def _control_token(vocab: Vocab) -> tuple[int, str]:
    """A token that ends an answer, and its text."""
    token = min(vocab.eog_ids)
    return token, vocab.token_bytes(token, special=True).decode()
