"""A kernel set: the operations of a tier, chosen once, when the model is loaded (``select_kernels``).

It consists of a device (weights, inputs, KV cache), operations, and a pass that fuses steps. If a tier can only be fast
by computing several operations together, ``Ops`` has a method for their composition, and the tier overrides it.
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
        """An MoE layer, prepared once and run for each batch."""
        return SteppedMoe(self, self, experts)

    def per_head(self, linears: Sequence[Linear]) -> PerHead:
        """A matrix for each head, prepared once and run for each batch."""
        return SteppedPerHead(self, linears)

    def fuse(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Replace neighbouring steps by fused ones, if this tier has them, in one peephole pass.

        Args:
            steps: the steps of all layers, in order.
        """
        return steps
