"""Random programs over two sessions, one with drafts and one without: their observable behaviour is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from scripted import ALL, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.generation import Draft, Event, StoppingAction
from slm_core.generation.speculation import DraftFunction, PromptLookup, Speculation, SuffixIndex
from slm_core.sampling import Sampling
from slm_core.types import EditLevel

N_STEPS = 25


def repeats(history: bytes) -> int | None:
    """A script that often repeats the token four tokens before."""
    return history[-4] if len(history) > 4 and history[-1] % 3 else None


class Pair:
    """The same session twice; ``drafted`` speculates."""

    def __init__(self, seed: int, level: EditLevel, *, shared: bool) -> None:
        self.random = random.Random(seed)
        self.options = {"level": level, "capabilities": ALL if shared else frozenset(), "n_ctx": 4000, "n_seq_max": 2}
        self.plain, self.drafted = (self._begin() for _ in range(2))

    def _begin(self) -> Session:
        session = Session(self._context(), ByteVocab(), sampling=Sampling(temperature=1.0, seed=5, top_k=0, min_p=0))
        session.append("abc")
        return session

    def _context(self) -> ScriptedContext:
        return ScriptedContext(repeats, n_batch=self.random.choice([8, 64]), **self.options)

    def _speculation(self) -> Speculation:
        drafter = self.random.choice([PromptLookup(3, 1), SuffixIndex(1), DraftFunction(sometimes_right)])
        return Speculation(drafter, n_max=self.random.randint(1, 9), adaptive=self.random.random() < 0.3)

    def step(self) -> None:
        """One random call on both."""
        step = self.random.choice(
            [
                self.answer,
                self.answer,
                self.answer,
                self.append,
                self.truncate,
                self.remove,
                self.dump,
                self.scratch_branch,
            ]
        )
        step()
        assert self.drafted.tokens == self.plain.tokens, step.__name__
        decoded = self.drafted.context.tokens(self.drafted.seq_id)
        n = min(len(decoded), len(self.drafted.tokens))
        assert decoded[:n] == self.drafted.tokens[:n], step.__name__
        if self.random.random() < 0.3:
            np.testing.assert_array_equal(self.drafted.next_logits(), self.plain.next_logits(), step.__name__)

    def answer(self) -> None:
        """Begin or resume an answer, which pauses, is abandoned, or ends."""
        n = self.random.randint(1, 15)
        options = Sampling(temperature=self.random.choice([0, 1.0]), seed=n, max_tokens=n, top_k=0, min_p=0)
        at, action = self.random.randint(1, 15), self.random.choice(list(StoppingAction))

        def criterion(event: Event, draft: Draft) -> StoppingAction:
            return action if len(draft.tokens) == at else StoppingAction.NEXT

        n_read, passes_options = self.random.randint(1, 20), self.random.random() < 0.7
        texts = []
        for session, drafts in ((self.plain, None), (self.drafted, self._speculation())):
            running = session._generation
            if running is not None and running.paused:
                generation = session.generate(stopping_criteria=[criterion])
            else:
                generation = session.generate(
                    options if passes_options else None, speculation=drafts, stopping_criteria=[criterion]
                )
            texts.append([event.text for event, _ in zip(generation, range(n_read), strict=False)])
            if not generation.paused and not generation.finished and not passes_options:
                generation.cancel()
                generation.run()
        assert texts[0] == texts[1]

    def append(self) -> None:
        """Add text."""
        text = "".join(self.random.choices("abcé🙂", k=self.random.randint(1, 20)))
        for session in (self.plain, self.drafted):
            session.append(text)

    def truncate(self) -> None:
        """Truncate both sessions."""
        length = self.random.randint(3, self.plain.n_tokens)
        for session in (self.plain, self.drafted):
            session.truncate(length)

    def remove(self) -> None:
        """Remove a range and recompute the rest: after a cut, the logits would depend on the history of edits."""
        start = self.random.randint(3, self.plain.n_tokens)
        end = self.random.randint(start, self.plain.n_tokens)
        for session in (self.plain, self.drafted):
            session.remove_span(start, end, exact=True)

    def dump(self) -> None:
        """Continue in another context, except with a paused answer whose drafter is a function: a dump lacks it."""
        running = self.drafted._generation
        unfinished = running is not None and not running.finished
        if unfinished and (not running.paused or running.speculation.speculation.drafter.settings() is None):
            return
        self.plain, self.drafted = (
            Session.restore(self._context(), ByteVocab(), session.dump()) for session in (self.plain, self.drafted)
        )

    def scratch_branch(self) -> None:
        """Begin a scratch branch, and leave it."""
        for session, drafts in ((self.plain, None), (self.drafted, self._speculation())):
            with session.scratch_branch() as elsewhere:
                elsewhere.append("xyz")
                elsewhere.generate(Sampling(temperature=0, max_tokens=5), speculation=drafts).run()


def sometimes_right(tokens: Sequence[int], n: int) -> Sequence[int]:
    """A drafter that is sometimes right."""
    return [tokens[-4] if i % 3 else 7 for i in range(n)] if len(tokens) > 4 else []


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("level", list(EditLevel))
def test_drafts_are_invisible_in_random_programs(level: EditLevel, shared: bool) -> None:
    for seed in range(15):
        pair = Pair(seed, level, shared=shared)
        for _ in range(N_STEPS):
            pair.step()
