"""A kernel set: what computes a model, chosen once, when the model is loaded (``select_kernels``).

It is a device, which holds weights, inputs and the KV cache; operations; and a pass that fuses steps. An operation
that a tier can only compute fast together with its neighbours is added to ``Ops`` as the composition of these
neighbours, and the tier overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slm_native.kernels.altup import AltUpOps
from slm_native.kernels.by_head import SteppedByHead
from slm_native.kernels.device import Device
from slm_native.kernels.mixtures import Mixture, SteppedMixture
from slm_native.kernels.parameters import ByHead, Experts, Linear
from slm_native.kernels.recurrent import RecurrentOps
from slm_native.kernels.rwkv import RwkvOps

if TYPE_CHECKING:
    from slm_native.steps import Step


class KernelSet(Device, RecurrentOps, RwkvOps, AltUpOps):
    """A tier: "reference", "cpu" or "torch"."""

    def mixture(self, experts: Experts) -> Mixture:
        """A layer of experts, prepared once and run for each batch."""
        return SteppedMixture(self, self, experts)

    def by_head(self, linears: Sequence[Linear]) -> ByHead:
        """A matrix for each head, prepared once and run for each batch."""
        return SteppedByHead(self, linears)

    def fuse(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The same steps, in fewer calls where this tier has some: one peephole pass over neighbours.

        Args:
            steps: of all layers of a model, in order.
        """
        return steps
