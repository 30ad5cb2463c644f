"""Operations of templates: the text equals plain jinja2, and each character counts as content or as control text."""

from __future__ import annotations

import json

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slm_core.errors import TemplateError
from slm_core.types import Segment
from slm_formatters.jinja_template import JinjaTemplate

# Text of templates has capitals and brackets, text of messages has small letters: a character shows its origin.
CONTENT = st.text("abcß ,.\n\t", max_size=12)

FOLLOWED = [
    "<{{ a }}>{{ b }}",
    "{{ '[' + a + ']' ~ b ~ 1 }}",
    "{{ (a + 'X' + b).split('X') | join('--') }}",
    "{% for part in (a ~ 'X' ~ b).split('X') %}<{{ part }}{{ loop.index }}>{% endfor %}",
    "{{ ('  X' + a + 'Y  ').strip() }}|{{ ('XX' + a).lstrip('X') }}|{{ (a + 'Y').rstrip('Y') }}|{{ a | trim }}",
    "{{ ('X' + a).removeprefix('X') }}{{ (a + 'X').removesuffix('X') }}",
    "{{ a.replace('b', 'X') }}{{ 'XYX'.replace('Y', a) }}{{ a | replace('a', 'Z', 1) }}",
    "{{ ('X' + a + 'Y')[1:-1] }}{{ (a + 'XY')[-2] }}{{ ('X' + a)[::-1] }}{{ a | reverse }}",
    "{% for letter in 'X' + a %}{{ letter }}-{% endfor %}",
    "{{ a | list | join('X') }}{{ [a, 'X', b] | join }}{{ 'X'.join([a, b]) }}",
    "{{ 'X%sY%sZ%%' % (a, b) }}{{ '%s' | format(a) }}{{ 'X%s' % a }}",
    "{{ '<{}|{}|{x}>'.format(a, 7, x=b) }}{{ '{0}{0}'.format(a) }}",
    "{% macro wrap(text) %}<{{ text }}>{{ caller() }}{% endmacro %}{% call wrap(a) %}({{ b }}){% endcall %}",
    "{% set block %}<{{ a }}>{% endset %}{{ block }}{{ block | length }}",
    "{% set ns = namespace(t='') %}{% for x in [a, b] %}{% set ns.t = ns.t + '<' + x %}{% endfor %}{{ ns.t }}",
    "{{ a * 2 }}{{ 'X' * 3 }}{{ a[:2] }}{{ a | first }}{{ a | last }}{{ a | default('X') }}{{ '' or a or 'X' }}",
    "{{ ('X' + a).partition('X') | last }}{{ (a ~ '\\nX').splitlines() | last }}{{ (a ~ ' X').split() | last }}",
    "{{ [a, b] | map('trim') | map('replace', 'a', 'X') | join('<') }}{{ [b, a] | sort | join('|') }}",
    "{% generation %}<{{ a }}>{% endgeneration %}",
    "{% set x, y = ('X' + a).partition('X')[1:] %}{{ x }}{{ y }}{{ dict(k=a).k }}{{ {'k': b}['k'] }}",
    "{{ cycler(a, 'X').next() }}{% for x in [1, 2, 3] %}{{ loop.cycle(a, 'X') }}{% endfor %}",
    "{{ 'X'|safe + 'Y' }}{{ a | string }}{{ (a, 'X') | map('string') | join }}",
]

SEALED = [
    "{{ {'k': a} | tojson }}{{ [a] | tojson(indent=2) }}",
    "{{ a | upper }}{{ a.title() }}{{ a | capitalize }}{{ a.upper() | lower }}{{ a | title }}",
    "{{ a | indent(2) }}{{ a | truncate(5) }}{{ a | center(20) }}{{ a.ljust(20) }}{{ a.zfill(9) }}",
    "{{ a.expandtabs(3) }}{{ a.swapcase() }}",
    "{{ [a, {'k': b}] }}{{ '%r' % a }}{{ '{!r:>30}'.format(a) }}{{ '{:>30}'.format(a) }}{{ '%-30s' % a }}",
    "{{ a | e }}{{ a | urlencode }}{{ ('x' | safe) + a }}{{ a.replace('', '-') }}{{ '%(k)s' % {'k': a} }}",
]


def plain_jinja(source: str, **variables: str) -> str:
    """The template rendered by a plain sandbox with the settings and filters of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return environment.from_string(source).render(**variables)


def render(source: str, **variables: object) -> list[Segment]:
    return JinjaTemplate(source).render([], options=variables)


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize("source", [*FOLLOWED, *SEALED])
@given(a=CONTENT, b=CONTENT)
@settings(max_examples=25, deadline=None)
def test_text_equals_plain_jinja(source: str, a: str, b: str) -> None:
    try:
        expected = plain_jinja(source, a=a, b=b)
    except (jinja2.TemplateError, TypeError, IndexError):
        with pytest.raises(TemplateError):
            render(source, a=a, b=b)
        return
    assert text_of(render(source, a=a, b=b)) == expected


@pytest.mark.parametrize("source", FOLLOWED)
@given(a=CONTENT, b=CONTENT)
@settings(max_examples=25, deadline=None)
def test_each_character_keeps_its_origin(source: str, a: str, b: str) -> None:
    try:
        segments = render(source, a=a, b=b)
    except TemplateError:
        return
    control = "".join(segment.text for segment in segments if segment.control)
    content = "".join(segment.text for segment in segments if not segment.control)
    assert not set(control) & set("abcß,."), "content counts as control text"
    assert not set(content) & set("XYZ<>[]-|()0123456789%"), "control text counts as content"


@pytest.mark.parametrize("source", SEALED)
@given(a=st.text("abcß,.", max_size=12), b=st.text("abcß,.", max_size=12))
@settings(max_examples=20, deadline=None)
def test_text_of_unknown_origin_is_content(source: str, a: str, b: str) -> None:
    control = "".join(segment.text for segment in render(source, a=a, b=b) if segment.control)
    assert not set(control.lower()) & set("abcß,."), "content counts as control text"


def test_safe_text_escapes_added_text() -> None:
    source = "{{ ('<X>' | safe + a + \"'Y'\") }}"
    assert text_of(render(source, a="<b>")) == plain_jinja(source, a="<b>") == "<X>&lt;b&gt;&#39;Y&#39;"
    assert [(s.text, s.control) for s in render(source, a="<b>")][1] == ("&lt;b&gt;", False)


def test_json_keeps_order_and_characters() -> None:
    data = {"z": "<é>", "a": [1, 2.5, None, True]}
    assert text_of(render("{{ d | tojson }}", d=data)) == '{"z": "<é>", "a": [1, 2.5, null, true]}'
    sorted_ascii = "{{ d | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':'), indent=1) }}"
    assert text_of(render(sorted_ascii, d=data)) == json.dumps(data, sort_keys=True, separators=(",", ":"), indent=1)


def test_variables_are_plain_data() -> None:
    with pytest.raises(TemplateError, match="cannot be given a object"):
        render("{{ x }}", x=object())
