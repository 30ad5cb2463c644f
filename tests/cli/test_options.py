"""Groups of flags compared with the options of the library."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import get_args, get_type_hints

import pytest

import slm_core as slm
from slm_core.cli.options import EngineOptions, SamplingOptions, expand_groups

OPTIONS = {field.name: field for field in fields(slm.Sampling)}
TYPES = get_type_hints(slm.Sampling)


@dataclass(frozen=True)
class Pair:
    left: int = 1
    right: str = "r"


@dataclass(frozen=True)
class OtherLeft:
    left: int = 2


FLAGS = [field for field in fields(SamplingOptions) if field.name not in ("preset", "others")]


@pytest.mark.parametrize("field", FLAGS, ids=lambda field: field.name)
def test_a_sampling_flag_has_the_type_and_the_default_of_its_option(field) -> None:
    annotated, option = get_args(get_type_hints(SamplingOptions, include_extras=True)[field.name])
    default = OPTIONS[field.name].default
    accepted = set(get_args(annotated)) - {type(None)}
    if TYPES[field.name] == tuple[str, ...]:
        assert accepted == {list[str]}
    else:
        assert accepted == (set(get_args(TYPES[field.name])) or {TYPES[field.name]}) - {type(None)}
    assert option.default == f"--{field.name.replace('_', '-')}", "typer keeps the flag's name there"
    assert (f"(default {default})" in option.help) == (default not in (None, ()))


def test_engine_flags_have_the_defaults_of_load() -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(slm.load).parameters.items()}
    engine = EngineOptions()
    assert (engine.backend, engine.device, engine.threads, engine.isolated) == tuple(
        defaults[name] for name in ("backend", "device", "n_threads", "isolated")
    )


def test_fields_of_a_group_replace_its_parameter() -> None:
    calls = []

    @expand_groups
    def command(*, before: int, pair: Pair, after: bool = False) -> None:
        calls.append((before, pair, after))

    parameters = inspect.signature(command).parameters
    assert [(name, p.default) for name, p in parameters.items()] == [
        ("before", inspect.Parameter.empty),
        ("left", 1),
        ("right", "r"),
        ("after", False),
    ]
    command(before=3, left=4, right="x", after=True)
    assert calls == [(3, Pair(4, "x"), True)]


def test_groups_with_a_common_flag_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicate parameter name: 'left'"):

        @expand_groups
        def command(*, pair: Pair, other: OtherLeft) -> None: ...
