"""Declared edit levels and capabilities, and the errors of calls beyond them."""

from __future__ import annotations

import dataclasses

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import UnsupportedEdit
from slm_core.types import Capability, EditLevel, Pos


class TestDeclarations(Scenarios):
    """Clause 2: capabilities and edit level are declared; a call beyond them raises the standard error."""

    def test_are_of_the_contract(self, bench: Bench) -> None:
        """Clause 2: contexts declare a frozen set of ``Capability`` and an ``EditLevel``, as in ``declares``."""
        context = bench.context()
        assert isinstance(context.capabilities, frozenset), "capabilities are not a frozenset"
        foreign = [name for name in context.capabilities if not isinstance(name, Capability)]
        assert not foreign, f"{foreign} are no capabilities of the contract ({', '.join(Capability)})"
        assert isinstance(context.edit_level, EditLevel), f"the edit level is {context.edit_level!r}"
        fixtures = bench.workshop.fixtures
        if fixtures.declares and bench.name in fixtures.models:
            declared, expected = {context.edit_level.name.lower(), *context.capabilities}, set(fixtures.declares)
            missing, unknown = sorted(expected - declared), sorted(declared - expected)
            assert not (missing or unknown), f"not declared any more: {missing}; declared, but not expected: {unknown}"

    def test_truncate_as_declared(self, bench: Bench) -> None:
        """Clause 2: ``truncate`` works from level TRUNCATE on, and raises ``UnsupportedEdit`` below."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        if context.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(0, 10))
            assert context.length(0) == 10, "truncate is declared, but truncate(10) left another length"
        else:
            with bench.refused("truncate at edit level REPLAY", UnsupportedEdit, context=context):
                context.truncate(Pos(0, 10))

    def test_cut_as_declared(self, bench: Bench) -> None:
        """Clause 2: ``cut`` works at level CUT, and raises ``UnsupportedEdit`` below."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        if context.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 5), Pos(0, 10))
            assert context.length(0) == 15, "cut is declared, but cut(5, 10) of 20 left another length"
        else:
            with bench.refused(f"cut at edit level {context.edit_level.name}", UnsupportedEdit, context=context):
                context.cut(Pos(0, 5), Pos(0, 10))

    def test_a_strangers_cuts_as_declared(self, bench: Bench) -> None:
        """Clauses 2 and 6: another backend's dump with cuts is restored at level CUT, and raises below."""
        context = bench.context()
        tokens = bench.tokens(20)
        bench.feed(context, tokens)
        snapshot = SequenceSnapshot.from_bytes(context.dump(0))
        removed = bench.tokens(3, seed=1)
        edits = (Edit(4, tuple(removed), 20),)
        data = dataclasses.replace(snapshot, backend="stranger", edits=edits, payload=b"").to_bytes()
        if context.edit_level >= EditLevel.CUT:
            reference = bench.reference()
            reference.decode([*tokens[:4], *removed, *tokens[4:17]])
            reference.cut(4, 7)
            reference.decode(tokens[17:])
            context.restore(1, data)
            more = bench.tokens(4, seed=2)
            bench.agree(bench.feed(context, more, seq_id=1), reference.decode(more), "a stranger's dump with a cut")
        else:
            with bench.refused("a stranger's dump with a cut, below CUT", UnsupportedEdit, context=context):
                context.restore(1, data)
