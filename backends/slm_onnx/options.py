"""The options of ``load`` that only this backend has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Self

from slm_core.errors import InvalidOption, UnknownOption
from slm_onnx import BACKEND

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "accuracy_level": "how quantized weights are multiplied: 0 in float (slow on the CPU), 4 with activations"
        " rounded to 8 bits (accepted: 0, 4; default: 4)",
        "spinning": "threads that wait keep their core busy: faster alone, slower beside other work (accepted: True,"
        " False; default: False)",
        "cache": "keep what loading builds on disk for the next time (accepted: True, False, None for models of 64 MiB"
        " and more; default: None)",
        "buckets": "pad batches, and the cells that attention looks at, to powers of two: few shapes, for providers"
        " that capture a run or compile for its shape (accepted: True, False; default: False)",
        "provider_options": "passed to the execution provider (accepted: a mapping of texts to texts)",
    }
)

CAPTURE = "enable_cuda_graph"
"""The provider option that enables capture of runs."""

OF_BUILDING = frozenset({"accuracy_level", "cache", "buckets"})
"""Options of built graphs; a directory of ONNX models brings its own graphs."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The caller's options; ``DESCRIPTIONS`` describes them."""

    accuracy_level: int = 4
    spinning: bool = False
    cache: bool | None = None
    buckets: bool = False
    provider_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> Self:
        """Check options by name.

        Raises:
            UnknownOption: no such option; the message lists all options.
            InvalidOption: a value does not fit.
        """
        fits = {
            "accuracy_level": lambda value: value in (0, 4) and not isinstance(value, bool),
            "spinning": lambda value: isinstance(value, bool),
            "cache": lambda value: value is None or isinstance(value, bool),
            "buckets": lambda value: isinstance(value, bool),
            "provider_options": _is_text_mapping,
        }
        for name, value in options.items():
            if name not in fits:
                raise UnknownOption(f"unknown option {name!r} of backend {BACKEND} (accepted: {', '.join(fits)})")
            if not fits[name](value):
                raise InvalidOption(f"{name}={value!r}: {DESCRIPTIONS[name]}")
        return cls(**options)  # type: ignore[arg-type]  # checked above

    def named(self, n_threads: int, *, builds: bool) -> dict[str, str]:
        """The settings in effect; see ``ModelInfo.settings``.

        Args:
            n_threads: threads of one operator.
            builds: whether the graph is built, so that options of building have an effect.
        """
        used = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        used |= {"threads": str(n_threads), "provider_options": str(dict(self.provider_options))}
        return {name: value for name, value in used.items() if builds or name not in OF_BUILDING}

    @property
    def captures(self) -> bool:
        """Whether the provider captures runs as CUDA graphs."""
        return self.provider_options.get(CAPTURE, "0").lower() in ("1", "true")


def _is_text_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
