"""The loop of a run: rounds of workloads, failures, and samples in between, all reported as events.

``python -m soaking.rounds PLAN`` (JSON) writes the events to standard output, one JSON value per line.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import pytest

from slm_core.diskcache import CACHE_VARIABLE, cache_root
from soaking import killing
from soaking.checks import tolerance
from soaking.resources import measure
from soaking.site import MODELS, Engine, Site
from soaking.workloads import WORKLOADS, Workload

Event: TypeAlias = Mapping[str, object]
Emit: TypeAlias = Callable[[Event], None]
_SAMPLES = 1000
"""The largest number of samples of a run; there is at most one after each round."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        engine: options for loading models.
        seed: determines workloads and all random numbers in them.
        seconds: duration; None for no limit.
        n_rounds: number of rounds; None for no limit. Each workload runs once before workloads are drawn at random.
        replay: a workload and a seed; only this round is run.
        only: names of the workloads to choose from; empty for all.
    """

    engine: Engine
    seed: int = 0
    seconds: float | None = None
    n_rounds: int | None = None
    replay: tuple[str, int] | None = None
    only: tuple[str, ...] = ()

    @property
    def workloads(self) -> list[Workload]:
        """The workloads to choose from."""
        return [workload for workload in WORKLOADS if not self.only or workload.name in self.only]

    def to_json(self) -> str:
        """The plan as JSON, for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in a JSON text."""
        fields = json.loads(text)
        replay, only = fields.pop("replay"), tuple(fields.pop("only"))
        return cls(Engine(**fields.pop("engine")), replay=tuple(replay) if replay else None, only=only, **fields)


def run(
    plan: Plan,
    emit: Emit,
    workloads: Sequence[Workload] = WORKLOADS,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Carry out a plan in a folder of its own, and report events.

    Events have a key "event": "start", "begin" and "end" (of a round), "failure", "sample", "over".

    Args:
        plan: the plan.
        emit: called with each event.
        workloads: workloads to choose from.
        stopped: called before each round; True ends the run.
    """
    with tempfile.TemporaryDirectory(prefix="slm-soak-") as name:
        folder = Path(name)
        before = os.environ.get(CACHE_VARIABLE)
        os.environ[CACHE_VARIABLE] = str(folder / "cache")
        site = Site.open(plan.engine, folder)
        try:
            _play(plan, site, emit, workloads, stopped)
        finally:
            site.close()
            os.environ.pop(CACHE_VARIABLE) if before is None else os.environ.update({CACHE_VARIABLE: before})


def _play(plan: Plan, site: Site, emit: Emit, workloads: Sequence[Workload], stopped: Callable[[], bool]) -> None:
    rng, start = random.Random(plan.seed), time.monotonic()
    status = site.workshop.backend.status()
    emit(
        {"event": "start", "backend": status.name, "version": status.version, "load_options": site.engine.load_options}
    )
    sampled_at, n_done, period = 0.0, 0, (plan.seconds or 0.0) / _SAMPLES
    caches = cache_root(), site.folder / killing.WORKER_CACHE
    while not stopped() and n_done != plan.n_rounds and not (plan.replay and n_done):
        if plan.seconds is not None and time.monotonic() - start >= plan.seconds:
            break
        workload, seed = _next(plan, workloads, n_done, rng)
        _play_round(workload, seed, n_done, site, emit)
        n_done += 1
        if n_done == 1:
            _compute_tolerances(site)
        elapsed = time.monotonic() - start
        if elapsed >= sampled_at + period:
            emit({"event": "sample", "elapsed_s": elapsed, "values": measure(*caches)})
            sampled_at = elapsed
    emit({"event": "over", "elapsed_s": time.monotonic() - start, "counts": dict(site.counts)})


def _compute_tolerances(site: Site) -> None:
    """Compute the tolerances of each model before the first sample, so that their memory does not count as growth."""
    for name in MODELS:
        tolerance(site, name).row, tolerance(site, name).gap


def _next(plan: Plan, workloads: Sequence[Workload], n_done: int, rng: random.Random) -> tuple[Workload, int]:
    """The next workload and its seed: each workload once, in order, then at random."""
    if plan.replay:
        name, seed = plan.replay
        return next(workload for workload in workloads if workload.name == name), seed
    seed = rng.getrandbits(32)
    if n_done < len(workloads):
        return workloads[n_done], seed
    (drawn,) = rng.choices(workloads, [workload.weight for workload in workloads])
    return drawn, seed


def _play_round(workload: Workload, seed: int, number: int, site: Site, emit: Emit) -> None:
    """One round. Any exception is a failure, after which contexts and models are loaded again."""
    identity = {"round": number, "workload": workload.name, "seed": seed}
    emit({"event": "begin", **identity})
    start = time.monotonic()
    try:
        workload.run(site, random.Random(seed))
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        lines = traceback.format_exception(error)
        emit({"event": "failure", **identity, "error": f"{type(error).__name__}: {error}", "traceback": "".join(lines)})
        site.renew()
    emit({"event": "end", **identity, "seconds": time.monotonic() - start, "counts": dict(site.counts)})


def main(plan: str) -> None:
    """Run in a process of its own; SIGTERM and SIGINT end it after the current round."""
    stop: list[int] = []

    def ask_to_stop(number: int, _: FrameType | None) -> None:
        stop.append(number)

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    faulthandler.enable()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with events

    def emit(event: Event) -> None:
        events.write(json.dumps(event) + "\n")

    read = Plan.from_json(plan)
    run(read, emit, read.workloads, stopped=lambda: bool(stop))


if __name__ == "__main__":
    main(sys.argv[1])
