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


def test_old_steps_lose_weight() -> None:
    costs = fitted_costs(0.02, 1e-3, 1e-7)
    for n in range(1, 400):
        costs.note(n, attended(0, n), 0.05 + 2e-3 * n)
    assert costs.seconds(100, attended(0, 100)) == pytest.approx(0.25, rel=0.05)
