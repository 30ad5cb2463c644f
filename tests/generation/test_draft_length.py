"""The adaptive draft length: measured costs, the best length, and when drafting is off."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.generation.speculation.draft_length import AdaptiveDraftLength, DecodeCosts


class Costs:
    """Costs that a test sets."""

    def __init__(self, seconds: list[float], n_others: float = 0.0, *, varies: bool = False) -> None:
        self.seconds, self.n_others, self.varies = seconds, n_others, varies
        self.has_single = True
        self.rounds: list[tuple[int, float]] = []

    def expected(self, n_most: int) -> list[float]:
        """The first ``n_most`` of the seconds."""
        return self.seconds[:n_most]

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Record the round."""
        self.rounds.append((n_tokens, seconds))


def test_costs_are_interpolated_and_extrapolated() -> None:
    costs = DecodeCosts()
    assert costs.expected(3) == [0.0] * 3
    assert not costs.has_single
    for n_tokens, seconds in ((2, 5.0), (4, 6.0), (9, 16.0)):
        costs.measured(n_tokens, seconds)
    sizes = np.arange(1, 14)
    slope = (16 - 5) / (9 - 2)  # beyond the measured sizes: the slope from the first to the last
    expected = np.where(sizes <= 9, np.interp(sizes, [2, 4, 9], [5.0, 6.0, 16.0]), 5 + slope * (sizes - 2))
    assert costs.expected(13) == pytest.approx(expected.tolist())
    assert costs.expected(3) == pytest.approx(expected[:3].tolist())
    assert not costs.has_single
    costs.measured(1, 4.0)
    assert costs.has_single
    assert costs.expected(4) == pytest.approx([4.0, 5.0, 5.5, 6.0])


def test_larger_decodes_are_never_expected_to_be_faster() -> None:
    costs = DecodeCosts()
    costs.measured(1, 4.0)
    costs.measured(5, 3.0)
    assert costs.expected(7) == pytest.approx([4.0, 4.0, 4.0, 4.0, 3.0, 4.0, 4.0])


def test_a_shorter_time_counts_more_than_a_longer_one() -> None:
    costs = DecodeCosts()
    for seconds, expected in ((10.0, 10.0), (6.0, 8.0), (18.0, 9.0), (9.0, 9.0)):
        costs.measured(1, seconds)
        assert costs.expected(1) == pytest.approx([expected])


def test_sizes_that_were_not_measured_for_64_rounds_are_forgotten() -> None:
    costs = DecodeCosts()
    costs.measured(3, 30.0)
    for _ in range(64):
        costs.measured(1, 10.0)
    assert costs.expected(3) == pytest.approx([10.0, 20.0, 30.0])
    costs.measured(1, 10.0)
    assert costs.expected(3) == pytest.approx([10.0, 15.0, 20.0])


@pytest.mark.parametrize(
    ("measured", "slope"), [(None, 0.5), ((5, 14.0), 0.1), ((5, 10.0), 0.0), ((5, 9.0), 0.0), ((5, 70.0), 0.5)]
)
def test_a_size_that_is_not_known_costs_what_was_measured_before_or_half_a_decode_a_token(
    measured: tuple[int, float] | None, slope: float
) -> None:
    costs = DecodeCosts()
    if measured:
        costs.measured(*measured)
    for _ in range(65):
        costs.measured(1, 10.0)
    assert costs.expected(4) == pytest.approx([10 * (1 + slope * i) for i in range(4)])


@pytest.mark.parametrize("n_others", [0.0, 3.0])
@pytest.mark.parametrize("n_hits", [0, 3, 9, 60])
def test_the_length_has_the_most_tokens_per_second(n_hits: int, n_others: float) -> None:
    decode_s = [1.0, 1.1, 1.15, 1.3, 1.31, 2.2, 2.3, 2.4, 2.45]
    costs = Costs(decode_s, n_others)
    draft_length = AdaptiveDraftLength(8, adaptive=True, costs=costs)
    draft_length.drafted(4, 99.0)  # the first draft reads the history, and does not count
    draft_length.drafted(4, 4 * 0.05)
    draft_length.verified([True] * n_hits)
    hits, trials = 1.0, 1.5
    for _ in range(n_hits):
        hits, trials = 0.95 * hits + 1, 0.95 * trials + 1
    assert draft_length.acceptance == pytest.approx(hits / trials)
    a = min(hits / trials, 0.999)
    # Leviathan et al. 2023: a draft of k tokens gives (1 - a^(k+1)) / (1 - a) tokens.
    rates = [(n_others + (1 - a ** (k + 1)) / (1 - a)) / (k * 0.05 + seconds) for k, seconds in enumerate(decode_s)]
    assert draft_length.length() == int(np.argmax(rates))


def test_acceptance_falls_with_each_miss() -> None:
    draft_length = AdaptiveDraftLength(8, adaptive=True, costs=Costs([1.0, 1.0]))
    draft_length.verified([True, False])
    hits, trials = 0.95 * (0.95 * 1.0 + 1), 0.95 * (0.95 * 1.5 + 1) + 1
    assert draft_length.acceptance == pytest.approx(hits / trials)


def test_of_lengths_that_are_equally_good_the_shortest_is_chosen() -> None:
    draft_length = AdaptiveDraftLength(3, adaptive=True, costs=Costs([1.0, 1e9, 1e9, 1e9], n_others=0.0))
    assert draft_length.length() == 0
    a = draft_length.acceptance
    even = Costs([1.0, 1 + a, 1 + a + a * a])
    assert AdaptiveDraftLength(2, adaptive=True, costs=even).length() == 0


def test_no_draft_before_costs_are_known_or_without_room() -> None:
    costs = Costs([1.0])
    draft_length = AdaptiveDraftLength(8, adaptive=True, costs=costs)
    assert draft_length.length() == 0
    assert draft_length.on
    costs.seconds, costs.has_single = [1.0, 1.0], False
    assert draft_length.length() == 0
    assert draft_length.on
    costs.has_single = True
    assert draft_length.length() == 1
    draft_length.decoded(2, 0.5)
    assert costs.rounds == [(2, 0.5)]


def slow(n_max: int, costs: Costs) -> AdaptiveDraftLength:
    """Drafts that take too long to be made without being decoded."""
    draft_length = AdaptiveDraftLength(n_max, adaptive=True, costs=costs)
    for _ in range(2):
        draft_length.drafted(1, 0.006 * costs.seconds[0])
    return draft_length


def test_drafting_that_does_not_pay_is_tried_ever_more_rarely() -> None:
    draft_length = slow(6, Costs([1.0] + [1e6] * 6))
    lengths = [draft_length.length() for _ in range(1200)]
    probes = [i for i, length in enumerate(lengths) if length]
    assert {lengths[i] for i in probes} == {4}
    # After a probe, one round decides, then twice as many rounds as before pass; 256 at most.
    assert probes[0] == 1 + 8
    assert np.diff(probes).tolist() == [1 + 1 + n for n in (16, 32, 64, 128, 256, 256, 256)][: len(probes) - 1]
    assert (draft_length.on, draft_length.n_switched_off, draft_length.n_switched_on) == (False, 1, 0)


def test_a_probe_is_no_longer_than_the_costs_that_are_known() -> None:
    draft_length = slow(6, Costs([1.0, 1e6, 1e6]))
    assert max(draft_length.length() for _ in range(12)) == 2


def test_a_probe_that_is_right_turns_drafting_on() -> None:
    draft_length = slow(6, Costs([1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2]))
    draft_length.verified([False] * 60)
    assert [draft_length.length() for _ in range(10)] == [0] * 9 + [4]
    weight, before = 2.0, draft_length.acceptance  # after a probe begins, earlier tokens count as two
    draft_length.verified([True] * 4)
    hits, trials = before * weight, weight
    for _ in range(4):
        hits, trials = 0.95 * hits + 1, 0.95 * trials + 1
    assert draft_length.acceptance == pytest.approx(hits / trials)
    assert draft_length.length() > 0
    assert (draft_length.on, draft_length.n_switched_off, draft_length.n_switched_on) == (True, 1, 1)
    draft_length.verified([False] * 60)
    assert [draft_length.length() for _ in range(10)] == [0] * 9 + [4]  # it waits for eight rounds again


def test_drafting_that_shares_its_decode_is_turned_on_as_soon_as_it_pays() -> None:
    for varies, expected in ((True, 2), (False, 0)):
        costs = Costs([1.0, 1e6, 1e6], varies=varies)
        draft_length = slow(2, costs)
        assert draft_length.length() == 0
        costs.seconds = [1.0, 1.0, 1.0]
        assert draft_length.length() == expected
        assert draft_length.n_switched_on == (expected > 0)


def test_cheap_drafts_are_compared_while_drafting_is_off_and_turn_it_on() -> None:
    costs = Costs([1.0, 1.4, 1.8])
    draft_length = AdaptiveDraftLength(2, adaptive=True, costs=costs)
    draft_length.drafted(1, 99.0)  # the first draft reads the history, and does not count
    draft_length.drafted(1, 0.02 / 4)
    assert draft_length.length() > 0
    assert draft_length.n_compared == 0, "drafts are decoded"
    draft_length.verified([False] * 60)
    assert [draft_length.length() for _ in range(300)] == [0] * 300, "no probe"
    assert draft_length.n_compared == 4
    rates = []
    while not draft_length.length():
        draft_length.verified([True])
        rates.append(draft_length.acceptance)
    assert (draft_length.n_switched_off, draft_length.n_switched_on) == (1, 1)
    assert rates[-2] < 0.4 + 0.005 < rates[-1], "a draft of one token costs 0.4 decodes and the time to make it"
    draft_length.verified([False] * 60)
    assert draft_length.length() == 0
    draft_length.drafted(1, 99.0)
    assert draft_length.n_compared == 0, "it takes too long"


def test_a_fixed_length_is_not_compared() -> None:
    draft_length = AdaptiveDraftLength(2, adaptive=False)
    draft_length.on = False
    assert draft_length.n_compared == 0
