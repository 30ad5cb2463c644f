"""Validates sampling options, each alone and all together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from slm_core.errors import InvalidOption, PluginError, UnknownOption
from slm_core.numerics import shown
from slm_core.plugins import registry
from slm_core.sampling.order import ORDER, SWITCHES, TRUNCATION

if TYPE_CHECKING:
    from slm_core.sampling.options import Sampling

_LARGEST = 1e30
_EXACT = 2**53
"""Floats represent all integers below this exactly. Larger integers become floats: NumPy takes at most 64 bits."""
Reader: TypeAlias = Callable[[str, object], object]
MIN_TEMPERATURE = 1e-4
"""The lowest temperature above 0. Below it, draws are practically greedy, and divided logits overflow."""


def _number(
    *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> Callable[[str, object], float]:
    def read(name: str, value: object) -> float:
        if not is_finite(value) or not least <= value <= most or not value > above:
            bounds = f" from {least}" if math.isfinite(least) else f" above {above}" if math.isfinite(above) else ""
            limit = f" to {most}" if math.isfinite(most) else ""
            if _is_too_large(value) and not limit:
                bounds, limit = bounds or f" from -{_LARGEST}", f" to {_LARGEST}"
            raise InvalidOption(f"{name}={shown(value)} (accepted: a number{bounds}{limit})")
        return value if abs(value) < _EXACT else float(value)

    return read


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number that fits into a float; JSON has larger integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_too_large(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > _LARGEST


def _integer(least: int, most: int = 2**63 - 1, *, optional: bool = False) -> Reader:
    def read(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            limit = f" to {most}" if most < 2**63 - 1 or (isinstance(value, int) and value > most) else " on"
            raise InvalidOption(f"{name}={shown(value)} (accepted: an integer from {least}{limit})")
        return value

    return read


def _bias(name: str, value: object) -> float:
    value = -math.inf if value == "-inf" else value
    if value == -math.inf or is_finite(value):
        return value
    bounds = f" from -{_LARGEST} to {_LARGEST}" if _is_too_large(value) else ""
    raise InvalidOption(f"{name}={shown(value)} (accepted: a number{bounds}, or -inf)")


def _token(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InvalidOption(f"{name}: {shown(value)} is not a token id (accepted: integers from 0 on)")
    return value


def _tokens(name: str, value: object) -> tuple[int, ...]:
    return tuple(sorted({_token(name, each) for each in _several(name, value)}))


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _several(name, value)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidOption(f"{name}={shown(value)} (accepted: texts that are not empty)")
    return tuple(str(text) for text in texts)


def _breakers(name: str, value: object) -> tuple[str | int, ...]:
    several = (value,) if isinstance(value, str) else _several(name, value)
    return tuple(_texts(name, (each,))[0] if isinstance(each, str) else _token(name, each) for each in several)


def _logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{name}={shown(value)} (accepted: a mapping from token ids to numbers)")
    ids = {key: int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 12 else key for key in value}
    return {_token(name, ids[key]): _bias(f"{name}[{key}]", bias) for key, bias in value.items()}


def _names(name: str, value: object) -> tuple[str, ...]:
    names = _several(name, value)
    if not all(isinstance(each, str) for each in names):
        raise InvalidOption(f"{name}={shown(value)} (accepted: names of steps)")
    return tuple(str(each) for each in names)


def _custom(name: str, value: object) -> dict[str, dict[str, object]]:
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        raise InvalidOption(
            f"{name}={shown(value)} (accepted: a mapping from names of steps to mappings of their options)"
        )
    try:
        read: dict[str, dict[str, object]] = json.loads(json.dumps(dict(value), default=dict, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"{name}={shown(value)} (accepted: options that are JSON values: {error})") from error
    return read


def _several(name: str, value: object) -> Collection[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | set | frozenset):
        raise InvalidOption(f"{name}={shown(value)} (accepted: a list)")
    return value


def _temperature(name: str, value: object) -> object:
    number = _number(least=0.0)(name, value)
    if 0 < number < MIN_TEMPERATURE:
        raise InvalidOption(f"{name}={shown(value)} (accepted: 0 for greedy, or a number from {MIN_TEMPERATURE})")
    return number


_SHARE, _POSITIVE, _ANY, _FROM_ZERO = _number(least=0.0, most=1.0), _number(above=0.0), _number(), _number(least=0.0)
_COUNT, _WINDOW = _integer(0), _integer(1, optional=True)

READERS: Mapping[str, Reader] = {
    "logit_bias": _logit_bias,
    "banned_tokens": _tokens,
    "eog_bias": _bias,
    "min_tokens": _COUNT,
    "repeat_penalty": _POSITIVE,
    "frequency_penalty": _ANY,
    "presence_penalty": _ANY,
    "penalty_window": _WINDOW,
    "dry_multiplier": _FROM_ZERO,
    "dry_base": _number(least=1.0),
    "dry_allowed_length": _integer(1),
    "dry_window": _WINDOW,
    "dry_breakers": _breakers,
    "no_repeat_ngram": _COUNT,
    "top_n_sigma": _FROM_ZERO,
    "top_k": _COUNT,
    "typical_p": _SHARE,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_a": _SHARE,
    "epsilon_cutoff": _SHARE,
    "eta_cutoff": _SHARE,
    "xtc_probability": _SHARE,
    "xtc_threshold": _number(above=0.0, most=0.5),
    "temperature": _temperature,
    "dynatemp_range": _FROM_ZERO,
    "dynatemp_exponent": _POSITIVE,
    "adaptive_entropy": _FROM_ZERO,
    "adaptive_decay": _number(least=0.0, most=0.999),
    "mirostat": _integer(0, 2),
    "mirostat_tau": _POSITIVE,
    "mirostat_eta": _POSITIVE,
    "min_keep": _integer(1),
    "order": _names,
    "custom": _custom,
    "logprobs": _integer(0, 1000, optional=True),
    "seed": _integer(0, optional=True),
    "max_tokens": _integer(0, optional=True),
    "stop": _texts,
}
"""A function for each option that checks it and converts its type."""


def check_order(order: Sequence[str], custom: Mapping[str, object]) -> None:
    """Refuse an order with a repeated or unknown step, and options of a step that does not run."""
    for step in order:
        if step in ORDER and step in registry().sampler_steps:
            raise PluginError(f"a plugin provides a sampler step {step!r}, which is built in: it needs another name")
        if order.count(step) > 1:
            raise InvalidOption(f"order names {step!r} twice")
        if step not in ORDER and step not in registry().sampler_steps:
            accepted = ", ".join([*ORDER, *registry().sampler_steps])
            raise UnknownOption(f"order names {step!r}, a step that nobody provides (accepted: {accepted})")
    for step in custom:
        if step in ORDER or step not in order:
            raise InvalidOption(f"custom has options of {step!r} (accepted: steps of plugins that order names)")


_DEPENDENT_OPTIONS = {
    "penalty_window": ("penalties", "repeat_penalty, frequency_penalty or presence_penalty"),
    "dry_base": ("dry", "dry_multiplier"),
    "dry_allowed_length": ("dry", "dry_multiplier"),
    "dry_window": ("dry", "dry_multiplier"),
    "dry_breakers": ("dry", "dry_multiplier"),
    "xtc_threshold": ("xtc", "xtc_probability"),
    "adaptive_decay": ("adaptive", "adaptive_entropy"),
    "mirostat_tau": ("mirostat", "mirostat"),
    "mirostat_eta": ("mirostat", "mirostat"),
}
"""Options that need a step, and the options that turn this step on."""


def check_together(sampling: Sampling) -> None:
    """Refuse options that contradict each other, and an option that cannot act.

    Raises:
        InvalidOption: the message names the options and a solution.
    """
    steps = sampling.steps
    for option, (step, off) in SWITCHES.items():
        if step not in steps and getattr(sampling, option) != off:
            value = getattr(sampling, option)
            raise InvalidOption(
                f"{option}={shown(value)} needs step {step!r}, which order lacks (name it, or set {off!r})"
            )
    for option, (step, switches) in _DEPENDENT_OPTIONS.items():
        if step not in steps and _differs(sampling, option):
            raise InvalidOption(f"{option}={getattr(sampling, option)!r} has no effect: turn {switches} on")
    truncation = [step for step in steps if step in TRUNCATION]
    _check_truncation(sampling, truncation, xtc="xtc" in steps)
    _check_temperature(sampling)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidOption(f"min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}")


def _check_truncation(sampling: Sampling, truncation: Sequence[str], *, xtc: bool) -> None:
    if sampling.mirostat and truncation:
        raise InvalidOption(
            f"mirostat={sampling.mirostat} chooses the candidates itself: turn {', '.join(truncation)} off"
            f" (Sampling.preset('neutral', mirostat={sampling.mirostat}) has no other step)"
        )
    if sampling.min_keep > 1 and not truncation and not xtc:
        raise InvalidOption(f"min_keep={sampling.min_keep} has no effect: no step truncates")
    if 0 < sampling.top_k < sampling.min_keep:
        raise InvalidOption(f"top_k={sampling.top_k} keeps fewer than min_keep={sampling.min_keep}")


def _check_temperature(sampling: Sampling) -> None:
    if sampling.temperature == 0:
        for option in ("dynatemp_range", "adaptive_entropy", "mirostat"):
            if getattr(sampling, option):
                raise InvalidOption(f"{option}={getattr(sampling, option)!r} cannot act at temperature=0 (greedy)")
    if sampling.dynatemp_range == 0 and _differs(sampling, "dynatemp_exponent"):
        raise InvalidOption(f"dynatemp_exponent={sampling.dynatemp_exponent!r} has no effect: turn dynatemp_range on")


def _differs(sampling: Sampling, option: str) -> bool:
    default: object = type(sampling).__dataclass_fields__[option].default
    value: object = getattr(sampling, option)
    return value != default
