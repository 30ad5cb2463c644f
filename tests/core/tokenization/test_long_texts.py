"""Long texts, such as a prompt of megabytes: other threads run while they are encoded."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models

import slm_core as slm
from slm_core.tokenization.encoding import encoding

LONG = "The quick brown fox, 12 + 30 = 42. " * 500


@pytest.fixture(scope="module")
def vocab() -> Any:
    return slm.load_vocab(slm.demo_model_path())


def test_another_thread_runs_while_a_long_text_is_encoded(vocab: Any) -> None:
    """Such as an engine's thread. In this test, Python switches threads only where one releases the GIL."""
    vocab.encode("x", add_special=False, parse_special=False)  # made with the first text
    may_run, ran = threading.Lock(), list[bool]()
    may_run.acquire()

    def run() -> None:
        with may_run:
            ran.append(True)

    other = threading.Thread(target=run)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        may_run.release()
        vocab.encode(LONG, add_special=False, parse_special=False)
        has_run = bool(ran)
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert has_run


def test_the_tokens_of_a_long_text(vocab: Any) -> None:
    """They are the tokens of its sentences: no merge spans the space between sentences."""
    ids = vocab.encode(LONG, add_special=False, parse_special=False)
    first, *_ = LONG.partition(" The")
    later = vocab.encode(" " + first, add_special=False, parse_special=False)
    end = vocab.encode(" ", add_special=False, parse_special=False)
    assert ids == vocab.encode(first, add_special=False, parse_special=False) + 499 * later + end


def test_pieces_without_a_token() -> None:
    """A unigram vocabulary spells them byte by byte: their texts are read from the encoding."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("ab", -1.0), ("c", -2.0)], 0, False))
    text = "abc\u20acxc" * 2000
    got, short = encoding(tokenizer, text), encoding(tokenizer, "abc\u20acxc")
    assert (got.ids, got.tokens) == (short.ids * 2000, short.tokens * 2000)
