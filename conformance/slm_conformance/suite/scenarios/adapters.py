"""Adapters (LoRA): logits, sequences with different adapters, edits, dumps, files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from slm_conformance.oracle.adapters import adapter_metadata, adapter_name, merged, random_adapter
from slm_conformance.oracle.gguf_writer import StoredTensor, write_gguf
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.context_dumps import foreign_context
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.suite.tolerance import Tolerance
from slm_conformance.suite.workshop import Rows
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import (
    ContextFull,
    InvalidModelFile,
    InvalidOption,
    InvalidSequence,
    InvalidSnapshot,
    InvalidToken,
    SnapshotMismatch,
    UnsupportedInput,
    UnsupportedModel,
)
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos

_FIRST, _SECOND = adapter_name(1), adapter_name(2)
_SEEDS = {_FIRST: 1, _SECOND: 2}
_STACK = {_FIRST: 0.75, _SECOND: -1.25}


class TestAdapters(Scenarios):
    """Clause 19: a sequence with adapters computes as if their changes were added to the model's weights."""

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 19: without ``ADAPTERS``, adapters raise ``UnsupportedInput``; an empty set is accepted everywhere."""
        context = bench.context()
        context.set_adapters(0, {})
        assert dict(context.adapters(0)) == {}, "a new sequence has adapters"
        if Capability.ADAPTERS in bench.capabilities:
            with bench.refused("an adapter that is not loaded", InvalidOption, context=context):
                context.set_adapters(0, {"no such adapter": 1.0})
            return
        with bench.refused("an adapter for a context that declares none", UnsupportedInput, context=context):
            context.set_adapters(0, {"any": 1.0})

    def test_like_merged_weights(self, bench: Bench) -> None:
        """Clauses 9 and 19: logits of a prompt, and of single tokens, equal those of merged weights."""
        context, tokens = _context(bench), bench.tokens(40)
        context.set_adapters(0, {_FIRST: 1.0})
        context.set_adapters(1, {_FIRST: 1.0})
        expected = _reference(bench, {_FIRST: 1.0}).decode(tokens)
        _agree(bench, bench.feed(context, tokens), expected, {_FIRST: 1.0}, "a prompt with an adapter")
        alone = bench.feed(context, tokens, seq_id=1, chunk=1)
        _agree(bench, alone, expected, {_FIRST: 1.0}, "single tokens with an adapter")

    def test_scales_are_added(self, bench: Bench) -> None:
        """Clause 19: the changes of several adapters are added, each multiplied by its scale."""
        context, tokens = _context(bench), bench.tokens(30)
        for seq_id, scales in enumerate(({_FIRST: 0.5}, {_FIRST: -0.5}, _STACK)):
            context.set_adapters(seq_id, scales)
            rows = bench.feed(context, tokens, seq_id)
            _agree(bench, rows, _reference(bench, scales).decode(tokens), scales, f"with adapters {scales}")

    def test_taken_away(self, bench: Bench) -> None:
        """Clause 19: an emptied sequence keeps its adapters until it gets others, or none."""
        context, tokens = _context(bench), bench.tokens(20)
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, tokens[:5])
        for scales in ({_FIRST: 1.0}, {_SECOND: 1.0}, {}):
            context.drop(0)
            if scales != {_FIRST: 1.0}:
                context.set_adapters(0, scales)
            assert dict(context.adapters(0)) == scales, f"the sequence has {context.adapters(0)}, not {scales}"
            rows = bench.feed(context, tokens)
            _agree(bench, rows, _reference(bench, scales).decode(tokens), scales, f"after other adapters: {scales}")

    def test_scale_zero(self, bench: Bench) -> None:
        """Clause 19: an adapter with the scale 0 counts as absent."""
        context, tokens = _context(bench), bench.tokens(12)
        context.set_adapters(0, {_FIRST: 0.0})
        assert dict(context.adapters(0)) == {}, "an adapter with the scale 0 is listed"
        rows = bench.feed(context, tokens)
        _agree(bench, rows, bench.reference().decode(tokens), {}, "an adapter with the scale 0")

    def test_in_one_batch(self, bench: Bench) -> None:
        """Clauses 7 and 19: one batch may mix sequences with different adapters, and without."""
        context, tokens = _context(bench), bench.tokens(24)
        sets: Sequence[Mapping[str, float]] = ({_FIRST: 1.0}, {}, _STACK, {_FIRST: 1.0})
        references = [_reference(bench, scales) for scales in sets]
        expected = [reference.decode(tokens[seq_id:]) for seq_id, reference in enumerate(references)]
        for seq_id, scales in enumerate(sets):
            context.set_adapters(seq_id, scales)
        for step in range(4):
            batch = context.new_batch()
            for i in range(5 * step, 5 * step + 5):
                for seq_id in (2, 0, 3, 1):
                    batch.add(tokens[seq_id + i], Pos(seq_id, i), logits=(i + seq_id) % 3 > 0)
            rows, owners = context.decode(batch).copy(), batch.seq_ids[batch.logits_mask]
            positions = batch.positions[batch.logits_mask]
            for seq_id, scales in enumerate(sets):
                sequence_rows, indices = rows[owners == seq_id], positions[owners == seq_id]
                _agree(
                    bench,
                    sequence_rows,
                    expected[seq_id][indices],
                    scales,
                    f"sequence {seq_id} among others, step {step}",
                )

    def test_hidden_states(self, bench: Bench) -> None:
        """Clauses 11 and 19: ``embed`` computes with adapters, too."""
        context, tokens = _context(bench), bench.tokens(9)
        if Capability.EMBEDDINGS not in bench.capabilities:
            return
        context.set_adapters(1, {_FIRST: 1.0})
        batch = bench.batch(context, (0, 0, tokens), (1, 0, tokens))
        states = context.embed(batch).copy()
        expected, (_, allowed) = _reference(bench, {_FIRST: 1.0}).embed(tokens), _adapted(bench, {_FIRST: 1.0})
        bench.states_agree(states[:9], bench.reference().embed(tokens), "hidden states without an adapter")
        bench.states_agree(states[9:], expected, "hidden states with an adapter", allowed)

    def test_top_logits(self, bench: Bench) -> None:
        """Clauses 12 and 19: ``decode_top`` computes with adapters, too."""
        context, tokens = _context(bench), bench.tokens(9)
        if Capability.DEVICE_SAMPLING not in bench.capabilities:
            return
        for seq_id in (1, 3):
            context.set_adapters(seq_id, {_FIRST: 1.0})
        rows = context.decode(bench.batch(context, (0, 0, tokens), (1, 0, tokens))).copy()
        top = context.decode_top(bench.batch(context, (2, 0, tokens), (3, 0, tokens)), 4)
        for i, row in enumerate(rows):
            best = np.lexsort((np.arange(len(row)), -row))[:4]
            assert top.tokens[i].tolist() == best.tolist(), f"row {i} has the top tokens {top.tokens[i]}, not {best}"

    def test_only_an_empty_sequence(self, bench: Bench) -> None:
        """Clause 19: a sequence with tokens gets no other adapters, so keys and values are never mixed."""
        context, tokens = _context(bench), bench.tokens(12)
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, tokens[:8])
        for why, scales in (("no adapters", {}), ("others", {_SECOND: 1.0}), ("another scale", {_FIRST: 0.5})):
            with bench.refused(f"{why} for a sequence with tokens", InvalidSequence, context=context):
                context.set_adapters(0, scales)
        context.set_adapters(0, {_FIRST: 1})
        expected = _reference(bench, {_FIRST: 1.0}).decode(tokens)[8:]
        _agree(bench, bench.feed(context, tokens[8:]), expected, {_FIRST: 1.0}, "after refused adapters")

    def test_forks(self, bench: Bench) -> None:
        """Clauses 5 and 19: a fork copies the adapters, also a fork of nothing."""
        bench.requires(EditLevel.TRUNCATE)
        context, tokens, reference = _context(bench), bench.tokens(24), _reference(bench, {_FIRST: 1.0})
        context.set_adapters(0, {_FIRST: 1.0})
        context.set_adapters(1, {_SECOND: 1.0})
        bench.feed(context, tokens[:20])
        context.fork(0, 1)
        context.fork(0, 2, 13)
        context.drop(0)
        expected = reference.decode(tokens)
        _agree(bench, bench.feed(context, tokens[20:], 1), expected[20:], {_FIRST: 1.0}, "a fork")
        _agree(bench, bench.feed(context, tokens[13:], 2), expected[13:], {_FIRST: 1.0}, "a fork of a part")
        context.fork(2, 3, 0)
        _agree(bench, bench.feed(context, tokens, 3), expected, {_FIRST: 1.0}, "a fork of nothing")

    def test_edits(self, bench: Bench) -> None:
        """Clauses 3, 4 and 19: ``truncate`` and ``cut`` keep the adapters."""
        bench.requires(EditLevel.TRUNCATE)
        context, tokens, reference = _context(bench), bench.tokens(30), _reference(bench, {_FIRST: 1.0})
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, tokens)
        bench.feed(context, tokens, 1)
        context.truncate(Pos(0, 20))
        reference.decode(tokens[:20])
        if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 3), Pos(0, 8))
            reference.cut(3, 8)
        rows = bench.feed(context, tokens[20:])
        _agree(bench, rows, reference.decode(tokens[20:]), {_FIRST: 1.0}, "after edits of a sequence with an adapter")
        context.truncate(Pos(0, 0))
        assert dict(context.adapters(0)) == {_FIRST: 1.0}, "truncating to nothing took the adapter away"

    def test_a_failed_batch(self, bench: Bench) -> None:
        """Clauses 1 and 19: a batch of sequences with different adapters that fails changes none of them."""
        context, tokens = _context(bench, n_ctx=32), bench.tokens(20)
        context.set_adapters(1, {_FIRST: 1.0})
        context.decode(bench.batch(context, (0, 0, tokens[:10]), (1, 0, tokens[:10])))
        with bench.refused("too many tokens", ContextFull, context=context):
            context.decode(bench.batch(context, (0, 10, tokens[10:]), (1, 10, tokens[10:])))
        with bench.refused("a token outside the vocabulary", InvalidToken, context=context):
            context.decode(bench.batch(context, (0, 10, tokens[10:12]), (1, 10, [bench.model.info.n_vocab])))
        for seq_id, scales in ((0, {}), (1, {_FIRST: 1.0})):
            expected = _reference(bench, scales).decode(tokens[:14])[10:]
            rows = bench.feed(context, tokens[10:14], seq_id)
            _agree(bench, rows, expected, scales, f"sequence {seq_id} after failed batches")

    def test_refused_scales(self, bench: Bench) -> None:
        """Clauses 1 and 19: unknown names, and scales that are no numbers from -1e6 to 1e6, are refused."""
        context = _context(bench)
        context.set_adapters(0, {_FIRST: 0.5})
        for why, scales in (
            ("an unknown name", {"no such adapter": 1.0}),
            ("a known and an unknown name", {_SECOND: 1.0, "no such adapter": 1.0}),
            ("an infinite scale", {_FIRST: float("inf")}),
            ("a scale beyond floats", {_FIRST: 10**400}),
            ("a large scale", {_FIRST: 1e39}),
            ("a scale that is none", {_FIRST: float("nan")}),
            ("a text as a scale", {_FIRST: "1"}),
        ):
            with bench.refused(why, InvalidOption, context=context):
                context.set_adapters(0, scales)  # type: ignore[arg-type]
            assert dict(context.adapters(0)) == {_FIRST: 0.5}, f"{why}: refused, but the adapters changed"
        with bench.refused("adapters for a sequence that does not exist", InvalidSequence, context=context):
            context.set_adapters(context.n_seq_max, {_FIRST: 1.0})


class TestAdapterDumps(Scenarios):
    """Clauses 6 and 19: a dump names the adapters by their content, and a restored sequence has them."""

    def test_goes_on(self, bench: Bench) -> None:
        """Clauses 6 and 19: a restored sequence has the dump's adapters, not its earlier ones."""
        context, tokens, reference = _context(bench), bench.tokens(24), _reference(bench, _STACK)
        context.set_adapters(0, _STACK)
        bench.feed(context, tokens[:20])
        data, expected = context.dump(0), reference.decode(tokens)[20:]
        other = bench.context()
        other.set_adapters(1, {_SECOND: 1.0})
        other.restore(1, data)
        assert dict(other.adapters(1)) == _STACK, f"the restored sequence has {other.adapters(1)}, not {_STACK}"
        _agree(bench, bench.feed(other, tokens[20:], 1), expected, _STACK, "a restored sequence with adapters")
        for _ in other.restore_steps(2, iter([data[:100], data[100:]])):
            pass
        _agree(bench, bench.feed(other, tokens[20:], 2), expected, _STACK, "restored in steps, with adapters")

    def test_without_adapters(self, bench: Bench) -> None:
        """Clauses 6 and 19: a dump without adapters takes them away."""
        context, tokens = _context(bench), bench.tokens(24)
        bench.feed(context, tokens[:20])
        data = context.dump(0)
        context.set_adapters(1, {_FIRST: 1.0})
        context.restore(1, data)
        rows = bench.feed(context, tokens[20:], 1)
        _agree(bench, rows, bench.reference().decode(tokens)[20:], {}, "a dump without adapters")

    def test_decoded_again(self, bench: Bench) -> None:
        """Clauses 6, 16 and 19: a dump of another backend is decoded again with its adapters."""
        context, tokens = _context(bench), bench.tokens(24)
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, tokens[:20])
        snapshot = SequenceSnapshot.from_bytes(context.dump(0))
        other = bench.context()
        other.restore(1, foreign(snapshot).to_bytes())
        expected = _reference(bench, {_FIRST: 1.0}).decode(tokens)[20:]
        _agree(bench, bench.feed(other, tokens[20:], 1), expected, {_FIRST: 1.0}, "another backend's dump")

    def test_a_failed_restore(self, bench: Bench) -> None:
        """Clauses 1, 6 and 19: a restore that fails leaves the sequence its tokens and adapters."""
        context, tokens = _context(bench, n_ctx=32), bench.tokens(40)
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, tokens[:10])
        large = bench.context()
        bench.feed(large, tokens)
        with bench.refused("a dump that does not fit", ContextFull, context=context):
            context.restore(0, large.dump(0))
        assert dict(context.adapters(0)) == {_FIRST: 1.0}, "a failed restore changed the adapters"
        expected = _reference(bench, {_FIRST: 1.0}).decode(tokens[:14])[10:]
        _agree(bench, bench.feed(context, tokens[10:14]), expected, {_FIRST: 1.0}, "after a failed restore")

    def test_needs_the_adapter(self, bench: Bench) -> None:
        """Clauses 6 and 19: a dump raises ``SnapshotMismatch`` unless its adapter is loaded, under any name."""
        context, model = _context(bench), bench.own_model()
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, bench.tokens(8))
        data, other = context.dump(0), bench.context(model=model)
        with bench.refused("a dump with an adapter that is not loaded", SnapshotMismatch, context=other):
            other.restore(0, data)
        model.adapters.load(bench.adapter(2).path, _FIRST)
        with bench.refused("a dump with an adapter of the same name only", SnapshotMismatch, context=other):
            other.restore(0, data)
        model.adapters.load(bench.adapter(1).path, "renamed")
        other.restore(0, data)
        assert dict(other.adapters(0)) == {"renamed": 1.0}, f"the restored sequence has {dict(other.adapters(0))}"

    def test_contexts(self, bench: Bench) -> None:
        """Clauses 18 and 19: in a restored context each sequence has its adapters, and forks share again."""
        context, tokens = _context(bench), bench.tokens(24)
        sets: Sequence[Mapping[str, float]] = ({_FIRST: 1.0}, {}, {_FIRST: 1.0}, _STACK)
        for seq_id in (0, 1, 3):
            context.set_adapters(seq_id, sets[seq_id])
            bench.feed(context, tokens[:16], seq_id)
        context.fork(0, 2)
        bench.feed(context, tokens[16:18], 2)
        data = b"".join(context.dump_context())
        for is_own in (True, False):
            other = bench.context()
            other.set_adapters(1, {_SECOND: 1.0})
            try:
                other.restore_context([data if is_own else foreign_context(data)])
            except SnapshotMismatch:
                assert not is_own, "a context's own dump was refused"
                continue
            assert other.n_free == context.n_free, f"{other.n_free} positions are free, and {context.n_free} were"
            for seq_id, scales in enumerate(sets):
                expected = _reference(bench, scales).decode(tokens)[other.length(seq_id) :]
                rows = bench.feed(other, tokens[other.length(seq_id) :], seq_id)
                what = f"sequence {seq_id} of a restored context, which {'it' if is_own else 'another backend'} dumped"
                _agree(bench, rows, expected, scales, what)

    def test_hostile_dumps(self, bench: Bench) -> None:
        """Clauses 6 and 19: dumps whose adapters are malformed are refused."""
        context = _context(bench)
        context.set_adapters(0, {_FIRST: 1.0})
        bench.feed(context, bench.tokens(8))
        snapshot = SequenceSnapshot.from_bytes(context.dump(0))
        (fingerprint,) = snapshot.adapters
        for why, adapters in (
            ("an infinite scale", {fingerprint: float("inf")}),
            ("a text as a scale", {fingerprint: "1"}),
            ("a list of adapters", [fingerprint]),
            ("an unknown fingerprint", {"0" * 64: 1.0}),
        ):
            hostile = dataclasses.replace(snapshot, adapters=adapters)  # type: ignore[arg-type]
            with bench.refused(f"a dump with {why}", InvalidSnapshot, SnapshotMismatch, context=context):
                context.restore(1, hostile.to_bytes())


class TestAdapterFiles(Scenarios):
    """Clause 19: adapters are loaded for a model by name, and files that do not fit are refused."""

    def test_loading(self, bench: Bench) -> None:
        """Clause 19: a loaded adapter is listed; its name is free again after ``unload``, and sequences keep it."""
        adapter, model, tokens = bench.adapter(1), bench.own_model(), bench.tokens(12)
        info = model.adapters.load(adapter.path, "mine")
        assert (info.name, info.rank, set(info.tensors)) == ("mine", 3, set(adapter.changes)), f"it is listed as {info}"
        assert list(model.adapters) == ["mine"], f"the adapters are {list(model.adapters)}"
        with bench.refused("a name that is taken", InvalidOption):
            model.adapters.load(bench.adapter(2).path, "mine")
        context = bench.context(model=model)
        context.set_adapters(0, {"mine": 1.0})
        bench.feed(context, tokens[:6])
        model.adapters.unload("mine")
        assert len(model.adapters) == 0, "an unloaded adapter is listed"
        expected = _reference(bench, {_FIRST: 1.0}).decode(tokens)[6:]
        _agree(bench, bench.feed(context, tokens[6:]), expected, {_FIRST: 1.0}, "after the adapter was unloaded")
        with bench.refused("an unloaded adapter", InvalidOption, context=context):
            context.set_adapters(1, {"mine": 1.0})
        with bench.refused("unloading it again", InvalidOption):
            model.adapters.unload("mine")

    def test_fingerprints(self, bench: Bench) -> None:
        """Clause 19: the fingerprint depends on the numbers, not on the name or the path."""
        adapter, model = bench.adapter(1), bench.own_model()
        copied = bench.directory / "copied.gguf"
        copied.write_bytes(adapter.path.read_bytes())
        first, copy_info = model.adapters.load(adapter.path, "first"), model.adapters.load(copied)
        assert copy_info.name == "copied", f"without a name, it is called {copy_info.name!r}"
        assert first.fingerprint == copy_info.fingerprint, "a copy has another fingerprint"
        assert model.adapters.load(bench.adapter(2).path, "second").fingerprint != first.fingerprint, "equal for others"

    def test_bad_files(self, bench: Bench) -> None:
        """Clause 19: damaged files, models, and adapters of other models are refused."""
        adapter, model = bench.adapter(1), bench.own_model()
        architecture, name = model.info.architecture, sorted(adapter.changes)[0]
        out, into = adapter.changes[name].shape
        good = {f"{name}.lora_a": _ones(2, into), f"{name}.lora_b": _ones(out, 2)}
        infinite = np.full((2, into), np.inf, np.float32)
        other = "qwen2" if architecture != "qwen2" else "llama"
        for why, tensors, kind in (
            ("no change", {}, architecture),
            ("no b", {f"{name}.lora_a": _ones(2, into)}, architecture),
            ("an a that is too wide", {**good, f"{name}.lora_a": _ones(2, into + 1)}, architecture),
            ("a b with too many rows", {**good, f"{name}.lora_b": _ones(out + 1, 2)}, architecture),
            ("matrices of different ranks", {**good, f"{name}.lora_b": _ones(out, 3)}, architecture),
            ("a tensor that the model does not have", {"x.lora_a": _ones(2, 4), "x.lora_b": _ones(4, 2)}, architecture),
            ("an infinity", {**good, f"{name}.lora_a": StoredTensor.pack(infinite, "f32")}, architecture),
            ("a tensor of another kind", {**good, "blk.0.attn_norm.weight": _ones(4, 2)}, architecture),
            ("another architecture", good, other),
        ):
            path = write_gguf(bench.directory / "bad.gguf", adapter_metadata(kind), tensors)
            with bench.refused(f"an adapter with {why}", InvalidModelFile, UnsupportedModel):
                model.adapters.load(path, why)
        for why, path in (("a model", bench.path), ("a missing file", bench.directory / "none.gguf")):
            with bench.refused(f"{why} as an adapter", InvalidModelFile):
                model.adapters.load(path, why)
        assert len(model.adapters) == 0, f"a refused adapter is listed: {list(model.adapters)}"

    def test_computed_or_refused(self, bench: Bench) -> None:
        """Clause 19: changes of embeddings and of the output matrix are computed or refused, never ignored."""
        bench.adapter(1)
        model, tokens, weights = bench.own_model(), bench.tokens(8), bench.weights()
        for name in ("output.weight", "token_embd.weight"):
            if name not in weights.tensors or (name == "token_embd.weight" and "output.weight" not in weights.tensors):
                continue  # in the reference, embeddings would be the output matrix, too
            adapter = random_adapter(bench.directory / f"{name}.gguf", model.info.architecture, weights, [name], 5)
            try:
                model.adapters.load(adapter.path, name)
            except UnsupportedModel:
                continue
            context, changed = bench.context(model=model), merged(weights, (adapter, 1.0))
            context.set_adapters(0, {name: 1.0})
            allowed = bench.workshop.tolerance_of(changed, bench.name, bench.kv_type)
            expected = reference_of(changed).decode(tokens)
            bench.agree(bench.feed(context, tokens), expected, f"with a change of {name}", allowed)


def _ones(n_rows: int, n_columns: int) -> StoredTensor:
    return StoredTensor.pack(np.ones((n_rows, n_columns), np.float32), "f32")


def _context(bench: Bench, n_ctx: int = 256) -> Context:
    """A context of a model with both random adapters."""
    for seed in _SEEDS.values():
        bench.adapter(seed)
    return bench.context(n_ctx=n_ctx)


def _adapted(bench: Bench, scales: Mapping[str, float]) -> tuple[Weights, Tolerance]:
    """The model with these adapters added to its weights, and the tolerances of its logits."""
    parts = ((bench.adapter(_SEEDS[name]), scale) for name, scale in scales.items())
    return bench.workshop.adapted(bench.name, bench.kv_type, *parts)


def _reference(bench: Bench, scales: Mapping[str, float]) -> Reference:
    return reference_of(_adapted(bench, scales)[0])


def _agree(bench: Bench, rows: Rows, expected: Rows, scales: Mapping[str, float], what: str) -> None:
    bench.agree(rows, expected, what, _adapted(bench, scales)[1])
