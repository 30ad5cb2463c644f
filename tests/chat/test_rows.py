"""Embedding rows in messages and sessions: parts, placeholders, dumps, drafts. The suite tests the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from scripted import TagFormatter
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.toy.backend import ToyBackend, ToyModel
from slm_core.chat import Chat, ChatOptions, Session, row_prompts
from slm_core.chat.records import check_records
from slm_core.chat.row_prompts import RowPromptEncoder
from slm_core.chat.rows_dump import read_rows, write_rows
from slm_core.container import pack, unpack
from slm_core.context.inputs import HeldInput
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import (
    InvalidEmbedding,
    InvalidOption,
    InvalidSnapshot,
    SlmError,
    SnapshotMismatch,
    TemplateError,
    UnsupportedInput,
)
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import PromptLookup, Proposal, Speculation
from slm_core.sampling import Sampling
from slm_core.types import EMBEDDED, Capability, ContextOptions, Message, ModelOptions, Role, Segment

GREEDY = Sampling(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyModel]:
    path = make_tiny_model("llama", "f32").write(tmp_path_factory.mktemp("rows") / "tiny.gguf")
    with ToyBackend().load(Path(path), ModelOptions()) as model:
        yield model


@pytest.fixture
def session(model: ToyModel) -> Session:
    return Session(model.new_context(ContextOptions(96, 2, 16)), model.vocab, sampling=GREEDY, owns_context=True)


def rows(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def part(model: ToyModel, n: int = 4, seed: int = 0, **options: object) -> EmbeddingRows:
    return EmbeddingRows(rows(n, model.info.n_embd, seed), **options)


def new_chat(model: ToyModel, messages: Sequence[Message] = (), formatter: object = None) -> Chat:
    session = Session(model.new_context(ContextOptions(96, 2, 16)), model.vocab, owns_context=True)
    return Chat(session, formatter or TagFormatter(), messages=messages, options=ChatOptions(GREEDY))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"rows": np.zeros((3, 4))}, InvalidEmbedding, "float64"),
        ({"rows": [[1.0]]}, InvalidEmbedding, "list"),
        ({"rows": np.zeros((0, 4), np.float32)}, InvalidEmbedding, "0 embedding rows"),
        ({"rows": np.full((2, 4), np.nan, np.float32)}, InvalidEmbedding, "row 0 of 2"),
        ({"offsets": np.zeros((2, 3), int)}, InvalidEmbedding, r"\[3, 3\]"),
        ({"offsets": np.zeros((3, 3))}, InvalidEmbedding, "float64"),
        ({"bias": np.zeros(2, np.float32)}, InvalidEmbedding, r"\[3\]"),
        ({"bias": np.full(3, np.nan, np.float32)}, InvalidEmbedding, "nan"),
        ({"blocks": [(0, 4)]}, InvalidOption, "of 3 rows"),
        ({"blocks": [(1, 1)]}, InvalidOption, "of 3 rows"),
        ({"blocks": [(0, 2), (1, 3)]}, InvalidOption, "in order"),
        ({"blocks": [0, 2]}, InvalidOption, "ranges"),
        ({"before": None}, InvalidOption, "before=None"),
    ],
)
def test_invalid_rows_are_refused(arguments: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        EmbeddingRows(**{"rows": np.zeros((3, 4), np.float32), **arguments})


def test_rows_are_copied_and_compare_by_content() -> None:
    numbers = rows(3, 4)
    first, second = EmbeddingRows(numbers, after="x"), EmbeddingRows(numbers.copy(), after="x")
    assert first == second
    assert hash(first) == hash(second)
    numbers[:] = 0
    assert first.rows.any()
    with pytest.raises(ValueError, match="read-only"):
        first.rows[0, 0] = 1
    others = [{"after": "y"}, {"rows": rows(3, 4, 1)}, {"offsets": np.zeros((3, 3), int)}, {"blocks": [(0, 2)]}]
    others.append({"bias": np.array([0, 0, -1], np.float32)})
    assert all(dataclasses.replace(first, **change) != first for change in others)
    assert dataclasses.replace(first, bias=np.zeros(3, np.float32)) == first, "a bias of 0 is none"


def test_a_message_takes_parts() -> None:
    a, b = EmbeddingRows(rows(2, 4)), EmbeddingRows(rows(2, 4, 1))
    message = Message("user", ["see ", a, "and", b])
    assert (message.content, message.rows) == ("see \ufffcand\ufffc", (a, b))
    assert Message("user", message.content, rows=message.rows) == message
    assert Message("user", ["only ", "text"]) == Message("user", "only text")
    assert Message("user", "plain \ufffc").rows == ()


@pytest.mark.parametrize("content", [["x", 3], [b"x"], 5, ["\ufffc", "rows"], {"a": "b"}])
def test_malformed_parts_are_refused(content: object) -> None:
    if content == ["\ufffc", "rows"]:
        content = ["\ufffc", EmbeddingRows(rows(1, 4))]
    with pytest.raises(InvalidOption):
        Message("user", content)


def test_rows_have_no_place_in_openais_shape_or_a_template() -> None:
    message = Message("user", [EmbeddingRows(rows(2, 4))])
    with pytest.raises(InvalidOption, match="OpenAI"):
        message.to_openai()
    from slm_core import formatter

    with pytest.raises(InvalidOption, match="Chat"):
        formatter(name="chatml").render([message])


def test_the_prompt_has_the_rows_between_the_tokens_of_the_texts(model: ToyModel) -> None:
    image = part(model, before="<s>", after="</s>")
    with new_chat(model, [Message("user", ["a", image, "b"])]) as chat:
        inputs = chat.session.inputs
    encode = model.vocab.encode
    first = encode("<|start|>user:a<s>", add_special=False, parse_special=True)
    last = encode("</s>b<|end|>", add_special=False, parse_special=True)
    assert [one for one in inputs if not isinstance(one, HeldInput)] == [*first, *last]
    assert all(isinstance(one, HeldInput) for one in inputs[len(first) : len(first) + 4])
    np.testing.assert_array_equal(np.stack([one.row for one in inputs if isinstance(one, HeldInput)]), image.rows)


class Careless(TagFormatter):
    """A format that drops, repeats or reorders messages."""

    def __init__(self, change: slice) -> None:
        self._change = change

    def render(self, messages: Sequence[Message], **options: object) -> list[Segment]:
        messages = list(messages)
        return super().render(messages * 2 if self._change == slice(None) else messages[self._change], **options)


@pytest.mark.parametrize("change", [slice(1), slice(None)])
def test_a_template_that_drops_or_repeats_rows_is_refused(model: ToyModel, change: slice) -> None:
    messages = [Message("user", ["a", part(model)]), Message("user", ["b", part(model, seed=1)])]
    with pytest.raises(TemplateError, match="drops or repeats"):
        new_chat(model, messages, Careless(change))


def test_a_template_may_reorder_messages(model: ToyModel) -> None:
    a, b = part(model), part(model, seed=1)
    messages = [Message("user", ["a", a]), Message("user", ["b", b])]
    with new_chat(model, messages, Careless(slice(None, None, -1))) as chat:
        rows = [one.row for one in chat.session.inputs if isinstance(one, HeldInput)]
    np.testing.assert_array_equal(np.stack(rows), np.concatenate([b.rows, a.rows]))


def test_texts_that_look_like_placeholders_are_refused_beside_rows_only(model: ToyModel) -> None:
    text = Message("user", "\U000f0000 \ufffc")
    with new_chat(model, [text]) as chat:
        assert chat.session.text.count("\U000f0000 \ufffc") == 1
        chat.delete(0)
        with pytest.raises(InvalidOption, match="private use"):
            chat.send([text, Message("user", [part(model)])])
        assert chat.messages == ()


def test_as_many_rows_as_there_are_placeholders(model: ToyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_prompts, "_MOST", 2)
    message = Message("user", [part(model), "and", part(model)])
    with new_chat(model, [message]) as chat:
        with pytest.raises(InvalidOption, match=r"3 embedding rows .*up to 2"):
            chat.send(Message("user", [part(model)]))
        assert chat.messages == (message,)


def test_prompts_reuse_the_inputs_of_rows(model: ToyModel) -> None:
    image, encoder = part(model), RowPromptEncoder(model.vocab)
    prompts = [[Segment(f"{i} \U000f0000 {i}", control=False)] for i in range(2)]
    first, second = (encoder.encode(prompt, [image]) for prompt in prompts)
    assert next(x for x in first if isinstance(x, HeldInput)) is next(x for x in second if isinstance(x, HeldInput))


def test_refused_rows_leave_the_chat_as_it_was(model: ToyModel) -> None:
    with new_chat(model, [Message("user", "a")]) as chat:
        before = chat.messages, chat.session.tokens
        wide = EmbeddingRows(rows(2, model.info.n_embd + 1))
        with pytest.raises(InvalidEmbedding, match="wide"):
            chat.send(Message("user", [wide]))
        with pytest.raises(InvalidOption, match="n_batch"):
            chat.edit(0, [part(model, 17, blocks=[(0, 17)])])
        chat.session.context.capabilities = frozenset(Capability) - {Capability.EMBEDDING_INPUT}
        with pytest.raises(UnsupportedInput, match="embedding_input"):
            chat.edit(0, [part(model)])
        assert (chat.messages, chat.session.tokens) == before


def test_biases_of_a_message_are_part_of_the_history(model: ToyModel) -> None:
    """Rows with another bias are other inputs; dumps of chats and sessions have them."""
    from slm_core.chat import chat_dump

    bias = np.array([0, -np.inf, 1.5, -2], np.float32)
    with new_chat(model, [Message("user", ["a", part(model, bias=bias)])]) as chat:
        assert [one.bias for one in chat.session.inputs if isinstance(one, HeldInput)] == bias.tolist()
        chat.session.prefill()
        n_before = len(chat.session.tokens)
        chat.edit(0, ["a", part(model, bias=-2 * np.ones(4, np.float32))])
        assert [one.bias for one in chat.session.inputs if isinstance(one, HeldInput)] == [-2] * 4
        assert len(chat.session.tokens) == n_before
        chat.edit(0, ["a", part(model, bias=bias)])
        restored = Session.restore(model.new_context(ContextOptions(96, 2, 16)), model.vocab, chat.session.dump())
        assert restored.inputs == chat.session.inputs
        assert chat_dump.read(chat.dump()).messages == chat.messages
        chat.session.context.capabilities = frozenset(Capability) - {Capability.ATTENTION_BIAS}
        with pytest.raises(UnsupportedInput, match="attention bias of rows"):
            chat.edit(0, ["b", part(model, bias=bias)])


def test_forget_does_not_divide_blocks(model: ToyModel) -> None:
    """Two images whose first rows are equal: the first difference of the prompts lies within the second image."""
    numbers = rows(6, model.info.n_embd)
    a, b = (EmbeddingRows(np.concatenate([numbers[:3], numbers[i : i + 1]]), blocks=[(0, 4)]) for i in (4, 5))
    messages = [Message("user", ["x", a]), Message("user", ["x", b]), Message("user", "y")]
    with new_chat(model, messages) as chat, new_chat(model, messages[1:]) as expected:
        chat.session.prefill()
        chat.forget(0)
        assert chat.session.inputs == expected.session.inputs


def test_drafters_and_samplers_see_tokens_only(session: Session) -> None:
    histories: list[list[int]] = []

    class Watching(PromptLookup):
        def draft(self, tokens: Sequence[int], n: int, *args: object) -> Proposal:
            histories.append(list(tokens))
            return super().draft(tokens, n)

    text = session.vocab.encode("abcabcab", add_special=False, parse_special=False)
    session.append_tokens(text)
    session.append_rows(rows(3, session.context.n_embd))
    session.append_tokens(text)
    plain = session.generate(dataclasses.replace(GREEDY, repeat_penalty=1.3)).run()
    session.truncate(2 * len(text) + 3)
    drafted = session.generate(
        dataclasses.replace(GREEDY, repeat_penalty=1.3), speculation=Speculation(Watching())
    ).run()
    assert drafted.tokens == plain.tokens
    assert histories
    assert all(EMBEDDED not in tokens and tokens[: 2 * len(text)] == [*text, *text] for tokens in histories)


def test_a_shift_moves_its_ends_out_of_blocks(session: Session) -> None:
    session.append_tokens([5, 6])
    session.append_rows(rows(10, session.context.n_embd), blocks=[(0, 9)])
    session.append_tokens([7] * 80)
    answer = session.generate(dataclasses.replace(GREEDY, max_tokens=12), shift=TokenShift(keep=4, share=0.3)).run()
    assert len(answer.tokens) == 12
    assert answer.overflowed is not None
    assert session.tokens[:11] == (5, 6, *[EMBEDDED] * 9)
    assert EMBEDDED not in session.tokens[11:], "the row after the block was not dropped"


def test_dumps_of_sessions_are_checked(model: ToyModel, session: Session) -> None:
    session.append_tokens([5, 6])
    session.append_rows(rows(6, model.info.n_embd), blocks=[(1, 5)])
    meta, sections = unpack("session", session.dump())
    assert len(sections) == 8
    damaged = [
        (*sections[:7], b""),
        sections[:7],
        (*sections[:7], sections[7][:-4]),
        (*sections, b""),
        (sections[0], sections[1] + b"\1\0\0\0", *sections[2:]),
    ]
    for parts in damaged:
        context = model.new_context(ContextOptions(96, 2, 16))
        with pytest.raises((InvalidSnapshot, SnapshotMismatch)):
            Session.restore(context, model.vocab, pack("session", meta, parts))
        assert (context.length(0), context.n_free) == (0, 96)
    small = model.new_context(ContextOptions(96, 2, 3))
    with pytest.raises(SnapshotMismatch, match="n_batch"):
        Session.restore(small, model.vocab, session.dump())
    refusing = model.new_context(ContextOptions(96, 2, 16))
    refusing.capabilities = frozenset(Capability) - {Capability.EMBEDDING_INPUT}
    with pytest.raises(SnapshotMismatch, match="embedding"):
        Session.restore(refusing, model.vocab, session.dump())


def test_a_block_may_begin_with_tokens(model: ToyModel, session: Session) -> None:
    width = model.info.n_embd
    block = [HeldInput(token=5, ahead=2), HeldInput(token=EMBEDDED, row=rows(1, width)[0], ahead=1), 7]
    check_records(session.context, block)
    block[1] = HeldInput(token=EMBEDDED, row=rows(1, width + 1)[0], ahead=1)
    with pytest.raises(InvalidEmbedding, match=rf"embedding rows are {width + 1} wide \(accepted: {width}"):
        check_records(session.context, block)


def test_rows_of_a_dump_are_the_same_rows() -> None:
    offsets = np.array([(0, y, x) for y in range(2) for x in range(3)])
    bias = np.array([0, -np.inf, 2, 0, -1, 0], np.float32)
    image = EmbeddingRows(rows(6, 5), [(0, 2), (2, 5)], offsets, "<a>", "<b>", bias)
    sections: list[bytes] = []
    stored = write_rows(image, sections)
    assert read_rows(stored, iter(sections)) == image
    for value in (None, {}, {"before": "", "after": 3}, {**stored, "more": ""}):
        with pytest.raises(InvalidSnapshot):
            read_rows(value, iter(sections))
    with pytest.raises(InvalidSnapshot):
        read_rows(stored, iter(()))
    whole = SequenceSnapshot.from_bytes(sections[0])
    removed = Edit(0, tuple(whole.held()[:1]), 7)
    for more in ({"payload": b"x"}, {"edits": (removed,)}, {"adapters": {"0" * 64: 1.0}}):
        with pytest.raises(InvalidSnapshot, match="malformed"):
            read_rows(stored, iter([dataclasses.replace(whole, **more).to_bytes()]))


def test_dumps_of_chats_are_checked(model: ToyModel) -> None:
    with new_chat(model, [Message(Role.USER, ["a", part(model)])]) as chat:
        meta, sections = unpack("chat", chat.dump())
    message = dict(meta["messages"][0])
    changes = [
        (message, sections[:1]),
        (message, [*sections, sections[1]]),
        ({**message, "content": "a"}, sections),
        ({**message, "rows": 3}, sections),
        ({**message, "rows": []}, sections),
        (message, [sections[0], sections[1][:-8]]),
    ]
    from slm_core.chat import chat_dump

    assert chat_dump.read(pack("chat", meta, sections)).messages == chat.messages
    for changed, parts in changes:
        with pytest.raises(SlmError):
            chat_dump.read(pack("chat", {**meta, "messages": [changed]}, parts))
