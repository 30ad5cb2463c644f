"""Control vectors: directions that are added to the residual stream after layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slm_conformance.oracle.adapters import (
    RandomAdapter,
    adapter_name,
    control_vector_metadata,
    control_vector_name,
    direction_name,
)
from slm_conformance.oracle.gguf_writer import StoredTensor, write_gguf
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.references import reference_of
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.suite.workshop import Rows
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidModelFile, InvalidOption, SnapshotMismatch
from slm_core.protocols import Context
from slm_core.types import Capability

_FIRST, _SECOND, _LOW_RANK = control_vector_name(1), control_vector_name(2), adapter_name(1)


class TestControlVectors(Scenarios):
    """Clause 19: a control vector adds its directions, each multiplied by the scale, to the outputs of layers."""

    def test_added_after_layers(self, bench: Bench) -> None:
        """Clauses 9 and 19: the directions, with any scale, change the logits of a prompt and of single tokens."""
        context, tokens = _context(bench), bench.tokens(24)
        for seq_id, (scale, chunk) in enumerate(((1.0, None), (1.0, 1), (-0.5, None))):
            scales = {_FIRST: scale}
            context.set_adapters(seq_id, scales)
            rows = bench.feed(context, tokens, seq_id, chunk)
            _agree(bench, rows, _reference(bench, scales).decode(tokens), scales, f"with a control vector: {scales}")

    def test_layer_range(self, bench: Bench) -> None:
        """Clause 19: ``layers`` chooses the directions from the first to the last layer, both included."""
        vector, model, tokens = bench.control_vector(1), bench.own_model(), bench.tokens(12)
        n_layers = model.info.n_layers
        whole, last = model.adapters.load(vector.path, "whole"), n_layers - 1
        part = model.adapters.load(vector.path, "part", layers=(last, last))
        assert (whole.layers, part.layers) == (tuple(range(1, n_layers)), (last,)), f"layers {whole.layers} and {part}"
        assert (part.rank, part.tensors) == (0, ()), f"a control vector is listed as {part}"
        if n_layers > 2:
            assert part.fingerprint != whole.fingerprint, "other layers, and the same fingerprint"
        for layers in ((0, 1), (2, 1), (n_layers, n_layers), (1,), "1"):
            with bench.refused(f"layers={layers!r}", InvalidOption):
                model.adapters.load(vector.path, "refused", layers=layers)  # type: ignore[arg-type]
        context = bench.context(model=model)
        context.set_adapters(0, {"part": 1.0})
        last_direction = RandomAdapter(vector.path, {direction_name(last): vector.changes[direction_name(last)]})
        weights, tolerance = bench.workshop.adapted(bench.name, bench.kv_type, (last_direction, 1.0))
        expected = reference_of(weights).decode(tokens)
        bench.agree(bench.feed(context, tokens), expected, "with the direction of the last layer", tolerance)

    def test_in_one_batch(self, bench: Bench) -> None:
        """Clauses 7 and 19: one batch may mix vectors, sets of vectors and low-rank changes, and none."""
        bench.adapter(1)
        context, tokens = _context(bench), bench.tokens(16)
        sets: Sequence[Mapping[str, float]] = ({_FIRST: 1.0}, {}, {_LOW_RANK: 0.75, _SECOND: 1.0}, {_SECOND: -0.5})
        for seq_id, scales in enumerate(sets):
            context.set_adapters(seq_id, scales)
        rows = context.decode(bench.batch(context, *((seq_id, 0, tokens) for seq_id in range(4)))).copy()
        for seq_id, scales in enumerate(sets):
            sequence_rows, expected = rows[16 * seq_id : 16 * seq_id + 16], _reference(bench, scales).decode(tokens)
            _agree(bench, sequence_rows, expected, scales, f"sequence {seq_id} with {scales} among others")

    def test_hidden_states(self, bench: Bench) -> None:
        """Clauses 11 and 19: ``embed`` computes with control vectors, too."""
        context, tokens = _context(bench), bench.tokens(9)
        if Capability.EMBEDDINGS not in bench.capabilities:
            return
        context.set_adapters(1, {_FIRST: 1.0})
        states = context.embed(bench.batch(context, (1, 0, tokens))).copy()
        weights, allowed = bench.workshop.adapted(bench.name, bench.kv_type, (bench.control_vector(1), 1.0))
        bench.states_agree(states, reference_of(weights).embed(tokens), "hidden states with a control vector", allowed)

    def test_dumps(self, bench: Bench) -> None:
        """Clauses 6, 16 and 19: a dump names the control vector by its content, and continues with it."""
        context, tokens, scales = _context(bench), bench.tokens(20), {_FIRST: 0.75}
        context.set_adapters(0, scales)
        bench.feed(context, tokens[:16])
        data, other = context.dump(0), bench.context()
        other.restore(1, data)
        other.restore(2, foreign(SequenceSnapshot.from_bytes(data)).to_bytes())
        expected = _reference(bench, scales).decode(tokens)[16:]
        for seq_id, how in ((1, "restored"), (2, "decoded again")):
            assert dict(other.adapters(seq_id)) == scales, f"{how}, the sequence has {other.adapters(seq_id)}"
            _agree(bench, bench.feed(other, tokens[16:], seq_id), expected, scales, f"a sequence that was {how}")
        without = bench.context(model=bench.own_model())
        with bench.refused("a dump with a control vector that is not loaded", SnapshotMismatch, context=without):
            without.restore(0, data)

    def test_bad_files(self, bench: Bench) -> None:
        """Clause 19: directions that do not fit the model are refused."""
        bench.control_vector(1)
        model = bench.own_model()
        n_layers, n_embd = model.info.n_layers, model.info.n_embd
        good = {"direction.1": _packed(n_embd)}
        infinite = StoredTensor.pack(np.full(n_embd, np.inf, np.float32), "f32")
        for why, tensors in (
            ("no direction", {}),
            ("a direction for layer 0", {**good, "direction.0": _packed(n_embd)}),
            ("a direction for a layer after the last", {**good, f"direction.{n_layers}": _packed(n_embd)}),
            ("a negative layer", {"direction.-1": _packed(n_embd)}),
            ("two directions for a layer", {**good, "direction.01": _packed(n_embd)}),
            ("a direction of no layer", {**good, "direction.x": _packed(n_embd)}),
            ("a tensor that is no direction", {**good, "blk.1.attn_q.weight.lora_a": _packed(n_embd)}),
            ("a direction that is too wide", {"direction.1": _packed(n_embd + 1)}),
            ("a matrix as a direction", {"direction.1": _packed(1, n_embd)}),
            ("a direction in F16", {"direction.1": StoredTensor.pack(np.ones(n_embd, np.float32), "f16")}),
            ("an infinity", {"direction.1": infinite}),
        ):
            path = write_gguf(bench.directory / "bad-vector.gguf", control_vector_metadata(), tensors)
            with bench.refused(f"a control vector with {why}", InvalidModelFile):
                model.adapters.load(path, why)
        assert len(model.adapters) == 0, f"a refused control vector is listed: {list(model.adapters)}"


def _packed(*shape: int) -> StoredTensor:
    return StoredTensor.pack(np.ones(shape, np.float32), "f32")


def _context(bench: Bench) -> Context:
    """A context of a model with two random control vectors."""
    bench.control_vector(1)
    bench.control_vector(2)
    return bench.context(n_ctx=128)


def _parts(bench: Bench, scales: Mapping[str, float]) -> Sequence[tuple[RandomAdapter, float]]:
    """The adapters of these names, with their scales."""
    makers = {
        _FIRST: lambda: bench.control_vector(1),
        _SECOND: lambda: bench.control_vector(2),
        _LOW_RANK: lambda: bench.adapter(1),
    }
    return [(makers[name](), scale) for name, scale in scales.items()]


def _reference(bench: Bench, scales: Mapping[str, float]) -> Reference:
    return reference_of(bench.workshop.adapted(bench.name, bench.kv_type, *_parts(bench, scales))[0])


def _agree(bench: Bench, rows: Rows, expected: Rows, scales: Mapping[str, float], what: str) -> None:
    tolerance = bench.workshop.adapted(bench.name, bench.kv_type, *_parts(bench, scales))[1]
    bench.agree(rows, expected, what, tolerance)
