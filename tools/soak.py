"""Hours of mixed work on backends: checks every answer, measures resources of each process, writes a report.

    python tools/soak.py --seconds 3600 --backend native --seed 1 --report soak.md
    python tools/soak.py --seconds 3600 --backend native --only 'requests together' --only 'kill -9'
    python tools/soak.py --backend onnx --replay 'dumped:1234'

Backends run at the same time, in a process each. Ctrl-C ends the run early, and the report is still written. The exit
status is 0 if all rounds passed and no resource grows, 1 if a round failed or a resource grows, and 3 if the run was
too short to tell: it needs a quarter of an hour. ``tools/soaking/workloads.py`` lists the workloads.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from soaking.record import Record
from soaking.report import report, summary
from soaking.rounds import Plan
from soaking.site import Engine
from soaking.supervisor import supervise
from soaking.trend import Verdict
from soaking.workloads import WORKLOADS

UNDECIDED = 3


def main(arguments: list[str]) -> int:
    """Run; returns the exit status."""
    args = _parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT for background jobs
        signal.signal(number, signal.default_int_handler)
    plans = [
        Plan(
            Engine(backend, args.device, args.threads),
            args.seed,
            args.seconds,
            args.rounds,
            args.replay,
            tuple(args.only or ()),
        )
        for backend in args.backend or ["native"]
    ]

    def write_report(records: Sequence[Record]) -> None:
        if args.report:
            args.report.write_text(report(records, f"python tools/soak.py {shlex.join(arguments)}"))

    records = supervise(plans, write_report)
    write_report(records)
    for record in records:
        print(summary(record))
        for failure in record.failures[:3]:
            print(f"  {failure.workload}, seed {failure.seed}: {failure.error[:500]}")
    if args.report:
        print(f"report: {args.report}")
    return status(records)


def status(records: Sequence[Record]) -> int:
    """The exit status."""
    if any(record.has_failed for record in records):
        return 1
    if all(record.plan.replay for record in records):
        return 0
    return 0 if {verdict for record in records for verdict in record.verdicts()} == {Verdict.FLAT} else UNDECIDED


def _replay(text: str) -> tuple[str, int]:
    name, _, seed = text.rpartition(":")
    return _workload(name), int(seed)


def _workload(name: str) -> str:
    names = [workload.name for workload in WORKLOADS]
    if name not in names:
        raise argparse.ArgumentTypeError(f"no workload {name!r} ({', '.join(names)})")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", action="append", help="a registered backend, or package.module:attribute; repeatable"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each model (default: 1)")
    parser.add_argument("--seconds", type=float, help="how long (default: until Ctrl-C)")
    parser.add_argument("--rounds", type=int, help="how many rounds (default: no end)")
    parser.add_argument("--seed", type=int, default=0, help="workloads and all that they draw follow from it")
    parser.add_argument("--only", type=_workload, action="append", help="a workload to choose from; repeatable")
    parser.add_argument("--replay", type=_replay, metavar="WORKLOAD:SEED", help="one round, as a report names it")
    parser.add_argument("--report", type=Path, help="a Markdown file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
