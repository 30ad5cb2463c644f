"""Estimates the time of a step from the times of earlier steps."""

from __future__ import annotations

import numpy as np

FIRST_PIECE = 32
"""Prompt tokens of a step with decoding requests, before enough steps were measured."""
PROMPT_SHARE = 2 / 3
"""Share of a step that prompts get at least: many decoding requests do not starve them."""
_DECAY = 0.98
"""Weight of a step relative to the step after it: the last 50 steps count most."""
_ENOUGH = 4
_ATTENDED = 1e-3
"""Scale of the count of attended positions, so that the normal equations are well conditioned."""


class StepCosts:
    """The time of a step: a constant, a time for each token, and a time for each position that a token attends to.

    The three numbers are the non-negative least squares fit to the measured steps; the weight of old steps decays.
    """

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._n_steps = 0
        self._fit: tuple[float, float, float] | None = None

    def note(self, n_tokens: int, n_attended: int, seconds: float) -> None:
        """Record that a step of ``n_tokens``, which attended to ``n_attended`` positions in total, took ``seconds``."""
        row = np.array([1.0, n_tokens, n_attended * _ATTENDED])
        self._products = _DECAY * self._products + np.outer(row, row)
        self._targets = _DECAY * self._targets + seconds * row
        self._n_steps += 1
        self._fit = None

    def seconds(self, n_tokens: int, n_attended: int) -> float | None:
        """Expected seconds of a step; None before enough steps were measured."""
        if self._n_steps < _ENOUGH:
            return None
        if self._fit is None:
            self._fit = _fitted(self._products, self._targets)
        constant, per_token, per_position = self._fit
        return constant + per_token * n_tokens + per_position * n_attended * _ATTENDED

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
