"""Options of sampling and length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from slm_core.display import changed_fields
from slm_core.errors import InvalidOption
from slm_core.sampling import checks
from slm_core.sampling.aliases import PRESETS, canonical
from slm_core.sampling.order import ORDER, SWITCHES


@dataclass(frozen=True, slots=True, repr=False)
class Sampling:
    """How to choose tokens and when to stop.

    The steps run in the order of ``ORDER``; each is off at its neutral value. docs/sampling.md has their formulas.

    Attributes:
        logit_bias: values added to the logits of tokens, by id; -inf bans a token. {} is off.
        banned_tokens: ids that are never chosen. () is off.
        eog_bias: added to the logits of the EOG tokens; with -inf, only ``max_tokens``, a stop text or a constraint
            ends the answer. 0 is off.
        min_tokens: tokens of the answer before an EOG token may end it (a stop text may end it earlier). 0 is off.
        repeat_penalty: divides positive and multiplies negative logits of recent tokens (CTRL, arXiv 1909.05858); 1 is
            off.
        frequency_penalty: subtracted from the logit of a recent token once per occurrence; 0 is off.
        presence_penalty: subtracted once from the logit of each recent token; 0 is off.
        penalty_window: the number of recent tokens of these three penalties; None for all tokens.
        dry_multiplier: scale of the penalty on tokens that would prolong a repetition (DRY, p-e-w 2024); 0 is off.
        dry_base: the penalty is ``dry_multiplier * dry_base ** (length - dry_allowed_length)``.
        dry_allowed_length: shorter repetitions are not penalized.
        dry_window: the number of last tokens to search for repetitions; None for all tokens.
        dry_breakers: a repetition does not cross a token that contains one of these texts (or has one of these ids).
        no_repeat_ngram: no n-gram of this length occurs twice (arXiv 1705.04304); 0 is off.
        top_n_sigma: keep tokens at most this many standard deviations of the logits below the largest one (arXiv
            2411.07641); 0 is off.
        top_k: keep the k likeliest tokens (arXiv 1805.04833); 0 is off.
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this probability (arXiv
            2202.00666); 1 is off.
        top_p: keep the likeliest tokens that together reach this probability (nucleus, arXiv 1904.09751); 1 is off.
        min_p: keep tokens of at least this share of the largest probability (arXiv 2407.01082); 0 is off.
        top_a: keep tokens of at least this number times the square of the largest probability; 0 is off.
        epsilon_cutoff: keep tokens of at least this probability (arXiv 2210.15191); 0 is off.
        eta_cutoff: like ``epsilon_cutoff``, with a bound that falls with the entropy (arXiv 2210.15191); 0 is off.
        xtc_probability: the probability of removing all but the least likely of the tokens above ``xtc_threshold``
            (XTC, p-e-w 2024); 0 is off.
        xtc_threshold: the threshold of XTC; at most 0.5, because two tokens must be able to reach it.
        temperature: divides the logits; 0 chooses the likeliest token (greedy); 1 is off.
        dynatemp_range: the temperature varies by this much around ``temperature``, with the entropy; 0 is off.
        dynatemp_exponent: the exponent of the entropy in the dynamic temperature.
        adaptive_entropy: lower the temperature when the running mean entropy, in nats, is above this; 0 is off.
        adaptive_decay: the weight of earlier tokens in this mean.
        mirostat: keep the surprise of the answer at ``mirostat_tau`` (arXiv 2007.14966): version 1 or 2; 0 is off.
        mirostat_tau: the target surprise, in bits.
        mirostat_eta: the learning rate of mirostat.
        min_keep: each truncation step keeps at least this many tokens.
        order: steps to run, built-in or of plugins, instead of ``ORDER``; it contains every step that an option needs.
        custom: options of the steps of plugins, by step.
        logprobs: the number of likeliest tokens in each event; None for no log-probabilities at all.
        seed: the seed of the draws; None for a new seed each time.
        max_tokens: the longest answer, in tokens; None for as long as the context has room.
        stop: texts that end the answer; they are not part of it.

    Raises:
        InvalidOption: a value is out of range, or two values contradict each other.
        UnknownOption: an unknown step in ``order``.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    banned_tokens: tuple[int, ...] = ()
    eog_bias: float = 0.0
    min_tokens: int = 0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int | None = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int | None = None
    dry_breakers: tuple[str | int, ...] = ("\n", ":", '"', "*")
    no_repeat_ngram: int = 0
    top_n_sigma: float = 0.0
    top_k: int = 40
    typical_p: float = 1.0
    top_p: float = 0.95
    min_p: float = 0.05
    top_a: float = 0.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    temperature: float = 0.7
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    adaptive_entropy: float = 0.0
    adaptive_decay: float = 0.9
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 1
    order: tuple[str, ...] = ()
    custom: Mapping[str, Mapping[str, object]] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, read in checks.READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        checks.check_order(self.order, self.custom)
        checks.check_together(self)

    def __repr__(self) -> str:
        return changed_fields(self)

    @property
    def steps(self) -> tuple[str, ...]:
        """The active steps, in the order in which they run."""
        acting = {step for option, (step, off) in SWITCHES.items() if getattr(self, option) != off}
        return tuple(step for step in self.order or ORDER if step in acting or step not in ORDER)

    @classmethod
    def create(cls, **options: object) -> Self:
        """The options in any spelling: of this library, transformers, OpenAI or llama.cpp.

        Raises:
            UnknownOption: an unknown option; the message lists the options of this library.
            InvalidOption: an invalid value, two spellings that disagree, or a contradiction.
        """
        return cls.from_dict(options)

    @classmethod
    def preset(cls, name: str, **options: object) -> Self:
        """A preset: "greedy", "precise", "balanced", "creative"; or "neutral", with every step off.

        Args:
            name: the name of the preset.
            options: options that override it, in any spelling.
        """
        if name not in PRESETS:
            raise InvalidOption(f"unknown preset {name!r} (accepted: {', '.join(PRESETS)})")
        return cls(**{**PRESETS[name], **canonical(options, _names())})  # type: ignore[arg-type]  # checked on creation

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The options from the result of ``to_dict``, or from a mapping in any spelling; see ``create``."""
        return cls(**canonical(values, _names()))  # type: ignore[arg-type]  # checked on creation

    def override(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Self:
        """These options with others for one answer; None keeps an option.

        Raises:
            InvalidOption: an invalid value.
        """
        stops = (stop,) if isinstance(stop, str) else stop
        named: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "stop": stops,
        }
        return replace(self, **{name: value for name, value in named.items() if value is not None})

    def to_dict(self) -> dict[str, object]:
        """The options as JSON values; -inf as the text "-inf"."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        bias = {str(token): _json_number(value) for token, value in self.logit_bias.items()}
        return {**plain, "logit_bias": bias, "eog_bias": _json_number(self.eog_bias)}


def _names() -> Sequence[str]:
    return [each.name for each in fields(Sampling)]


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
