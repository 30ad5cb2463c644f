"""Step costs, fitted to the times of steps that follow a known law."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.engine.costs import FIRST_PIECE, StepCosts, attended


def fitted_costs(constant: float, per_token: float, per_position: float, *, noise: float = 0.0) -> StepCosts:
    random, costs = np.random.default_rng(0), StepCosts()
    for _ in range(200):
        n, depth = int(random.integers(1, 300)), int(random.integers(0, 4000))
        seconds = constant + per_token * n + per_position * attended(depth, n)
        costs.note(n, attended(depth, n), seconds * (1 + noise * random.standard_normal()))
    return costs


def test_attended_positions_are_counted() -> None:
    assert attended(5, 3) == (5 + 1) + (5 + 2) + (5 + 3)


def test_a_linear_law_is_fitted() -> None:
    estimate = fitted_costs(0.02, 1e-3, 1e-7).seconds(100, 50_000)
    assert estimate == pytest.approx(0.02 + 0.1 + 0.005, rel=1e-6)


def test_noise_is_averaged() -> None:
    # 50 steps count: the mean of 50 errors of 10 % is off by 1.4 %, a fit of three numbers by about twice that.
    assert fitted_costs(0.02, 1e-3, 1e-7, noise=0.1).seconds(100, 50_000) == pytest.approx(0.125, rel=0.1)


def test_costs_are_never_negative() -> None:
    costs = StepCosts()
    for n in (1, 2, 3, 4, 50, 60):
        costs.note(n, 1_000_000 // n, 0.001 * n)  # more positions take less time
    assert all((costs.seconds(*point) or 0) >= 0 for point in [(0, 0), (0, 10**9), (10**6, 0)])


@pytest.mark.parametrize("depth", [0, 100, 3000])
def test_affordable_is_the_largest_number_of_tokens_that_fits(depth: int) -> None:
    costs = fitted_costs(0.02, 1e-3, 1e-7)
    n = costs.affordable(0.1, 4, 400, depth, 512)
    assert 1 < n < 512

    def seconds(n: int) -> float:
        return 0.02 + 1e-3 * (4 + n) + 1e-7 * (400 + attended(depth, n))

    assert seconds(n) <= 0.1 * (1 + 1e-9) and seconds(n + 1) > 0.1 * (1 - 1e-9)


@pytest.mark.parametrize("step_s", [0.1, 0.3])
def test_prompts_get_two_thirds_of_a_step_with_many_decoding_requests(step_s: float) -> None:
    """Decoding takes 0.2 s, so a step with prompts takes 0.6 s."""
    costs = fitted_costs(0.1, 1e-3, 0.0)
    assert costs.affordable(step_s, 100, 400, 0, 4096) == pytest.approx(400, abs=1)
    assert costs.affordable(0.7, 100, 400, 0, 4096) == pytest.approx(500, abs=1)


def test_a_step_has_at_least_one_prompt_token() -> None:
    assert fitted_costs(0.02, 1.0, 0.0).affordable(0.1, 0, 0, 0, 512) == 1


def test_costs_before_the_first_measurement() -> None:
    costs = StepCosts()
    assert costs.seconds(1, 1) is None
    assert costs.affordable(0.1, 4, 400, 0, 512) == FIRST_PIECE
    assert costs.affordable(0.1, 4, 400, 0, 5) == 5


CURVE = {1: 1.0, 2: 1.55, 3: 1.99, 4: 2.34, 8: 2.93, 16: 4.36, 64: 5.0}
"""Times of steps of a few tokens on a CPU with AVX2, in steps of one token; others are interpolated."""


def on_curve(n_tokens: int, n_attended: int) -> float:
    """Seconds of a step; from 64 tokens on, each takes 0.03 s."""
    few = float(np.interp(n_tokens, list(CURVE), list(CURVE.values())))
    return few + 0.03 * max(0, n_tokens - 64) + 1e-5 * n_attended


def test_steps_of_a_few_tokens_need_not_follow_the_law() -> None:
    random, costs = np.random.default_rng(0), StepCosts()
    for _ in range(300):
        n, depth = int(random.choice([1, 2, 3, 4, 8, 256, 512])), int(random.integers(0, 4000))
        costs.note(n, attended(depth, n), on_curve(n, attended(depth, n)))
    for n in (1, 2, 3, 4, 8):
        # The law is fitted to steps that do not follow it, which also changes its time of a position.
        assert costs.seconds(n, attended(2000, n)) == pytest.approx(on_curve(n, attended(2000, n)), rel=0.01)
    assert costs.seconds(6, 6 * 2000) == pytest.approx(on_curve(6, 6 * 2000), rel=0.03), "measured: 4 and 8 tokens"
    assert costs.seconds(400, attended(2000, 400)) == pytest.approx(on_curve(400, attended(2000, 400)), rel=0.05)


def test_a_disturbed_step_of_a_few_tokens_is_forgotten() -> None:
    costs = fitted_costs(0.02, 1e-3, 1e-7)
    costs.note(70, 0, 0.09)
    costs.note(5, 0, 9.0)
    disturbed = costs.seconds(5, 0)
    assert disturbed is not None and disturbed > 1
    for _ in range(257):
        costs.note(1, 0, 0.021)
        costs.note(90, 0, 0.11)
    assert costs.seconds(5, 0) == pytest.approx(0.025, rel=0.01)


def test_old_steps_lose_weight() -> None:
    costs = fitted_costs(0.02, 1e-3, 1e-7)
    for n in range(1, 400):
        costs.note(n, attended(0, n), 0.05 + 2e-3 * n)
    assert costs.seconds(100, attended(0, 100)) == pytest.approx(0.25, rel=0.05)
