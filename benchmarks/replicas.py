"""The overhead of Ray: ``slm serve --ray`` with one replica compared with ``slm serve``, in turns.

    python benchmarks/replicas.py MODEL.gguf [--rounds 5]

Each round asks both servers for one stream, and for 16 streams together. The table has the medians, and the ratio.
"""

from __future__ import annotations

import argparse
import datetime
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from cpu import machine
from http_servers import SlmServer

import slm_core as slm

N_PROMPT, N_ANSWER, N_STREAMS, N_CTX = 64, 128, 16, 8192


def measured(server: SlmServer, tokens: random.Random) -> tuple[float, float, float]:
    """First token of one stream in ms, its tokens/s after that, and the tokens/s of all streams together."""

    def prompt() -> list[int]:
        return tokens.choices(range(10, 1000), k=N_PROMPT)

    one = server.stream(prompt(), N_ANSWER)
    started = time.perf_counter()
    many = server.together([prompt() for _ in range(N_STREAMS)], N_ANSWER)
    seconds = max(each.times[-1] for each in many) - started
    return (
        1000 * one.first_token_s,
        (N_ANSWER - 1) / (one.times[-1] - one.times[0]),
        sum(len(each.tokens) for each in many) / seconds,
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with slm.load(args.model) as model:
        eog = sorted(model.vocab.eog_ids)
        title = f"{model.info.name}, {model.info.quantization}"
    names: Sequence[tuple[str, Sequence[object]]] = (("slm serve", ()), ("with --ray", ("--ray", "--replicas", 1)))
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name, _ in names}
    servers = {name: SlmServer(args.model, N_CTX, N_STREAMS, eog, options) for name, options in names}
    try:
        for round_ in range(-1, args.rounds):  # the first one warms up
            for name, server in servers.items():
                values = measured(server, random.Random(round_))
                if round_ >= 0:
                    results[name].append(values)
    finally:
        for server in servers.values():
            server.__exit__(None, None, None)
    print(f"{machine()}, {datetime.date.today()}: {title}\n")
    print("| | slm serve | with --ray | ratio |\n|---|---|---|---|")
    for i, row_name in enumerate(("one stream: first token, ms", "one stream: tokens/s", "16 streams: tokens/s")):
        direct, ray = (median(values[i] for values in results[name]) for name, _ in names)
        print(f"| {row_name} | {direct:.3g} | {ray:.3g} | {ray / direct:.2f} |")


if __name__ == "__main__":
    main()
