"""Damaged dumps, and dumps that were made to do harm."""

from __future__ import annotations

import contextlib
import dataclasses
import tracemalloc
from collections.abc import Iterable

import numpy as np

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.hostile import hostile_dumps
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidSnapshot, SlmError, SnapshotMismatch
from slm_core.protocols import Context
from slm_core.types import EditLevel, Pos

N_HOSTILE = 3_000
"""The number of dumps, divided among the adopter's models; each model gets different dumps."""

N_TRACED = 200
"""The number of dumps whose memory is measured, divided in the same way."""
N_DAMAGED = 5_000
"""The number of positions at which a dump is damaged, for each kind of damage; most dumps are smaller than that. The
positions are divided among the adopter's models."""
MOST_MEMORY = 16 << 20
"""Bytes that ``restore`` may allocate at once for a hostile dump; the dumps have at most 130 kB."""


class TestHostileDumps(Scenarios):
    """Clause 6: no bytes crash, hang, exhaust memory, or leave a sequence half restored."""

    def test_every_truncation(self, bench: Bench) -> None:
        """Clause 6: a small dump that is truncated at any byte raises and changes nothing."""
        data = _small_dump(bench)
        lengths = _of_model(bench, spread_indices(len(data), bench.workshop.share(N_DAMAGED)))
        self._refused(bench, ((f"a dump cut off after {n} of {len(data)} bytes", data[:n]) for n in lengths))

    def test_every_byte(self, bench: Bench) -> None:
        """Clause 6: a small dump with any one byte changed raises and changes nothing."""
        data = _small_dump(bench)
        indices = _of_model(bench, spread_indices(len(data), bench.workshop.share(N_DAMAGED)))
        changed = ((i, (data[i] + 1 + 37 * i % 255) % 256) for i in indices)
        self._refused(
            bench, ((f"a dump with byte {i} changed", data[:i] + bytes([b]) + data[i + 1 :]) for i, b in changed)
        )

    def test_hostile_dumps(self, bench: Bench) -> None:
        """Clause 6: 3,000 dumps with false headers, lengths or numbers and right checksums raise, or restore whole."""
        models = bench.workshop.fixtures.models
        n = _share(bench, N_HOSTILE)
        context, tokens = bench.context(n_ctx=64, n_seq_max=3), bench.tokens(20)
        bench.feed(context, tokens[:12])
        good = context.dump(0)
        for i, data in enumerate(hostile_dumps(_valid_dumps(bench), n, seed=models.index(bench.name))):
            self._restored_or_refused(bench, context, i, data)
        context.restore(1, good)
        expected = bench.reference().decode(tokens)[12:]
        for seq_id in (0, 1):
            bench.agree(
                bench.feed(context, tokens[12:], seq_id), expected, f"sequence {seq_id} after {n} hostile dumps"
            )

    def test_memory_for_hostile_dumps(self, bench: Bench) -> None:
        """Clause 6: memory is not allocated from a header's sizes before they are checked."""
        context, seed = bench.context(n_ctx=64), 99 + bench.workshop.fixtures.models.index(bench.name)
        dumps = list(hostile_dumps(_valid_dumps(bench), _share(bench, N_TRACED), seed=seed))
        tracemalloc.start()
        try:
            for i, data in enumerate(dumps):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                with contextlib.suppress(Exception):  # test_hostile_dumps checks the errors
                    context.restore(1, data)
                peak = tracemalloc.get_traced_memory()[1] - before
                assert peak < MOST_MEMORY, f"hostile dump {i}, of {len(data)} bytes, made restore take {peak:,} bytes"
        finally:
            tracemalloc.stop()

    @staticmethod
    def _restored_or_refused(bench: Bench, context: Context, i: int, data: bytes) -> None:
        before = contents_of(context)
        try:
            returned = context.restore(1, data)
        except SlmError as error:
            assert "\n" not in str(error), f"hostile dump {i}: the message is not one line: {error}"
            assert contents_of(context) == before, f"hostile dump {i}: refused ({error}), but the context changed"
            return
        except Exception as error:
            raise AssertionError(f"hostile dump {i}: raised {type(error).__name__} ({error}), no SlmError") from error
        tokens = context.tokens(1)
        assert returned == Pos(1, len(tokens)), (
            f"hostile dump {i}: restored {len(tokens)} tokens, but returned {returned}"
        )
        strange = [token for token in tokens if not 0 <= token < bench.vocab.size]
        assert not strange, f"hostile dump {i}: restored token {strange[0]}, which is outside the vocabulary"
        n_free = context.n_ctx - sum(context.length(seq_id) for seq_id in range(context.n_seq_max))
        assert context.n_free == n_free, f"hostile dump {i}: n_free is {context.n_free}, {n_free} positions are free"
        assert context.tokens(0) == before[1], f"hostile dump {i}: restored into sequence 1, but sequence 0 changed"

    @staticmethod
    def _refused(bench: Bench, dumps: Iterable[tuple[str, bytes]]) -> None:
        context, tokens = bench.context(n_ctx=64, n_seq_max=2), bench.tokens(16, seed=7)
        bench.feed(context, tokens[:12])
        for what, data in dumps:
            with bench.refused(what, InvalidSnapshot, SnapshotMismatch, context=context):
                context.restore(0, data)
        expected = bench.reference().decode(tokens)[12:]
        bench.agree(bench.feed(context, tokens[12:]), expected, "what follows dumps that were refused")


def spread_indices(size: int, most: int) -> list[int]:
    """At most ``most`` indexes below ``size``, ascending: all, or the first ones, the last ones, and some between."""
    if size <= most:
        return list(range(size))
    first, last = most // 2, most // 4
    between = np.linspace(first, size - last, most - first - last, endpoint=False).astype(int)
    return [*range(first), *between.tolist(), *range(size - last, size)]


def _share(bench: Bench, usual: int) -> int:
    """The number of dumps for this model."""
    return -(-bench.workshop.share(usual) // len(bench.workshop.fixtures.models))


def _of_model(bench: Bench, indices: list[int]) -> list[int]:
    """The indices for this model: every third one if there are three models."""
    models = bench.workshop.fixtures.models
    return indices[models.index(bench.name) :: len(models)]


def _small_dump(bench: Bench) -> bytes:
    context = bench.context(n_ctx=64)
    bench.feed(context, bench.tokens(2))
    return context.dump(0)


def _valid_dumps(bench: Bench) -> list[bytes]:
    """Valid dumps to mutate: of a short sequence, and of one with a cut if possible; both also as another backend's."""
    context = bench.context(n_ctx=64)
    bench.feed(context, bench.tokens(6))
    dumps = [context.dump(0)]
    if bench.edit_level >= EditLevel.CUT:
        context.cut(Pos(0, 1), Pos(0, 3))
        bench.feed(context, bench.tokens(3, seed=1))
        dumps.append(context.dump(0))
    strangers = (dataclasses.replace(SequenceSnapshot.from_bytes(d), backend="stranger", payload=b"") for d in dumps)
    return [*dumps, *(stranger.to_bytes() for stranger in strangers)]
