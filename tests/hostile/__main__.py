"""A long run: ``python -m tests.hostile --seconds 3600``. The exit status is 1 if a case crashed, hung or leaked."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.hostile.kinds import KINDS
from tests.hostile.pool import VERDICTS, RunResult, run, targets


def main() -> int:
    """Run the kinds and backends of the command line, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together, on one worker")
    parser.add_argument("--kind", choices=KINDS, help="one kind of input alone")
    parser.add_argument("--backend", help="one backend alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case: other numbers, other inputs")
    parser.add_argument("--cases", type=int, default=1 << 60, help="at most so many for each target")
    parser.add_argument("--workers", type=int, default=1, help="targets at once")
    args = parser.parse_args()
    chosen = list(targets(args.kind, args.backend))
    if not chosen:
        parser.error(f"nothing attacks backend {args.backend!r} with {args.kind!r}")
    share = args.seconds * args.workers / len(chosen)
    with ThreadPoolExecutor(args.workers) as executor:
        results = list(executor.map(lambda target: run(*target, share, args.first, args.cases), chosen))
    sys.stdout.write(f"{table(results)}\n")
    for one in results:
        for seed, verdict, message in one.bad:
            sys.stdout.write(f"{one.kind} {one.backend} case {seed}: {verdict}: {message}\n")
    return int(any(one.bad for one in results))


def table(results: list[RunResult]) -> str:
    """The counts as a Markdown table."""
    head = ("input", "backend", "tried", *VERDICTS, "slowest")
    rows = [
        (one.kind, one.backend, one.counts.total(), *(one.counts[name] for name in VERDICTS), f"{one.slowest[0]:.1f} s")
        for one in results
    ]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) + " |" for row in lines
    )


if __name__ == "__main__":
    sys.exit(main())
