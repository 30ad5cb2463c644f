"""Several completions of a prompt over the backend's forks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM, next_row
from slm_core.chat import Session
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation import Completion, Draft, Event, FinishReason, StoppingAction
from slm_core.sampling import Sampling
from slm_core.types import Capability

N_PROMPT = 20
N_TOKENS = 6
ANY = replace(UNIFORM, seed=4, max_tokens=N_TOKENS)
"""A seed with equal completions for n = 2 and n = 4, although forks that are decoded together may round differently."""


class TestCompletions(Scenarios):
    """Completions: forks of one prompt are decoded together, and each gives the result that it gives alone."""

    above_contract = True

    def test_log_probabilities(self, bench: Bench) -> None:
        """Generation: the log probability of a completion's token follows from the tokens before it."""
        completions = _session(bench).completions(3, ANY)
        logprobs: list[list[float]] = [[] for _ in range(3)]
        for event in completions:
            if event.event.token is not None:
                logprobs[event.index].append(event.event.logprob)
        for i, completion in enumerate(completions.answers):
            what = f"completion {i}"
            bench.log_probabilities_agree(bench.tokens(N_PROMPT), completion.answer.tokens, logprobs[i], what)
            mean = float(np.mean(logprobs[i]))
            assert completion.index == i, f"{completion!r} is at index {i}"
            assert math.isclose(completion.mean_logprob, mean), f"{completion!r} of events with the mean {mean}"

    def test_however_many(self, bench: Bench) -> None:
        """Generation: completion i of a seed does not depend on n, and completion 0 equals ``generate``."""
        two, four = (
            _tokens(_session(bench).completions(2, ANY).run()),
            _tokens(_session(bench).completions(4, ANY).run()),
        )
        assert four[:2] == two, "the first two of four completions are others than two alone"
        assert _session(bench).generate(ANY).run().tokens == two[0], "completion 0 is not what generate() says"
        assert len(set(four)) == 4, "completions with streams of their own say the same"

    def test_in_turns(self, bench: Bench) -> None:
        """Generation: events alternate between unfinished completions; each can be paused, resumed and cancelled."""
        letters = [bench.vocab.encode(letter, add_special=False, parse_special=False)[-1] for letter in "abcdef"]
        sampling = Sampling(temperature=0, max_tokens=5, logit_bias={letters[0]: 1e4})
        indices: list[int] = []

        def pauses(event: Event, draft: Draft) -> StoppingAction:
            return StoppingAction.PAUSE if len(draft.tokens) == 3 else StoppingAction.NEXT

        session = _session(bench)
        completions = session.completions(
            3, sampling, stopping_criteria=[pauses], on_event=lambda event: indices.append(event.index)
        )
        first = [next(completions) for _ in range(4)]
        order = [event.index for event in first]
        completions.cancel(1)
        order += [event.index for event in completions]
        assert order == [0, 1, 2, 0, 2, 0, 2] == indices, (
            "three completions, the second cancelled after one token, paused after three:"
            f" events {order}, seen {indices}"
        )
        assert (completions.paused, completions.over) == (True, False), f"{completions!r} is not paused"
        with bench.refused("answers of paused completions", SessionError):
            _ = completions.answers
        ends = [(c.index, c.answer.tokens, c.answer.finish_reason) for c in completions.resume(()).run()]
        reasons = (FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH)
        expected = [(i, (letters[0],) * n, reason) for i, n, reason in zip(range(3), (5, 1, 5), reasons, strict=True)]
        assert ends == expected, f"resumed completions end as {ends}, not {expected}"
        mean = completions.answers[1].mean_logprob
        assert mean == first[1].event.logprob, f"a completion of one token has the mean {mean}, its event {first[1]}"
        assert (completions.paused, completions.over) == (False, True), f"{completions!r} is not over"
        for n, best_of in ((0, None), (True, None), (2, 1), (1.0, None), (1, 2.0)):
            with bench.refused(f"n={n}, best_of={best_of}", InvalidOption, context=session.context):
                session.completions(n, sampling, best_of=best_of)  # type: ignore[arg-type]

    def test_no_trace(self, bench: Bench) -> None:
        """Generation: after completions that are read to the end or left early, the context holds the same tokens."""
        session = _session(bench)
        before, contents = next_row(session), contents_of(session.context)
        session.completions(3, ANY).run()
        assert contents_of(session.context) == contents, "completions left something in the context"
        with session.completions(3, ANY) as completions:
            next(completions)
        assert contents_of(session.context) == contents, (
            "completions that were left early left something in the context"
        )
        bench.same(next_row(session), before, "the next logits after completions")

    def test_decodes_the_prompt_once(self, bench: Bench) -> None:
        """Generation: n completions take positions for their tokens, and one copy of the prompt if forks share it."""
        shared = Capability.SHARED_FORK in bench.capabilities
        needed = 4 * N_TOKENS + (N_PROMPT if shared else 5 * N_PROMPT)
        session = Session(bench.context(n_ctx=needed, n_seq_max=5), bench.vocab)
        session.append_tokens(bench.tokens(N_PROMPT))
        for completion in session.completions(4, ANY).run():
            usage, tokens = completion.answer.usage, completion.answer.tokens
            ended = tokens[-1] in bench.vocab.eog_ids
            assert ended or len(tokens) == N_TOKENS, (
                f"4 completions in {needed} positions: one has {len(tokens)} tokens"
            )
            cached = N_PROMPT if completion.index else 0
            assert usage.cached_tokens == cached, (
                f"completion {completion.index} counts {usage.cached_tokens} as cached"
            )

    def test_in_a_full_context(self, bench: Bench) -> None:
        """Generation: completions that fill the context end one by one, with the tokens that they would have had."""
        shared = Capability.SHARED_FORK in bench.capabilities
        whole = _session(bench).completions(4, ANY).run()
        n_ctx = 4 * 3 + 3 + (N_PROMPT if shared else 5 * N_PROMPT)
        session = Session(bench.context(n_ctx=n_ctx, n_seq_max=5, n_batch=3), bench.vocab)
        session.append_tokens(bench.tokens(N_PROMPT))
        completions = session.completions(4, ANY)
        logprobs: list[list[float]] = [[] for _ in range(4)]
        for event in completions:
            logprobs[event.index].append(event.event.logprob)
        for cut, full in zip(completions.answers, whole, strict=True):
            tokens = cut.answer.tokens
            assert tokens == full.answer.tokens[: len(tokens)], f"in a full context, {cut!r} is no part of {full!r}"
            assert len(tokens) >= 4, f"completions with room for three tokens each end after {len(tokens)}"
            what = f"completion {cut.index} in a full context"
            bench.log_probabilities_agree(bench.tokens(N_PROMPT), tokens, logprobs[cut.index], what)

    def test_best_of(self, bench: Bench) -> None:
        """Generation: ``best_of`` keeps the completions with the largest mean log probability, best first."""
        every = _session(bench).completions(4, ANY).run()
        answered = _session(bench).completions(2, ANY, best_of=4).run()
        best = sorted(every, key=lambda completion: -completion.mean_logprob)[:2]
        assert [completion.index for completion in every] == [0, 1, 2, 3], (
            "completions without best_of are not in order"
        )
        assert _tokens(answered) == _tokens(best), (
            "best_of kept other completions than the completions with the largest mean"
        )


def _session(bench: Bench) -> Session:
    session = Session(bench.context(n_seq_max=5), bench.vocab)
    session.append_tokens(bench.tokens(N_PROMPT))
    return session


def _tokens(completions: tuple[Completion, ...] | list[Completion]) -> list[tuple[int, ...]]:
    return [completion.answer.tokens for completion in completions]
