"""The record of a run, accumulated from its events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soaking.resources import RESOURCES
from soaking.rounds import Event, Plan
from soaking.trend import Trend, Verdict, fit


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed round.

    Attributes:
        workload: name of the workload.
        seed: its seed.
        number: number of the round.
        error: type and message, or how the process ended.
        traceback: the whole traceback.
    """

    workload: str
    seed: int
    number: int
    error: str
    traceback: str = ""


@dataclass(slots=True)
class Record:
    """The course of a run.

    Attributes:
        plan: the plan.
        version: version of the backend.
        load_options: passed to ``load``.
        rounds: number of rounds by workload.
        seconds: seconds by workload.
        failures: the failures, in order.
        counts: other counts of workloads.
        times_s: the times of samples.
        samples: the amounts of each resource at these times.
        elapsed_s: seconds until the last event that has a time.
        current: the round that is running.
        is_over: whether the process ended normally.
    """

    plan: Plan
    version: str = ""
    load_options: dict[str, object] = field(default_factory=dict)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    samples: list[list[float]] = field(default_factory=list)
    elapsed_s: float = 0.0
    current: Event | None = None
    is_over: bool = False

    def take(self, event: Event | Any) -> None:
        """Add an event."""
        match event["event"]:
            case "start":
                self.version, self.load_options = event["version"], event["load_options"]
            case "begin":
                self.current = event
            case "end":
                self.rounds[event["workload"]] += 1
                self.seconds[event["workload"]] += event["seconds"]
                self.counts, self.current = event["counts"], None
            case "failure":
                failed = (event["workload"], event["seed"], event["round"], event["error"], event["traceback"])
                self.failures.append(Failure(*failed))
            case "sample":
                self.elapsed_s = event["elapsed_s"]
                self.times_s.append(event["elapsed_s"])
                self.samples.append(event["values"])
            case "over":
                self.elapsed_s, self.is_over = event["elapsed_s"], True

    def died(self, error: str, traceback: str) -> None:
        """Record that the process ended early; the running round is a failure."""
        current: Any = self.current or {"workload": "none", "seed": 0, "round": 0}
        self.failures.append(Failure(current["workload"], current["seed"], current["round"], error, traceback))

    def trends(self) -> list[Trend | None]:
        """The trend of each resource; None if there are too few samples."""
        return [fit(self.times_s, [sample[i] for sample in self.samples]) for i in range(len(RESOURCES))]

    def verdicts(self) -> list[Verdict]:
        """The verdict on each resource."""
        pairs = zip(self.trends(), RESOURCES, strict=True)
        return [Verdict.UNDECIDED if trend is None else trend.verdict(kind.allowed) for trend, kind in pairs]

    @property
    def has_failed(self) -> bool:
        """Whether a round failed or a resource grows."""
        return bool(self.failures) or Verdict.GROWS in self.verdicts()
