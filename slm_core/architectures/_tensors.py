"""Checks that a file has the tensors that its model needs, and no others."""

from __future__ import annotations

import logging

from slm_core.architectures._spec import ModelSpec
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import TensorInfo, WeightSource
from slm_core.gguf.cursor import shown
from slm_core.quant import supported_types

_log = logging.getLogger(__name__)


def check_tensors(gguf: WeightSource, spec: ModelSpec) -> None:
    """Check a file's tensors against its model: names, shapes and types; weights are not read.

    Raises:
        InvalidModelFile: a tensor is missing or has the wrong shape.
        UnsupportedModel: a tensor has a type that cannot be read, or is not part of the architecture.
    """
    known_names = set()
    for name, expected in spec.tensors():
        known_names.add(name)
        if name not in gguf.tensors:
            if expected.required:
                raise InvalidModelFile(f"{gguf.path}: tensor {name!r} of shape {expected.shape} is missing")
            continue
        tensor = gguf.tensors[name]
        if tensor.shape != expected.shape:
            raise InvalidModelFile(f"{gguf.path}: tensor {name!r} has the shape {tensor.shape}, not {expected.shape}")
        if expected.used:
            _check_type(gguf, tensor)
        else:
            _log.info("%s: tensor %r changes nothing here", gguf.path, name)
    for name in gguf.tensors:
        if name not in known_names:
            raise UnsupportedModel(
                f"{gguf.path}: tensor {shown(name)} is unknown for {spec.architecture} models, so results could be"
                " wrong"
            )


def _check_type(gguf: WeightSource, tensor: TensorInfo) -> None:
    if tensor.ggml_type not in supported_types():
        accepted = ", ".join(ggml_type.name for ggml_type in supported_types())
        raise UnsupportedModel(
            f"{gguf.path}: tensor {tensor.name!r} is of type {tensor.ggml_type.name} (accepted: {accepted})"
        )
