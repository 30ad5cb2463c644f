"""Features of templates in transformers besides messages, compared with transformers."""

# ruff: noqa: E501  # a template stays on one line
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import slm_core as slm
from slm_core.errors import TemplateError
from slm_core.types import Segment

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
GENERATION = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{%- generation %}{% for part in m.content.split(' ') %}{{ part }}{{ loop.index }} {% endfor %}</s>"
    "{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long <"},
]
PREFIX: list[dict[str, Any]] = [{"role": "user", "content": "Write."}]
ENDINGS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Once upon"},
    {"role": "assistant", "content": "Once upon "},
    {"role": "assistant", "content": " \nOnce upon a time,\n\n"},
    {"role": "assistant", "content": [{"type": "text", "text": "Once"}, {"type": "text", "text": " upon "}]},
    {"role": "assistant", "content": "tail", "reasoning_content": "I think "},
    {"role": "assistant", "content": "<think>hm</think>tail"},
    {"role": "assistant", "content": ""},
]


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.fixture(scope="module")
def templates(shared_dir: Path) -> dict[str, str]:
    templates = {}
    for path in sorted((shared_dir / "oracles" / "chat_templates").glob("*.jinja")):
        with path.open(newline="") as file:
            templates[path.stem] = file.read()
    return templates


def test_generation_tags_mark_the_mask_of_transformers() -> None:
    (rendered,), (spans,) = render_jinja_template(
        [TURNS], chat_template=GENERATION, return_assistant_tokens_mask=True, **TOKENS
    )
    segments = slm.formatter(template=GENERATION, **TOKENS).render(TURNS)
    assert text_of(segments) == rendered
    mask = "".join("1" if segment.generated else "0" for segment in segments for _ in segment.text)
    masked = [i for start, end in spans for i in range(start, end)]
    assert mask == "".join("1" if i in masked else "0" for i in range(len(rendered)))
    assert {(s.control, s.generated) for s in segments} == {(a, b) for a in (True, False) for b in (True, False)}


def continued_by_transformers(template: str, messages: list[dict[str, Any]], field: bool | str) -> str | None:
    try:
        return render_jinja_template([messages], chat_template=template, continue_final_message=field, **TOKENS)[0][0]  # type: ignore[no-any-return]
    except Exception:  # any error means that it cannot
        return None


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda message: str(message)[:60])
def test_continued_messages_equal_transformers(templates: dict[str, str], ending: dict[str, Any]) -> None:
    n = 0
    for name, template in templates.items():
        if "strftime_now" in template:  # the clock of transformers cannot be set
            continue
        for field in (True, "reasoning_content"):
            expected = continued_by_transformers(template, [*PREFIX, ending], field)
            formatter = slm.formatter(template=template, **TOKENS)
            if expected is None:
                with pytest.raises(TemplateError):
                    formatter.render([*PREFIX, ending], continue_final_message=field)
                continue
            segments = formatter.render([*PREFIX, ending], continue_final_message=field)
            assert text_of(segments) == expected, f"{name} {field}"
            n += 1
    assert n or ending["content"] == "<think>hm</think>tail", "no template could continue the message"


def test_a_message_object_can_be_continued() -> None:
    formatter = slm.formatter(name="chatml")
    messages = [slm.Message("user", "Write."), slm.Message("assistant", "Once upon")]
    assert text_of(formatter.render(messages, continue_final_message=True)).endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(TemplateError, match="no message to continue"):
        formatter.render([], continue_final_message=True)
    with pytest.raises(TemplateError, match="has no 'reasoning_content' to continue"):
        formatter.render(messages, continue_final_message="reasoning_content")


def test_all_names_of_reasoning_are_accepted() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}|{{ messages[0].reasoning }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        messages = [{"role": "assistant", "content": "", name: "hm", "tool_calls": None}]
        expected = render_jinja_template([messages], chat_template=template)[0][0]
        assert text_of(slm.formatter(template=template).render(messages)) == expected


def test_tools_from_functions_equal_transformers() -> None:
    def add(a: int, b: int = 2) -> int:
        """Add numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    template = "{{ tools | tojson }}"
    expected = render_jinja_template([[]], tools=[add], chat_template=template)[0][0]
    assert text_of(slm.formatter(template=template).render([], tools=[add])) == expected


FEATURES = [
    "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': [1.0, none, true]} | tojson(sort_keys=true) }}",
    "{{ {'é': '<\"'} | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% elif loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(self=1, x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.role[0] %}{% endfor %}{{ ns.x }}",
    "{{ dict(a=1, b=2) | items | list }}{{ dict.fromkeys(['a']) }}{{ documents is none }}{{ x is defined }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages[-1]['content'].rsplit(' ', 1)[-1] }}{{ messages[0].content is string }}{{ messages[0] is mapping }}",
    "{%- macro m(a, b='x') -%}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{%- endmacro -%}{{ m(1, 2, 3, c=4) }}",
    "{% set x %}a{{ messages[0].content }}{% endset %}{{ x | length }}{{ x | upper }}{{ x.startswith('a') }}",
    "  {% if true %}\n  a\n  {% endif %}\n  b\n{# c #}\nd\n",
    "{{ messages[::-1] | map(attribute='content') | list }}{{ range(3) | list }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 3 }}",
    "{{ messages[5].content }}|{{ nothing }}|{{ messages[0].nothing | default('d') }}|{{ messages[0].get('nothing', 'g') }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}{% with y = 1 %}{{ y }}{% endwith %}{% raw %}{{ }}{% endraw %}",
    "{{ [3, 1, 2] | sort }}{{ [1, 1] | unique | list }}{{ ['a', 'b'] | last }}{{ 'a,b' | replace(',', ';') }}{{ ' x ' | trim }}",
    "{% for k, v in messages[0] | dictsort %}{{ k }}={{ v }};{% endfor %}{% for a in [1, 2] recursive %}{{ a }}{% endfor %}",
    "{{ '%s-%05.1f' % ('a', 2.5) }}{{ '{:>4}|{}'.format('a', 1) }}{{ 'a' ~ 1 ~ none }}{{ 'ab' * 2 }}{{ 'b' in 'abc' }}",
    "{{ messages[0].content[1:] }}{{ messages[0].content | first }}{{ messages[0].content | list }}{{ 'A'.lower().upper().title() }}",
    "{{ raise_exception('no: ' + messages[0].content) }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__ }}{{ messages[0].content.__class__.__name__ }}",
    "{{ messages[0].content + [1] }}",
    "{{ [1] + messages[0].content }}",
    "{{ messages[0].content.nothing.more }}",
    "{{ messages[0].content() }}",
    "{{ messages[0].content - 1 }}{{ messages.nothing.more }}",
    "{{ messages[0].content | safe | tojson | length | items | list }}",
    "{% for m in messages %}{{ loop.previtem.role }}{{ loop.nextitem.role }}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{% endfor %}",
    "{{ 5 | string + '1' | int | string }}{{ '3' | float }}{{ 3.7 | round }}{{ -3 | abs }}{{ [1, 2] | sum }}{{ [1, 2] | max }}",
    "{{ 'a\\nb' | indent(2) }}{{ 'abc def' | capitalize }}{{ 'a b c' | wordcount }}{{ 'x' | center(5) }}{{ [1,2,3] | batch(2) | list }}",
    "{{ messages[0] | pprint }}{{ '<b>a</b>' | striptags }}{{ 'a b c' | wordwrap(3) }}{{ {'a': 1} | xmlattr }}{{ 'http://a.b' | urlize }}",
    "{{ messages[0] | truncate(3) }}{{ range(4).index(2) }}{{ (5).bit_length() }}{{ 2.5.is_integer() }}",
    "{{ 'abc' | truncate(2) }}{{ '<a>' | e }}{{ 'a b' | urlencode }}{{ messages | groupby('role') | length }}",
]


@pytest.mark.parametrize("template", FEATURES, ids=lambda template: template[:50])
def test_templates_have_the_features_of_transformers(template: str) -> None:
    try:
        expected = render_jinja_template([TURNS], chat_template=template, **TOKENS)[0][0]
    except Exception as error:
        with pytest.raises(TemplateError, match=re.escape(str(error)[:40])):
            slm.formatter(template=template, **TOKENS).render(TURNS)
        return
    assert text_of(slm.formatter(template=template, **TOKENS).render(TURNS)) == expected


def test_every_shared_case_with_the_public_api(shared_dir: Path, templates: dict[str, str]) -> None:
    from datetime import datetime

    n = 0
    for name, template in templates.items():
        collection = json.loads((shared_dir / "oracles" / "chat_templates" / f"{name}.json").read_text())
        now = datetime.fromisoformat(collection["now"])
        for case in collection["cases"]:
            formatter = slm.formatter(
                template=template, bos_token=case["bos_token"], eos_token=case["eos_token"], now=now
            )
            options = {"tools": case["tools"], "add_generation_prompt": case["add_generation_prompt"], **case["kwargs"]}
            if "error" in case:
                with pytest.raises(TemplateError, match=re.escape(case["error"].partition(": ")[2])):
                    formatter.render(case["messages"], **options)
            else:
                assert text_of(formatter.render(case["messages"], **options)) == case["expected"], (
                    f"{name} {case['case']}"
                )
            n += 1
    print(f"{n} cases of {len(templates)} templates agree")  # noqa: T201  # the count is part of the result
