"""Hidden states after any layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from slm_conformance.oracle.adapters import adapter_name, control_vector_name
from slm_conformance.oracle.reference import Reference
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.workshop import Rows
from slm_core.errors import ContextFull, InvalidOption, InvalidPosition, InvalidToken, UnsupportedOutput
from slm_core.protocols import Context
from slm_core.types import Capability, Pos


class TestLayerStates(Scenarios):
    """Clause 21: ``layer_states`` gives the outputs of layers; all else is as in ``decode``."""

    models = ("llama-f32",)

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: ``layer_states`` works if ``LAYER_STATES`` is declared, else raises ``UnsupportedOutput``."""
        context = bench.context()
        batch = bench.batch(context, (0, 0, bench.tokens(5)))
        if Capability.LAYER_STATES not in context.capabilities:
            with bench.refused("layer states that are not declared", UnsupportedOutput, context=context):
                context.layer_states(batch, [0])
            return
        states = context.layer_states(batch, [1])
        shape = 1, 5, bench.model.info.n_embd
        assert isinstance(states, np.ndarray), f"states of layers are a {type(states).__name__}, not an array of NumPy"
        assert states.dtype == np.dtype(np.float32) and states.shape == shape, (
            f"states of 5 tokens after one layer are {states.dtype} {states.shape}, not float32 {shape}"
        )

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clauses 8, 9 and 21: states after each layer equal the reference's, in any order of layers and any chunks."""
        context, tokens = _context(bench), bench.tokens(60)
        expected = bench.reference().layer_states(tokens)
        layers = [*range(len(expected))][::-1]
        for seq_id, chunk in enumerate((33, 1)):
            states = _feed(context, tokens, layers, chunk, seq_id)
            _agree(bench, states, expected[layers], f"states after layers {layers}, in chunks of {chunk}")
        some = _feed(context, tokens, [0, 0], 60, seq_id=2)
        _agree(bench, some, expected[[0, 0]], "states after the first layer, asked for twice")

    def test_rows_asked_for(self, bench: Bench) -> None:
        """Clauses 7 and 21: requested rows of several sequences come in the order of the batch."""
        context, tokens, batch = _context(bench), bench.tokens(20), None
        references = [bench.reference().layer_states(tokens[seq_id:]) for seq_id in range(2)]
        batch, owners = context.new_batch(), []
        for i in range(12):
            for seq_id in (1, 0):
                is_requested = (i + seq_id) % 3 == 0
                batch.add(tokens[seq_id + i], Pos(seq_id, i), logits=is_requested)
                owners += [(seq_id, i)] * is_requested
        expected = np.stack([references[seq_id][1:, i] for seq_id, i in owners], axis=1)
        layers = [*range(1, len(references[0]))]
        _agree(bench, context.layer_states(batch, layers), expected, "every third row of two sequences")
        batch.clear()
        batch.extend(tokens[:3], Pos(2, 0))
        shapes = context.layer_states(batch, [0, 1]).shape, context.layer_states(context.new_batch(), [0, 1]).shape
        assert shapes == ((2, 0, expected.shape[2]),) * 2, f"no row asked for, and an empty batch, give shapes {shapes}"

    def test_in_turns_with_decode(self, bench: Bench) -> None:
        """Clause 21: ``layer_states`` adds tokens to the cache like ``decode``, and the next logits follow."""
        tokens, context, reference = bench.tokens(30), _context(bench), bench.reference()
        reference.decode(tokens[:10])
        bench.feed(context, tokens[:10])
        _agree(bench, _feed(context, tokens[10:20], [0], 10), reference.layer_states(tokens[10:20])[:1], "after decode")
        assert context.tokens(0) == tuple(tokens[:20]), "10 tokens decoded, 10 more read: the sequence has others"
        bench.agree(bench.feed(context, tokens[20:]), reference.decode(tokens[20:]), "decode after layer states")

    def test_with_adapters(self, bench: Bench) -> None:
        """Clauses 19 and 21: states are those of each sequence's adapters, directions of control vectors included."""
        context, tokens = _context(bench), bench.tokens(12)
        if Capability.ADAPTERS not in context.capabilities:
            pytest.skip("declared absent: adapters")
        lora, vector = bench.adapter(), bench.control_vector()
        weights, allowed = bench.workshop.adapted(bench.name, bench.kv_type, (lora, 0.5), (vector, 1.0))
        context.set_adapters(0, {adapter_name(1): 0.5, control_vector_name(1): 1.0})
        batch = bench.batch(context, (0, 0, tokens), (1, 0, tokens))
        layers = [*range(len(bench.reference().layer_states(tokens)))]
        states = context.layer_states(batch, layers)
        expected = [Reference(weights).layer_states(tokens), bench.reference().layer_states(tokens)]
        for rows, each, what in (
            (states[:, :12], expected[0], "with adapters"),
            (states[:, 12:], expected[1], "without"),
        ):
            for layer in layers:
                bench.states_agree(rows[layer], each[layer], f"states {what}, after layer {layer}", allowed)

    def test_refusals(self, bench: Bench) -> None:
        """Clauses 1 and 21: unknown layers, and batches that ``decode`` refuses, raise and change nothing."""
        context, size = _context(bench, n_ctx=40), bench.vocab.size
        n_layers = len(bench.reference().layer_states([0]))
        _feed(context, bench.tokens(20), [0], 20)
        for why, layers in (("no layer", []), ("a layer below 0", [0, -1]), ("a layer too many", [n_layers])):
            with bench.refused(f"layer states of {why}", InvalidOption, context=context):
                context.layer_states(bench.batch(context, (0, 20, [1])), layers)
        for why, first, tokens, error in (
            ("a token outside the vocabulary", 20, [1, size], InvalidToken),
            ("a position that is not the next", 21, [1], InvalidPosition),
            ("more tokens than positions", 20, [1] * 21, ContextFull),
        ):
            with bench.refused(f"layer states with {why}", error, context=context):
                context.layer_states(bench.batch(context, (0, first, tokens)), [0])


def _context(bench: Bench, n_ctx: int = 256) -> Context:
    if Capability.LAYER_STATES not in bench.capabilities:
        pytest.skip("declared absent: layer_states")
    return bench.context(n_ctx=n_ctx)


def _feed(context: Context, tokens: Sequence[int], layers: Sequence[int], chunk: int, seq_id: int = 0) -> Rows:
    """Append tokens in batches; returns the states of all, [layers, T, E]."""
    parts = []
    for first in range(0, len(tokens), chunk):
        batch = context.new_batch()
        batch.extend(tokens[first : first + chunk], Pos(seq_id, context.length(seq_id)), logits="all")
        parts.append(context.layer_states(batch, layers).copy())
    return np.concatenate(parts, axis=1)


def _agree(bench: Bench, states: Rows, expected: Rows, what: str) -> None:
    """Compare the states [layers, T, E] within the float32 bound for the output of the last norm (clause 9)."""
    assert states.shape == expected.shape, f"{what}: shape {states.shape}, not {expected.shape}"
    for i, (rows, each) in enumerate(zip(states, expected, strict=True)):
        bench.states_agree(rows, each, f"{what} (layer {i} of those asked for)")
