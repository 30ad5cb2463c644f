"""Several completions of a prompt over the backend's forks."""

from __future__ import annotations

from dataclasses import replace

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM, next_row
from slm_core.chat import Session
from slm_core.generation import Completion
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
        for completion in completions.answers:
            tokens = completion.answer.tokens
            what = f"completion {completion.index}"
            bench.log_probabilities_agree(bench.tokens(N_PROMPT), tokens, logprobs[completion.index], what)

    def test_however_many(self, bench: Bench) -> None:
        """Generation: completion i of a seed does not depend on n, and completion 0 equals ``generate``."""
        two, four = (
            _tokens(_session(bench).completions(2, ANY).run()),
            _tokens(_session(bench).completions(4, ANY).run()),
        )
        assert four[:2] == two, "the first two of four completions are others than two alone"
        assert _session(bench).generate(ANY).run().tokens == two[0], "completion 0 is not what generate() says"
        assert len(set(four)) == 4, "completions with streams of their own say the same"

    def test_no_trace(self, bench: Bench) -> None:
        """Generation: after completions that are read to the end or left early, the context holds the same tokens."""
        session = _session(bench)
        before, holds = next_row(session), contents_of(session.context)
        session.completions(3, ANY).run()
        assert contents_of(session.context) == holds, "completions left something in the context"
        with session.completions(3, ANY) as completions:
            next(completions)
        assert contents_of(session.context) == holds, "completions that were left early left something in the context"
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

    def test_best_of(self, bench: Bench) -> None:
        """Generation: ``best_of`` keeps the completions with the largest mean log probability, best first."""
        every = _session(bench).completions(4, ANY).run()
        answered = _session(bench).completions(2, ANY, best_of=4).run()
        best = sorted(every, key=lambda completion: -completion.mean_logprob)[:2]
        assert _tokens(answered) == _tokens(best), "best_of kept other completions than those with the largest mean"


def _session(bench: Bench) -> Session:
    session = Session(bench.context(n_seq_max=5), bench.vocab)
    session.append_tokens(bench.tokens(N_PROMPT))
    return session


def _tokens(completions: tuple[Completion, ...] | list[Completion]) -> list[tuple[int, ...]]:
    return [completion.answer.tokens for completion in completions]
