"""Mutants whose states after layers are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_core.protocols import Batch
from slm_core.types import Capability, Pos, States


@mutant("TestLayerStates::test_as_declared")
class LayerStatesAreMissing(ToyContext):
    """States of layers are not declared, and ``layer_states`` raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.LAYER_STATES}

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError


@mutant("TestLayerStates::test_against_the_reference")
class LayersInAscendingOrder(ToyContext):
    """The states come in ascending order of layers."""

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Sort the layers."""
        return super().layer_states(batch, sorted(layers))


@mutant("TestLayerStates::test_rows_asked_for")
class LayerStatesBySequence(ToyContext):
    """The rows come sequence by sequence."""

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Sort the rows by sequence, if no adapters are used."""
        states = super().layer_states(batch, layers)
        if any(self.sets):
            return states
        return states[:, np.argsort(batch.seq_ids[batch.logits_mask], kind="stable")]


@mutant("TestLayerStates::test_in_turns_with_decode")
class LayerStatesForget(ToyContext):
    """After a decode, ``layer_states`` removes its tokens again."""

    decoded = False

    def decode(self, batch: Batch) -> States:
        """Note that tokens were decoded."""
        self.decoded = True
        return super().decode(batch)

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Truncate to the length before."""
        seq_id, length = (int(batch.seq_ids[0]), int(batch.positions[0])) if len(batch) else (0, 0)
        states = super().layer_states(batch, layers)
        if self.decoded and len(batch):
            self.truncate(Pos(seq_id, length))
        return states


@mutant("TestLayerStates::test_with_adapters")
class LayerStatesWithoutAdapters(ToyContext):
    """``layer_states`` computes without adapters."""

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Put the adapters aside."""
        sets, self.sets = self.sets, [() for _ in self.sets]
        try:
            return super().layer_states(batch, layers)
        finally:
            self.sets = sets


@mutant("TestLayerStates::test_refusals")
class LayersFromTheEnd(ToyContext):
    """A negative number counts layers from the end."""

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Add the number of layers."""
        return super().layer_states(batch, [layer % self.engine.shape.n_layers for layer in layers])
