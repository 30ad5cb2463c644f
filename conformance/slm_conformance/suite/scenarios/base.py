"""The base of scenario classes: it runs each scenario on each of the adopter's models, with a bench."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from slm_conformance.oracle.factories import SHAPES, SMALL_SHAPES
from slm_conformance.suite.adoption import fixtures_of, workshop_of
from slm_conformance.suite.bench import Bench
from slm_core.types import EditLevel


class Scenarios:
    """A class of scenarios. Each takes a ``Bench`` only, and its docstring begins with its clause.

    Attributes:
        level: the edit level that the scenarios need; they are skipped if the backend declares less.
        models: the models to run on; None for the adopter's models.
        further_models: additional models to run on, unless a single file is under test.
        on_one_model: scenarios whose result does not depend on the model; they run on the first one.
        above_contract: whether they test code above the contract, which is the same for every backend. Then each runs
            on one model and in one chat format, in turn, unless the adopter asks for more
            (``BackendFixtures.above_contract``).
        families: additional chat formats to run in, on a tiny model with the control tokens of each.
    """

    level: ClassVar[EditLevel] = EditLevel.REPLAY
    models: ClassVar[tuple[str, ...] | None] = None
    further_models: ClassVar[tuple[str, ...]] = ()
    on_one_model: ClassVar[tuple[str, ...]] = ()
    above_contract: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each scenario on each model, and in each chat format."""
        fixtures = fixtures_of(metafunc.module, metafunc.config)
        name = metafunc.function.__name__
        models = self.models or fixtures.models
        if not metafunc.config.getoption("--slm-model"):
            models += tuple(model for model in self.further_models if model not in models)
        tiny = next((model for model in models if model.partition("-")[0] in SHAPES | SMALL_SHAPES), None)
        formats = tuple(f"{tiny}+{family}" for family in self.families if tiny is not None)
        if name in self.on_one_model or metafunc.config.getoption("--slm-quick"):
            models, formats = models[:1], ()
        elif self.above_contract and fixtures.above_contract != "each model":
            models, formats = _one_in_turn(models, name), _one_in_turn(formats, name)
        models += formats
        metafunc.parametrize("bench", models, indirect=True, ids=[Path(model).name for model in models])

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest) -> Iterator[Bench]:
        """A bench for one model; the scenario's contexts are closed after it."""
        with Bench(workshop_of(request.module, request.config), request.param) as bench:
            bench.requires(self.level)
            yield bench


def _one_in_turn(models: tuple[str, ...], scenario: str) -> tuple[str, ...]:
    """One of the models for a scenario, the same in each run; empty if there are no models."""
    return models and (models[zlib.crc32(scenario.encode()) % len(models)],)
