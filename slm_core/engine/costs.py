"""Estimates the time of a step from the times of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_PIECE = 32
"""Prompt tokens of a step with decoding requests, before enough steps were measured."""
PROMPT_SHARE = 2 / 3
"""Share of a step that prompts get at least: many decoding requests do not starve them."""
_DECAY = 0.98
"""Weight of a step relative to the step after it: the last 50 steps count most."""
_ENOUGH = 4
"""Steps that are measured before the first estimate."""
_ATTENDED = 1e-3
"""Scale of the count of attended positions, so that the normal equations are well conditioned."""
_FEW = 64
"""Steps of at most 64 tokens are also measured separately, by their number of tokens."""
_NEWEST = 0.2
"""Smallest weight of the newest step in the mean of steps with the same number of tokens."""
_FORGOTTEN = 256
"""Steps after which the mean of a size is dropped if no further step had this size."""
_REFITTED, _NEW = 8, 2
"""After a step of few tokens, the law is fitted again only at every eighth step, or if the step is among the first two
of its size."""


@dataclass(slots=True)
class _Mean:
    """The mean of steps with about the same number of tokens.

    Attributes:
        n_tokens: their tokens.
        seconds: their time.
        n_attended: positions that they attended to.
        n: their number.
        noted_at: the number of the newest of these steps, counted over steps of any size.
    """

    n_tokens: float = 0.0
    seconds: float = 0.0
    n_attended: float = 0.0
    n: int = 0
    noted_at: int = 0

    def note(self, n_tokens: int, n_attended: int, seconds: float, at: int) -> None:
        self.n += 1
        weight = max(_NEWEST, 1 / self.n)
        self.n_tokens += weight * (n_tokens - self.n_tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.n_attended += weight * (n_attended - self.n_attended)
        self.noted_at = at


class StepCosts:
    """The time of a step: a constant, a time for each token, and a time for each position that a token attends to.

    The three numbers are the non-negative least squares fit to the measured steps; the weight of old steps decays.

    Steps of a few tokens do not follow this law: on a CPU, the second token of a step can cost half as much as the
    first, and a token of a prompt 3 % of it. So the mean difference from the law is kept for small numbers of tokens,
    and is interpolated between them.
    """

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))  # sums of the products of 1, tokens, positions and seconds
        self._n_steps = 0
        self._few: dict[int, _Mean] = {}
        self._fit: tuple[float, float, float] | None = None
        self._offsets: list[float] = []

    def note(self, n_tokens: int, n_attended: int, seconds: float) -> None:
        """Record that a step of ``n_tokens``, which attended to ``n_attended`` positions in total, took ``seconds``."""
        row = np.array([1.0, n_tokens, n_attended * _ATTENDED, seconds])
        self._products *= _DECAY
        self._products += row[:, None] * row
        self._n_steps += 1
        if n_tokens > _FEW or self._noted(n_tokens, n_attended, seconds) <= _NEW or self._n_steps % _REFITTED == 0:
            self._fit = None

    def _noted(self, n_tokens: int, n_attended: int, seconds: float) -> int:
        """Record a step of a few tokens; returns the number of measured steps of its size."""
        mean = self._few.setdefault(_size(n_tokens), _Mean())
        mean.note(n_tokens, n_attended, seconds, self._n_steps)
        return mean.n

    def seconds(self, n_tokens: int, n_attended: int) -> float | None:
        """Expected seconds of a step; None before enough steps were measured."""
        times = self.growing(n_tokens, n_attended, 0, 1)
        return times[0] if times else None

    def growing(self, n_tokens: int, n_attended: int, depth: int, n_times: int) -> list[float]:
        """Expected seconds of a step, and of the step with 1, 2, ... more tokens of a sequence.

        Args:
            n_tokens: the tokens of the step.
            n_attended: positions that they attend to.
            depth: positions of the sequence before its further tokens.
            n_times: the length of the result.

        Returns:
            The times; [] before enough steps were measured.
        """
        if self._n_steps < _ENOUGH:
            return []
        if self._fit is None:
            self._fit = _fitted(self._products[:3, :3], self._products[:3, 3])
            self._offsets = self._differences(self._fit)
        offsets = self._offsets[n_tokens : n_tokens + n_times]
        offsets += [0.0] * (n_times - len(offsets))
        step_s = _law(self._fit, n_tokens, n_attended)
        per_token, per_position = self._fit[1], self._fit[2] * _ATTENDED
        return [
            max(0.0, step_s + per_token * n + per_position * attended(depth, n) + offset)
            for n, offset in enumerate(offsets)
        ]

    def has_measured(self, n_tokens: int) -> bool:
        """Whether a step of about ``n_tokens`` was measured recently, or is long enough to follow the fitted law."""
        return self._n_steps >= _ENOUGH and (n_tokens > _FEW or _size(n_tokens) in self._few)

    def _differences(self, fit: tuple[float, float, float]) -> list[float]:
        """Seconds that steps of 0, 1, 2, ... tokens take longer than the law; none from twice ``_FEW`` on."""
        self._few = {n: mean for n, mean in self._few.items() if self._n_steps - mean.noted_at < _FORGOTTEN}
        if not self._few:
            return []
        means = [self._few[size] for size in sorted(self._few)]
        measured = [mean.seconds - _law(fit, mean.n_tokens, mean.n_attended) for mean in means]
        n_tokens = [mean.n_tokens for mean in means]
        return np.interp(np.arange(2 * _FEW), [*n_tokens, 2 * _FEW], [*measured, 0.0]).tolist()

    def affordable(self, seconds: float, n_tokens: int, n_attended: int, depth: int, most: int) -> int:
        """The number of prompt tokens that fit into a step, 1 to ``most``.

        A step may take longer than ``seconds`` if prompts would get less than ``PROMPT_SHARE`` of it.

        Args:
            seconds: the time of the step.
            n_tokens: the other tokens of the step.
            n_attended: positions that the other tokens attend to.
            depth: positions before the prompt tokens.
            most: the largest result.
        """
        if self.seconds(0, 0) is None:
            return max(1, min(FIRST_PIECE, most))
        others = self.seconds(n_tokens, n_attended)
        assert others is not None
        longest = max(seconds, others / (1 - PROMPT_SHARE))
        low, high = 1, max(1, most)
        while low < high:
            n = (low + high + 1) // 2
            estimate = self.seconds(n_tokens + n, n_attended + attended(depth, n))
            assert estimate is not None
            low, high = (n, high) if estimate <= longest else (low, n - 1)
        return low


def attended(depth: int, n_tokens: int) -> int:
    """Positions that ``n_tokens`` attend to in total, after ``depth`` earlier positions."""
    return n_tokens * depth + n_tokens * (n_tokens + 1) // 2


def _size(n_tokens: int) -> int:
    """The number of tokens; above 8, rounded up to a multiple of 4: fewer sizes are measured sooner."""
    return n_tokens if n_tokens <= 8 else -(-n_tokens // 4) * 4


def _law(fit: tuple[float, float, float], n_tokens: float, n_attended: float) -> float:
    constant, per_token, per_position = fit
    return constant + per_token * n_tokens + per_position * n_attended * _ATTENDED


def _fitted(products: np.ndarray, targets: np.ndarray) -> tuple[float, float, float]:
    """Non-negative least squares: solve the normal equations, removing the most negative variable each time."""
    used = [0, 1, 2]
    while True:
        part = products[np.ix_(used, used)] + 1e-9 * np.diag(np.diag(products)[used] + 1e-12)
        values = np.linalg.solve(part, targets[used])
        if (values >= 0).all():
            fit = np.zeros(3)
            fit[used] = values
            return float(fit[0]), float(fit[1]), float(fit[2])
        used.pop(int(values.argmin()))
