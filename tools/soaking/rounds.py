"""The loop: rounds of workloads, what went wrong in them, and samples in between, as events.

``python -m soaking.rounds PLAN`` (JSON) writes the events to standard output, one JSON value a line.
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
from soaking.resources import measure
from soaking.site import Engine, Site
from soaking.workloads import WORKLOADS, Workload

Event: TypeAlias = Mapping[str, object]
Emit: TypeAlias = Callable[[Event], None]
_SAMPLES = 1000
"""As many samples are taken in a run, or one after each round if that is fewer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        engine: how models are loaded.
        seed: workloads and all that they draw follow from it.
        seconds: how long; None for no end.
        n_rounds: how many rounds; None for no end. Each workload comes once before any is drawn.
        replay: a workload and a seed: that round alone is played.
    """

    engine: Engine
    seed: int = 0
    seconds: float | None = None
    n_rounds: int | None = None
    replay: tuple[str, int] | None = None

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The same again."""
        fields = json.loads(text)
        replay = fields.pop("replay")
        return cls(Engine(**fields.pop("engine")), replay=tuple(replay) if replay else None, **fields)


def run(
    plan: Plan,
    emit: Emit,
    workloads: Sequence[Workload] = WORKLOADS,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Do what is planned, in a folder of its own, and tell what happens.

    Events have a key "event": "start", "begin" and "end" of a round, "failure", "sample", "over".

    Args:
        plan: what to do.
        emit: is given each event.
        workloads: to choose from.
        stopped: asked before each round.
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
        elapsed = time.monotonic() - start
        if elapsed >= sampled_at + period:
            emit({"event": "sample", "elapsed_s": elapsed, "values": measure(*caches)})
            sampled_at = elapsed
    emit({"event": "over", "elapsed_s": time.monotonic() - start, "counts": dict(site.counts)})


def _next(plan: Plan, workloads: Sequence[Workload], n_done: int, rng: random.Random) -> tuple[Workload, int]:
    """Each workload once, in order, then at random."""
    if plan.replay:
        name, seed = plan.replay
        return next(workload for workload in workloads if workload.name == name), seed
    seed = rng.getrandbits(32)
    if n_done < len(workloads):
        return workloads[n_done], seed
    (drawn,) = rng.choices(workloads, [workload.weight for workload in workloads])
    return drawn, seed


def _play_round(workload: Workload, seed: int, number: int, site: Site, emit: Emit) -> None:
    """One round; whatever it raises is a failure, after which nothing old is trusted."""
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
    """Run in a process of its own; SIGTERM and SIGINT end it after the round."""
    stop: list[int] = []

    def ask_to_stop(number: int, _: FrameType | None) -> None:
        stop.append(number)

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    faulthandler.enable()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no event

    def emit(event: Event) -> None:
        events.write(json.dumps(event) + "\n")

    run(Plan.from_json(plan), emit, stopped=lambda: bool(stop))


if __name__ == "__main__":
    main(sys.argv[1])
