"""The report, in Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from soaking.record import Record
from soaking.resources import RESOURCES
from soaking.supervisor import GIVES_BACK
from soaking.trend import N_BLOCKS, SIGMAS, WARM_UP, Trend, Verdict

_PACKAGES = ("numpy", "llama-cpp-python", "onnxruntime", "llguidance", "tokenizers")
_MOST_FAILURES = 20
_MOST_LINES = 30


def report(records: Sequence[Record], command: str) -> str:
    """The whole report: the machine, and the verdict, trends, rounds and failures of each run."""
    return "\n".join([*_head(command), *(line for record in records for line in _section(record)), *_method()])


def summary(record: Record) -> str:
    """One line for each run."""
    n = len(record.failures)
    trends = [_verdict_text(trend, i) for i, trend in enumerate(record.trends())]
    course = f"{record.rounds.total():,} rounds in {_duration(record.elapsed_s)}, {n} failure{'s' * (n != 1)}"
    return f"{record.plan.engine.backend}: {course}; {'; '.join(trends)}"


def _head(command: str) -> list[str]:
    return [
        f"# Soak, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "",
        f"    {command}",
        "",
        f"- machine: {_processor()}, {len(os.sched_getaffinity(0))} cores in use, {_memory_gib():.0f} GiB,"
        f" {platform.system()} {platform.release()}",
        f"- Python {platform.python_version()}, slm-core at commit {_commit()}",
        f"- {', '.join(_versions())}",
        "",
    ]


def _section(record: Record) -> list[str]:
    plan, trends = record.plan, record.trends()
    options = f", {record.load_options}" if record.load_options else ""
    verdict = "failed" if record.has_failed else "passed" if set(record.verdicts()) == {Verdict.FLAT} else "undecided"
    lines = [
        f"## {plan.engine.backend}: {verdict}",
        "",
        f"Version {record.version}, device {plan.engine.device}, {plan.engine.n_threads} thread(s){options}; seed"
        f" {plan.seed}; {record.rounds.total():,} rounds in {_duration(record.elapsed_s)}.",
        "",
        "| resource | first | last | slope per hour ± standard error | verdict |",
        "|---|---:|---:|---:|---|",
    ]
    for i, (kind, trend) in enumerate(zip(RESOURCES, trends, strict=True)):
        first = f"{record.samples[0][i]:,.4g}" if record.samples else "-"
        last = f"{trend.last:,.4g}" if trend else "-"
        slope = f"{trend.per_hour:+.3g} ± {trend.error_per_hour:.2g}" if trend else "-"
        lines.append(
            f"| {f'{kind.name}, {kind.unit}'.strip(', ')} | {first} | {last} | {slope} | {_verdict_text(trend, i)} |"
        )
    lines += ["", "| workload | rounds | seconds | failures |", "|---|---:|---:|---:|"]
    failed = [failure.workload for failure in record.failures]
    for workload in record.plan.workloads:
        name = workload.name
        lines.append(f"| {name} | {record.rounds[name]:,} | {record.seconds[name]:,.0f} | {failed.count(name)} |")
    counted = ", ".join(f"{count:,} {name}" for name, count in sorted(record.counts.items()))
    return [*lines, "", f"Counted besides: {counted or 'nothing'}.", "", *_failures(record)]


def _failures(record: Record) -> list[str]:
    lines = []
    for failure in record.failures[:_MOST_FAILURES]:
        again = (
            f"python tools/soak.py --backend {record.plan.engine.backend} --replay '{failure.workload}:{failure.seed}'"
        )
        lines += [
            f"### Round {failure.number}, {failure.workload}",
            "",
            f"Alone: `{again}`",
            "",
            "```",
            *failure.traceback.strip().splitlines()[-_MOST_LINES:],
            failure.error[:2000],
            "```",
            "",
        ]
    if len(record.failures) > _MOST_FAILURES:
        lines += [f"... and {len(record.failures) - _MOST_FAILURES} more failures.", ""]
    return lines


def _method() -> list[str]:
    allowed = ", ".join(f"{kind.allowed:g} {kind.unit or kind.name}".strip() for kind in RESOURCES)
    return [
        "## How the slopes were found",
        "",
        f"Samples are taken between rounds, after a garbage collection. The first {WARM_UP:.0%} of a run are left out."
        f" The rest is averaged over {N_BLOCKS} blocks of equal time, and a line is fitted to their means by least"
        " squares. Its standard error is widened by the correlation r of neighbouring residuals, by"
        f" sqrt((1 + r) / (1 - r)). A resource is flat if slope plus {SIGMAS:g} standard errors, over the time that the"
        f" line spans, is at most {allowed}; it grows if the slope less {SIGMAS:g} standard errors is above that."
        f" glibc's allocator gives freed memory back at once ({' '.join(f'{k}={v}' for k, v in GIVES_BACK.items())}).",
        "",
    ]


def _verdict_text(trend: Trend | None, i: int) -> str:
    kind = RESOURCES[i]
    if trend is None:
        return f"{kind.name} undecided: too few samples"
    verdict = trend.verdict(kind.allowed)
    if verdict is Verdict.FLAT:
        return f"{kind.name} flat within {max(trend.bound_per_hour, 0):.2g} {kind.unit}".strip() + " per hour"
    slope = f"{trend.per_hour:+.3g} ± {trend.error_per_hour:.2g} {kind.unit}".strip()
    return f"{kind.name} {verdict.value}: {slope} per hour"


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{remainder:02}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _versions() -> list[str]:
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return versions


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return process.stdout.strip() or "unknown"
