"""Random programs: a context and a model of the contract run the same steps and must agree after each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from slm_conformance.fixtures import FURTHER_MODELS
from slm_conformance.oracle.family_table import SMALL
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.programs.context_programs import Mismatch, Player
from slm_conformance.suite.programs.context_steps import Sizes, Step
from slm_conformance.suite.programs.random_context_programs import N_STEPS, SIZES, ProgramMaker, shrink
from slm_conformance.suite.scenarios.base import Scenarios

N_PROGRAMS = 20
"""Programs of 40 steps on the first model, enough to kill each mutant of these scenarios. Others: one per size."""
LEAST_STEPS = 12
"""Steps of the only program of a model, if ``BackendFixtures.volume`` asks for less than one program."""


class TestModelBased(Scenarios):
    """All clauses: any sequence of legal and illegal calls gives the results that the contract states."""

    further_models = FURTHER_MODELS

    def test_random_programs(self, bench: Bench) -> None:
        """Clauses 1 to 15: programs of random calls hold; a program that fails is shrunk and printed as a script."""
        is_first = bench.name == bench.workshop.fixtures.models[0]
        n_programs = N_PROGRAMS if is_first else len(SIZES)
        n_steps = max(LEAST_STEPS, min(N_STEPS, bench.workshop.share(n_programs * N_STEPS)))
        for seed in seeds(bench, n_programs, at_least=len(SIZES)):
            sizes = SIZES[seed % len(SIZES)]
            declared = bench.model.info.n_vocab, bench.edit_level, bench.capabilities
            program = ProgramMaker(*declared, seed=seed, sizes=sizes).make(n_steps)
            if _mismatch(bench, program, sizes):
                smallest = shrink(program, lambda smaller, sizes=sizes: bool(_mismatch(bench, smaller, sizes)))  # type: ignore[misc]
                pytest.fail(f"seed {seed}: {_mismatch(bench, smallest, sizes)}", pytrace=False)


def seeds(bench: Bench, n_programs: int, *, at_least: int) -> Iterator[int]:
    """Seeds of programs: ``n_programs``, or ``at_least`` in a quick run, and more while ``--slm-budget`` lasts."""
    effort, began = bench.workshop.effort, time.monotonic()
    seed = effort.first_seed
    n_programs = at_least if effort.quick else bench.workshop.share(n_programs)
    while seed < effort.first_seed + n_programs or time.monotonic() - began < effort.seconds:
        yield seed
        seed += 1
    bench.note(f"programs of seeds {effort.first_seed} to {seed - 1}")


def _mismatch(bench: Bench, program: Sequence[Step], sizes: Sizes) -> str:
    """The script that shows a failure of a program; "" if it does not fail."""
    try:
        Player(bench, opening(bench), sizes).play(program)
    except Mismatch as mismatch:
        return str(mismatch)
    return ""


def opening(bench: Bench) -> str:
    """The lines of Python that load the model."""
    fixtures = bench.workshop.fixtures
    lines, source = [], f"Path({str(bench.path)!r})"
    kind, _, weights = bench.name.partition("-")
    if kind in SMALL:
        lines = ["from slm_conformance.oracle.families import family_model"]
        source = f"family_model(Path('.'), {kind!r})"
    elif bench.path.parent == bench.workshop.directory:
        lines = ["from slm_conformance.oracle.factories import make_tiny_model"]
        source = f"make_tiny_model({kind!r}, {weights!r}).write(Path('tiny.gguf'))"
    options = f"{fixtures.device!r}, {bench.workshop.n_threads!r}, None, {dict(fixtures.load_options)!r}"
    backend = repr(fixtures.backend) + (", isolated=True" if fixtures.isolated else "")
    loading = f"model = make_backend({backend}).load(source, ModelOptions({options}))"
    return "\n".join([*lines, f"source = {source}", loading])
