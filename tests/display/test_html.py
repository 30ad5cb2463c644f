"""HTML of notebooks: any text of a model stays text, and the displayed numbers are right."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import slm_core as slm
from display.parsed_html import checked
from slm_core.chat.prompt import encode_segments
from slm_core.display.html import text_shown
from slm_core.generation import FinishReason, Timings, ToolResult, Usage
from slm_core.types import MalformedCall, Message, ToolCall

GREEDY = slm.Sampling(temperature=0, max_tokens=24)
ATTACKS = [
    "<script>alert(1)</script>",
    "</div></span></td></table>",
    '" onmouseover="alert(1)',
    "' style='position:fixed",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp; &#60;",
    "<!-- --> <![CDATA[ ]]> <?php ?>",
    "$\\href{javascript:alert(1)}{x}$ \\(x\\)",
    "</title><style>*{display:none}</style>",
    "\u202etxt.exe\u2066",
]
# Characters that HTML can contain; another test has the others.
PLAIN = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff", include_characters="\t\n")
HOSTILE = st.lists(st.one_of(st.sampled_from(ATTACKS), st.text(PLAIN)), min_size=1).map("".join).filter(bool)


@pytest.fixture(scope="module")
def model() -> slm.Model:
    return slm.load(slm.demo_model_path(), backend="native", n_threads=1)


def answer(text: str) -> slm.Answer:
    call = ToolCall(text, {text: text})
    return slm.Answer(
        text,
        FinishReason.STOP,
        (1, 2, 3),
        Usage(5, 2, 3),
        Timings(0.1, 0.2, 0.0, 0.1),
        reasoning=text,
        tool_calls=(call,),
        malformed_calls=(MalformedCall(text, text),),
        results=(ToolResult(call, text),),
    )


@given(HOSTILE)
@example("<script>alert(1)</script>")
def test_text_of_a_model_is_text(text: str) -> None:
    hostile, harmless = checked(answer(text)._repr_html_()), checked(answer("x")._repr_html_())
    assert hostile.elements == harmless.elements, "the text changed the structure"
    assert hostile.texts.count(text) == 2, "once as reasoning, once as the answer"


@given(st.lists(st.tuples(HOSTILE, st.floats(-50, 0)), min_size=1, max_size=4))
def test_tokens_and_their_alternatives_are_text(tokens: list[tuple[str, float]]) -> None:
    from slm_core.display.blocks import TokenProbability

    shown = slm.ColouredText([TokenProbability(text, logprob, [(text, logprob)]) for text, logprob in tokens])
    parsed = checked(shown._repr_html_())
    assert "".join(text for text, _ in tokens) in parsed.text
    assert len(parsed.titles) == len(tokens)
    for (text, _), title in zip(tokens, parsed.titles, strict=True):
        assert title.count(repr(text)) >= 2


@given(st.text())
def test_every_text_can_be_shown_and_saved(text: str) -> None:
    shown = text_shown(text)
    shown.encode()  # a notebook is a file in UTF-8
    assert len(shown) == len(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "".join(a for a, b in zip(text, shown, strict=True) if a != b).isprintable() is (text == shown)


def test_a_model_with_a_hostile_name_is_text(model: slm.Model) -> None:
    info = replace(model.info, name="".join(ATTACKS), path=Path("/<script>x"), reason="<b>", formatter="&amp;")
    parsed = checked(info._repr_html_())
    assert "".join(ATTACKS) in parsed.texts
    assert {"/<script>x", "<b>", "&amp;"} <= set(parsed.texts)
    assert checked(model._repr_html_()).text.count("2,829,120") == 1


def test_a_chat_shows_its_messages_as_text(model: slm.Model) -> None:
    messages = [Message("user", attack) for attack in ATTACKS]
    with model.chat(system="Be <b>kind</b>.", messages=messages, n_ctx=1024) as chat:
        parsed = checked(chat._repr_html_())
        assert [text for text in parsed.texts if text in ATTACKS] == ATTACKS
        assert "Be <b>kind</b>." in parsed.texts
    assert "closed" in checked(chat._repr_html_()).text
    assert repr(chat) == "<Chat: closed>"


def test_a_chat_marks_what_the_next_answer_computes(model: slm.Model) -> None:
    with model.chat(system="You are terse.", n_ctx=512, sampling=GREEDY) as chat:
        chat.send("My dog is called Rex.")
        chat.send("What is my dog called?")
        assert marked(chat) == computed_by_hand(chat) == [True] * 5
        chat.edit(3, "What is my cat called?")
        assert marked(chat) == computed_by_hand(chat) == [True] * 3 + [False] * 2
        chat.edit(0, "You are kind.")
        assert marked(chat) == computed_by_hand(chat) == [False] * 5
        chat.send("Hello!")
        assert marked(chat) == [True] * 7


def marked(chat: slm.Chat) -> list[bool]:
    labels = re.findall(r"(?:^|>)\d+ (?:system|user|assistant)([^<]*)<", chat._repr_html_())
    return ["not computed" not in label for label in labels]


def computed_by_hand(chat: slm.Chat) -> list[bool]:
    """Whether the context holds the tokens of each message and of all before it, without the token that ends it."""
    tokens = chat.session.context.tokens(chat.session.seq_id)
    prefixes = [
        encode_segments(model_vocab, chat.formatter.render(chat.messages[: i + 1], add_generation_prompt=False))
        for i in range(len(chat.messages))
        if (model_vocab := chat.session.vocab)
    ]
    newline = 1  # after the end of a message the template writes a line break
    return [tuple(ids[: -1 - newline]) == tokens[: len(ids) - 1 - newline] for ids in prefixes]


def test_a_context_shows_whose_cells_are_whose(model: slm.Model) -> None:
    with model.new_context(n_ctx=64, n_seq_max=4) as context:
        batch = context.new_batch()
        batch.extend(range(10, 30), slm.Pos(0, 0), logits="none")
        context.decode(batch)
        context.fork(0, 1)
        context.truncate(slm.Pos(1, 12))
        html = context._repr_html_()
        parsed = checked(html)
        n_own = sum(context.n_exclusive(seq_id) for seq_id in range(4))
        assert (
            uses(parsed.text)
            == {"own": n_own, "shared": 12, "free": context.n_free}
            == {"own": 8, "shared": 12, "free": 44}
        )
        assert [title.split(": ")[1] for title in parsed.titles] == ["shared"] * 12 + ["own"] * 8 + ["free"] * 44
        assert "sequence 1" in parsed.text and "12 tokens" in parsed.text and "sequence 2" not in parsed.text
    assert "closed" in checked(context._repr_html_()).text


def test_a_large_context_has_a_small_map(model: slm.Model) -> None:
    with model.new_context(n_ctx=100_000) as context:
        parsed = checked(context._repr_html_())
        assert 200 <= len(parsed.titles) <= 256
        assert parsed.titles[-1].startswith("cells 99,") and "to 99,999: free" in parsed.titles[-1]


def uses(text: str) -> dict[str, int]:
    return {use: int(n.replace(",", "")) for n, use in re.findall(r"([\d,]+) (own|shared|cached|free)", text)}


def test_an_isolated_context_has_a_map_too() -> None:
    with (
        slm.load(slm.demo_model_path(), backend="native", isolated=True, n_threads=1) as model,
        model.new_context(n_ctx=64, n_seq_max=2) as context,
    ):
        batch = context.new_batch()
        batch.extend(range(10, 30), slm.Pos(0, 0), logits="none")
        context.decode(batch)
        assert uses(checked(context._repr_html_()).text) == {"own": 20, "free": 44}
        assert repr(context) == "<IsolatedContext: 20 of 64 positions used, 1 of 2 sequences>"


def test_an_engine_shows_how_its_positions_are_used(model: slm.Model) -> None:
    with model.engine(n_ctx=512) as engine:
        engine.submit("Once upon a time", GREEDY, request_id="<script>").run()
        parsed = checked(engine._repr_html_())
        assert sum(uses(parsed.text).values()) == 512
        assert "answered1" in parsed.text
    assert repr(engine) == "<Engine: 'Pip', closed>"


def test_embeddings_show_cosines() -> None:
    vectors = np.array([[3, 0], [0, 2], [-1, 0], [1, 1]], np.float32)
    parsed = checked(slm.Embeddings(vectors, slm.Pooling.MEAN, (1, 2, 3, 4))._repr_html_())
    grid = [text for text in parsed.texts if re.fullmatch(r"-?\d\.\d\d", text)]
    assert [float(text) for text in grid] == pytest.approx(
        [1, 0, -1, 0.71, 0, 1, 0, 0.71, -1, 0, 1, -0.71, 0.71, 0.71, -0.71, 1]
    )
    many = checked(slm.Embeddings(np.ones((40, 3), np.float32), slm.Pooling.MEAN, (1,) * 40)._repr_html_())
    assert "28 more vectors not shown" in many.text
    empty = slm.Embeddings(np.empty((0, 0), np.float32), slm.Pooling.MEAN, ())
    assert "0 vectors" in checked(empty._repr_html_()).text


def test_a_scored_text_is_coloured(model: slm.Model) -> None:
    score = model.score("My dog is called Rex. €", top=2)
    shown = slm.ColouredText.of_score(score, model.vocab)
    assert shown.text == model.vocab.decode(score.tokens, special=True)
    parsed = checked(shown._repr_html_())
    assert shown.text in parsed.text
    likeliest = model.vocab.decode([score.top[1][0][0]], special=True)
    assert f"{likeliest!r}: {100 * np.exp(score.top[1][0][1]):.1f} %" in parsed.titles[0], (
        "the first token has no probability"
    )


def test_a_streamed_answer_is_coloured(model: slm.Model) -> None:
    with model.chat(n_ctx=256, sampling=replace(GREEDY, logprobs=3)) as chat:
        events = list(chat.stream("My dog is called Rex."))
    shown = slm.ColouredText.of_events(events, model.vocab)
    assert shown.text.startswith("".join(event.text for event in events))
    assert [token.logprob for token in shown.tokens] == [event.logprob for event in events]
    assert all(len(token.alternatives) == 3 for token in shown.tokens)
    colours = re.findall(r"hsla\((\d+),", shown._repr_html_())
    assert [int(hue) for hue in colours] == [round(120 * np.exp(event.logprob)) for event in events]
