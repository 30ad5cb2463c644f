"""Which scenarios kill which mutant: ``python -m slm_conformance.mutants.matrix PAGE`` plays them and writes a page.

Playing a mutant takes about ten seconds. With ``--results FILE``, results are kept and only new mutants are played.
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

import slm_conformance.mutants
from slm_conformance.mutants.registry import MUTANTS, Mutant
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
"""Scenarios of the layers above a context. They fail on many errors of a context, and do not locate them."""

WITHIN_THEIR_AREA = {
    "TestHostileDumps": "Dump",
    "TestHostileSessions": "TestHostileSessions",
    "TestVocabulary": "TestVocabulary",
    "TestEmbeddings": "TestEmbeddings",
    "TestDeviceSampling": "TestDeviceSampling",
    "TestEmbeddingInput": "TestEmbeddingInput",
    "TestBidirectionalBlocks": "TestBidirectionalBlocks",
    "TestMropePositions": "TestMropePositions",
    "TestAttentionBias": "TestAttentionBias",
    "TestMtp": "TestMtp",
    "TestLayerStates": "TestLayerStates",
    "TestClose::test_mem": "TestClose",
}
"""Scenarios that are slow or need a capability, and the area of each: part of the name of a mutant's scenario."""

NOT_PLAYED = ("TestModelBased", "TestSessionPrograms", "TestChatPrograms")
"""Random programs fail on most mutants, so they would hide which other scenario is needed."""

ENOUGH_KILLS = 2
"""Playing a mutant stops after this many scenarios have failed: no scenario kills it alone."""


def all_mutants() -> list[Mutant]:
    """All mutants of the package, sorted by name."""
    for module in pkgutil.iter_modules(slm_conformance.mutants.__path__):
        importlib.import_module(f"slm_conformance.mutants.{module.name}")
    return sorted(MUTANTS, key=lambda mutant: mutant.name)


def play_mutant(mutant: Mutant) -> list[str]:
    """The scenarios that kill a mutant, its own scenario first; no more than ``ENOUGH_KILLS``."""
    named = mutant.killed_by
    others = [name for name in scenario_names() if name != named and _is_played(name, mutant)]
    others.sort(key=lambda name: not name.startswith(named.partition("::")[0]))  # its class first: likely to kill it
    failed: list[str] = []
    for name, outcome in play_in_turn(mutant.fixtures(), [named, *others]):
        failed += [name] * (outcome.verdict is Verdict.FAILS)
        if len(failed) == ENOUGH_KILLS:
            break
    return failed


def _is_played(scenario: str, mutant: Mutant) -> bool:
    if scenario.startswith(NOT_PLAYED) or scenario.startswith(ABOVE) != mutant.killed_by.startswith(ABOVE):
        return False
    return all(area in mutant.killed_by for slow, area in WITHIN_THEIR_AREA.items() if scenario.startswith(slow))


def killed_by_one(killed_by: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each scenario, the mutants that no other scenario kills.

    Args:
        killed_by: for each mutant, the scenarios that kill it.
    """
    alone: dict[str, list[str]] = {}
    for mutant, scenarios in killed_by.items():
        if len(scenarios) == 1:
            alone.setdefault(scenarios[0], []).append(mutant)
    return alone


def play_mutants(mutants: Sequence[Mutant], results: Path | None, n_processes: int) -> dict[str, list[str]]:
    """The scenarios that kill each mutant, by the name of the mutant's backend.

    Args:
        mutants: the mutants to play.
        results: a JSON file of earlier results; new results are added to it.
        n_processes: the number of mutants played at a time; 0 plays none.
    """
    results_so_far: dict[str, list[str]] = (
        json.loads(results.read_text(encoding="utf-8")) if results is not None and results.exists() else {}
    )
    new = [mutant for mutant in mutants if mutant.backend not in results_so_far] if n_processes else []
    with ProcessPoolExecutor(max(1, n_processes)) as processes:
        for job in as_completed(jobs := {processes.submit(play_mutant, mutant): mutant for mutant in new}):
            results_so_far[jobs[job].backend] = job.result()
            if results is not None:
                results.write_text(json.dumps(results_so_far, indent=1), encoding="utf-8")
    return {mutant.backend: results_so_far[mutant.backend] for mutant in mutants if mutant.backend in results_so_far}


def page(mutants: Sequence[Mutant], killed_by: Mapping[str, Sequence[str]]) -> str:
    """The page of mutants by scenario, in Markdown.

    Args:
        mutants: all mutants.
        killed_by: the scenarios that kill each mutant, by the name of its backend; a missing mutant was not played.
    """
    alone = killed_by_one(killed_by)
    named = {mutant.killed_by for mutant in mutants}
    names = scenario_names()
    without = [name for name in names if name not in alone]
    lines = [
        _PAGE_START.format(
            n_mutants=len(mutants), n_scenarios=len(names), n_played=len(killed_by), n_alone=len(names) - len(without)
        )
    ]
    for name in names:
        lines += [_row(mutant, killed_by.get(mutant.backend)) for mutant in mutants if mutant.killed_by == name]
    if without:
        lines += [
            "",
            "## Not yet shown to be needed",
            "",
            _SCENARIOS_WITHOUT_MUTANTS,
            "",
            "| scenario | has mutants |",
            "|---|---|",
        ]
    lines += [f"| `{name}` | {'yes' if name in named else 'no'} |" for name in without]
    return "\n".join(lines) + "\n"


def _row(mutant: Mutant, killed_by: Sequence[str] | None) -> str:
    others = (
        ["not played yet"] if killed_by is None else [f"`{name}`" for name in killed_by if name != mutant.killed_by]
    )
    breaks = mutant.breaks.replace("``", "`")
    return f"| `{mutant.name}` | {breaks} | `{mutant.killed_by}` | {', '.join(others) or 'none'} |"


_PAGE_START = """# Mutants of the toy, by scenario

On this page you can look up which scenario of the conformance suite detects which bug. The suite is tested with
mutants: toy backends, each of which breaks one promise of the contract on purpose. The table lists each mutant
with the scenarios that kill it. Another page has [mutants of the project's own code](mutants.md).
[conformance.md](conformance.md) says how to use and extend the suite.

```sh
python -m slm_conformance.mutants.matrix docs/conformance-mutants.md   # writes this page: do not edit it by hand
```

The suite has {n_scenarios} scenarios and {n_mutants} mutants. `make test` runs each mutant with the scenario in
the column "killed by", which must fail. For the last column, other scenarios run on the mutant, too, until the
first of them fails: {n_played} of the {n_mutants} mutants were played this way, and {n_alone} scenarios have a
mutant that only they kill. With `--results`, only new mutants are played; scenarios that were added later do
not run on older mutants.

Random programs run only on their own mutants. Scenarios of sessions, chats, generation and sampling run only on
mutants of these areas. Scenarios of hostile dumps, vocabulary, memory, embeddings, bidirectional blocks, M-RoPE
positions, multi-token prediction and sampling on devices run only on mutants of their own area. All mutants run the
tiny llama model in float32. Scenarios about the content of answers run the demo model, scenarios of M-RoPE positions a
tiny qwen2vl, and scenarios of multi-token prediction a tiny llama with a layer for it.

| mutant | breaks | killed by | also killed by |
|---|---|---|---|"""

_SCENARIOS_WITHOUT_MUTANTS = """No mutant is known that these scenarios alone kill: other scenarios kill their mutants
as well, or their mutants have not been played on other scenarios yet."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Play the mutants and write the page."""
    parser = argparse.ArgumentParser(prog="python -m slm_conformance.mutants.matrix", description=__doc__)
    parser.add_argument("page", type=Path, help="the Markdown file to write")
    parser.add_argument("--results", type=Path, help="a JSON file that keeps the results")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants played at a time; 0: none")
    args = parser.parse_args(arguments)
    mutants = all_mutants()
    args.page.write_text(page(mutants, play_mutants(mutants, args.results, args.processes)), encoding="utf-8")


if __name__ == "__main__":
    main()
