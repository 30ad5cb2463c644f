"""The list of workloads. To add one, write a function of a site and a random generator, and add it here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from soaking import chats, contexts, killing, requests, sessions
from soaking.site import Site

Run: TypeAlias = Callable[[Site, random.Random], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work.

    Attributes:
        name: name in reports and for replays.
        run: runs one round, and raises if something is wrong. Its second argument is the source of all randomness.
        weight: how often it is chosen, relative to the others.
    """

    name: str
    run: Run
    weight: float = 1.0


WORKLOADS: tuple[Workload, ...] = (
    Workload("random programs of context calls", contexts.random_program, 4),
    Workload("illegal calls", contexts.illegal_calls, 2),
    Workload("bad dumps", contexts.bad_dumps, 2),
    Workload("open and close", contexts.open_and_close, 2),
    Workload("parallel threads", contexts.parallel_threads),
    Workload("same calls again", contexts.same_calls_again, 2),
    Workload("greedy", sessions.greedy, 4),
    Workload("sampled", sessions.sampled, 3),
    Workload("constrained", sessions.constrained, 3),
    Workload("speculated", sessions.speculated, 3),
    Workload("beams", sessions.beams, 2),
    Workload("completions", sessions.completions, 2),
    Workload("endless", sessions.endless),
    Workload("edited", sessions.edited, 3),
    Workload("dumped", sessions.dumped, 3),
    Workload("cancelled", sessions.cancelled, 3),
    Workload("requests together", requests.mixed, 4),
    Workload("long chat", chats.long_chat, 3),
    Workload("restored chat", chats.restored_chat, 2),
    Workload("oracles", chats.oracles, 2),
    Workload("tools", chats.tools),
    Workload("kill -9", killing.killed, 0.5),
)
