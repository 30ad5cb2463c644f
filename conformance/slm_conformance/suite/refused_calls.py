"""Calls of sessions that are refused, and calls that end an answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from slm_conformance.suite.bench import Bench
from slm_core.chat import Session
from slm_core.errors import InvalidOption, InvalidSequence, SessionError
from slm_core.generation import FinishReason, StoppingAction, StoppingCriterion
from slm_core.generation.shifting import TokenShift
from slm_core.sampling import SamplerChain, Sampling

GREEDY = Sampling(temperature=0, max_tokens=8)
ANY = Sampling(temperature=1e12, top_k=0, top_p=1.0, min_p=0.0, seed=11, max_tokens=12)
"""All tokens are equally likely, so a model with few EOG tokens does not end an answer at once."""


def pause_at(n: int) -> StoppingCriterion:
    """A stopping criterion that pauses an answer after its n-th token."""
    return lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == n else StoppingAction.NEXT


def check_branches_are_refused(bench: Bench, session: Session) -> None:
    """Invalid scores, searches and completions raise and take no sequence."""
    calls: dict[str, Callable[[], object]] = {
        "score with top=-1": lambda: session.score("a", top=-1),
        "beams that are a number": lambda: session.beam_search(3),  # type: ignore[arg-type]
        "completions of a number": lambda: session.completions(2, 3),  # type: ignore[arg-type]
        "0 completions": lambda: session.completions(0),
        "2 completions, the best of 1": lambda: session.completions(2, best_of=1),
        "a biased completion": lambda: session.completions(3, Sampling(logit_bias={bench.vocab.size: 1.0})),
    }
    for name, call in calls.items():
        with bench.refused(name, InvalidOption, context=session.context):
            call()
    for n in (4, 5):
        with bench.refused(f"{n} completions in 4 sequences", InvalidSequence, context=session.context):
            session.completions(n)


def check_edits_end_answers(bench: Bench, session: Session) -> None:
    """An edit ends a paused answer, and completions that have not begun; the next answer ends one that is running."""
    with session.completions(3, GREEDY) as completions:
        session.append_tokens(bench.tokens(1))
        with bench.refused("completions of a history that has changed", SessionError, context=session.context):
            next(completions)
    edits: dict[str, Callable[[], object]] = {
        "append_tokens": lambda: session.append_tokens(bench.tokens(1)),
        "truncate": lambda: session.truncate(session.n_tokens - 1),
        "rollback": lambda: session.rollback(mark),
        "remove_span": lambda: session.remove_span(2, 3),
        "follow": lambda: session.follow(bench.tokens(5, seed=1)),
    }
    for name, edit in edits.items():
        mark = session.mark()
        running = session.generate(ANY, stopping_criteria=[pause_at(2)])
        for _event in running:
            pass
        edit()
        assert session.generate(GREEDY) is not running, f"{name} did not end a paused answer"
    first = session.generate(ANY)
    next(first)
    session.generate(ANY).run()
    assert first.run().finish_reason is FinishReason.CANCELLED, "an answer continues after the next one has begun"


def check_code_is_not_dumped(bench: Bench, session: Session) -> None:
    """An answer with code that a dump cannot contain is not dumped."""
    sampler = SamplerChain.for_vocab(GREEDY, bench.vocab)
    custom: Any = SimpleNamespace(sample=sampler.sample, accept=sampler.accept, set_history=sampler.set_history)
    code: tuple[dict[str, Any], ...] = (
        {"sampler": custom},
        {"logits_processors": [lambda tokens, row: row]},
        {"shift": TokenShift()},
    )
    for options in code:
        for _event in session.generate(ANY, stopping_criteria=[pause_at(2)], **options):
            pass
        with bench.refused(f"a dump of an answer with {options}", SessionError, context=session.context):
            session.dump()
        session.truncate(4)


def check_ranges(bench: Bench, session: Session) -> None:
    """Edits outside of the history, and answers to an empty one, raise."""
    ranges = ((3, 2), (-1, 2), (0, session.n_tokens + 1), (session.n_tokens + 1, session.n_tokens + 1))
    for start, end in ranges:
        with bench.refused(f"a removal of [{start}, {end})", SessionError, context=session.context):
            session.remove_span(start, end)
    for length in (-1, session.n_tokens + 1):
        with bench.refused(f"a truncation to {length} tokens", SessionError, context=session.context):
            session.truncate(length)
    empty = Session(session.context, bench.vocab)
    for begin in (empty.generate, lambda: empty.completions(1), empty.next_logits):
        with bench.refused("an answer to nothing", SessionError, context=session.context):
            begin()
