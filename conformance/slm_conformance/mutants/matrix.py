"""Which scenario notices which fault: ``python -m slm_conformance.mutants.matrix PAGE`` plays all and writes a page.

It takes about ten seconds a fault. With ``--results FILE`` what was found is kept, and only what is new is played.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from slm_conformance import mutants
from slm_conformance.mutants.registry import FAULTS, Fault
from slm_conformance.suite.meta import Verdict, play_in_turn, scenario_names

ABOVE = (
    "TestSession",
    "TestChat",
    "TestTools",
    "TestOracle",
    "TestMeaning",
    "TestGeneration",
    "TestSampling",
    "TestConstraints",
    "TestSpeculation",
    "TestBeam",
    "TestCompletions",
    "TestHostileSessions",
)
"""Scenarios of the layers above a context. They fail on much that a context gets wrong, without saying what."""

WITHIN_THEIR_AREA = {
    "TestHostileDumps": "Dump",
    "TestHostileSessions": "TestHostileSessions",
    "TestVocabulary": "TestVocabulary",
    "TestEmbeddings": "TestEmbeddings",
    "TestDeviceSampling": "TestDeviceSampling",
    "TestEmbeddingInput": "TestEmbeddingInput",
    "TestBidirectionalBlocks": "TestBidirectionalBlocks",
    "TestMropePositions": "TestMropePositions",
    "TestClose::test_mem": "TestClose",
}
"""Scenarios that are slow, or of what not all do; and what a fault's scenario has in its name where they are played."""

NOT_PLAYED = ("TestModelBased", "TestSessionPrograms", "TestChatPrograms")
"""Random programs are meant to notice what others notice."""

N_KILLERS = 2
"""A fault that so many notice is known not to be one that only one notices."""


def all_faults() -> list[Fault]:
    """Every broken toy of the package, by name."""
    for module in pkgutil.iter_modules(mutants.__path__):
        importlib.import_module(f"slm_conformance.mutants.{module.name}")
    return sorted(FAULTS, key=lambda fault: fault.name)


def killers(fault: Fault) -> list[str]:
    """The scenarios that fail on a broken toy, the one it names first; no more than ``N_KILLERS``."""
    named = fault.killed_by
    others = [name for name in scenario_names() if name != named and _is_played(name, fault)]
    others.sort(key=lambda name: not name.startswith(named.partition("::")[0]))  # its neighbours are likely to notice
    failed: list[str] = []
    for name, outcome in play_in_turn(fault.fixtures(), [named, *others]):
        failed += [name] * (outcome.verdict is Verdict.FAILS)
        if len(failed) == N_KILLERS:
            break
    return failed


def _is_played(scenario: str, fault: Fault) -> bool:
    if scenario.startswith(NOT_PLAYED) or scenario.startswith(ABOVE) != fault.killed_by.startswith(ABOVE):
        return False
    return all(area in fault.killed_by for slow, area in WITHIN_THEIR_AREA.items() if scenario.startswith(slow))


def only_killers(killed_by: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each scenario, the faults that no other notices.

    Args:
        killed_by: for each fault, the scenarios that fail.
    """
    alone: dict[str, list[str]] = {}
    for fault, scenarios in killed_by.items():
        if len(scenarios) == 1:
            alone.setdefault(scenarios[0], []).append(fault)
    return alone


def play_faults(faults: Sequence[Fault], results: Path | None, n_processes: int) -> dict[str, list[str]]:
    """For each fault, by the name of its backend, the scenarios that notice it.

    Args:
        faults: what to play.
        results: a JSON file of what was found before, where what is found is added.
        n_processes: how many are played at a time; 0 for none.
    """
    known: dict[str, list[str]] = json.loads(results.read_text()) if results is not None and results.exists() else {}
    new = [fault for fault in faults if fault.backend not in known] if n_processes else []
    with ProcessPoolExecutor(max(1, n_processes)) as processes:
        for job in as_completed(jobs := {processes.submit(killers, fault): fault for fault in new}):
            known[jobs[job].backend] = job.result()
            if results is not None:
                results.write_text(json.dumps(known, indent=1))
    return {fault.backend: known[fault.backend] for fault in faults if fault.backend in known}


def page(faults: Sequence[Fault], killed_by: Mapping[str, Sequence[str]]) -> str:
    """The page of faults by scenario, in Markdown.

    Args:
        faults: all that there are.
        killed_by: by the name of a fault's backend, the scenarios that fail; a fault that is missing was not played.
    """
    alone = only_killers(killed_by)
    named = {fault.killed_by for fault in faults}
    names = scenario_names()
    without = [name for name in names if name not in alone]
    lines = [
        _HEADER.format(
            n_faults=len(faults), n_scenarios=len(names), n_played=len(killed_by), n_alone=len(names) - len(without)
        )
    ]
    for name in names:
        lines += [_row(fault, killed_by.get(fault.backend)) for fault in faults if fault.killed_by == name]
    if without:
        lines += ["", "## Not yet shown to be needed", "", _WITHOUT, "", "| scenario | faults name it |", "|---|---|"]
    lines += [f"| `{name}` | {'yes' if name in named else 'no'} |" for name in without]
    return "\n".join(lines) + "\n"


def _row(fault: Fault, killers: Sequence[str] | None) -> str:
    others = ["not played yet"] if killers is None else [f"`{name}`" for name in killers if name != fault.killed_by]
    breaks = fault.breaks.replace("``", "`")
    return f"| `{fault.name}` | {breaks} | `{fault.killed_by}` | {', '.join(others) or 'none'} |"


_HEADER = """# Faults by scenario

Written by `python -m slm_conformance.mutants.matrix docs/conformance-faults.md`; not to be edited by hand. How the
suite is used and extended: [conformance.md](conformance.md).

The suite has {n_scenarios} scenarios, and {n_faults} toys that each break one promise. That each is noticed by the
scenario it names is tested in every run of the tests. The last column comes from playing other scenarios on it, up to
the first that fails, too: {n_played} of the {n_faults} were played so, and {n_alone} scenarios have a fault that they
alone notice.

Not played against others are the random programs. Scenarios of sessions, chats, generation and sampling are played on
faults that name one of them; hostile dumps, vocabulary, memory, embeddings, rows in a grid and sampling on devices on
faults of their area. All toys run the tiny llama model in float32; the demo model where a scenario is about what it
says, and a tiny qwen2vl where it is about rows in a grid.

| fault | breaks | killed by | also noticed by |
|---|---|---|---|"""

_WITHOUT = """For these scenarios no fault is known that they alone notice: those that faults name are noticed by
others as well, or have not been played against the others yet."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m slm_conformance.mutants.matrix", description=__doc__)
    parser.add_argument("page", type=Path, help="the Markdown file to write")
    parser.add_argument("--results", type=Path, help="a JSON file of what was found, which is kept")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="faults played at a time; 0: none")
    given = parser.parse_args(arguments)
    faults = all_faults()
    given.page.write_text(page(faults, play_faults(faults, given.results, given.processes)))


if __name__ == "__main__":
    main()
