"""Steps of one operation: a norm of the residual stream, a factor on it, and its way to another device."""

from __future__ import annotations

from dataclasses import dataclass

from slm_native.kernels.device import Device
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Norm
from slm_native.kv import Array
from slm_native.steps.base import Hidden, Step, StepInputs


@dataclass(frozen=True, slots=True, eq=False)
class NormStep(Step):
    """The residual stream, normalized (post-norm encoders).

    Attributes:
        ops: the arithmetic.
        norm: its weights [E].
    """

    ops: Ops
    norm: Norm

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return self.ops.normed(x, self.norm)

    def describe(self) -> str:
        """See ``Step``."""
        return f"norm ({self.norm.kind.value})"


@dataclass(frozen=True, slots=True, eq=False)
class ScaleStep(Step):
    """The residual stream times a factor (gemma4).

    Attributes:
        factor: [1].
    """

    factor: Array

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return x * self.factor

    def describe(self) -> str:
        """See ``Step``."""
        return "scale"


@dataclass(frozen=True, slots=True, eq=False)
class TransferStep(Step):
    """The residual stream moves to the device of the layer that follows.

    Attributes:
        device: of the tier, which may be several.
        layer: number of that layer; the number of layers means the output matrix.
    """

    device: Device
    layer: int

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return self.device.entering(x, self.layer)

    def describe(self) -> str:
        """See ``Step``."""
        return f"to the device of layer {self.layer}"
