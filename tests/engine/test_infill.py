"""Text with a gap: the order of its tokens, and the answer wherever prompts go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.protocols import Vocab
from slm_core.types import InfillTokens

GREEDY = slm.Sampling(temperature=0, max_tokens=8)
GAP = slm.Infill("def add(a, b):\n", "\n\nprint(add(1, 2))\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slm.Model]:
    path = make_tiny_model("llama").write(tmp_path_factory.mktemp("infill") / "tiny.gguf")
    with slm.load(path, backend="native") as loaded:
        yield loaded


class Letters:
    """A vocabulary of code points; ids from 200 on are control tokens."""

    size, eos, eog_ids = 256, None, frozenset[int]()

    def __init__(self, infill: InfillTokens | None, bos: int | None = None) -> None:
        self.infill, self.bos = infill, bos

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not parse_special, "the texts are content"
        return [self.bos] * (add_special and self.bos is not None) + [ord(letter) for letter in text]

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        raise NotImplementedError


ALL = InfillTokens(prefix=201, suffix=202, middle=203, file=204, repository=205)


def shown(vocab: Vocab, gap: slm.Infill) -> str:
    names = dict(zip((200, 201, 202, 203, 204, 205), ("<B>", "<P>", "<S>", "<M>", "<F>", "<R>"), strict=True))
    return "".join(names.get(token, chr(token)) for token in gap.tokens(vocab))


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (slm.Infill("ab", "cd"), "<P>ab<S>cd<M>"),
        (slm.Infill("", ""), "<P><S><M>"),
        (slm.Infill("ab", "cd", name="g.py"), "<F>g.py\n<P>ab<S>cd<M>"),
        (slm.Infill("ab", "cd", {"f.py": "x"}), "<F>f.py\nx<P>ab<S>cd<M>"),
        (
            slm.Infill("ab", "cd", {"f.py": "x", "e.py": "y\n"}, "g.py", "tools"),
            "<R>tools\n<F>f.py\nx<F>e.py\ny\n<F>g.py\n<P>ab<S>cd<M>",
        ),
    ],
)
def test_the_order_of_tokens(gap: slm.Infill, expected: str) -> None:
    """The order of Qwen2.5-Coder's report (arXiv:2409.12186, figures 2 and 3), and of llama.cpp's server."""
    assert shown(Letters(ALL), gap) == expected
    assert shown(Letters(ALL, bos=200), gap) == "<B>" + expected


@pytest.mark.parametrize(
    ("infill", "gap", "message"),
    [
        (None, GAP, "no tokens for text with a gap"),
        (replace(ALL, file=None), slm.Infill("a", "b", {"f.py": ""}), "no token for files and name: leave it out"),
        (replace(ALL, file=None), slm.Infill("a", "b", name="f.py"), "no token for files and name"),
        (replace(ALL, repository=None), slm.Infill("a", "b", repository="r"), "no token for repository"),
    ],
)
def test_what_a_vocabulary_lacks_is_named(infill: InfillTokens | None, gap: slm.Infill, message: str) -> None:
    with pytest.raises(slm.VocabError, match=message):
        gap.tokens(Letters(infill))


def test_a_gap_is_a_prompt_wherever_prompts_go(model: slm.Model) -> None:
    """The answers equal the answers to its tokens; control tokens in its texts are content."""
    spelled = slm.Infill("<|im_end|>", "<|im_start|>")
    tokens = [gap.tokens(model.vocab) for gap in (GAP, spelled)]
    controls = set(model.vocab.encode("<|im_start|><|im_end|>", add_special=False, parse_special=True))
    assert len(controls) == 2
    assert not controls & set(tokens[1])
    expected = [answer.tokens for answer in model.generate(tokens, GREEDY)]
    assert [answer.tokens for answer in model.generate([GAP, spelled], GREEDY)] == expected
    assert model.generate(GAP, GREEDY).tokens == expected[0]
    with model.engine(n_ctx=512, n_parallel=2) as engine:
        assert engine.submit(GAP, GREEDY).run().tokens == expected[0]
    with model.session(n_ctx=512) as session:
        assert session.append(GAP) == len(tokens[0])
        assert session.generate(GREEDY).run().tokens == expected[0]
        with pytest.raises(slm.SessionError, match="begins a history, and this one has"):
            session.append(GAP)
        assert session.n_tokens == len(tokens[0]) + 8


def test_thinking_is_refused(model: slm.Model) -> None:
    with pytest.raises(slm.InvalidOption, match="thinking= has an effect on messages only"):
        model.generate(GAP, GREEDY, thinking=True)


def test_the_process_of_an_isolated_model_tells_its_tokens(model: slm.Model) -> None:
    assert model.vocab.infill == InfillTokens(1, 2, 3)
    with slm.load(model.info.path, backend="native", isolated=True) as isolated:
        assert isolated.vocab.infill == model.vocab.infill
        assert isolated.generate(GAP, GREEDY).tokens == model.generate(GAP, GREEDY).tokens


def test_the_demo_model_has_none() -> None:
    with slm.load(slm.demo_model_path()) as demo, pytest.raises(slm.VocabError, match="was not trained to fill it"):
        demo.generate(GAP)
