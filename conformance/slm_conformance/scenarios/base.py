"""What every scenario class derives from: it gives each scenario a bench, once for each model of the adopter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slm_conformance.adoption import fixtures_of, workshop_of
from slm_conformance.bench import Bench


class Scenarios:
    """A class of scenarios. Its tests take the fixture ``bench``; their docstrings begin with their clause."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each scenario on each model."""
        models = fixtures_of(metafunc.module, metafunc.config).models
        metafunc.parametrize("bench", models, indirect=True, ids=[name.rpartition("/")[2] for name in models])

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest) -> Iterator[Bench]:
        """A bench for one model; what the scenario made there is closed after it."""
        bench = Bench(workshop_of(request.module, request.config), request.param)
        yield bench
        bench.close()
