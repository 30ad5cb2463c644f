"""GBNF: llama.cpp's grammars are read, and allow the same tokens as in llama.cpp."""

# ruff: noqa: RUF001  (letters that look alike are among the characters)

from __future__ import annotations

import codecs
import contextlib
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from constraints.llama_grammars import LlamaGrammar, LlamaGrammars
from scripted import ByteVocab
from slm_core.constraints import Gbnf, GrammarConstraint, Limits, compile  # noqa: A004
from slm_core.errors import ConstraintError
from slm_core.tokenization import GgufVocab

PUBLISHED = ("arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list")
AMBIGUOUS = {
    "a run that ends in what it is made of": 'root ::= [a-z]+ "x" [0-9]+ "1"',
    "a word that begins another": 'root ::= ("do" | "done" | "d") ("ne" | "nerd" | "o") root?',
    "nested, with a run at the end": 'root ::= "(" (root | run) ")" run?\nrun ::= [a-c]+ "c"',
    "recursion at both ends": 'root ::= "a" root "a" | "a" [^b] "a" | "b"+ root',
    "empty at all ends": 'root ::= s ("," s)* root?\ns ::= [ \\t]{0,3} ("x" | ) [ ]*',
    "counted": 'root ::= ([ab]{2,4} "b"){3} (root | "" )',
    "characters of two to four bytes": 'root ::= ("é" | "ē" | [а-я]+ "я" | "🚀" | [🚀-🛿] "x" root)* "."',
    "all but some": 'root ::= "/*" ([^*] | "*" [^/])* "*/" root? | "/" "*"',
    "escapes": r'root ::= "\x41\u00e9\U0001F680\t\"\\\[" [\]\-a\x00-\x1f] [^\n] . root?',
}


@cache
def comparable_tokens(vocab: GgufVocab) -> np.ndarray:
    """Mask of the tokens that can be compared: llama.cpp reads control tokens as text, and never allows a NUL."""
    data = [vocab.token_bytes(token) for token in range(vocab.size)]
    return np.array([bool(one) and one[0] not in (0, 0xFF) for one in data])


def excused(data: bytes, allowed_here: bool) -> bool:
    """Whether llama.cpp has a known bug: it allows bytes that are not UTF-8, and refuses some incomplete characters."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return not allowed_here
    return allowed_here and bool(decoder.getstate()[0])


def compared(constraint: GrammarConstraint, llama_grammar: LlamaGrammar, vocab: GgufVocab) -> np.ndarray:
    """The mask of tokens that both allow; fails with a token that only one of them allows."""
    allowed, allowed_by_llama = constraint.allowed, llama_grammar.allowed()
    if constraint.forced:
        assert allowed_by_llama[constraint.forced[0]], (
            f"{vocab.token_bytes(constraint.forced[0])!r} is forced here, and refused by llama.cpp"
        )
        return allowed
    comparable = comparable_tokens(vocab).copy()
    comparable[list(vocab.eog_ids)] = not vocab.decode(constraint.tokens).endswith(
        "\ufffd"
    )  # llama.cpp allows an incomplete last character
    generated = b"".join(map(vocab.token_bytes, constraint.tokens))
    wrong = [
        t
        for t in np.flatnonzero((allowed != allowed_by_llama) & comparable).tolist()
        if not excused(generated + vocab.token_bytes(t), allowed[t])
    ]
    assert not wrong, (
        f"after {generated!r}, {vocab.token_bytes(wrong[0])!r} is {'allowed' if allowed[wrong[0]] else 'refused'} here"
        f" only ({len(wrong)} tokens differ)"
    )
    return allowed & comparable


def walk(grammar: str, vocab: GgufVocab, llama: LlamaGrammars, seed: int, n_steps: int) -> None:
    constraint, llama_grammar = compile(Gbnf(grammar), vocab), llama.begin(grammar)
    assert llama_grammar is not None, "llama.cpp refuses the grammar"
    draw = random.Random(seed)
    for _ in range(n_steps):
        tokens = np.flatnonzero(compared(constraint, llama_grammar, vocab))
        # Half of the tokens have one byte, so that tokens end inside characters and words.
        short = [t for t in draw.choices(tokens, k=40) if len(vocab.token_bytes(int(t))) <= 1]
        token = int(draw.choice(short)) if short and draw.random() < 0.5 else int(draw.choice(tokens))
        if token in vocab.eog_ids:
            assert constraint.is_complete
            break
        constraint.advance(token)
        llama_grammar.accept(token)
    llama_grammar.close()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("tokens", ["gpt-2", "llama-spm"])
def test_published_grammars_allow_the_same_tokens_as_llama_cpp(
    name: str,
    tokens: str,
    shared_dir: Path,
    vocab: Callable[[str], GgufVocab],
    llama_grammars: Callable[[str], LlamaGrammars],
) -> None:
    grammar = (shared_dir / "oracles" / "grammars" / f"{name}.gbnf").read_text(encoding="utf-8")
    for seed in range(2):
        walk(grammar, vocab(tokens), llama_grammars(tokens), seed, 30)


@pytest.mark.parametrize("grammar", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_ambiguous_grammars_allow_the_same_tokens_as_llama_cpp(
    grammar: str, vocab: Callable[[str], GgufVocab], llama_grammars: Callable[[str], LlamaGrammars]
) -> None:
    for seed in range(4):
        walk(grammar, vocab("gpt-2"), llama_grammars("gpt-2"), seed, 25)


@pytest.mark.parametrize(
    ("grammar", "place", "message"),
    [
        ('root ::= "a', (1, 12), "ends within a text"),
        ('root ::= "a"\nother ::= (b | "c"', (2, 19), r"expected '\)'"),
        ("root ::= nowhere", (1, 10), "no rule 'nowhere'"),
        ('root ::= "\\q"', (1, 11), "escape"),
        ("root ::= [z-a]", (1, 10), "ends before it begins"),
        ('root ::= "a"{3,2}', (1, 13), "3 repeats at least and 2 at most"),
        ('root ::= * "a"', (1, 10), "expected an item before"),
        ('root = "a"', (1, 6), "expected '::='"),
        ('root ::= "a" ) "b"', (1, 14), "expected an item"),
        ('root ::= "a"\n\n  | "b"', (3, 3), "expected a rule's name"),
        ('root ::= "a"\nroot ::= "b"', (2, 1), "defined twice"),
        ('root ::= "a"{9999999999}', (1, 14), "repeats"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, (1, 75), "nest deeper than 64"),
        ('other ::= "a"', (None, None), "no rule 'root'"),
        ("root ::= root", (None, None), "allows no text"),
    ],
)
def test_an_invalid_grammar_is_refused_with_its_position(
    grammar: str, place: tuple[int | None, int | None], message: str
) -> None:
    with pytest.raises(ConstraintError, match=message) as caught:
        compile(Gbnf(grammar), ByteVocab())
    assert (caught.value.line, caught.value.column) == place
    assert "\n" not in str(caught.value)


def test_llama_cpp_refuses_and_accepts_the_same_mutants(
    shared_dir: Path, llama_grammars: Callable[[str], LlamaGrammars]
) -> None:
    """Grammars with one character removed, doubled or replaced."""
    llama, draw = llama_grammars("gpt-2"), random.Random(3)
    texts = [(shared_dir / "oracles" / "grammars" / f"{name}.gbnf").read_text() for name in ("json", "chess", "list")]
    n_refused = 0
    for _ in range(150):
        text = draw.choice(texts)
        i = draw.randrange(len(text))
        mutant = text[:i] + draw.choice(["", text[i] * 2, draw.choice(text)]) + text[i + 1 :]
        llama_grammar = llama.begin(mutant)
        reason = ""
        try:
            compile(Gbnf(mutant), ByteVocab())
        except ConstraintError as error:
            reason = str(error)
        n_refused += llama_grammar is None
        # llama.cpp silently accepts a reversed range, an empty class and a second definition, with another meaning.
        stricter = any(
            word in reason for word in ("before it begins", "no characters", "defined twice", "allows no text")
        )
        assert (llama_grammar is None) == bool(reason) or (llama_grammar is not None and stricter), (
            f"{mutant!r}: {reason or 'accepted'}"
        )
        if llama_grammar is not None:
            llama_grammar.close()
    assert n_refused > 30


def chain(n: int, rule: str) -> str:
    """``n`` rules that each refer to the next rule by the word ``next`` in ``rule``."""
    return (
        "root ::= r0\n"
        + "\n".join(f"r{i} ::= {rule}".replace("next", f"r{i + 1}") for i in range(n))
        + f'\nr{n} ::= "x"'
    )


HOSTILE = {
    "rules that refer to themselves only": "root ::= a\na ::= root",
    "a chain of rules": chain(900, 'next "a"'),
    "too many rules": chain(9000, "next"),
    "what doubles sixty times": chain(60, "next next"),
    "many alternatives": 'root ::= "a"' + "".join(f' | "{i}"' for i in range(20000)),
    "a long text": 'root ::= "' + "ab" * 100000 + '"',
    "counts within counts": 'root ::= (((("a"{1000}){1000}){1000}){1000}){1000}',
    "signs upon signs": 'root ::= "a"' + "*" * 10000,
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_is_bounded(grammar: str) -> None:
    """Compiled or refused within seconds, in this process, so that a crash fails the test."""
    started = time.monotonic()
    with contextlib.suppress(ConstraintError):
        _ = compile(Gbnf(grammar), ByteVocab()).allowed
    assert time.monotonic() - started < 20, "the bound is several times the time on two busy cores"


def test_the_root_rule_and_limits_are_options() -> None:
    assert compile(Gbnf('a ::= "x" | "y" b\nb ::= "z"', root="b"), ByteVocab()).forced == tuple(b"z")
    with pytest.raises(ConstraintError, match="2 rules"):
        compile(Gbnf('a ::= "x"\nroot ::= a'), ByteVocab(), limits=Limits(rules=1))
    with pytest.raises(ConstraintError, match="21 characters"):
        compile(Gbnf('a ::= "x"\nroot ::= a.'), ByteVocab(), limits=Limits(text=20))
