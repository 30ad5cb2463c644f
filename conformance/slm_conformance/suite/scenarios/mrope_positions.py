"""Rows that stand apart in time, height and width: what they lead to, and how they are edited and dumped."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.reference import Reference
from slm_conformance.suite.bench import Bench, Rows
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.toy.backend import ToyBackend
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Batch, Context
from slm_core.types import Capability, ContextOptions, EditLevel, ModelOptions, Pos

_GRID = [(0, y, x) for y in range(3) for x in range(5)]
"""An image of 3 rows of 5 patches."""
_FIRST, _LAST = 6, 6 + len(_GRID)
_N = 40


class TestMropePositions(Scenarios):
    """Clause 15: rows stand where their offsets say, and what follows behind the furthest of all."""

    models = ("qwen2vl-f32",)

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: offsets are taken where ``MROPE_POSITIONS`` is declared; elsewhere ``UnsupportedInput``."""
        context = bench.context()
        batch = _batch(bench, context, 0, _LAST)
        if Capability.MROPE_POSITIONS not in bench.capabilities:
            with bench.refused("offsets for a context that declares none", UnsupportedInput, context=context):
                context.decode(batch)
            return
        rows = context.decode(batch)
        assert rows.shape == (_LAST, bench.model.info.n_vocab), f"{_LAST} tokens and rows give logits {rows.shape}"

    def test_dumps_as_declared(self, bench: Bench) -> None:
        """Clauses 6 and 15: where they are not declared, a dump with offsets raises ``SnapshotMismatch``."""
        with ToyBackend().load(bench.path, ModelOptions()) as toy, toy.new_context(ContextOptions(64, 1, 64)) as other:
            _feed(bench, other, 0, _LAST)
            data = other.dump(0)
        context = bench.context()
        if Capability.MROPE_POSITIONS not in bench.capabilities:
            with bench.refused("a dump with offsets", SnapshotMismatch, context=context):
                context.restore(1, data)
            return
        context.restore(1, data)
        bench.agree(
            _feed(bench, context, _LAST, _N, seq_id=1), _expected(bench)[_LAST:], "what follows the toy's image"
        )

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clauses 8, 9 and 15: text, an image and text, in one batch and in several."""
        for sizes in ([_N], [_LAST, _N - _LAST], [9, 8, _N - 17]):
            context, done, rows = _context(bench), 0, []
            for n in sizes:
                rows.append(_feed(bench, context, done, done + n))
                done += n
            bench.agree(np.concatenate(rows), _expected(bench), f"text, an image and text in batches of {sizes}")

    def test_forked_and_truncated(self, bench: Bench) -> None:
        """Clauses 3, 5 and 15: what is left of an image is as if no more of it had come."""
        context = _context(bench)
        _feed(bench, context, 0, 30)
        context.fork(0, 1, 12)
        bench.agree(_feed(bench, context, 12, _N, seq_id=1), _expected(bench)[12:], "what follows a fork in an image")
        if bench.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(0, 25))
            bench.agree(_feed(bench, context, 25, _N), _expected(bench)[25:], "what follows a truncate")
            context.truncate(Pos(0, 12))
            reference, more = bench.reference(), bench.tokens(5, seed=3)
            _decode(bench, reference, 0, 12)
            bench.agree(bench.feed(context, more), reference.decode(more), "text behind a truncate in an image")

    def test_cut(self, bench: Bench) -> None:
        """Clauses 4 and 15: what is behind a cut moves by the places that are cut, not by the tokens."""
        bench.requires(EditLevel.CUT)
        for start, end in ((4, _LAST + 2), (0, 3), (8, _LAST), (2, 10)):
            context, reference = _context(bench), bench.reference()
            _feed(bench, context, 0, 30)
            _decode(bench, reference, 0, 30)
            context.cut(Pos(0, start), Pos(0, end))
            reference.cut(start, end)
            more = bench.tokens(8, seed=4)
            bench.agree(bench.feed(context, more), reference.decode(more), f"8 tokens after a cut of [{start}, {end})")

    def test_dump_and_restore(self, bench: Bench) -> None:
        """Clauses 6 and 15: a dump with an image goes on in another context of the same backend."""
        context, other = _context(bench), bench.context(n_ctx=64)
        _feed(bench, context, 0, 25)
        other.restore(1, context.dump(0))
        bench.agree(_feed(bench, other, 25, _N, seq_id=1), _expected(bench)[25:], "a restored dump with an image")

    def test_decoded_again(self, bench: Bench) -> None:
        """Clauses 6 and 15: where the payload of a dump means nothing, rows are decoded again where they stood."""
        context, reference = _context(bench), bench.reference()
        _feed(bench, context, 0, 30)
        _decode(bench, reference, 0, 30)
        if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 3), Pos(0, 9))
            reference.cut(3, 9)
        other, more = bench.context(n_batch=7), bench.tokens(8, seed=4)
        other.restore(0, foreign(SequenceSnapshot.from_bytes(context.dump(0))).to_bytes())
        found = bench.feed(other, more)
        bench.agree(found, reference.decode(more), "another backend's dump with an image, decoded 7 at a time")


def _context(bench: Bench) -> Context:
    if Capability.MROPE_POSITIONS not in bench.capabilities:
        pytest.skip("declared absent: mrope_positions")
    return bench.context()


def _rows(bench: Bench) -> Rows:
    """The image's rows; no token has them."""
    table = bench.reference().table(bench.tokens(2 * len(_GRID), seed=9))
    return (0.7 * table[::2] + 0.5 * table[1::2]).astype(np.float32)


def _batch(bench: Bench, context: Context, start: int, stop: int, seq_id: int = 0) -> Batch:
    """A part of the text, with as much of the image as is in it."""
    batch, tokens = context.new_batch(), bench.tokens(_N)
    first, last = (min(max(place, start), stop) for place in (_FIRST, _LAST))
    batch.extend(tokens[start:first], Pos(seq_id, start), logits="all")
    done = first - _FIRST
    offsets = np.array(_GRID[done : last - _FIRST], np.int32).reshape(-1, 3) - _furthest(done)
    batch.add_embeddings(_rows(bench)[done : last - _FIRST], Pos(seq_id, first), offsets=offsets, logits="all")
    batch.extend(tokens[last:stop], Pos(seq_id, last), logits="all")
    return batch


def _furthest(n: int) -> int:
    """How many places the first ``n`` rows of the image take."""
    return max((1 + max(offset) for offset in _GRID[: max(n, 0)]), default=0)


def _feed(bench: Bench, context: Context, start: int, stop: int, seq_id: int = 0) -> Rows:
    return context.decode(_batch(bench, context, start, stop, seq_id)).copy()


def _decode(bench: Bench, reference: Reference, start: int, stop: int) -> Rows:
    """The same of the reference, which is given the image whole, or as much as there is of it."""
    tokens = bench.tokens(_N)
    states = [reference.embed(tokens[start:_FIRST])]
    n = min(stop, _LAST) - _FIRST
    states.append(reference.embed_rows(_rows(bench)[:n].astype(np.float64), offsets=_GRID[:n]))
    if stop > _LAST:
        states.append(reference.embed(tokens[_LAST:stop]))
    return reference.logits(np.concatenate(states))


def _expected(bench: Bench) -> Rows:
    return _decode(bench, bench.reference(), 0, _N)
