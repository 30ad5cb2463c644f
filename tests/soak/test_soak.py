"""The soak program: a short run on each backend passes, and injected faults are reported."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import soak
from slm_conformance.suite.spec import make_backend
from soaking import killing, trend
from soaking.checks import Wrong
from soaking.record import Record
from soaking.report import report, summary
from soaking.rounds import Plan, run
from soaking.site import Engine, Site
from soaking.supervisor import supervise
from soaking.trend import Verdict
from soaking.workloads import WORKLOADS, Workload

TESTS = Path(__file__).resolve().parents[1]
FAULTY = "soak_faults"


def play(plan: Plan, workloads: Sequence[Workload] = WORKLOADS) -> Record:
    record = Record(plan)
    run(plan, record.take, workloads)
    return record


def workloads_named(*names: str) -> list[Workload]:
    return [workload for workload in WORKLOADS if workload.name in names]


@contextmanager
def site_of(backend: str, folder: Path) -> Iterator[Site]:
    site = Site.open(Engine(backend), folder)
    try:
        yield site
    finally:
        site.close()


@pytest.mark.parametrize("backend", ["native", "llamacpp", "onnx"])
def test_each_workload_passes_once(backend: str) -> None:
    status = make_backend(backend).status()
    if not status.installed:
        pytest.skip(f"backend {backend!r} is not installed: {status.reason}")
    kills = backend == "native"  # most of the time is the start of processes, which does not depend on the backend
    workloads = [workload for workload in WORKLOADS if kills or workload.run is not killing.killed]
    record = play(Plan(Engine(backend), seed=2, n_rounds=len(workloads)), workloads)
    assert [f"{failure.workload}: {failure.traceback}" for failure in record.failures] == []
    assert record.rounds == dict.fromkeys((workload.name for workload in workloads), 1)


def test_a_plan_is_the_same_in_another_process() -> None:
    for plan in (Plan(Engine("native"), 3, 60.0, 5, ("greedy", 7)), Plan(Engine("onnx"), only=("greedy", "sampled"))):
        assert Plan.from_json(plan.to_json()) == plan


def test_only_chosen_workloads_run() -> None:
    (record,) = supervise([Plan(Engine("native"), n_rounds=3, only=("same calls again",))], lambda records: None)
    assert record.rounds == {"same calls again": 3} and not record.failures


def test_a_run_depends_only_on_its_seed() -> None:
    def events(seed: int) -> list[object]:
        numbers = []
        work = [Workload(name, lambda site, rng: numbers.append(rng.random())) for name in "abc"]
        run(Plan(Engine("native"), seed, n_rounds=6), lambda event: None, work)
        return numbers

    assert events(1) == events(1) != events(2)


def leak_memory(leaked: list[object]) -> None:
    leaked.append(np.ones(2**19))


def leak_file(leaked: list[object]) -> None:
    leaked.append(Path(os.devnull).open())  # noqa: SIM115


def leak_nothing(leaked: list[object]) -> None:
    leaked[:] = [np.ones(2**19), Path(os.devnull).read_bytes()]


@pytest.mark.parametrize(
    ("leak", "grows"), [(leak_memory, "resident memory"), (leak_file, "file descriptors"), (leak_nothing, "")]
)
def test_a_leak_is_reported(leak: Callable[[list[object]], None], grows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round leaks 4 MiB, or a file; the line spans the last 15 of 20 rounds."""
    monkeypatch.setattr(trend, "MIN_HOURS", 0)
    leaked: list[object] = []
    try:
        record = play(Plan(Engine("native"), n_rounds=20), [Workload("leak", lambda site, rng: leak(leaked))])
    finally:
        for each in leaked:
            getattr(each, "close", lambda: None)()
    assert [part.split(":")[0] for part in summary(record).split("; ") if " grows: " in part] == (
        [f"{grows} grows"] if grows else []
    )
    assert soak.status([record]) == (1 if grows else 0)


def test_a_dump_acknowledged_before_it_is_written_is_reported(tmp_path: Path) -> None:
    with site_of("native", tmp_path) as site, pytest.raises(Wrong, match="acknowledged as saved before kill -9"):
        killing.killed(site, random.Random(3), worker=FAULTY)


def test_a_broken_backend_is_reported_with_a_seed_that_reproduces_it() -> None:
    engine = Engine(f"{FAULTY}:Broken")
    record = play(Plan(engine, seed=1, n_rounds=6), workloads_named("edited"))
    assert record.failures
    failure = record.failures[0]
    again = play(Plan(engine, replay=(failure.workload, failure.seed)), workloads_named("edited"))
    assert [each.error for each in again.failures] == [failure.error]
    text = report([record], "soak")
    assert f"--replay '{failure.workload}:{failure.seed}'" in text
    assert f"## {engine.backend}: failed" in text
    assert soak.status([record]) == 1


def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (record,) = supervise([Plan(Engine(f"{FAULTY}:Crashing"), n_rounds=3)], lambda records: None)
    (failure,) = record.failures
    assert (failure.workload, failure.number) == (WORKLOADS[0].name, 0)
    assert "SIGSEGV" in failure.error and "soak_faults.py" in failure.traceback


def test_names_of_workloads_are_unique() -> None:
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)


def test_a_run_that_is_too_short_is_undecided() -> None:
    record = play(Plan(Engine("native"), n_rounds=1), [Workload("nothing", lambda site, rng: None)])
    assert set(record.verdicts()) == {Verdict.UNDECIDED}
    assert soak.status([record]) == soak.UNDECIDED
