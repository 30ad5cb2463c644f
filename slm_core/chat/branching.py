"""Several answers from one session. They are forks, and the session does not change."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import checked_tokens
from slm_core.chat.sequences import check_free, claim, release
from slm_core.context.inputs import text_tokens
from slm_core.errors import SessionError
from slm_core.generation.beam import BeamSearch, Rules
from slm_core.generation.beam_options import BeamAnswer, Beams
from slm_core.generation.branches import Branches
from slm_core.generation.completions import Branch, CompletionEvent, CompletionGroup, Completions, checked_completions
from slm_core.generation.control import Control
from slm_core.generation.events import Timings, Usage
from slm_core.generation.loop import Generation
from slm_core.generation.scoring import Score, score_tokens
from slm_core.generation.token_loop import Progress
from slm_core.protocols import Constraint
from slm_core.sampling import LogitsProcessor, Sampling, chain_for
from slm_core.types import Pos, PrefillProgress

if TYPE_CHECKING:
    from slm_core.chat.session import Session


def beam_search(
    session: Session,
    beams: Beams,
    constraint: Constraint | None,
    cancelled: Callable[[], bool],
    progress: PrefillProgress | None,
    *,
    special: bool,
) -> BeamAnswer:
    """See ``Session.beam_search``."""
    rules = Rules(session.vocab, beams, special=special)
    check_free(session.context, beams.width, f"a beam search of width {beams.width}")
    n_prompt, n_cached = session.n_tokens, session.n_tokens - session.n_pending
    started = time.perf_counter()
    row = session.prefill(cancelled, progress=progress)
    prefilled = time.perf_counter()
    hypotheses = []
    if row is not None:
        with contextlib.closing(_Claimed(session, beams.width)) as claimed:
            hypotheses = BeamSearch(rules, claimed.branches, constraint).run(row, cancelled)
    usage = Usage(n_prompt, n_cached, sum(len(hypothesis.tokens) for hypothesis in hypotheses))
    return BeamAnswer(tuple(hypotheses), usage, Timings(prefilled - started, time.perf_counter() - prefilled))


def score(session: Session, content: str | Sequence[int], top: int) -> Score:
    """See ``Session.score``."""
    if isinstance(content, str):
        ids: Sequence[int] = session.vocab.encode(content, add_special=not session.n_tokens, parse_special=False)
    else:
        ids = checked_tokens("content", content, "a text, or a list of token ids")
    with session.scratch_branch() as aside:
        before = aside.prefill() if aside.n_tokens else None
        return score_tokens(aside.context, aside.seq_id, ids, before, top=top)


def completions(
    session: Session,
    n: int,
    best_of: int | None,
    plan: Plan,
    control: Control,
    on_event: Callable[[CompletionEvent], None] | None,
) -> Completions:
    """See ``Session.completions``."""
    n_made = checked_completions(n, best_of)
    if not session.n_tokens:
        raise SessionError("there is nothing to continue: append text first")
    check_free(session.context, n_made, f"making {n_made} completions")
    claimed = _Claimed(session, n_made)
    group = CompletionGroup(claimed.branches, claimed.prefill, n_made)
    sampling = plan.sampling
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(63))
    n_tokens, n_cached = session.n_tokens, session.n_tokens - session.n_pending

    def generation(i: int) -> Generation:
        sampler = chain_for(sampling, session.vocab, plan.logits_processors, stream=i)
        sampler.set_history(text_tokens(session.inputs))
        return Generation(
            Branch(group, i, n_tokens),
            session.vocab,
            sampler,
            Progress(
                n_tokens, n_tokens if i else n_cached, sampling.max_tokens, sampling.stop, time_left_s=plan.timeout
            ),
            control=control,
            constraint=None if plan.constraint is None else plan.constraint.clone(),
            special=plan.special,
        )

    try:
        generations = [generation(i) for i in range(n_made)]
    except BaseException:
        claimed.close()
        raise
    return Completions(generations, group, None if best_of is None else n, claimed.close, on_event)


@dataclass(frozen=True, slots=True)
class Plan:
    """Options that all completions share.

    Attributes:
        sampling: how tokens are chosen.
        logits_processors: change each row of logits.
        constraint: restricts the answers; None for no constraint.
        special: whether control tokens other than EOG become text.
        timeout: seconds after which they are cancelled; None for no limit.
    """

    sampling: Sampling
    logits_processors: Sequence[LogitsProcessor]
    constraint: Constraint | None
    special: bool
    timeout: float | None


class _Claimed:
    """Sequences for branches of a session, claimed until ``close``."""

    def __init__(self, session: Session, n: int) -> None:
        self._session = session
        self._inputs = session.inputs
        self._seq_ids = [claim(session.context, None, self) for _ in range(n)]
        self.branches = Branches(session.context, Pos(session.seq_id, session.n_tokens), self._seq_ids)

    def prefill(self, cancelled: Callable[[], bool], *, progress: PrefillProgress | None) -> NDArray[np.float32] | None:
        """Decode the prompt."""
        if self._session.inputs != self._inputs:
            raise SessionError("the session has changed since its completions were asked for: ask for them again")
        return self._session.prefill(cancelled, progress=progress)

    def close(self) -> None:
        """Drop the branches, and free their sequences."""
        self.branches.close()
        for seq_id in self._seq_ids:
            release(self._session.context, seq_id)
        self._seq_ids = []
