"""Steps of one operation: a norm, a factor, a direction, a copy to another device."""

from __future__ import annotations

from dataclasses import dataclass

from slm_native.kernels.device import Device
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Norm
from slm_native.kv import Array
from slm_native.steps.base import Hidden, Step, StepInputs


@dataclass(frozen=True, slots=True, eq=False)
class NormStep(Step):
    """Normalizes the residual stream (post-norm encoders).

    Attributes:
        ops: the kernel set.
        norm: weights of the norm [E].
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
    """Multiplies the residual stream by a factor (gemma4).

    Attributes:
        factor: the factor [1].
    """

    factor: Array

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return x * self.factor

    def describe(self) -> str:
        """See ``Step``."""
        return "scale"


@dataclass(frozen=True, slots=True, eq=False)
class ControlVectorStep(Step):
    """Adds a direction of a control vector to the residual stream; with AltUp, to each stream, as in llama.cpp.

    Attributes:
        direction: the direction [E], multiplied by its scale.
    """

    direction: Array

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return [stream + self.direction for stream in x] if isinstance(x, list) else x + self.direction

    def describe(self) -> str:
        """See ``Step``."""
        return "control vector"


@dataclass(frozen=True, slots=True, eq=False)
class KeepStep(Step):
    """Keeps a copy of the residual stream after a layer.

    Attributes:
        ops: the kernel set.
        layer: number of the layer.
    """

    ops: Ops
    layer: int

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        assert not isinstance(x, list), "no layer states of models with streams"
        inputs.kept[self.layer] = self.ops.concatenated([x])
        return x

    def describe(self) -> str:
        """See ``Step``."""
        return "keep the hidden states"


@dataclass(frozen=True, slots=True, eq=False)
class TransferStep(Step):
    """Copies the residual stream to the device of the next layer.

    Attributes:
        device: the device of the kernel set, which may consist of several.
        layer: number of the next layer; the number of layers for the output matrix.
    """

    device: Device
    layer: int

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """See ``Step``."""
        return self.device.entering(x, self.layer)

    def describe(self) -> str:
        """See ``Step``."""
        return f"to the device of layer {self.layer}"
