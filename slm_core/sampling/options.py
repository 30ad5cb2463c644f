"""What a user may say about sampling and length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Self

from slm_core.errors import InvalidOption
from slm_core.sampling import checks
from slm_core.sampling.aliases import PRESETS, canonical
from slm_core.sampling.order import ORDER, SWITCHES


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop.

    The steps run in the order of ``ORDER``; each is off at its neutral value. docs/sampling.md has their formulas.

    Attributes:
        logit_bias: added to the logits of tokens, by id; -inf bans. {} is off.
        banned_tokens: ids that never come. () is off.
        eog_bias: added to the logits of the tokens that end an answer; -inf for an answer that only ``max_tokens``, a
            stop text or a constraint ends. 0 is off.
        min_tokens: tokens of the answer before which no token ends it (stop texts do). 0 is off.
        repeat_penalty: divides positive and multiplies negative logits of recent tokens (CTRL, arXiv 1909.05858); 1 is
            off.
        frequency_penalty: taken from a recent token's logit as often as it came; 0 is off.
        presence_penalty: taken once from the logit of each recent token; 0 is off.
        penalty_window: how many tokens are recent for these three; None for all.
        dry_multiplier: scale of the penalty on tokens that would prolong a repetition (DRY, p-e-w 2024); 0 is off.
        dry_base: the penalty is ``dry_multiplier * dry_base ** (length - dry_allowed_length)``.
        dry_allowed_length: repetitions shorter than this are free.
        dry_window: tokens in which repetitions are looked for; None for all.
        dry_breakers: a repetition does not reach across a token that holds one of these texts (or is one of these ids).
        no_repeat_ngram: no run of this many tokens comes twice (arXiv 1705.04304); 0 is off.
        top_n_sigma: keep tokens at most this many standard deviations of the logits below the largest one (arXiv
            2411.07641); 0 is off.
        top_k: keep the k likeliest tokens (arXiv 1805.04833); 0 is off.
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this probability (arXiv
            2202.00666); 1 is off.
        top_p: keep the likeliest tokens that together reach this probability (nucleus, arXiv 1904.09751); 1 is off.
        min_p: keep tokens at least this share as likely as the likeliest one (arXiv 2407.01082); 0 is off.
        top_a: keep tokens at least as likely as this times the square of the largest probability; 0 is off.
        epsilon_cutoff: keep tokens of at least this probability (arXiv 2210.15191); 0 is off.
        eta_cutoff: the same, with a bound that falls with the entropy (arXiv 2210.15191); 0 is off.
        xtc_probability: how often all but the least likely of the tokens above ``xtc_threshold`` are taken out (XTC,
            p-e-w 2024); 0 is off.
        xtc_threshold: see there; at most 0.5, as two tokens must be able to reach it.
        temperature: divides the logits; 0 takes the likeliest token (greedy); 1 is off.
        dynatemp_range: the temperature lies this much around ``temperature``, by the entropy; 0 is off.
        dynatemp_exponent: how it follows the entropy.
        adaptive_entropy: cool where the running mean entropy, in nats, is above this; 0 is off.
        adaptive_decay: weight of the past in that mean.
        mirostat: keep the surprise of what is said at ``mirostat_tau`` (arXiv 2007.14966): version 1 or 2; 0 is off.
        mirostat_tau: the surprise to keep, in bits.
        mirostat_eta: how fast it is corrected.
        min_keep: each truncation step keeps at least this many tokens.
        order: steps to run, built-in or of plugins, in place of ``ORDER``; every step that an option asks for is named.
        custom: options of steps that plugins provide, by step.
        logprobs: how many of the likeliest tokens come with each event; None for none, not even the chosen one's.
        seed: the draws are a function of it; None takes a new one each time.
        max_tokens: the longest answer; None for as long as the context has room.
        stop: texts that end the answer; they are not part of it.

    Raises:
        InvalidOption: a value out of its range, or two that contradict each other.
        UnknownOption: a step in ``order`` that nobody provides.
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

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that act, in the order in which they run."""
        acting = {step for option, (step, off) in SWITCHES.items() if getattr(self, option) != off}
        return tuple(step for step in self.order or ORDER if step in acting or step not in ORDER)

    @classmethod
    def create(cls, **options: object) -> Self:
        """The options by any spelling: this library's, or that of transformers, OpenAI or llama.cpp.

        Raises:
            UnknownOption: no such option in any spelling; the message lists this library's.
            InvalidOption: a value that does not fit, two spellings that disagree, a contradiction.
        """
        return cls.from_dict(options)

    @classmethod
    def preset(cls, name: str, **options: object) -> Self:
        """A set of options by name: "greedy", "precise", "balanced", "creative"; or "neutral", with every step off.

        Args:
            name: the preset.
            options: options that differ from it, in any spelling.
        """
        if name not in PRESETS:
            raise InvalidOption(f"unknown preset {name!r} (accepted: {', '.join(PRESETS)})")
        return cls(**{**PRESETS[name], **canonical(options, _names())})  # type: ignore[arg-type]  # checked on creation

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The options from a mapping, as ``to_dict`` gives it, or by any spelling; see ``create``."""
        return cls(**canonical(values, _names()))  # type: ignore[arg-type]  # checked on creation

    def to_dict(self) -> dict[str, object]:
        """The options as JSON values; -inf as the text "-inf"."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        bias = {str(token): _json_number(value) for token, value in self.logit_bias.items()}
        return {**plain, "logit_bias": bias, "eog_bias": _json_number(self.eog_bias)}


def _names() -> Sequence[str]:
    return [each.name for each in fields(Sampling)]


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
