"""What a user may say about sampling and length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self

from slm_core.errors import InvalidOption, UnknownOption


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop; steps run in the order of the attributes, each off at its neutral value.

    Attributes:
        repeat_penalty: divides positive and multiplies negative logits of the last 64 tokens (CTRL, arXiv
            1909.05858); 1 is off.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the most likely tokens that together reach this probability (nucleus, arXiv 1904.09751); 1 is off.
        min_p: keep tokens at least this share as likely as the most likely one (arXiv 2407.01082); 0 is off.
        temperature: divides logits before the draw; 0 takes the most likely token (greedy).
        seed: the draws are a function of it; None takes a new one each time.
        max_tokens: the longest answer; None for as long as the context has room.
        stop: texts that end the answer; they are not part of it.

    Raises:
        InvalidOption: a value out of its range.
    """

    repeat_penalty: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    temperature: float = 0.7
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        self._check_number("repeat_penalty", above=0.0)
        self._check_number("top_p", least=0.0, most=1.0)
        self._check_number("min_p", least=0.0, most=1.0)
        self._check_number("temperature", least=0.0)
        self._check_integer("top_k", 0)
        if self.seed is not None:
            self._check_integer("seed", 0)
        if self.max_tokens is not None:
            self._check_integer("max_tokens", 0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidOption(f"stop={self.stop!r} (accepted: texts that are not empty)")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The options from a mapping, as ``to_dict`` gives it.

        Raises:
            UnknownOption, InvalidOption: a name or value that does not fit.
        """
        accepted = {field.name for field in fields(cls)}
        for name in values:
            if name not in accepted:
                raise UnknownOption(f"unknown sampling option {name!r} (accepted: {', '.join(sorted(accepted))})")
        try:
            return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__
        except TypeError as error:
            raise InvalidOption(f"sampling options {dict(values)!r}: {error}") from error

    def to_dict(self) -> dict[str, object]:
        """The options as JSON values."""
        return {**asdict(self), "stop": list(self.stop)}

    def _check_number(
        self, name: str, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
    ) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not (least <= value <= most and value > above):
            bounds = f"from {least}" if math.isfinite(least) else f"above {above}"
            limit = f" to {most}" if math.isfinite(most) else ""
            raise InvalidOption(f"{name}={value!r} (accepted: a number {bounds}{limit})")

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidOption(f"{name}={value!r} (accepted: an integer from {least} on)")
