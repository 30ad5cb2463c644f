"""Embedding rows with M-RoPE offsets: their logits, and how they are edited and dumped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.reference import Reference
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import next_row
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.suite.workshop import Rows
from slm_conformance.toy.backend import ToyBackend
from slm_core.chat import Session
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidEmbedding, SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Batch, Context
from slm_core.types import Capability, ContextOptions, EditLevel, ModelOptions, Pos

_OFFSETS = [(0, y, x) for y in range(3) for x in range(5)]
"""Offsets (time, height, width) of the patches of an image, 3 high and 5 wide."""
_FIRST, _LAST = 6, 6 + len(_OFFSETS)  # the positions of the image: [_FIRST, _LAST)
_N = 40  # tokens and patches: text, the image, text


class TestMropePositions(Scenarios):
    """Clause 15: a row's offset sets its M-RoPE position; the next token follows the highest position."""

    models = ("qwen2vl-f32",)

    def test_as_declared(self, bench: Bench) -> None:
        """Clauses 2 and 15: offsets [n, 3] work if ``MROPE_POSITIONS`` is declared, else raise ``UnsupportedInput``."""
        context = bench.context()
        batch, right = context.new_batch(), np.array(_OFFSETS[:3])
        wrong: dict[str, NDArray[Any]] = {
            "in two dimensions": right[:, :2],
            "of another number of rows": right[:2],
            "with fractions": right + 0.5,
        }
        for what, offsets in wrong.items():
            with bench.refused(f"offsets {what}", InvalidEmbedding):
                batch.add_embeddings(_rows(bench)[:3], Pos(0, 0), offsets=offsets)
        assert len(batch) == 0, f"refused rows left {len(batch)} inputs in the batch"
        batch = _batch(bench, context, 0, _LAST)
        if Capability.MROPE_POSITIONS not in bench.capabilities:
            with bench.refused("offsets for a context that declares none", UnsupportedInput, context=context):
                context.decode(batch)
            return
        rows = context.decode(batch)
        assert rows.shape == (_LAST, bench.model.info.n_vocab), f"{_LAST} tokens and rows give logits {rows.shape}"

    def test_in_a_session(self, bench: Bench) -> None:
        """Clause 15: ``Session.append_rows`` with offsets gives the rows their positions, also when decoded again."""
        _context(bench)
        session = Session(bench.context(n_batch=_FIRST + 4), bench.vocab)
        session.append_tokens(bench.tokens(_N)[:_FIRST])
        session.append_rows(_rows(bench), offsets=np.array(_OFFSETS))
        session.append_tokens(bench.tokens(_N)[_LAST:])
        expected = _expected(bench)
        bench.agree(next_row(session), expected[-1:], "the next logits after an image in parts")
        session.truncate(_FIRST + 7)
        bench.agree(next_row(session), expected[_FIRST + 6 : _FIRST + 7], "the next logits within an image")

    def test_dumps_as_declared(self, bench: Bench) -> None:
        """Clauses 6 and 15: a dump with offsets raises ``SnapshotMismatch`` if they are not declared."""
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
            _feed(bench, context, _LAST, _N, seq_id=1), _expected(bench)[_LAST:], "the text after the toy's image"
        )

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clauses 8, 9 and 15: text, an image and text give the reference's logits, in one batch and in several."""
        for sizes in ([_N], [_LAST, _N - _LAST], [9, 8, _N - 17]):
            context, start, rows = _context(bench), 0, []
            for n in sizes:
                rows.append(_feed(bench, context, start, start + n))
                start += n
            bench.agree(np.concatenate(rows), _expected(bench), f"text, an image and text in batches of {sizes}")

    def test_forked_and_truncated(self, bench: Bench) -> None:
        """Clauses 3, 5 and 15: a fork or truncate inside an image keeps the M-RoPE positions of the first rows."""
        context = _context(bench)
        _feed(bench, context, 0, 30)
        bench.feed(context, bench.tokens(12, seed=3), seq_id=1)
        context.drop(1)
        context.fork(0, 1, 12)
        bench.agree(
            _feed(bench, context, 12, _N, seq_id=1), _expected(bench)[12:], "the text after a fork inside an image"
        )
        if bench.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(0, 25))
            bench.agree(_feed(bench, context, 25, _N), _expected(bench)[25:], "the text after a truncate")
            context.truncate(Pos(0, 12))
            reference, more = bench.reference(), bench.tokens(5, seed=3)
            _decode(bench, reference, 0, 12)
            bench.agree(bench.feed(context, more), reference.decode(more), "text after a truncate inside an image")

    def test_cut(self, bench: Bench) -> None:
        """Clauses 4 and 15: tokens after a cut move by its M-RoPE positions, not by its number of tokens."""
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
        """Clauses 6 and 15: a dump with an image replaces text of the same length, with room for both or for one."""
        context = _context(bench)
        _feed(bench, context, 0, 25)
        for n_ctx in (64, 48):
            other = bench.context(n_ctx=n_ctx)
            bench.feed(other, bench.tokens(25, seed=3), seq_id=1)
            other.restore(1, context.dump(0))
            bench.agree(_feed(bench, other, 25, _N, seq_id=1), _expected(bench)[25:], "a restored dump with an image")

    def test_decoded_again(self, bench: Bench) -> None:
        """Clauses 6 and 15: rows of an image in another backend's dump are decoded again at their M-RoPE positions."""
        context, reference = _context(bench), bench.reference()
        _feed(bench, context, 0, 30)
        _decode(bench, reference, 0, 30)
        if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 3), Pos(0, 9))
            reference.cut(3, 9)
        other, more = bench.context(n_batch=7), bench.tokens(8, seed=4)
        other.restore(0, foreign(SequenceSnapshot.from_bytes(context.dump(0))).to_bytes())
        rows = bench.feed(other, more)
        bench.agree(rows, reference.decode(more), "another backend's dump with an image, decoded 7 at a time")


def _context(bench: Bench) -> Context:
    if Capability.MROPE_POSITIONS not in bench.capabilities:
        pytest.skip("declared absent: mrope_positions")
    return bench.context()


def _rows(bench: Bench) -> Rows:
    """The image's embedding rows, which differ from every token's."""
    table = bench.reference().table(bench.tokens(2 * len(_OFFSETS), seed=9))
    return (0.7 * table[::2] + 0.5 * table[1::2]).astype(np.float32)


def _batch(bench: Bench, context: Context, start: int, stop: int, seq_id: int = 0) -> Batch:
    """The inputs [start, stop) of the text with its image."""
    batch, tokens = context.new_batch(), bench.tokens(_N)
    first, last = (min(max(bound, start), stop) for bound in (_FIRST, _LAST))
    batch.extend(tokens[start:first], Pos(seq_id, start), logits="all")
    patches = slice(first - _FIRST, last - _FIRST)
    offsets = np.array(_OFFSETS[patches], np.int32).reshape(-1, 3) - _n_positions(patches.start)
    batch.add_embeddings(_rows(bench)[patches], Pos(seq_id, first), offsets=offsets, logits="all")
    batch.extend(tokens[last:stop], Pos(seq_id, last), logits="all")
    return batch


def _n_positions(n: int) -> int:
    """The number of M-RoPE positions that the first ``n`` rows of the image take."""
    return max((1 + max(offset) for offset in _OFFSETS[: max(n, 0)]), default=0)


def _feed(bench: Bench, context: Context, start: int, stop: int, seq_id: int = 0) -> Rows:
    return context.decode(_batch(bench, context, start, stop, seq_id)).copy()


def _decode(bench: Bench, reference: Reference, start: int, stop: int) -> Rows:
    """Logits of the reference, which takes the image in one call."""
    tokens = bench.tokens(_N)
    states = [reference.embed(tokens[start:_FIRST])]
    n = min(stop, _LAST) - _FIRST
    states.append(reference.embed_rows(_rows(bench)[:n].astype(np.float64), offsets=_OFFSETS[:n]))
    if stop > _LAST:
        states.append(reference.embed(tokens[_LAST:stop]))
    return reference.logits(np.concatenate(states))


def _expected(bench: Bench) -> Rows:
    return _decode(bench, bench.reference(), 0, _N)
