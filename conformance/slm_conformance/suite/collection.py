"""Checks and changes of collected scenarios: completeness, expected failures, the header."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import ModuleType

import pytest

from slm_conformance.suite import scenarios
from slm_conformance.suite.adoption import fixtures_of, workshop_of
from slm_conformance.suite.meta import scenario_names, tests_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.subject import describe

_TAKES_LONG = (
    "TestBackend::test_an_unknown_device",
    "TestClose::test_the_interpreter",
    "TestCut::test_with_each_kv_type",
    "TestDecodeLimits::test_long",
    "TestDumpRestore::test_in_another_process",
    "TestHostile",
    "TestMeaning",
    "TestNumbers::test_each",
    "TestNumbers::test_the",
    "TestVocabulary::test_random",
)
"""Scenarios that take more than half a second on an idle machine."""


def prepare(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that adopting modules are complete, mark expected failures, deselect scenarios that run elsewhere.

    Raises:
        pytest.UsageError: a module leaves out or replaces scenarios, or expects one to fail that does not exist.
    """
    for module, adopted in by_module(items).items():
        expected = fixtures_of(module, config).expected_failures
        _check_complete(module)
        _check_models(module, config)
        _check_names(module, expected)
        for item in adopted:
            reason = expected.get(_name(item), expected.get(_name(item, with_model=True)))
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        if not fixtures_of(module, config).slow:
            _leave_out(config, items, _slow(adopted))
        if fixtures_of(module, config).above_contract == "elsewhere":
            _leave_out(config, items, {item for item in adopted if item.cls.above_contract})


def first_look(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow scenarios."""
    _leave_out(config, items, {item for functions in by_module(items).values() for item in _slow(functions)})


def _slow(adopted: Iterable[pytest.Function]) -> set[pytest.Item]:
    return {item for item in adopted if _name(item).startswith(_TAKES_LONG) or item.get_closest_marker("slow")}


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: AbstractSet[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def headers(config: pytest.Config, items: Iterable[pytest.Item]) -> list[str]:
    """Lines about the backend under test: version, devices, models, edit levels, capabilities."""
    lines = []
    for module in by_module(items):
        try:
            subject = describe(workshop_of(module, config))
        except pytest.skip.Exception as skipped:
            lines.append(f"slm-conformance: {skipped.msg}")
            continue
        lines += [f"slm-conformance: {line}" for line in (str(subject), *(f"  {model}" for model in subject.models))]
    return lines


def by_module(items: Iterable[pytest.Item]) -> Mapping[ModuleType, list[pytest.Function]]:
    """The collected scenarios, by the module that adopts them."""
    adopted: dict[ModuleType, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, Scenarios):
            adopted.setdefault(item.module, []).append(item)
    return adopted


def _check_complete(module: ModuleType) -> None:
    for name in scenarios.__all__:
        ours, theirs = getattr(scenarios, name), getattr(module, name, None)
        if theirs is None or not issubclass(theirs, ours):
            raise pytest.UsageError(
                f"{module.__name__} leaves out {name}: import all of slm_conformance.scenarios; what a backend lacks it"
                " declares, what it breaks goes into expected_failures"
            )
        for test in tests_of(ours):
            if getattr(theirs, test) is not getattr(ours, test):
                raise pytest.UsageError(f"{module.__name__} replaces {name}::{test}: put it into expected_failures")


def _check_models(module: ModuleType, config: pytest.Config) -> None:
    """Refuse a run in which all scenarios would be skipped."""
    with contextlib.suppress(pytest.skip.Exception):
        workshop = workshop_of(module, config)
        refusals = [workshop.refusal(name) for name in workshop.fixtures.models]
        if None not in refusals:
            raise pytest.UsageError(f"{workshop.fixtures.backend} runs none of the suite's models: {refusals[0]}")


def _check_names(module: ModuleType, expected: Mapping[str, str]) -> None:
    unknown = [name for name in expected if name.split("[")[0] not in scenario_names()]
    if unknown:
        raise pytest.UsageError(f"{module.__name__} expects {unknown[0]} to fail, but there is no such scenario")


def _name(item: pytest.Function, *, with_model: bool = False) -> str:
    assert item.cls is not None
    return f"{item.cls.__name__}::{item.name if with_model else item.originalname}"
