"""A kernel set: the operations of a tier, chosen once, when the model is loaded (``select_kernels``).

It is a device, which holds weights, inputs and the KV cache; operations; and a pass that fuses steps. An operation
that a tier can only compute fast together with its neighbours is added to ``Ops`` as the composition of these
neighbours, and the tier overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slm_native.kernels.altup import AltUpOps
from slm_native.kernels.device import Device
from slm_native.kernels.moe import MoeLayer, SteppedMoe
from slm_native.kernels.parameters import Experts, Linear, PerHead
from slm_native.kernels.per_head import SteppedPerHead
from slm_native.kernels.recurrent import RecurrentOps
from slm_native.kernels.rwkv import RwkvOps

if TYPE_CHECKING:
    from slm_native.steps import Step


class KernelSet(Device, RecurrentOps, RwkvOps, AltUpOps):
    """A tier: "reference", "cpu" or "torch"."""

    def moe(self, experts: Experts) -> MoeLayer:
        """A layer of experts, prepared once and run for each batch."""
        return SteppedMoe(self, self, experts)

    def per_head(self, linears: Sequence[Linear]) -> PerHead:
        """A matrix for each head, prepared once and run for each batch."""
        return SteppedPerHead(self, linears)

    def fuse(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The same steps, in fewer calls if this tier has fused ones: one peephole pass over neighbours.

        Args:
            steps: of all layers of a model, in order.
        """
        return steps
