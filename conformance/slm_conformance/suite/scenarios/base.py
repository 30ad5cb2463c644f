"""What every scenario class derives from: it gives each scenario a bench, once for each model of the adopter."""

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
    """A class of scenarios. Each takes a ``Bench`` and nothing else; its docstring begins with its clause.

    Attributes:
        level: the edit level that the scenarios need; they are skipped if less is declared.
        models: the models to run on; None for the adopter's models.
        further_models: what they run on besides the adopter's models, unless one file is under test.
        on_one_model: scenarios whose result no model changes; they run on the first.
        above_contract: whether they test what is written once, on top of any backend. They run on one model and in one
            chat format each, in turn, unless the adopter asks for more (``BackendFixtures.above_contract``).
        families: further chat formats that they run in, on a tiny model with the control tokens of each.
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
