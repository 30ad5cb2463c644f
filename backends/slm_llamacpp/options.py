"""The options of ``load`` that only this backend has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from slm_core.errors import InvalidOption, UnknownOption
from slm_llamacpp import BACKEND
from slm_llamacpp.devices import DeviceChoice

SPLIT_MODES = ("none", "layer", "row", "tensor")  # in the order of llama_split_mode


class _Option(NamedTuple):
    description: str
    accepted: str
    fits: Callable[[Any], bool]


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _is_split(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) == 0:
        return False
    shares = [share for share in value if isinstance(share, int | float) and not isinstance(share, bool)]
    return len(shares) == len(value) and all(0 <= share < float("inf") for share in shares) and sum(shares) > 0


_OPTIONS: Mapping[str, _Option] = MappingProxyType(
    {
        "flash_attention": _Option(
            'fused attention; "auto" is on for a GPU, for quantized values in the KV cache, and for keys and values in'
            " f16 of more than 8 sequences, as in an engine",
            '"auto", True, False',
            lambda value: value == "auto" or _is_bool(value),
        ),
        "n_ubatch": _Option(
            "tokens computed at once; a longer batch is cut", "an integer from 1 on", lambda value: _is_int(value, 1)
        ),
        "use_mmap": _Option("map the file instead of reading it", "True, False", _is_bool),
        "use_mlock": _Option("keep the weights from being swapped out", "True, False", _is_bool),
        "check_tensors": _Option("look for damaged weights while loading", "True, False", _is_bool),
        "repack": _Option(
            "copy weights into layouts that suit the CPU; off where a probe found that this build dies of it",
            "True, False",
            _is_bool,
        ),
        "n_gpu_layers": _Option(
            "layers that a GPU takes; -1 for all", "an integer from -1 on", lambda value: _is_int(value, -1)
        ),
        "split_mode": _Option(
            "how several GPUs share the model", ", ".join(SPLIT_MODES), lambda value: value in SPLIT_MODES
        ),
        "main_gpu": _Option(
            "the GPU that takes all layers with split_mode 'none': an index into the chosen GPUs",
            "an integer from 0 on",
            lambda value: _is_int(value, 0),
        ),
        "tensor_split": _Option("each GPU's share of the model", "numbers from 0 on, one a GPU", _is_split),
        "offload_kv": _Option("keep the KV cache on the GPU", "True, False", _is_bool),
    }
)
_FOR_GPUS = ("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "offload_kv")

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {name: f"{option.description} (accepted: {option.accepted})" for name, option in _OPTIONS.items()}
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The caller's options, see ``DESCRIPTIONS``; None for llama.cpp's default."""

    flash_attention: bool | None = None
    n_ubatch: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    check_tensors: bool | None = None
    repack: bool | None = None
    n_gpu_layers: int | None = None
    split_mode: str | None = None
    main_gpu: int | None = None
    tensor_split: tuple[float, ...] | None = None
    offload_kv: bool | None = None

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> Self:
        """Check options by name.

        Raises:
            UnknownOption: no such option; the message lists all options.
            InvalidOption: a value does not fit.
        """
        for name, value in options.items():
            if name not in _OPTIONS:
                raise UnknownOption(f"unknown option {name!r} of backend {BACKEND} (accepted: {', '.join(_OPTIONS)})")
            if not _OPTIONS[name].fits(value):
                raise InvalidOption(f"{name}={value!r} (accepted: {_OPTIONS[name].accepted})")
        values: dict[str, Any] = {name: None if value == "auto" else value for name, value in options.items()}
        if "tensor_split" in values:
            values["tensor_split"] = tuple(float(share) for share in values["tensor_split"])
        return cls(**values)

    def check_gpus(self, n_gpus: int, max_devices: int) -> None:
        """Check the GPU options against the number of GPUs in use.

        Raises:
            InvalidOption: a GPU option without a GPU, or an option that names an unused GPU.
        """
        for name in _FOR_GPUS:
            value = getattr(self, name)
            if n_gpus == 0 and value is not None and not (name == "n_gpu_layers" and value == 0):
                raise InvalidOption(f"{name}={value!r} is for GPUs, and the model runs on the CPU: leave it out")
        if self.main_gpu is not None and self.main_gpu >= n_gpus:
            raise InvalidOption(f"main_gpu={self.main_gpu} (accepted: 0 to {n_gpus - 1})")
        if self.tensor_split is not None and len(self.tensor_split) > min(n_gpus, max_devices):
            raise InvalidOption(f"tensor_split has {len(self.tensor_split)} shares for {n_gpus} GPUs")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a loaded model.

    Attributes:
        device: the chosen devices.
        n_threads: number of CPU threads.
        repack: whether weights may be copied into other layouts.
        options: the caller's options.
    """

    device: DeviceChoice
    n_threads: int
    repack: bool
    options: LoadOptions

    def named(self) -> dict[str, str]:
        """The settings in effect; see ``ModelInfo.settings``. llama.cpp decides other settings."""
        chosen = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        chosen |= {"threads": self.n_threads, "repack": self.repack}
        return {name: str(value) for name, value in chosen.items() if value is not None}
