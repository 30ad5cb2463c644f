"""What every scenario class derives from: it gives each scenario a bench, once for each model of the adopter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from slm_conformance.adoption import fixtures_of, workshop_of
from slm_conformance.bench import Bench
from slm_conformance.factories import SHAPES, SMALL_SHAPES
from slm_core.types import EditLevel


class Scenarios:
    """A class of scenarios. Each takes a ``Bench`` and nothing else; its docstring begins with its clause.

    Attributes:
        level: the edit level that the scenarios need; they are skipped where less is declared.
        models: what they run on; the adopter's models where None.
        further_models: what they run on besides the adopter's models, unless one file is under test.
        on_one_model: scenarios whose result no model changes; they run on the first.
        families: further chat formats that they run in, on a tiny model with the control tokens of each.
    """

    level: ClassVar[EditLevel] = EditLevel.REPLAY
    models: ClassVar[tuple[str, ...] | None] = None
    further_models: ClassVar[tuple[str, ...]] = ()
    on_one_model: ClassVar[tuple[str, ...]] = ()
    families: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each scenario on each model, and in each chat format."""
        models = self.models or fixtures_of(metafunc.module, metafunc.config).models
        if not metafunc.config.getoption("--slm-model"):
            models += tuple(name for name in self.further_models if name not in models)
        tiny = next((name for name in models if name.partition("-")[0] in SHAPES | SMALL_SHAPES), None)
        models += tuple(f"{tiny}+{family}" for family in self.families if tiny is not None)
        if metafunc.function.__name__ in self.on_one_model or metafunc.config.getoption("--slm-quick"):
            models = models[:1]
        metafunc.parametrize("bench", models, indirect=True, ids=[Path(name).name for name in models])

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest) -> Iterator[Bench]:
        """A bench for one model; what the scenario made there is closed after it."""
        with Bench(workshop_of(request.module, request.config), request.param) as bench:
            bench.requires(self.level)
            yield bench
