"""The pytest plugin. Every pytest run loads it, so it imports the suite only if a module adopts it."""

from __future__ import annotations

import sys

import pytest

pytest.register_assert_rewrite(*(f"slm_conformance.suite.{name}" for name in ("scenarios", "bench", "workshop")))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that replace a fixtures class."""
    group = parser.getgroup("slm-conformance", "conformance of slm-core backends")
    group.addoption("--slm-backend", metavar="NAME", help="the backend under test: a name, or package.module:attribute")
    group.addoption("--slm-model", metavar="PATH", help="the model file to test on (default: tiny random models)")
    group.addoption("--slm-device", metavar="NAME", default="auto", help="the device to load on (default: auto)")
    help_text = "load each model in a process of its own"
    group.addoption("--slm-isolated", action="store_true", help=help_text)
    help_text = "a first look: one model, few random programs, no scenario that takes long"
    group.addoption("--slm-quick", action="store_true", help=help_text)
    help_text = "random programs for so many seconds on each model, beyond the first 20 (default: 0)"
    group.addoption("--slm-budget", metavar="SECONDS", type=float, default=0.0, help=help_text)
    help_text = "seed of the first random program; each has the next one (default: 0)"
    group.addoption("--slm-seed", metavar="N", type=int, default=0, help=help_text)
    help_text = "write a report: .html, .json or .svg (repeatable)"
    group.addoption("--slm-report", metavar="PATH", action="append", default=[], help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of slow scenarios; record the run if a report was requested."""
    config.addinivalue_line("markers", "slow: takes more than a few seconds (listed with --durations)")
    if config.getoption("--slm-report"):
        from slm_conformance.report.recorder import watch

        watch(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that adopting modules are complete, and mark expected failures."""
    if _is_adopted():
        from slm_conformance.suite.collection import first_look, prepare

        prepare(config, items)
        if config.getoption("--slm-quick"):
            first_look(config, items)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Report the backend under test."""
    if not _is_adopted():
        return []
    from slm_conformance.suite.collection import headers

    return headers(config, items)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the models."""
    if _is_adopted():
        from slm_conformance.suite.adoption import close_workshops

        close_workshops(config)


def _is_adopted() -> bool:
    """Whether any module of this run has imported scenarios."""
    return "slm_conformance.suite.scenarios" in sys.modules
