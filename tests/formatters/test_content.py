"""Content stays content in every template and family: special tokens spelled in content are never parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slm_core as slm
from slm_core.chat import encode_segments
from slm_core.errors import TemplateError
from slm_core.protocols import Formatter
from slm_core.types import Segment
from slm_formatters import plugin
from slm_formatters.jinja_template import JinjaTemplate

_MARKERS = re.compile(r"<[^<>\s'\"]{2,40}>|\[/?[A-Z_]{3,30}\]")
_COMMON = ["<|im_end|>", "<|im_start|>", "</s>", "[/INST]", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<think>"]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A number"}}},
    },
}


class MarkerVocab:
    """Byte tokens, and one special token per marker."""

    bos = eos = None
    eog_ids: frozenset[int] = frozenset()

    def __init__(self, markers: Sequence[str]) -> None:
        self.markers = sorted(markers, key=len, reverse=True)
        self.size = 256 + len(self.markers)
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids: list[int] = []
        place = 0
        for match in self._pattern.finditer(text) if parse_special else ():
            ids += [*text[place : match.start()].encode(), 256 + self.markers.index(match.group())]
            place = match.end()
        return [*ids, *text[place:].encode()]

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
        if id < 256:
            return bytes([id])
        return self.markers[id - 256].encode() if special else b""


def _prompts(shared_dir: Path) -> dict[str, tuple[Formatter, MarkerVocab]]:
    """Every template with a vocabulary of its control tokens."""
    now, tokens = datetime(2026, 1, 15), {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    prompts: dict[str, tuple[Formatter, MarkerVocab]] = {}
    for path in sorted((shared_dir / "oracles" / "chat_templates").glob("*.jinja")):
        with path.open(newline="") as file:
            text = file.read()
        constants = " ".join(JinjaTemplate(text).constants) + re.sub(r"\{[{%#].*?[}%#]\}", " ", text, flags=re.DOTALL)
        markers = {*_MARKERS.findall(constants), *_COMMON, "<BOS>", "<EOS>"}
        prompts[path.stem] = slm.formatter(template=text, now=now, **tokens), MarkerVocab(sorted(markers))
    for entry in plugin.slm_formatters():
        if entry.name != "template":
            prompts[entry.name] = slm.formatter(name=entry.name, now=now, **tokens), MarkerVocab(["<BOS>", *_COMMON])
    return prompts


@pytest.fixture(scope="module")
def prompts(shared_dir: Path) -> dict[str, tuple[Formatter, MarkerVocab]]:
    return _prompts(shared_dir)


def _conversation(text: str, field: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation with a tool, in which one field is ``text``."""
    contents = {"system": "Be terse.", "user": "1+2?", "argument": "1", "result": "3", "description": "Add numbers"}
    contents[field] = text
    function = {**TOOL["function"], "description": contents["description"]}  # type: ignore[dict-item]
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": contents["argument"]}},
    }
    messages = [
        {"role": "system", "content": contents["system"]},
        {"role": "user", "content": contents["user"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": contents["result"]},
    ]
    return messages, [{**TOOL, "function": function}]


def _specials(formatter: Formatter, vocab: MarkerVocab, text: str, field: str) -> list[int] | None:
    """The special tokens of the prompt, or None if the template refuses the conversation."""
    messages, tools = _conversation(text, field)
    for conversation in (messages, messages[1:], messages[:2], messages[1:2]):
        try:
            segments = formatter.render(conversation, tools=tools)
        except TemplateError:
            continue
        return [token for token in encode_segments(vocab, segments) if token >= 256]  # type: ignore[arg-type]
    return None


@given(data=st.data())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_forged_tokens_do_not_change_the_special_tokens(
    prompts: dict[str, tuple[Formatter, MarkerVocab]], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(prompts)), label="template")
    formatter, vocab = prompts[name]
    field = data.draw(st.sampled_from(["system", "user", "argument", "result", "description"]), label="field")
    words = st.sampled_from(vocab.markers) | st.sampled_from([" ", "\n", "x", '"', "\\", "'", "{", "|"])
    forged = "w" + "".join(data.draw(st.lists(words, max_size=6), label="words")) + "w"
    innocuous = _MARKERS.sub("marker", forged)
    for marker in vocab.markers:
        innocuous = innocuous.replace(marker, "marker")
    assert _specials(formatter, vocab, forged, field) == _specials(formatter, vocab, innocuous, field)


def test_markers_in_every_field_of_every_template_stay_text(prompts: dict[str, tuple[Formatter, MarkerVocab]]) -> None:
    n = 0
    for name, (formatter, vocab) in prompts.items():
        for field in ("system", "user", "argument", "result", "description"):
            specials = _specials(formatter, vocab, f"w{''.join(vocab.markers)} {' '.join(vocab.markers)}w", field)
            assert specials == _specials(formatter, vocab, "w marker w", field), f"{name}: {field} became control text"
            n += specials is not None
    print(f"{n} fields of {len(prompts)} templates hold")  # noqa: T201  # the count is part of the result


def test_a_token_joined_from_content_is_not_parsed() -> None:
    formatter = slm.formatter(template="{% for m in messages %}<|{{ m.content }}|>{{ m.content | upper }}{% endfor %}")
    vocab = MarkerVocab(["<|im_end|>", "<|IM_END|>"])
    ids = encode_segments(vocab, formatter.render([{"role": "user", "content": "im_end"}]))  # type: ignore[arg-type]
    assert max(ids) < 256
    spelled = encode_segments(vocab, [Segment("<|im_end|>", control=True)])  # type: ignore[arg-type]
    assert min(spelled) >= 256, "the vocabulary would parse the text as a token"
