"""Decoding beside other work: tokens per second of the native engine with one thread and with the default threads.

    python benchmarks/busy.py
    python benchmarks/busy.py --model my.gguf --busy 0 1 2 --rounds 9 --out benchmarks/results

`--busy N` starts N programs that loop forever. All cases of a row take turns, so a change of the machine's speed
affects each of them. The ratio is the speed with the default threads over the better of two speeds, with one thread and
with one thread per core: 1 is best.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median

from cpu import machine

import slm_core as slm
from slm_core.cpu import usable_cores
from slm_core.loading import demo_model_path
from slm_core.model import Model

SECONDS = 0.5  # of each case, in each round
N_PROMPT = 16
LOOP = "while True: pass"


class Decoder:
    """Decodes one sequence, token by token."""

    def __init__(self, model: Model) -> None:
        self._context = model.new_context(n_ctx=1024, n_seq_max=1, n_batch=N_PROMPT)
        self._batch = self._context.new_batch()
        self._n_vocab = model.vocab.size

    def tokens_per_second(self, seconds: float) -> float:
        """The speed of decoding after a short prompt."""
        self._context.drop(0)
        self._decode(range(1, 1 + N_PROMPT))
        n, start = 0, time.perf_counter()
        while n < 900 and time.perf_counter() - start < seconds:
            self._decode([17 * n % self._n_vocab])
            n += 1
        return n / (time.perf_counter() - start)

    def _decode(self, tokens: Sequence[int]) -> None:
        self._batch.clear()
        self._batch.extend(tokens, slm.Pos(0, self._context.length(0)), logits="last")
        self._context.decode(self._batch)


@contextmanager
def busy(n: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start ``n`` programs that use a core each; they are stopped until they get SIGCONT."""
    programs = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(n)]
    try:
        for program in programs:
            program.send_signal(signal.SIGSTOP)
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(path: Path, n_busy: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Median speeds with one thread, with a thread a core, and with the default, for each number of busy programs."""
    threads: list[int | None] = [1, usable_cores(), None]
    models = [slm.load(path, backend="native", device="cpu", n_threads=n) for n in threads]
    decoders = [Decoder(model) for model in models]
    speeds: dict[int, list[list[float]]] = {n: [[] for _ in threads] for n in n_busy}
    with busy(max(n_busy)) as programs:
        for _ in range(rounds):
            for n in n_busy:
                for program in programs[:n]:
                    program.send_signal(signal.SIGCONT)
                for i, decoder in enumerate(decoders):
                    speeds[n][i].append(decoder.tokens_per_second(SECONDS))
                for program in programs[:n]:
                    program.send_signal(signal.SIGSTOP)
    return {n: [median(case) for case in cases] for n, cases in speeds.items()}


def table(speeds: dict[int, list[float]]) -> list[str]:
    """The rows of a table in Markdown."""
    lines = [
        "| busy programs | one thread | a thread a core | default | default over the better |",
        "|---|---|---|---|---|",
    ]
    for n, (one, all_cores, default) in speeds.items():
        lines.append(f"| {n} | {one:,.1f} | {all_cores:,.1f} | {default:,.1f} | {default / max(one, all_cores):.2f} |")
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", help="repeatable (default: the demo model)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="numbers of busy programs (default: 0 1)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a folder for the table")
    arguments = parser.parse_args()
    lines = [f"# Decoding beside other work, {date.today()}", "", machine()]
    for path in arguments.model or [demo_model_path()]:
        lines += ["", f"## {path.stem}: tokens per second", "", *table(measure(path, arguments.busy, arguments.rounds))]
        print("\n".join(lines[-len(arguments.busy) - 4 :]), flush=True)
    if arguments.out:
        (arguments.out / f"busy-{date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
