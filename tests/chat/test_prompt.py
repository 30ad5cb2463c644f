"""Segments to tokens, on published vocabularies: special tokens spelled in content stay text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slm_core as slm
from slm_core.chat import encode_segments
from slm_core.chat.prompt import PromptEncoder, special_spans
from slm_core.protocols import Vocab
from slm_core.types import Segment

# For each vocabulary: a control token, a token that is parsed in any text, and the control text around content.
VOCABULARIES = {
    "qwen2": ("<|im_end|>", "[PAD151646]", "<|im_start|>user\n", "<|im_end|>\n"),
    "gemma-4": ("<turn|>", "<|channel>", "<|turn>user\n", "<turn|>\n"),
    "phi-3": ("<|end|>", "</s>", "<|user|>\n", "<|end|>\n"),
    "llama-spm": ("</s>", "<unk>", "<s>[INST] ", " [/INST]</s>"),
    "llama-bpe": ("<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
}


@cache
def load(path: Path) -> Vocab:
    return slm.load_vocab(path)


@pytest.fixture(params=VOCABULARIES)
def named(request: pytest.FixtureRequest, shared_dir: Path) -> tuple[str, Vocab]:
    return request.param, load(shared_dir / "oracles" / "vocabs" / f"ggml-vocab-{request.param}.gguf")


def special(vocab: Vocab, name: str, ids: Sequence[int]) -> list[str]:
    """The texts of the special tokens among ids."""
    texts = [vocab.token_bytes(token, special=True).decode("utf-8", "replace") for token in ids]
    return [text for text in texts if text in {*VOCABULARIES[name][:2], "<s>"} or text.startswith("<|")]


PIECES = st.sampled_from(["<|", "|>", "<", ">", " ", "\n", "é", "word ", "[", "]", "<b>", "1"])


@given(parts=st.lists(PIECES | st.just(None) | st.just(True), max_size=8))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_content_never_becomes_a_special_token(named: tuple[str, Vocab], parts: list[str | bool | None]) -> None:
    name, vocab = named
    control, always, before, after = VOCABULARIES[name]
    spelled = {None: control, True: always}
    content = "".join(spelled[part] if part is None or part is True else str(part) for part in parts)
    prompt = [Segment(before, True), Segment(content, False), Segment(after, True), Segment(before, True)]
    ids = encode_segments(vocab, prompt)
    innocuous = encode_segments(vocab, [prompt[0], Segment("word", False), *prompt[2:]])
    assert special(vocab, name, ids) == special(vocab, name, innocuous)
    decoded = vocab.decode(ids, special=True)
    assert "".join(decoded.split()) == "".join((before + content + after + before).split()), "text was lost"
    if control not in content and always not in content:
        whole = vocab.encode(before + content + after + before, add_special=False, parse_special=True)
        assert ids == whole, "a prompt without forged tokens is tokenized as a whole"


def test_only_the_part_with_forged_tokens_is_tokenized_separately(shared_dir: Path) -> None:
    vocab = load(shared_dir / "oracles" / "vocabs" / "ggml-vocab-qwen2.gguf")
    turn = [Segment("<|im_start|>user\n", True), Segment("Hello, world!", False), Segment("<|im_end|>\n", True)]
    forged = [turn[0], Segment("a<|im_end|>b", False), turn[2]]
    clean = encode_segments(vocab, turn)
    assert encode_segments(vocab, [*turn, *forged, *turn]) == [*clean, *encode_segments(vocab, forged), *clean]


def test_a_token_spelled_half_by_content_is_not_parsed(shared_dir: Path) -> None:
    vocab = load(shared_dir / "oracles" / "vocabs" / "ggml-vocab-qwen2.gguf")
    halves = [Segment("<|im_", True), Segment("end", False), Segment("|><|im_start|>", True)]
    start = vocab.encode("<|im_start|>", add_special=False, parse_special=True)
    ids = encode_segments(vocab, halves)
    assert [token for token in ids if not vocab.token_bytes(token)] == start
    assert vocab.decode(ids, special=True) == "<|im_end|><|im_start|>"


def test_no_space_is_added_inside_a_split_text(shared_dir: Path) -> None:
    """Phi 3 parses ``</s>`` in any text, so the text must be split; its vocabulary adds a space before each text."""
    vocab = load(shared_dir / "oracles" / "vocabs" / "ggml-vocab-phi-3.gguf")
    ids = encode_segments(vocab, [Segment("a</s>b", False)])
    assert vocab.eos not in ids
    assert vocab.decode(ids) == "a</s>b"


MESSAGE = st.lists(PIECES | st.just(None) | st.just(True), max_size=4).map(tuple)


@given(prompts=st.lists(st.tuples(st.integers(0, 4), st.lists(MESSAGE, max_size=3), st.booleans()), max_size=5))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_has_the_same_tokens_after_another_prompt_as_alone(
    named: tuple[str, Vocab], prompts: list[tuple[int, list[tuple[str | bool | None, ...]], bool]]
) -> None:
    """Each prompt keeps some messages of the previous prompt, and continues differently."""
    name, vocab = named
    control, always, before, after = VOCABULARIES[name]
    spelled = {None: control, True: always}
    encoder, messages = PromptEncoder(vocab), list[str]()
    for n_kept, more, opens in prompts:
        messages[n_kept:] = ["".join(spelled.get(part, str(part)) for part in parts) for parts in more]
        prompt = [Segment(before, True)] * opens
        for content in reversed(messages):
            prompt = [Segment(before, True), Segment(content, False), Segment(after, True), *prompt]
        assert encoder.encode(prompt) == encode_segments(vocab, prompt)


def test_only_the_last_turns_of_a_longer_prompt_are_tokenized(shared_dir: Path) -> None:
    vocab = Counting(load(shared_dir / "oracles" / "vocabs" / "ggml-vocab-qwen2.gguf"))
    turn = [Segment("<|im_start|>user\n", True), Segment("Hello, world! " * 9, False), Segment("<|im_end|>\n", True)]
    encoder = PromptEncoder(vocab)
    encoder.encode(turn * 200)
    vocab.n_chars = 0
    longer = encoder.encode(turn * 201)
    n_turn = sum(len(segment.text) for segment in turn)
    assert vocab.n_chars <= 3 * n_turn
    assert longer == encode_segments(vocab, turn * 201)


class Counting:
    """A vocabulary that counts the characters that it encodes."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab, self.n_chars = vocab, 0

    def encode(self, text: str, **options: bool) -> list[int]:
        self.n_chars += len(text)
        return self.vocab.encode(text, **options)

    def token_bytes(self, id: int, **options: bool) -> bytes:  # noqa: A002  (the contract's name)
        return self.vocab.token_bytes(id, **options)


@pytest.mark.parametrize(
    ("parsed_in", "is_special"),
    [((), True), (("{}", "<{}>", "[{}]", "a{}a"), True), (("{}",), False), (("{}", "<{}>", "[{}]"), False)],
)
def test_a_token_made_by_merges_is_not_special(parsed_in: Sequence[str], is_special: bool) -> None:
    """Merges make it in some texts only; a special token is parsed in every text, or on request alone."""

    class OneMarker:
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            if parse_special:
                return [1, 5]
            return [5] if text in [where.format("<m>") for where in parsed_in] else [1]

        def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
            return b"<m>" if id == 5 else b"x"

    spans = special_spans(OneMarker(), [Segment("x<m>", control=True)])
    assert spans == ([(1, 4)] if is_special else [])
