"""Options of speculative decoding, and drafters from the settings in dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slm_core.argument_checks import check_methods, refused
from slm_core.errors import InvalidOption
from slm_core.generation.speculation.lookup import PromptLookup
from slm_core.generation.speculation.mtp import MTP, MtpDrafter
from slm_core.generation.speculation.proposal import Drafter
from slm_core.generation.speculation.suffix import SuffixIndex
from slm_core.sampling import Sampling

_KINDS: Mapping[str, type[PromptLookup | SuffixIndex | MtpDrafter]] = {
    MTP: MtpDrafter,
    "prompt_lookup": PromptLookup,
    "suffix_index": SuffixIndex,
}
_DRAFTERS = "'mtp', or a drafter, as PromptLookup()"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: draft tokens cheaply, decode them in one batch, and keep the accepted tokens.

    Attributes:
        drafter: proposes the tokens; "mtp" for the layers for multi-token prediction of the model that answers.
        n_max: the longest draft, 1 to 64 tokens.
        adaptive: choose the draft length that pays best, which may be 0; False always drafts ``n_max`` tokens.

    Raises:
        InvalidOption: ``n_max`` is out of its range, or ``drafter`` is not a drafter.
    """

    drafter: Drafter
    n_max: int = 16
    adaptive: bool = True

    if TYPE_CHECKING:  # the drafter may be its name

        def __init__(self, drafter: Drafter | Literal["mtp"], n_max: int = 16, adaptive: bool = True) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.drafter, str):
            if self.drafter != MTP:
                raise refused("drafter", self.drafter, _DRAFTERS)
            object.__setattr__(self, "drafter", MtpDrafter())
        else:
            check_methods("drafter", self.drafter, ("draft", "settings"), _DRAFTERS)
        if isinstance(self.n_max, bool) or not isinstance(self.n_max, int) or not 1 <= self.n_max <= 64:
            raise InvalidOption(f"n_max={self.n_max!r} (accepted: 1 to 64)")
        if not isinstance(self.adaptive, bool):
            raise InvalidOption(f"adaptive={self.adaptive!r} (accepted: True, False)")


def prompt_lookup(sampling: Sampling, wanted: bool | None, expected: Sequence[int] = ()) -> Speculation | None:
    """Prompt lookup for an answer; None without drafts.

    Args:
        sampling: how the answer is sampled.
        wanted: whether it drafts. None: only if it is drawn without a seed, or has expected tokens. A batch rounds
            differently from single tokens, so all other answers are reproducible without drafts only.
        expected: see ``PromptLookup``.
    """
    is_drawn = sampling.temperature > 0 and sampling.seed is None
    drafts = is_drawn or len(expected) > 0 if wanted is None else wanted
    return Speculation(PromptLookup(expected=expected)) if drafts else None


def drafter_of(settings: Mapping[str, object]) -> Drafter:
    """Make a drafter from the result of ``Drafter.settings``.

    Raises:
        InvalidOption: the settings are invalid.
    """
    options = dict(settings)
    kind = _KINDS.get(str(options.pop("drafter", None)))
    if (
        kind is None
        or (kind is MtpDrafter and options)
        or not all(isinstance(value, int) and not isinstance(value, bool) for value in options.values())
    ):
        raise InvalidOption(
            f"drafter settings {dict(settings)!r} (accepted: the settings of {', '.join(sorted(_KINDS))})"
        )
    try:
        return kind(**options)  # type: ignore[arg-type]  # the names are checked by the call
    except TypeError as error:
        raise InvalidOption(f"drafter settings {dict(settings)!r}: {error}") from error
