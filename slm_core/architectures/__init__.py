"""Architectures of model files: one module each, whose ``spec`` reads metadata into a ``ModelSpec``.

There is no list of modules; plugins add architectures by the hook ``slm_architectures``. Any backend that builds its
own forward pass can use them.
"""

from slm_core.architectures import _tables as tables
from slm_core.architectures._decoder import decoder_spec, encoder_spec, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._positions import ReadFactors, alibi_slopes, rope_kind, ropes_of, temperatures
from slm_core.architectures._recurrent import Mamba2Spec, MambaSpec, RecurrentSpec, Rwkv7Spec, ShortConvSpec
from slm_core.architectures._registry import architecture_names, read_spec
from slm_core.architectures._rope import Rope, yarn_ramp
from slm_core.architectures._sizes import Sizes, read_sizes
from slm_core.architectures._spec import (
    DENSE,
    EMBEDDING,
    POSITIONS,
    TEXT_TYPES,
    Activation,
    AnyActivation,
    ExpertsSpec,
    Gating,
    KvShape,
    LatentSpec,
    LayerSpec,
    LongRopeSpec,
    ModelSpec,
    NormKind,
    RopeSpec,
    RopeStyle,
    TemperatureSpec,
    TensorSpec,
    Xielu,
    YarnSpec,
)
from slm_core.architectures._tensors import check_tensors

__all__ = [
    "DENSE",
    "EMBEDDING",
    "POSITIONS",
    "TEXT_TYPES",
    "Activation",
    "AnyActivation",
    "ExpertsSpec",
    "Gating",
    "Keys",
    "KvShape",
    "LatentSpec",
    "LayerSpec",
    "LongRopeSpec",
    "Mamba2Spec",
    "MambaSpec",
    "ModelSpec",
    "NormKind",
    "ReadFactors",
    "RecurrentSpec",
    "Rope",
    "RopeSpec",
    "RopeStyle",
    "Rwkv7Spec",
    "ShortConvSpec",
    "Sizes",
    "TemperatureSpec",
    "TensorSpec",
    "Xielu",
    "YarnSpec",
    "alibi_slopes",
    "architecture_names",
    "check_tensors",
    "decoder_spec",
    "encoder_spec",
    "read_rope",
    "read_sizes",
    "read_spec",
    "rope_factors",
    "rope_kind",
    "ropes_of",
    "tables",
    "temperatures",
    "yarn_ramp",
]
