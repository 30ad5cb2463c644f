"""The harness detects a worker that dies, hangs, leaks or accepts invalid inputs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slm_core.errors import InvalidModelFile
from tests.hostile.kinds import Kind, Nonsense
from tests.hostile.pool import Worker
from tests.hostile.worker import outcome


class _Panic(BaseException):
    pass


class _Engine(Kind):
    """Shows a behaviour of engines, chosen by the seed."""

    def prepare(self) -> None:
        pass

    def attack(self, seed: int) -> None:
        match seed:
            case 1:
                raise InvalidModelFile("refused")
            case 2:
                raise InvalidModelFile("two\nlines")
            case 3:
                raise Nonsense("logits")
            case 4:
                raise _Panic("unwrap")
            case 5:
                raise InvalidModelFile("x" * 3000)


@pytest.mark.parametrize(
    ("seed", "verdict"), [(0, "accepted"), (1, "refused"), (2, "leaked"), (3, "nonsense"), (4, "leaked"), (5, "leaked")]
)
def test_each_outcome_has_its_verdict(tmp_path: Path, seed: int, verdict: str) -> None:
    assert outcome(_Engine("core", tmp_path), seed)[0] == verdict


def test_a_worker_that_dies_or_hangs_is_replaced() -> None:
    with Worker("templates", "core", wall_s=5) as worker:
        assert worker.attack(0)[0] in ("accepted", "refused")
        os.kill(_pid(worker), signal.SIGABRT)
        verdict, message = worker.attack(1)
        assert (verdict, message[:7]) == ("crashed", "SIGABRT")
        assert worker.attack(0)[0] in ("accepted", "refused")
        os.kill(_pid(worker), signal.SIGSTOP)  # the stopped process does not answer
        assert worker.attack(1)[0] == "hung"
        assert worker.attack(0)[0] in ("accepted", "refused")


def _pid(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid
