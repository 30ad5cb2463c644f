"""The report as JSON, for other programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

from slm_conformance.report.record import Report, Scenario, Section
from slm_conformance.suite.meta import Verdict

SCHEMA = "slm-conformance-report/1"
"""The version of the format. It changes if readers have to change; new keys do not change it."""


def json_data(report: Report) -> str:
    """A JSON document; docs/conformance.md describes it."""
    document = {
        "schema": SCHEMA,
        "date": report.date,
        "versions": report.versions,
        "summary": _summary(report.total()),
        "runs": [
            {"label": label, "module": run.module, "summary": _summary(report.count(run)), **asdict(run.subject)}
            for label, run in zip(report.labels(), report.runs, strict=True)
        ],
        "sections": [_section(report, section) for section in report.sections],
    }
    return json.dumps(document, indent=1) + "\n"


def _summary(counts: Counter[Verdict]) -> dict[str, int]:
    return {verdict.value: counts[verdict] for verdict in Verdict}


def _section(report: Report, section: Section) -> dict[str, object]:
    rows = [_scenario(report, scenario) for scenario in section.scenarios]
    return {"name": section.name, "about": section.about, "hint": section.hint, "scenarios": rows}


def _scenario(report: Report, scenario: Scenario) -> dict[str, object]:
    results = [
        {
            "run": number,
            "model": model,
            "verdict": result.verdict.value,
            "reason": result.reason,
            "seconds": round(result.seconds, 4),
        }
        for number, run in enumerate(report.runs)
        for model, result in run.of(scenario.name).items()
    ]
    return {"name": scenario.name, "clause": scenario.clause, "proves": scenario.proves, "results": results}
