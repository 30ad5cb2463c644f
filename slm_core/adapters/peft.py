"""Adapters as directories, as PEFT's ``save_pretrained`` writes them: a configuration, and a safetensors file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters.adapter import EMBEDDING, LowRank
from slm_core.adapters.base_model import BaseModel
from slm_core.checkpoints import Sources, sources_of
from slm_core.checkpoints.changes import Both, Change, Grouped, GroupPart, Interleaved, Multiplied, Slice, Transposed
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.safetensors import SafetensorsFile
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.gguf.cursor import shown
from slm_core.jsonfile import read_json
from slm_core.quant import dequantize

CONFIG, WEIGHTS, MODEL_CONFIG = "adapter_config.json", "adapter_model.safetensors", "config.json"
_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_NEUTRAL = """
arrow_config auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode layers_pattern
layers_to_transform loftq_config lora_dropout megatron_config megatron_core peft_version qalora_group_size revision
runtime_config target_modules task_type velora_config
"""
"""Keys that have no effect on the numbers of a saved adapter."""
_OFF = """
alora_invocation_tokens bdlora_config ensure_weight_tying kappa_tune_config layer_replication lora_bias lora_ga_config
modules_to_save monteclora_config target_parameters trainable_token_indices use_bdlora use_dora use_qalora
"""
"""Keys whose features are not implemented; they may be absent, null, false or empty."""
_ADDED = (True, False, "gaussian", "eva", "orthogonal")
"""Initializations of A and B that leave the model's own matrices as they are."""
_LARGEST = 1e9
_KINDS = {"F32": GgmlType.F32, "F16": GgmlType.F16, "BF16": GgmlType.BF16}


def read_peft(folder: Path, base: BaseModel) -> dict[str, LowRank]:
    """The changes in a directory.

    Raises:
        InvalidModelFile: a file is missing or damaged, or the adapter does not fit the model.
        UnsupportedModel: an adapter of another kind.
    """
    if not (folder / CONFIG).is_file():
        raise InvalidModelFile(
            f"{folder}: a directory without an {CONFIG} (accepted: a GGUF file, a directory of PEFT)"
        )
    scales = _Scales(Config(folder / CONFIG, read_json(folder / CONFIG)))
    if not (folder / WEIGHTS).is_file():
        pickled = any(folder.glob("adapter_model.bin"))
        why = ", and pickled weights are never read: save it anew by PEFT's save_pretrained" if pickled else ""
        raise InvalidModelFile(f"{folder}: there is no {WEIGHTS}{why}")
    changes: dict[str, LowRank] = {}
    with closing(SafetensorsFile(folder / WEIGHTS)) as file:
        modules = _modules(file)
        sources = _sources(folder, base, modules)
        for module, (a, b) in modules.items():
            targets = sources.get(f"{module}.weight")
            if not targets:
                raise InvalidModelFile(f"{folder}: the adapter changes {shown(module)}, which this model does not have")
            matrices = _numbers(file, a), _numbers(file, b)
            if matrices[0].ndim != 2 or matrices[1].ndim != 2:
                raise InvalidModelFile(f"{folder}: the change of {shown(module)} does not consist of matrices")
            scale = scales.of(module, matrices[0].shape[0])
            for name, change in targets.items():
                changes[name] = LowRank(*_converted(folder, module, change, name, *matrices), scale)
    return changes


class _Scales:
    """The scale of each module's change: alpha / r, or alpha / sqrt(r).

    Args:
        config: adapter_config.json; unknown keys are refused.

    Raises:
        UnsupportedModel: an adapter of another kind, or a feature that is not implemented.
        InvalidModelFile: an invalid value.
    """

    def __init__(self, config: Config) -> None:
        config.only("peft_type", "LORA")
        for name in _OFF.split():
            config.only(name, False, [], {})
        config.only("bias", "none")
        config.only("init_lora_weights", *_ADDED)
        config.neutral(*_NEUTRAL.split())
        config.only("fan_in_fan_out", False, True)  # says how the model stores its matrix; A and B are the same
        self._r, self._alpha = config.size("r"), config.number("lora_alpha")
        self._sqrt = config.flag("use_rslora", False)
        self._ranks, self._alphas = _patterns(config, "rank_pattern"), _patterns(config, "alpha_pattern")
        config.refuse_others()
        self._source = config.source

    def of(self, module: str, rank: int) -> float:
        """The scale of a module's change with A of ``rank`` rows."""
        stated = _matching(self._ranks, module, self._r)
        if stated != rank:
            raise InvalidModelFile(f"{self._source}: {shown(module)} has the rank {rank}, and {stated} is stated")
        return _matching(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._sqrt else rank)


def _patterns(config: Config, name: str) -> Mapping[str, float]:
    """Numbers by the ends of modules' names. PEFT accepts regular expressions here; only names are accepted."""
    section = config.mapping(name)
    for pattern, value in section.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
            raise InvalidModelFile(f"{config.source}: {name} has {repr(value)[:80]} (accepted: a number above 0)")
        if not re.fullmatch(r"\^?[\w.]{1,200}", pattern):
            raise UnsupportedModel(f"{config.source}: {name} has the pattern {pattern[:80]!r} (accepted: names)")
    return section


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that a module's name ends with; a pattern with ^ is the whole name."""
    return next((value for key, value in patterns.items() if f"^.{module}".endswith(_ending(key))), default)


def _ending(pattern: str) -> str:
    return f"^.{pattern[1:]}" if pattern.startswith("^") else f".{pattern}"


def _modules(file: SafetensorsFile) -> dict[str, tuple[str, str]]:
    """The names of A and B of each changed module."""
    pairs: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        match = _PAIR.fullmatch(name)
        if match is None:
            reason = "DoRA is not implemented" if "magnitude" in name else "it is none of a low-rank change"
            raise UnsupportedModel(f"{file.path}: tensor {shown(name)}: {reason} (accepted: lora_A, lora_B)")
        pairs.setdefault(match[1], {})[match[2]] = name
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise InvalidModelFile(f"{file.path}: the change of {shown(module)} has no A, or no B")
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}


def _sources(folder: Path, base: BaseModel, modules: Mapping[str, object]) -> Sources:
    """The tensors of the model by their names in a directory, from its configuration."""
    config_path, names = folder / MODEL_CONFIG, {f"{module}.weight" for module in modules}
    if config_path.is_file():
        return sources_of(Config(config_path, read_json(config_path)), names)
    if not base.is_file:
        return sources_of(Config(Path(MODEL_CONFIG), base.config), names)
    try:
        sources = sources_of(Config(Path("the model's file"), base.config, is_partial=True), names)
    except (UnsupportedModel, InvalidModelFile) as error:
        missing = str(error)
    else:
        if names <= sources.keys():
            return sources
        missing = f"no {sorted(names - sources.keys())[0][:100]}"
    raise UnsupportedModel(
        f"{folder}: the file of the model does not tell all names of its tensors in PEFT ({missing}): copy the"
        f" {MODEL_CONFIG} of the original model to {config_path}"
    )


def _converted(
    folder: Path, module: str, change: Change | None, name: str, a: NDArray[np.float32], b: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A and B of a tensor of the model, whose product is the converted product of A and B of the module."""
    if name == EMBEDDING:
        a, b = b.T, a.T  # PEFT multiplies a token's column of A by B
    try:
        for row_change in _of_rows(change):
            row_change.shape(b.shape)
            b = row_change.values(b)
    except ValueError as error:
        raise InvalidModelFile(f"{folder}: the change of {shown(module)} does not fit this model: {error}") from None
    except TypeError:
        raise UnsupportedModel(f"{folder}: changes of {shown(module)} are not implemented") from None
    return a, b


def _of_rows(change: Change | None) -> Iterator[Change]:
    """The conversions of a matrix, which act on its rows.

    Raises:
        TypeError: a conversion of another kind.
    """
    match change:
        case None | Transposed():  # A and B belong to the matrix (out, in), however the directory stores it
            return
        case Both():
            yield from _of_rows(change.first)
            yield from _of_rows(change.second)
        case Interleaved() | Grouped() | GroupPart() | Multiplied() | Slice(axis=0):
            yield change
        case _:
            raise TypeError(type(change))


def _numbers(file: SafetensorsFile, name: str) -> NDArray[np.float32]:
    tensor = file.tensors[name]
    if tensor.dtype not in _KINDS:
        raise UnsupportedModel(f"{file.path}: tensor {shown(name)} is {tensor.dtype} (accepted: {', '.join(_KINDS)})")
    return dequantize(file.data(name), _KINDS[tensor.dtype], tensor.shape)
