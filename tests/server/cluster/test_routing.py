"""The choice of a replica: its rule, its bound, and a simulation of 1,000 replicas."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slm_core.server.cluster.forwarding import prompt_text
from slm_core.server.cluster.routing import BLOCK, PrefixIndex, Routing

TEXTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(
    lambda letters: "".join(c * BLOCK for c in letters)
)
"""Texts of whole blocks, which often begin alike."""


def n_blocks_alike(a: str, b: str) -> int:
    """The number of first blocks that two texts share."""
    n = 0
    while n * BLOCK < min(len(a), len(b)) and a[: (n + 1) * BLOCK] == b[: (n + 1) * BLOCK]:
        n += 1
    return n


@given(st.lists(TEXTS, max_size=8), TEXTS)
def test_the_index_finds_the_longest_prefix(added: list[str], text: str) -> None:
    index = PrefixIndex(n_chars=1 << 20)
    for each in added:
        index.add("a", each)
    longest = max((n_blocks_alike(each, text) for each in added), default=0)
    assert index.matched(["a", "b"], text) == {"a": longest / (len(text) // BLOCK), "b": 0}


@given(st.lists(TEXTS, min_size=1, max_size=12), st.integers(1, 6))
def test_the_index_forgets_from_the_end(added: list[str], n_blocks: int) -> None:
    """With room for n blocks, the last text is known as far as there is room, and nothing beyond."""
    index = PrefixIndex(n_chars=n_blocks * BLOCK)
    for each in added:
        index.add("a", each)
    known = min(n_blocks, len(added[-1]) // BLOCK)
    assert index.matched(["a"], added[-1])["a"] * (len(added[-1]) // BLOCK) == pytest.approx(known)


def test_a_conversation_that_goes_on_begins_like_before() -> None:
    first = {"model": "m", "tools": [{"b": 1, "a": 2}], "messages": [{"role": "user", "content": "x" * 200}]}
    answer = {"role": "assistant", "content": "y"}
    later = {**first, "messages": [*first["messages"], answer], "temperature": 1}  # type: ignore[misc]
    assert prompt_text(later).startswith(prompt_text(first))
    assert prompt_text({"temperature": 1}) == ""
    assert prompt_text({"prompt": ["a", [1, 2]]}) == "\na\n[1, 2]"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), TEXTS),
        st.tuples(st.just("end"), st.integers(0, 100)),
        st.tuples(st.just("replicas"), st.integers(1, 5)),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 4), st.sampled_from([0.5, 1.0, 2.0]))
def test_no_replica_is_far_above_the_mean(operations: list[tuple[str, object]], n_parallel: int, beta: float) -> None:
    """The published bound: the chosen replica has at most mean + max(mean, n_parallel) / beta requests."""
    routing = Routing(n_parallel, n_chars=1 << 20, beta=beta)
    routing.keep(["0"])
    running: list[str] = []
    for kind, value in operations:
        if kind == "begin":
            mean = sum(routing.loads.values()) / len(routing.loads)
            chosen = routing.choose(str(value))
            assert routing.loads[chosen] <= mean + max(mean, n_parallel) / beta + 1e-9
            routing.begin(chosen, str(value))
            running.append(chosen)
        elif kind == "end" and running:
            routing.end(running.pop(int(value) % len(running)))  # type: ignore[call-overload]
        elif kind == "replicas":
            names = [str(i) for i in range(int(value))]  # type: ignore[call-overload]
            routing.keep(names)
            running = [name for name in running if name in names]
        assert dict(routing.loads) == {name: running.count(name) for name in routing.loads}


def test_a_prompt_goes_where_it_is_cached_until_others_have_less_to_do() -> None:
    routing = Routing(n_parallel=4, n_chars=1 << 20)
    routing.keep(["a", "b"])
    text = "x" * 10 * BLOCK
    chosen = []
    for _ in range(8):
        replica = routing.choose(text)
        routing.begin(replica, text)
        chosen.append(replica)
    first, other = chosen[0], {"a": "b", "b": "a"}[chosen[0]]
    assert chosen[:4] == [first] * 4, "as many as it computes together"
    assert other in chosen[4:6]
    routing.keep([other])
    assert routing.choose(text) == other


def test_idle_replicas_take_turns() -> None:
    routing = Routing(n_parallel=4, n_chars=1 << 20)
    routing.keep("abcd")
    for _ in range(8):
        replica = routing.choose("")
        routing.begin(replica, "")
        routing.end(replica)
    assert routing.loads == dict.fromkeys("abcd", 0)
    assert set(routing._n_begun.values()) == {2}


class Simulation:
    """300 replicas that answer chats with 20 long system prompts, popular as Zipf's law says.

    An answer takes a second, and the computation of what is not cached up to three.
    """

    N, N_PARALLEL, N_REQUESTS = 300, 2, 1000

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.caches = PrefixIndex(n_chars=60_000)  # what the simulated replicas have cached
        self.systems = [f"{i:06}" * 500 for i in range(20)]
        self.popularity = [1 / (i + 1) for i in range(20)]

    def run(
        self, choose: Callable[[str], str], began: Callable[[str, str], None], ended: Callable[[str], None]
    ) -> None:
        """Answer requests that come at 60 % of the rate that the replicas can bear."""
        self.most, self.matched, self.n = 0, 0.0, 0
        loads: dict[str, int] = {}
        ends: list[tuple[float, str]] = []
        time, rate = 0.0, 0.6 * self.N * self.N_PARALLEL / 2.5
        histories: list[str] = []
        while self.n < self.N_REQUESTS:
            time += self.draw.expovariate(rate)
            while ends and ends[0][0] <= time:
                _, name = heapq.heappop(ends)
                loads[name] -= 1
                ended(name)
            if histories and self.draw.random() < 0.6:
                text = histories[self.draw.randrange(len(histories))] + f"{self.n:06}" * 30
            else:
                text = self.draw.choices(self.systems, self.popularity)[0] + f"{self.n:06}" * 30
            name = choose(text)
            began(name, text)
            loads[name] = loads.get(name, 0) + 1
            share = self.caches.matched([name], text)[name]
            self.caches.add(name, text)
            heapq.heappush(ends, (time + 1 + 3 * (1 - share), name))
            histories = [*histories[-2000:], text]
            self.n += 1
            self.matched += share
            self.most = max(self.most, loads[name])


def test_hundreds_of_replicas() -> None:
    """More tokens are cached than with random choice, and a popular prefix does not overload its replica."""
    routing = Routing(Simulation.N_PARALLEL, n_chars=60_000)
    routing.keep([str(i) for i in range(Simulation.N)])
    ours, others = Simulation(1), Simulation(1)
    ours.run(routing.choose, routing.begin, routing.end)
    others.run(lambda _: str(others.draw.randrange(others.N)), lambda *_: None, lambda _: None)
    assert ours.matched > 3 * others.matched
    assert ours.most <= 2 * Simulation.N_PARALLEL < others.most
