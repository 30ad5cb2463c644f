"""Options of speculative decoding, and drafters from the settings in dumps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slm_core.errors import InvalidOption
from slm_core.generation.speculation.lookup import PromptLookup
from slm_core.generation.speculation.proposal import Drafter
from slm_core.generation.speculation.suffix import SuffixIndex

_KINDS: Mapping[str, type[PromptLookup | SuffixIndex]] = {
    "prompt_lookup": PromptLookup,
    "suffix_index": SuffixIndex,
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: draft tokens cheaply, decode them in one batch, and keep the accepted tokens.

    Attributes:
        drafter: proposes the tokens.
        n_max: the longest draft, 1 to 64 tokens.
        adaptive: choose the draft length that pays best, which may be 0; False always drafts ``n_max`` tokens.

    Raises:
        InvalidOption: ``n_max`` is out of its range.
    """

    drafter: Drafter
    n_max: int = 16
    adaptive: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.n_max, bool) or not isinstance(self.n_max, int) or not 1 <= self.n_max <= 64:
            raise InvalidOption(f"n_max={self.n_max!r} (accepted: 1 to 64)")
        if not isinstance(self.adaptive, bool):
            raise InvalidOption(f"adaptive={self.adaptive!r} (accepted: True, False)")


def drafter_of(settings: Mapping[str, object]) -> Drafter:
    """Make a drafter from the result of ``Drafter.settings``.

    Raises:
        InvalidOption: the settings are invalid.
    """
    options = dict(settings)
    kind = _KINDS.get(str(options.pop("drafter", None)))
    if kind is None or not all(isinstance(value, int) and not isinstance(value, bool) for value in options.values()):
        raise InvalidOption(f"drafter settings {dict(settings)!r} (accepted: those of {', '.join(sorted(_KINDS))})")
    try:
        return kind(**options)  # type: ignore[arg-type]  # the names are checked by the call
    except TypeError as error:
        raise InvalidOption(f"drafter settings {dict(settings)!r}: {error}") from error
