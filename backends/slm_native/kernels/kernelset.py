"""A kernel set: the operations of a tier, chosen once, when the model is loaded (``select_kernels``).

It consists of a device (weights, inputs, KV cache), operations, and a pass that fuses steps. If a tier can only be fast
by computing several operations together, ``Ops`` has a method for their composition, and the tier overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_native.kernels.altup import AltUpOps
from slm_native.kernels.device import Device
from slm_native.kernels.moe import MoeLayer, SteppedMoe
from slm_native.kernels.parameters import Experts, Linear, Lora, PerHead, Weight, float_tensor
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

    def lora(self, weight: Weight, a: NDArray[np.float32], b: NDArray[np.float32]) -> Lora:
        """A low-rank change of a matrix, prepared once and used for each batch.

        Args:
            weight: the matrix, or the table of embeddings.
            a: [r, in].
            b: [out, r].
        """
        name = weight.tensor.name
        return Lora(self.prepare(float_tensor(f"{name}.lora_a", a)), self.prepare(float_tensor(f"{name}.lora_b", b)))

    def fuse(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Replace neighbouring steps by fused ones, if this tier has them, in one peephole pass.

        Args:
            steps: the steps of all layers, in order.
        """
        return steps
