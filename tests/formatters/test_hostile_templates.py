"""Templates that try to hang, to exhaust memory, to escape the sandbox or to crash: each raises ``TemplateError``."""

from __future__ import annotations

import resource
import threading
import time

import pytest

from slm_core.errors import TemplateError
from slm_formatters.jinja_template import JinjaTemplate
from slm_formatters.limits import Limits

TIGHT = Limits(seconds=0.3, characters=1 << 18)
NEST = "{% set ns = namespace(x=[1]) %}{% for i in range(3000) %}{% set ns.x = STEP %}{% endfor %}"

TIME = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(99999) %}{{ f(n) if n else '' }}{% endfor %}{% endmacro %}{{ f(0) }}" * 50,
    "{% for i in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | map('string') | map('upper') | list | length }}{% endfor %}",
    "{{ 7 ** (7 ** 77) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 5 | round(-1000000000) }}",
]
MEMORY = [
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 'x'.center(10 ** 10) }}{# #}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ '\t'.expandtabs(10 ** 10) }}",
    "{{ 'x'.zfill(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%.10000000000f' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "{{ 'x' | indent(10 ** 10, first=true) }}",
    "{{ ('a' * 1000).replace('', 'b' * 1000) }}",
    "{{ ('a' * 1000).join(range(1000) | map('string')) }}",
    "{{ range(99999) | batch(10 ** 10, 'x') | list }}",
    "{{ [1] | slice(10 ** 10) | list }}",
    "{{ [1] | tojson(indent=10 ** 10) }}",
    "{{ ('x ' * 60000) | wordwrap(1) }}",
    "{{ ('http://a.' * 20000) | urlize }}",
    "{{ 'a'.translate({97: 'x' * 1000}) }}",
    "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set x = 'x' * 1000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}{% endmacro %}{{ f() }}",
    NEST.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    NEST.replace("STEP", "ns.x + ns.x"),
    NEST.replace("STEP", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x == 1 }}",
    NEST.replace("STEP", "(ns.x,) * 100"),
    NEST.replace("STEP", "dict(a=ns.x, b=ns.x)"),
]
RECURSION = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "{{ " + "-" * 100_000 + "1 }}",
    "{{ " + "[" * 3_000 + "]" * 3_000 + " }}",
    "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    NEST.replace("STEP", "(ns.x,)") + "{{ {ns.x: 1} }}",
    NEST.replace("STEP", "[ns.x] | batch(1) | list"),
]
SANDBOX = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ messages.append(1) }}",
    "{{ messages._mask }}{{ text._mask.x }}",
    "{{ text._mask[0] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace(_x=1) }}",
    "{% include 'etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ lipsum(n=1000) }}",
    "{{ 'abc'.encode() }}",
]
INVALID = ["{% if %}", "{{ 1 +", "{% endfor %}", "{{ a | nofilter }}", "{% unknown %}", "x" * (1 << 20)]


@pytest.mark.parametrize("source", [*TIME, *MEMORY, *RECURSION, *SANDBOX, *INVALID], ids=lambda source: source[:40])
def test_a_hostile_template_is_an_error(source: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(TemplateError) as caught:
        JinjaTemplate(source, TIGHT).render([{"role": "user", "content": "hi"}], options={"text": "hi"})
    assert "\n" not in str(caught.value), "errors have one line"
    assert len(str(caught.value)) < 700
    assert time.monotonic() - started < 20 * TIGHT.seconds, "the time limit did not hold"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 300 * 1024, f"the process grew by {grown // 1024} MiB"


def test_data_nested_too_deeply_is_an_error() -> None:
    nested: list[object] = []
    for _ in range(5_000):
        nested = [nested]
    with pytest.raises(TemplateError):
        JinjaTemplate("{{ x | tojson }}").render([], options={"x": nested})


def test_limits_apply_to_one_rendering() -> None:
    """A rendering that exceeds its limits does not affect the template or other threads."""
    template = JinjaTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done", TIGHT)
    outcomes: list[str] = []
    threads = [threading.Thread(target=lambda n=n: outcomes.append(_outcome(template, n))) for n in (3, 99_999, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["done", "done", "stopped"]
    assert _outcome(template, 4) == "done"


def _outcome(template: JinjaTemplate, n: int) -> str:
    try:
        return template.render([], options={"n": n})[0].text
    except TemplateError:
        return "stopped"
