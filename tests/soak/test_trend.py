"""The regression line through measurements: its slope and error agree with those of generated data."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from soaking.trend import MIN_HOURS, Trend, Verdict, fit

HOUR = np.linspace(0, 3600, 1000)


def noise(rng: np.random.Generator, r: float) -> NDArray[np.float64]:
    """First-order autoregressive noise of variance 1; white if ``r`` is 0."""
    steps = rng.standard_normal(len(HOUR)) * np.sqrt(1 - r * r)
    values = np.empty(len(HOUR))
    values[0] = rng.standard_normal()
    for i in range(1, len(HOUR)):
        values[i] = r * values[i - 1] + steps[i]
    return values


@pytest.mark.parametrize("r", [0.0, 0.9, 0.98])
def test_the_slope_is_found_within_two_standard_errors(r: float) -> None:
    """For at least 85 % of 200 lines. Independent normal errors give 95 %, but r is estimated from 40 values."""
    rng, n_found = np.random.default_rng(int(100 * r)), 0
    for _ in range(200):
        trend = fit(HOUR, 5 + 7 * HOUR / 3600 + noise(rng, r))
        assert trend is not None
        n_found += abs(trend.per_hour - 7) <= 2 * trend.error_per_hour
    assert n_found >= 170


def test_the_error_of_white_noise_is_that_of_least_squares() -> None:
    """For n samples of variance 1, evenly over 0.75 hours: sqrt(12 / n) / 0.75, averaged over 100 lines."""
    rng = np.random.default_rng(1)
    errors = [trend.error_per_hour for _ in range(100) if (trend := fit(HOUR, noise(rng, 0)))]
    # The correlation is estimated from 40 residuals; a random correlation of 1 / sqrt(40) only widens the error.
    assert np.sqrt(12 / 750) / 0.75 == pytest.approx(np.mean(errors), rel=0.15)


def test_growth_in_the_warm_up_does_not_count() -> None:
    trend = fit(HOUR, np.minimum(HOUR, 800))
    assert trend is not None and trend.per_hour == trend.error_per_hour == 0
    assert trend.verdict(0.5) is Verdict.FLAT


def test_a_constant_has_no_slope_and_no_error() -> None:
    trend = fit(HOUR, np.full(len(HOUR), 0.1))
    assert trend is not None and (trend.per_hour, trend.error_per_hour) == (0, 0)


@pytest.mark.parametrize(
    ("trend", "verdict"),
    [
        (Trend(10, 2.5, 1, 0), Verdict.FLAT),
        (Trend(10, 4, 1, 0), Verdict.UNDECIDED),
        (Trend(30, 4, 1, 0), Verdict.GROWS),
        (Trend(30, 4, 0.25, 0), Verdict.FLAT),
        (Trend(30, 4, MIN_HOURS / 2, 0), Verdict.UNDECIDED),
    ],
)
def test_the_verdict_depends_on_the_growth_over_the_run(trend: Trend, verdict: Verdict) -> None:
    assert trend.verdict(16) is verdict


@pytest.mark.parametrize("n", [0, 1, 9])
def test_too_few_samples_are_undecided(n: int) -> None:
    assert fit(HOUR[:n], HOUR[:n]) is None
