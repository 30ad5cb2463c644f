"""``slm serve`` under ten times its capacity.

    python benchmarks/overload.py [MODEL.gguf] [--minutes 10] [--times 10] [--max-requests 32] [--out FOLDER]

First, 32 clients send one request after another: their rate of answers is the capacity. Then requests come at ten times
that rate (Poisson), whether or not earlier ones are answered. Beyond ``--max-requests`` the server refuses them with
429. An admitted request waits for the other admitted requests only: the bound of its time is twice the time of
``--max-requests`` answers at the capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from cpu import machine
from http_servers import SlmServer

import slm_core as slm

N_PROMPT, N_ANSWER, N_CLIENTS = 64, 32, 32


@dataclass
class Results:
    """The results of the clients.

    Attributes:
        statuses: requests by status.
        seconds: of the answered requests.
        without_wait: refusals without Retry-After.
        memory: MiB of the server and its engine, every 10 seconds.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    without_wait: int = 0
    memory: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, server: SlmServer, random_tokens: random.Random, results: Results) -> None:
    """Send one request with a prompt of its own."""
    body = {**server.body(random_tokens.choices(range(10, 1000), k=N_PROMPT), N_ANSWER), "stream": False}
    started = time.perf_counter()
    response = await http.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body)
    results.statuses[response.status_code] += 1
    if response.status_code == 200:
        results.seconds.append(time.perf_counter() - started)
    elif "retry-after" not in response.headers:
        results.without_wait += 1


async def capacity(http: httpx.AsyncClient, server: SlmServer, seconds: float) -> float:
    """Answers per second for clients that wait for them."""
    results, until = Results(), time.perf_counter() + seconds

    async def client(number: int) -> None:
        tokens = random.Random(number)
        while time.perf_counter() < until:
            await ask(http, server, tokens, results)

    async with asyncio.TaskGroup() as tasks:
        for number in range(N_CLIENTS):
            tasks.create_task(client(number))
    return results.statuses[200] / seconds


async def overload(http: httpx.AsyncClient, server: SlmServer, rate: float, seconds: float) -> Results:
    """Send requests at a rate."""
    results, tokens, until = Results(), random.Random(0), time.perf_counter() + seconds
    next_at = measured_at = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        while next_at < until:
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
            tasks.create_task(ask(http, server, tokens, results))
            next_at += tokens.expovariate(rate)
            if next_at >= measured_at:
                results.memory.append(memory(server.pid))
                measured_at += 10
    return results


def memory(pid: int) -> float:
    """MiB of a process and its children."""
    total, pids = 0.0, [pid]
    while pids:
        each = Path("/proc") / str(pids.pop())
        pids += map(int, " ".join(path.read_text() for path in each.glob("task/*/children")).split())
        lines = (each / "status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
    return total


async def measure(server: SlmServer, options: argparse.Namespace) -> str:
    """The table."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        await capacity(http, server, 10)
        rate = await capacity(http, server, 30)
        results = await overload(http, server, options.times * rate, 60 * options.minutes)
        after = await capacity(http, server, 30)
    p50, p99, most = (float(np.percentile(results.seconds, q)) for q in (50, 99, 100))
    bound = 2 * options.max_requests / rate
    rows = {
        "answers/s that it can bear": f"{rate:.1f}",
        "requests/s that came": f"{results.statuses.total() / 60 / options.minutes:.1f}",
        "answered; answers/s": f"{results.statuses[200]:,}; {results.statuses[200] / 60 / options.minutes:.1f}",
        "refused with 429": f"{results.statuses[429]:,} ({results.without_wait} without Retry-After)",
        "other statuses": str({key: n for key, n in results.statuses.items() if key not in (200, 429)} or "none"),
        "seconds of an answer: p50, p99, most": f"{p50:.2f}, {p99:.2f}, {most:.2f}",
        "their bound": f"{bound:.2f}",
        "MiB of memory at the start, after a tenth, at the end": ", ".join(
            f"{results.memory[i]:.0f}" for i in (0, len(results.memory) // 10, -1)
        ),
        "answers/s afterwards": f"{after:.1f}",
    }
    return "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=slm.demo_model_path())
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--max-requests", type=int, default=32)
    parser.add_argument("--out", type=Path, help="a folder for the table")
    options = parser.parse_args()
    with slm.load(options.model) as model:
        eog_ids = list(model.vocab.eog_ids)
    with SlmServer(options.model, 16_384, 16, eog_ids, ["--max-requests", options.max_requests]) as server:
        table = asyncio.run(measure(server, options))
    page = f"{machine()}; {datetime.date.today()}; {options.model.name}; {options.minutes:g} minutes at"
    page += f" {options.times:g} times the load, at most {options.max_requests} requests at a time\n\n"
    page += f"| | |\n|---|---|\n{table}"
    print(page)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"overload-{datetime.date.today()}.md").write_text(page)


if __name__ == "__main__":
    main()
