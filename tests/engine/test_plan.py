"""What a step computes, tried over random traces in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.engine.plan import ActiveRequest, WaitingRequest, line_up, plan_step


def active(number: int, **changes: object) -> ActiveRequest:
    plain = ActiveRequest(
        number, n_held=0, n_pending=10, decoding=False, n_exclusive=0, rank=(0, -number), last_turn=-1
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def everything(n_tokens: int, n_attended: int, depth: int, most: int) -> int:
    return most


def eight(n_tokens: int, n_attended: int, depth: int, most: int) -> int:
    return min(8, most)


def sizes(plan: object) -> dict[int, int]:
    return {piece.id: piece.n_tokens for piece in plan.pieces}  # type: ignore[attr-defined]


def test_a_long_prompt_does_not_hold_up_decoding() -> None:
    plan = plan_step([active(0, n_pending=4000), active(1, n_pending=1, decoding=True)], 9999, 512, eight)
    assert sizes(plan) == {1: 1, 0: 8}


def test_nobody_decodes_so_the_batch_is_full() -> None:
    assert sizes(plan_step([active(0, n_pending=4000)], 9999, 512, eight)) == {0: 512}


def test_prompts_take_turns() -> None:
    first = active(0, n_pending=100, last_turn=7)
    plan = plan_step([first, active(1, last_turn=6), active(2, n_pending=1, decoding=True)], 999, 512, eight)
    assert sizes(plan) == {2: 1, 1: 8}


def test_what_one_prompt_leaves_goes_to_the_next() -> None:
    plan = plan_step([active(0, n_pending=3), active(1), active(2, n_pending=1, decoding=True)], 999, 512, eight)
    assert sizes(plan) == {2: 1, 0: 3, 1: 5}


def test_the_lowest_rank_gives_way() -> None:
    requests = [active(i, n_pending=1, decoding=True, n_exclusive=10) for i in range(3)]
    requests[0] = replace(requests[0], rank=(-1, 0))
    plan = plan_step(requests, 1, 512, everything)
    assert plan.preempted == (0,)
    assert sizes(plan) == {1: 1, 2: 1}


def test_shared_positions_free_nothing() -> None:
    requests = [active(i, n_pending=1, decoding=True, n_exclusive=0 if i == 2 else 10) for i in range(3)]
    assert plan_step(requests, 0, 512, everything).preempted == (2, 1)


def test_a_request_alone_that_does_not_fit_is_full() -> None:
    plan = plan_step([active(0, n_pending=1, decoding=True, n_exclusive=50)], 0, 512, everything)
    assert (plan.full, plan.pieces, plan.preempted) == (0, (), ())


def test_waiting_counts_as_priority() -> None:
    urgent, old = WaitingRequest(5, 2, 0.0, 0.0), WaitingRequest(1, 0, 19.9, 0.0)
    assert line_up([old, urgent], 10) == [5, 1]
    assert line_up([replace(old, waited_s=20.0), urgent], 10) == [1, 5]


def test_of_equal_priorities_whoever_was_served_least_comes_first() -> None:
    assert line_up([WaitingRequest(0, 0, 1, 500.0), WaitingRequest(1, 0, 0.5, 20.0)], 10) == [1, 0]


# Traces.


@dataclass
class Simulated:
    """A request of a trace: its prompt and answer in tokens, when it comes, its priority."""

    n_prompt: int
    n_answer: int
    arrives: int
    priority: int
    n_held: int = 0
    n_history: int = field(init=False)
    last_turn: int = -1
    waited: int = 0

    def __post_init__(self) -> None:
        self.n_history = self.n_prompt

    @property
    def n_pending(self) -> int:
        return self.n_history - self.n_held

    @property
    def over(self) -> bool:
        return self.n_history == self.n_prompt + self.n_answer


requests_of_a_trace = st.lists(
    st.builds(Simulated, st.integers(1, 60), st.integers(1, 20), st.integers(0, 30), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=2000, deadline=None)
@given(requests_of_a_trace, st.integers(81, 200), st.integers(12, 64), st.integers(1, 16))
def test_traces(trace: list[Simulated], n_ctx: int, n_batch: int, budget: int) -> None:
    """Room is never exceeded; every decoder that is kept is in every step; prompts have bounded waits; all end."""
    admitted: list[int] = []
    bound = 4000
    for step in range(bound):
        if all(request.over for request in trace):
            return
        admitted = [i for i in admitted if not trace[i].over]
        admitted += [i for i, r in enumerate(trace) if r.arrives <= step and not r.over and i not in admitted]
        held = sum(trace[i].n_held for i in admitted)
        states = [
            ActiveRequest(
                i,
                trace[i].n_held,
                trace[i].n_pending,
                decoding=trace[i].n_history > trace[i].n_prompt and trace[i].n_pending == 1,
                n_exclusive=trace[i].n_held,
                rank=(trace[i].priority, -i),
                last_turn=trace[i].last_turn,
            )
            for i in admitted
        ]
        if not states:
            continue
        plan = plan_step(states, n_ctx - held, n_batch, lambda a, b, c, most: min(budget, most))
        assert plan.full is None, "each request fits alone"
        assert plan.pieces, "a step computes something"
        kept = {state.id: state for state in states if state.id not in plan.preempted}
        for number in plan.preempted:
            assert number in admitted
            assert all(kept[other].rank > (trace[number].priority, -number) for other in kept)
            trace[number].n_held = 0
        n_tokens = sum(piece.n_tokens for piece in plan.pieces)
        assert n_tokens <= n_batch
        assert sum(trace[i].n_held for i in kept) + n_tokens <= n_ctx
        decoders = {number for number, state in kept.items() if state.decoding}
        in_step = {piece.id for piece in plan.pieces}
        assert decoders <= in_step, "every decoder is in every step"
        if decoders:
            assert sum(p.n_tokens for p in plan.pieces if p.id not in decoders) <= budget
        _check_turns(trace, kept, in_step, decoders, n_ctx - held)
        for piece in plan.pieces:
            assert 1 <= piece.n_tokens <= kept[piece.id].n_pending
            request = trace[piece.id]
            request.n_held += piece.n_tokens
            request.last_turn = step
            request.n_history += request.n_pending == 0
            if request.over:
                request.n_held = 0
    raise AssertionError("a trace did not end")


def _check_turns(
    trace: list[Simulated], kept: dict[int, ActiveRequest], in_step: set[int], decoders: set[int], n_free: int
) -> None:
    """A prompt waits for one turn of each other prompt at most, as long as there is room."""
    prompts = set(kept) - decoders
    skipped = prompts - in_step
    for number in skipped:
        served = prompts & in_step
        assert all(kept[other].last_turn <= kept[number].last_turn for other in served)
