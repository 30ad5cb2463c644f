"""Plays a random program: a context, the model of the contract and an oracle run the same steps and must agree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.runs import Run, image_offsets
from slm_conformance.oracle.twin import Twin, add_run
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.programs.context_steps import (
    Call,
    Cut,
    Decode,
    Drop,
    Dump,
    Fork,
    Restore,
    Sizes,
    Step,
    Truncate,
    Variant,
)
from slm_conformance.suite.programs.contract_model import ContractModel
from slm_conformance.suite.tolerance import relative_errors
from slm_conformance.suite.workshop import Rows
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import SlmError
from slm_core.protocols import BackendModel, Batch, Context
from slm_core.types import Capability, LogitsSelection, Pos, TopLogits

_FIRST_DUMP, _PROBE = 100, 99
"""First sequence ids of the oracle for dumped sequences, and its sequence id for probes."""
_PROBE_N_CTX = 1024
_PROBE_EVERY = 13
"""Steps after which all sequences are restored in another context."""
Placed: TypeAlias = tuple[int, int, tuple[int, ...]] | tuple[int, int, tuple[int, ...], str, bool]
"""Sequence, first position and tokens of a run; then its kind, and whether it is a block."""
N_TOP = 5
"""The k of ``decode_top`` in programs."""


class Mismatch(AssertionError):
    """A context differs from the model; the message is a script that shows it."""


class Player:
    """Plays a program on a context, on the model and on an oracle.

    Args:
        bench: makes the context.
        opening: the lines of Python that load the same model.
        sizes: sizes of the context.
    """

    def __init__(self, bench: Bench, opening: str, sizes: Sizes) -> None:
        self._bench, self._sizes = bench, sizes
        self._context = bench.context(n_ctx=sizes.n_ctx, n_seq_max=sizes.n_seq_max, n_batch=sizes.n_batch)
        self._other = bench.context(n_ctx=_PROBE_N_CTX, n_seq_max=1, n_batch=sizes.n_batch)
        self._oracle = bench.oracle()
        info, context = bench.model.info, self._context
        self._n_embd = info.n_embd
        self._model = ContractModel(info.n_vocab, context.edit_level, context.capabilities, sizes)
        self._dumps: dict[int, bytes] = {}
        # A context within a sliding window may support cuts that the larger context of the oracle does not support.
        self._leaves_out_cuts = isinstance(self._oracle, Twin) and self._oracle.edit_level < context.edit_level
        self._kv = f"2 * [KvType({bench.kv_type.value!r})]"
        options = f"ContextOptions({sizes.n_ctx}, {sizes.n_seq_max}, {sizes.n_batch}, *{self._kv})"
        self._script = [*_IMPORTS, *opening.splitlines(), f"context = model.new_context({options})"]

    def play(self, program: Sequence[Step]) -> None:
        """Play all steps.

        Raises:
            Mismatch: with the script.
        """
        with self._context, self._other:
            for i, step in enumerate(program, 1):
                if not (isinstance(step, Cut) and self._leaves_out_cuts):
                    self._play(step)
                for seq_id in range(self._sizes.n_seq_max if i % _PROBE_EVERY == 0 or i == len(program) else 0):
                    self._probe(seq_id)

    def _probe(self, seq_id: int) -> None:
        """Continue a sequence in another context, from its KV payload and from its tokens and edits."""
        token, n = seq_id + 1, self._model.length(seq_id)
        if n == 0:
            return
        self._oracle.fork(seq_id, _PROBE)
        expected = self._appended(Run(_PROBE, 0, (token,)), hidden=False)
        kinds: tuple[Variant, ...] = ("own", "foreign")
        for kind in kinds if Capability.KV_PAYLOAD in self._model.capabilities else kinds[1:]:
            self._compare_probe(seq_id, kind, (0, n, (token,)), expected)

    def _compare_probe(self, seq_id: int, kind: Variant, run: Placed, expected: Rows) -> None:
        bench, sizes = self._bench, (_PROBE_N_CTX, 1, self._sizes.n_batch)
        lines = [
            f"other = model.new_context(ContextOptions({sizes[0]}, {sizes[1]}, {sizes[2]}, *{self._kv}))",
            f"other.restore(0, variant(context.dump({seq_id}), {kind!r}))",
            f"rows = decode(other, model, {run!r})",
        ]
        try:
            self._other.restore(0, variant(self._context.dump(seq_id), kind))
            rows = decode(self._other, bench.model, run)
        except SlmError as error:
            self._fail("\n".join(lines), f"the dump of sequence {seq_id} leads to {type(error).__name__} ({error})")
        script, self._script = self._script, [*self._script, *lines]
        self._compare_rows(Decode((Run(0, 0, (0,)),)), rows, expected)
        self._script = script

    def _play(self, step: Step) -> None:
        if isinstance(step, Restore) and step.name not in self._dumps:
            return
        line, call = self._call(step)
        errors, must = self._model.play(step)
        expected_errors = " or ".join(sorted(error.__name__ for error in errors))
        try:
            rows = call(self._context)
        except SlmError as error:
            if not isinstance(error, tuple(errors)):
                outcome = f"raised {type(error).__name__} ({error})"
                self._fail(line, f"it {outcome}, the contract says {expected_errors or 'nothing is wrong with it'}")
            self._script.append(f"with suppress({type(error).__name__}):\n    {line}")
        except Exception as error:
            self._fail(line, f"it raised {type(error).__name__} ({error}), which is none of slm_core.errors")
        else:
            if errors and must:
                self._fail(line, f"it was accepted, the contract says {expected_errors}")
            self._script.append(line)
            if errors:
                self._model.make(step)
            expected = self._follow(step)
            if isinstance(step, Decode):
                self._compare_rows(step, rows, expected)
        self._compare_contents()

    def _call(self, step: Step) -> tuple[str, Callable[[Context], Rows | TopLogits | None]]:
        """A step as a line of Python and as a function."""
        match step:
            case Decode(runs):
                placed = self._placed(runs)
                arguments = ["context", "model", *map(repr, placed)]
                arguments += [f"call={step.call!r}"] if step.call != "decode" else []
                arguments += [f"every={step.every}"] if step.every != 1 else []
                arguments += ["woven=True"] if step.woven else []
                call = functools.partial(decode, call=step.call, every=step.every, woven=step.woven)
                return f"rows = decode({', '.join(arguments)})", lambda context: call(
                    context, self._bench.model, *placed
                )
            case Dump(seq_id, name):
                return f"dump_{name} = context.dump({seq_id})", lambda context: self._store_dump(
                    name, context.dump(seq_id)
                )
            case Restore(seq_id, name, kind):
                data = variant(self._dumps[name], kind)
                dump_name = f"dump_{name}" if kind == "own" else f"variant(dump_{name}, {kind!r})"
                return f"context.restore({seq_id}, {dump_name})", lambda context: _nothing(
                    context.restore(seq_id, data)
                )
        line, edit = _edit(step)
        return f"context.{line}", lambda context: _nothing(edit(context))

    def _placed(self, runs: Sequence[Run]) -> list[Placed]:
        firsts = self._model.first_positions(runs)
        placed: list[Placed] = []
        for run, first in zip(runs, firsts, strict=True):
            plain = run.kind == "tokens" and not run.block
            placed.append((run.seq_id, first, run.tokens, *(() if plain else (run.kind, run.block))))
        return placed

    def _store_dump(self, name: int, data: bytes) -> None:
        self._dumps[name] = data

    def _follow(self, step: Step) -> Rows | None:
        """Do the step in the oracle; returns the rows of a decode, one for each input in the order of the batch."""
        oracle = self._oracle
        match step:
            case Decode(runs):
                return self._expected(step) if any(run.tokens for run in runs) else None
            case Fork(src, dst, end):
                oracle.fork(src, dst, end)
            case Truncate(seq_id, index):
                oracle.truncate(index, seq_id)
            case Cut(seq_id, start, end):
                oracle.cut(start, end, seq_id)
            case Drop(seq_id):
                oracle.drop(seq_id)
            case Dump(seq_id, name):
                oracle.fork(seq_id, _FIRST_DUMP + name)
            case Restore(seq_id, name, _):
                oracle.fork(_FIRST_DUMP + name, seq_id)
            case _:
                for seq_id in range(self._sizes.n_seq_max):
                    oracle.drop(seq_id)
        return None

    def _expected(self, step: Decode) -> Rows:
        blocks = [self._appended(run, hidden=step.call == "embed") for run in step.runs]
        return np.stack([blocks[i][j] for i, j in step.order()])

    def _appended(self, run: Run, *, hidden: bool) -> Rows:
        """The oracle's logits, or hidden states, of a run."""
        oracle = self._oracle
        if isinstance(oracle, Twin):
            rows = None if run.kind == "tokens" else rows_of(run.tokens, self._n_embd)
            return oracle.append(run, rows, hidden=hidden)
        x = oracle.table(run.tokens) if run.kind == "tokens" else rows_of(run.tokens, self._n_embd).astype(np.float64)
        several = len(run.tokens) > 1  # one input is not a block, and one row is not an image
        offsets = image_offsets(len(run.tokens)) if run.kind == "image" and several else None
        states = oracle.embed_rows(x, run.seq_id, bidirectional=run.block and several, offsets=offsets)
        return states if hidden else oracle.logits(states)

    # Comparisons.

    def _compare_rows(self, step: Decode, rows: Rows | TopLogits | None, expected: Rows | None) -> None:
        if rows is None or expected is None:
            return
        expected = expected[step.rows_with_logits()]
        actual = self._completed(rows, expected) if isinstance(rows, TopLogits) else rows
        if actual.shape != expected.shape:
            self._fail(f"assert rows.shape == {expected.shape}", f"{step.call} gave rows of shape {actual.shape}")
        if not len(expected):
            return
        tolerance, oracle = self._bench.tolerance, self._oracle.name
        errors, allowed = relative_errors(actual, expected), tolerance.state if step.call == "embed" else tolerance.row
        i = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        if not errors[i] <= allowed:
            k = int(np.argmax(np.abs(actual[i] - expected[i])))
            expected_logit, difference = float(expected[i, k]), float(abs(actual[i, k] - expected[i, k]))
            name = f"rows[{i}, {k}]"
            if isinstance(rows, TopLogits):
                name = f"rows.logits[{i}, {rows.tokens[i].tolist().index(k)}]"
            line = f"assert abs({name} - {expected_logit:.6g}) < {difference / 2:.2g}  # by {oracle}"
            self._fail(line, f"row {i} differs from {oracle} by {errors[i]:.1e} of its norm, allowed {allowed:.1e}")

    def _completed(self, top: TopLogits, expected: Rows) -> Rows:
        """Rows of logits, completed with the oracle's values for logits that are not among the largest."""
        if top.tokens.shape != (len(expected), N_TOP):
            self._fail(f"assert rows.tokens.shape == {(len(expected), N_TOP)}", f"its shape is {top.tokens.shape}")
        rows = expected.copy()
        np.put_along_axis(rows, top.tokens.astype(np.int64), top.logits, 1)
        return rows

    def _compare_contents(self) -> None:
        for seq_id in range(self._sizes.n_seq_max):
            actual, expected = self._context.tokens(seq_id), self._model.tokens(seq_id)
            if actual != expected:
                self._fail(f"assert context.tokens({seq_id}) == {expected}", f"sequence {seq_id} holds {actual}")
        if self._context.n_free != self._model.n_free and self._model.copied is not None:
            seq_id, expected_copy = self._model.copied
            self._model.sequences[seq_id] = expected_copy
        self._model.copied = None
        if self._context.n_free != self._model.n_free:
            self._fail(f"assert context.n_free == {self._model.n_free}", f"n_free is {self._context.n_free}")

    def _fail(self, line: str, why: str) -> None:
        script = "\n".join([*self._script, f"{line}"])
        raise Mismatch(f"a program of context calls goes wrong in its last line: {why}\n\n{script}\n")


_IMPORTS = (
    "from contextlib import suppress",
    "from pathlib import Path",
    "from slm_conformance.suite.programs.context_programs import decode, variant",
    "from slm_conformance.suite.spec import make_backend",
    "from slm_core.errors import *",
    "from slm_core.types import ContextOptions, KvType, ModelOptions, Pos",
)


def decode(
    context: Context, model: BackendModel, *runs: Placed, call: Call = "decode", every: int = 1, woven: bool = False
) -> Rows | TopLogits:
    """Decode a batch of runs.

    Args:
        context: the context.
        model: its model.
        runs: sequence, first position, tokens; perhaps the kind of inputs, and whether they are a block.
        call: ``decode``, ``embed``, or ``top`` for ``decode_top``.
        every: every n-th input has logits; 0 for none.
        woven: whether runs of tokens are interleaved, one token each.
    """
    step = Decode(tuple(Run(run[0], 0, *run[2:]) for run in runs), call, every, woven)
    batch, rows_with_logits = context.new_batch(), set(step.rows_with_logits())
    for n, (i, j) in enumerate(step.order() if woven else ()):
        batch.add(runs[i][2][j], Pos(runs[i][0], runs[i][1] + j), logits=n in rows_with_logits)
    for run, placed in zip(step.runs, runs if not woven else (), strict=False):
        _add(batch, run, placed[1], model.info.n_embd, rows_with_logits)
    if call == "top":
        return context.decode_top(batch, N_TOP)
    return (context.embed(batch) if call == "embed" else context.decode(batch)).copy()


def _add(batch: Batch, run: Run, first: int, n_embd: int, rows_with_logits: Collection[int]) -> None:
    """Add a run, one input at a time if only some of them have logits."""
    n, start = len(run.tokens), len(batch)
    rows = None if run.kind == "tokens" else rows_of(run.tokens, n_embd)
    has_logits = [start + i in rows_with_logits for i in range(n)]
    if all(has_logits) or not any(has_logits):
        add_run(batch, run, first, rows, has_logits=any(has_logits))
        return
    offsets = _single_offsets(n) if run.kind == "image" else None
    for i in range(n):
        position = Pos(run.seq_id, first + i)
        logits: LogitsSelection = "last" if has_logits[i] else "none"
        if rows is None:
            batch.add(run.tokens[i], position, logits=has_logits[i])
        else:
            batch.add_embeddings(
                rows[i : i + 1], position, offsets=None if offsets is None else offsets[i], logits=logits
            )
    if run.block and n > 1:
        batch.join_block(n)


def _single_offsets(n: int) -> list[NDArray[np.int32]]:
    """The offsets of each row of an image from its default position, [1, 3] each."""
    offsets, default = [], 0
    for offset in image_offsets(n):
        offsets.append(np.array([[axis - default for axis in offset]], np.int32))
        default = max(default, 1 + max(offset))
    return offsets


def rows_of(seeds: Sequence[int], n_embd: int) -> NDArray[np.float32]:
    """Random embedding rows, one per seed, float32 [n, E], with the magnitude of the tiny models' embeddings."""
    rows = np.empty((len(seeds), n_embd), np.float32)
    for row, seed in zip(rows, seeds, strict=True):
        row[:] = np.random.default_rng([7, seed]).standard_normal(n_embd) * 2.5 / np.sqrt(n_embd)
    return rows


def variant(data: bytes, kind: Variant) -> bytes:
    """A changed dump.

    Args:
        data: a dump of a sequence.
        kind: "own": unchanged; "foreign": of another backend; "format": in another payload format of the same backend
            (in both, the payload cannot be read, and tokens and edits are replayed); "truncated" by a byte; "short" by
            a byte of its payload, with the right checksum; "model": of another model; "token": with a last token out of
            range.
    """
    if kind in ("own", "truncated"):
        return data if kind == "own" else data[:-1]
    snapshot = SequenceSnapshot.from_bytes(data)
    if kind == "short":
        return dataclasses.replace(snapshot, payload=snapshot.payload[:-1]).to_bytes()
    if kind == "model":
        return dataclasses.replace(snapshot, fingerprint="0" * len(snapshot.fingerprint)).to_bytes()
    if kind == "format":
        return dataclasses.replace(snapshot, payload_format="of-tomorrow", payload=b"\7" * 99).to_bytes()
    if kind == "token" and len(snapshot.tokens):
        snapshot.tokens[-1] = 2**31 - 1
    return dataclasses.replace(snapshot, backend="stranger", payload_format="", payload=b"\7" * 99).to_bytes()


def _edit(step: Step) -> tuple[str, Callable[[Context], object]]:
    match step:
        case Fork(src, dst, end):
            return f"fork({src}, {dst}, {end})", lambda context: context.fork(src, dst, end)
        case Truncate(seq_id, index):
            return f"truncate(Pos({seq_id}, {index}))", lambda context: context.truncate(Pos(seq_id, index))
        case Cut(seq_id, start, end):
            line = f"cut(Pos({seq_id}, {start}), Pos({seq_id}, {end}))"
            return line, lambda context: context.cut(Pos(seq_id, start), Pos(seq_id, end))
        case Drop(seq_id):
            return f"drop({seq_id})", lambda context: context.drop(seq_id)
    return "clear()", lambda context: context.clear()


def _nothing(_: object) -> None:
    """Return None: an edit has no logits."""
