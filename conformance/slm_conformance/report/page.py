"""The report as one self-contained HTML page: no scripts, no external files, and all texts of a run escaped."""

from __future__ import annotations

from collections import Counter
from html import escape

from slm_conformance.report.record import PLURALS, Report, Result, Run, Scenario, Section, one_line
from slm_conformance.suite.meta import Verdict
from slm_conformance.suite.subject import Subject

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1e21; --soft: #5b616b; --line: #d9dce1; --band: #f4f5f7;
  --FAILS: #b3261e; --holds: #1f7a33; --absent: #5b616b; --open: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --text: #e6e7ea; --soft: #a2a8b3; --line: #363a42;
  --band: #1f2228; --FAILS: #ff8a80; --holds: #7fd18f; --absent: #a2a8b3; --open: #e6b85c; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 2rem auto;
  padding: 0 1rem; max-width: 75rem; }
a { color: inherit; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.row { display: grid; grid-template-columns: minmax(14rem, 2fr) repeat(var(--runs), minmax(9rem, 1fr)); gap: 0 1rem;
  padding: .35rem .6rem; border-top: 1px solid var(--line); }
.row > * { min-width: 0; overflow-wrap: anywhere; }
.head { font-weight: 600; border-top: 0; }
summary { cursor: pointer; display: block; }
summary .row > :first-child::before { content: "\\25b8\\00a0"; color: var(--soft); }
details[open] summary .row > :first-child::before { content: "\\25be\\00a0"; }
details[open] { background: var(--band); }
details .row .row { border: 0; }
.hint { padding: 0 .6rem .5rem 1.6rem; font-size: 14px; }
.indent { padding-left: 1.6rem; }
.small { font-size: 13px; }
.FAILS { color: var(--FAILS); font-weight: 600; }
.holds { color: var(--holds); }
.absent { color: var(--absent); }
.open { color: var(--open); }
ul { padding-left: 1.2rem; margin: .3rem 0; }
"""

_CLASS = {
    Verdict.FAILS: "FAILS",
    Verdict.HOLDS: "holds",
    Verdict.ABSENT: "absent",
    Verdict.EXPECTED: "open",
    Verdict.NOT_RUN: "open",
}


def html_page(report: Report) -> str:
    """A page with a column for each run, and a row for each scenario."""
    labels = report.labels()
    title = "Conformance: " + ", ".join(labels)
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head>",
        f'<body style="--runs: {len(labels)}"><h1>{_text(title)}</h1>',
        f'<p class="soft">{_text(report.date)}; {_text(_versions(report))}</p>',
        *(_about(run.subject) for run in report.runs),
        _failures(report),
        "<h2>Clauses</h2>",
        _row("head", "", [_text(label) for label in labels]),
        _row("head", "all", [_counts(report.count(run)) for run in report.runs]),
        *(_section(report, section) for section in report.sections),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _text(text: str) -> str:
    return escape(one_line(text))


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def _about(subject: Subject) -> str:
    models = "".join(f"<li>{_text(str(model))}</li>" for model in subject.models)
    return f'<p><b>{_text(str(subject))}</b></p><ul class="small">{models}</ul>'


def _failures(report: Report) -> str:
    items = [
        f'<li><a href="#{_text(scenario.name)}"><code>{_text(scenario.name)}</code></a> on {_text(label)}, '
        f"{_text(model)}: {_text(result.reason)}</li>"
        for label, scenario, model, result in report.failures()
    ]
    return f'<h2 class="FAILS">What fails</h2><ul>{"".join(items)}</ul>' if items else ""


def _section(report: Report, section: Section) -> str:
    counts = [report.count(run, section) for run in report.runs]
    is_open = any(count[verdict] for count in counts for verdict in (Verdict.FAILS, Verdict.EXPECTED))
    name = f'<span><b>{_text(section.name)}</b> <span class="soft">{_text(section.about)}</span></span>'
    return "\n".join(
        [
            f"<details{' open' if is_open else ''}><summary>{_row('', name, [_counts(count) for count in counts])}"
            f'</summary><div class="hint soft">If this fails, look at: {_text(section.hint)}</div>',
            *(_scenario(report.runs, scenario) for scenario in section.scenarios),
            "</details>",
        ]
    )


def _scenario(runs: tuple[Run, ...], scenario: Scenario) -> str:
    clause = f"<b>{_text(scenario.clause)}</b>: " if scenario.clause else ""
    name = (
        f'<div class="indent" id="{_text(scenario.name)}"><code>{_text(scenario.name.partition("::")[2])}</code>'
        f'<div class="soft small">{clause}{_text(scenario.proves)}</div></div>'
    )
    return _row("", name, [_cell(run.of(scenario.name)) for run in runs])


def _cell(results: dict[str, Result]) -> str:
    """One cell; models with the same result share a line."""
    models: dict[tuple[Verdict, str], list[str]] = {}
    for model, result in results.items():
        models.setdefault((result.verdict, result.reason), []).append(model)
    order = list(Verdict)
    return "".join(
        f'<div><span class="{_CLASS[verdict]}">{_text(verdict)}</span> '
        f'<span class="soft small">{_text(", ".join(names))}</span>{_because(reason)}</div>'
        for (verdict, reason), names in sorted(models.items(), key=lambda item: order.index(item[0][0]))
    )


def _because(reason: str) -> str:
    return f'<div class="small">{_text(reason)}</div>' if reason else ""


def _counts(counts: Counter[Verdict]) -> str:
    parts = (
        f'<span class="{_CLASS[verdict]}">{counts[verdict]} {_text(word)}</span>'
        for verdict, word in PLURALS.items()
        if counts[verdict]
    )
    return ", ".join(parts) or "nothing"


def _row(kind: str, first: str, cells: list[str]) -> str:
    columns = "".join(f"<div>{cell}</div>" for cell in cells)
    return f'<div class="row {kind}"><div>{first}</div>{columns}</div>'
