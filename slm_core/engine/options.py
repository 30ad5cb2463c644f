"""The options of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from slm_core.errors import InvalidOption

Reuse = Literal["prefix", "cut"]
"""How a prompt uses a kept history: only the common prefix, or also the tokens after a range that the prompt lacks."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine shares a context.

    Attributes:
        n_parallel: the largest number of requests that are computed together; ``n_seq_max`` and ``n_batch`` bound it,
            too.
        step_ms: milliseconds that a step may take. Prompts are divided so that decoding requests get a token at least
            this often. If prompts would get less than two thirds of a step, the step takes longer.
        aging_s: seconds of waiting that count as one step of priority.
        prefix_cache: whether sequences of answered requests are kept for later prompts with the same prefix.
        reuse: "prefix" uses the common prefix. "cut" also cuts ranges that the prompt lacks, for example reasoning that
            a template drops, and uses the tokens after them. Their keys and values depend on the range, so the answer
            may differ; ``Usage.shifted_tokens`` counts these tokens.
        swap_bytes: memory for dumps of preempted requests, in bytes; with 0, their tokens are computed again.
        cache_dir: a directory for dumps of kept sequences, for later prompts, also after a restart; None for no
            directory. Several processes may share it.
        cache_dir_bytes: the largest number of bytes of all dumps in the directory.

    Raises:
        InvalidOption: a number that is not above 0, or a value of the wrong type.
    """

    n_parallel: int = 16
    step_ms: float = 100
    aging_s: float = 10
    prefix_cache: bool = True
    reuse: Reuse = "prefix"
    swap_bytes: int = 1 << 30
    cache_dir: Path | None = None
    cache_dir_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in ("step_ms", "aging_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidOption(f"{name}={value!r} (accepted: a number above 0)")
        for name, least in (("n_parallel", 1), ("swap_bytes", 0), ("cache_dir_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidOption(f"{name}={value!r} (accepted: an integer from {least} on)")
        if not isinstance(self.prefix_cache, bool):
            raise InvalidOption(f"prefix_cache={self.prefix_cache!r} (accepted: True, False)")
        if self.reuse not in get_args(Reuse):
            raise InvalidOption(f"reuse={self.reuse!r} (accepted: {', '.join(get_args(Reuse))})")
        if self.reuse == "cut" and not self.prefix_cache:
            raise InvalidOption("reuse='cut' needs the prefix cache (give prefix_cache=True, or leave reuse out)")
