"""What a step costs, learnt from the steps that were measured."""

from __future__ import annotations

import numpy as np

FIRST_PIECE = 32
"""Prompt tokens of a step beside decoding requests, before enough steps were measured."""
_DECAY = 0.98
"""Weight of a step relative to the step after it: the last 50 steps count most."""
_ENOUGH = 4
_ATTENDED = 1e-3
"""Scale of the count of attended positions, so that the normal equations are well conditioned."""


class StepCosts:
    """Seconds of a step, as a constant, a share for each token, and a share for each position that a token attends to.

    The three numbers are the non-negative least squares fit to the measured steps; old steps fade out.
    """

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._n_steps = 0
        self._fit: tuple[float, float, float] | None = None

    def note(self, n_tokens: int, n_attended: int, seconds: float) -> None:
        """A step of ``n_tokens``, which attended to ``n_attended`` positions in all, took ``seconds``."""
        row = np.array([1.0, n_tokens, n_attended * _ATTENDED])
        self._products = _DECAY * self._products + np.outer(row, row)
        self._targets = _DECAY * self._targets + seconds * row
        self._n_steps += 1
        self._fit = None

    def seconds(self, n_tokens: int, n_attended: int) -> float | None:
        """What a step will take; None before enough steps were measured."""
        if self._n_steps < _ENOUGH:
            return None
        if self._fit is None:
            self._fit = _fitted(self._products, self._targets)
        constant, per_token, per_position = self._fit
        return constant + per_token * n_tokens + per_position * n_attended * _ATTENDED

    def affordable(self, seconds: float, n_tokens: int, n_attended: int, depth: int, most: int) -> int:
        """How many prompt tokens fit into a step of ``seconds``: 1 to ``most``.

        Args:
            seconds: what the step may take.
            n_tokens: tokens that the step has without them.
            n_attended: positions that those attend to.
            depth: positions before the prompt tokens.
            most: the largest answer.
        """
        if self.seconds(0, 0) is None:
            return max(1, min(FIRST_PIECE, most))
        low, high = 1, max(1, most)
        while low < high:
            n = (low + high + 1) // 2
            estimate = self.seconds(n_tokens + n, n_attended + attended(depth, n))
            assert estimate is not None
            low, high = (n, high) if estimate <= seconds else (low, n - 1)
        return low


def attended(depth: int, n_tokens: int) -> int:
    """Positions that ``n_tokens`` attend to in all, the first one after ``depth`` others."""
    return n_tokens * depth + n_tokens * (n_tokens + 1) // 2


def _fitted(products: np.ndarray, targets: np.ndarray) -> tuple[float, float, float]:
    """Non-negative least squares by its normal equations: the most negative number is left out until none is."""
    used = [0, 1, 2]
    while True:
        part = products[np.ix_(used, used)] + 1e-9 * np.diag(np.diag(products)[used] + 1e-12)
        values = np.linalg.solve(part, targets[used])
        if (values >= 0).all():
            fit = np.zeros(3)
            fit[used] = values
            return float(fit[0]), float(fit[1]), float(fit[2])
        used.pop(int(values.argmin()))
