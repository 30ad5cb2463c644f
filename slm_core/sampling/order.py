"""The built-in steps: their names, their order, and the options that turn them on."""

from __future__ import annotations

from collections.abc import Mapping

ORDER = (
    "logit_bias",
    "end_of_answer",
    "penalties",
    "dry",
    "no_repeat_ngram",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "top_a",
    "epsilon_cutoff",
    "eta_cutoff",
    "xtc",
    "temperature",
    "adaptive",
    "mirostat",
)
"""The built-in steps in the default order; see ``Sampling.order``."""

TRUNCATION = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "top_a", "epsilon_cutoff", "eta_cutoff")
"""Truncation steps, which keep the likeliest (or most typical) tokens."""

SWITCHES: Mapping[str, tuple[str, object]] = {
    "logit_bias": ("logit_bias", {}),
    "banned_tokens": ("logit_bias", ()),
    "eog_bias": ("end_of_answer", 0),
    "min_tokens": ("end_of_answer", 0),
    "repeat_penalty": ("penalties", 1),
    "frequency_penalty": ("penalties", 0),
    "presence_penalty": ("penalties", 0),
    "dry_multiplier": ("dry", 0),
    "no_repeat_ngram": ("no_repeat_ngram", 0),
    "top_n_sigma": ("top_n_sigma", 0),
    "top_k": ("top_k", 0),
    "typical_p": ("typical_p", 1),
    "top_p": ("top_p", 1),
    "min_p": ("min_p", 0),
    "top_a": ("top_a", 0),
    "epsilon_cutoff": ("epsilon_cutoff", 0),
    "eta_cutoff": ("eta_cutoff", 0),
    "xtc_probability": ("xtc", 0),
    "temperature": ("temperature", 1),
    "dynatemp_range": ("temperature", 0),
    "adaptive_entropy": ("adaptive", 0),
    "mirostat": ("mirostat", 0),
}
"""The option that turns each step on, and the value at which the step is off."""
