"""Speculative decoding over the backend's contexts: the same answers in fewer batches."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.generation import Script
from slm_conformance.suite.scenarios.sessions import UNIFORM, fresh_row, next_row
from slm_conformance.suite.workshop import Rows
from slm_core import constraints
from slm_core.chat import Session
from slm_core.generation import Answer, Draft, Event, StoppingAction, StoppingCriterion
from slm_core.generation.speculation import (
    Drafter,
    DraftFunction,
    DraftModel,
    PromptLookup,
    Speculation,
    SuffixIndex,
    accept_or_draw,
)
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel

N_PROMPT = 20
N_TOKENS = 12
GREEDY = Sampling(temperature=0, max_tokens=N_TOKENS)
N_DRAWS = 3000
SIGMAS = 6


class TestSpeculation(Scenarios):
    """Speculation: wrong drafts are truncated; answers are the same as without drafts."""

    above_contract = True

    def test_greedy_is_the_largest_logit(self, bench: Bench) -> None:
        """Clause 9: with right, wrong and mixed drafts, each greedy token has the largest logit if it is clear."""
        for name, drafter in self._drafters(bench).items():
            answer = _answer(bench, drafter, GREEDY)
            bench.chosen(bench.tokens(N_PROMPT), answer.tokens, f"a greedy answer with drafts of {name}")

    def test_the_chain_decides(self, bench: Bench) -> None:
        """Generation: a drafted token that the sampler chain excludes is not accepted, whatever its logit."""
        bench.requires(EditLevel.TRUNCATE)
        first, *others = _answer(bench, None, GREEDY).tokens
        banned = tuple(set(others) - {first})  # so that the likeliest token after the first is banned
        sampling = Sampling(temperature=0, max_tokens=N_TOKENS, banned_tokens=banned)
        with DraftModel(bench.context(n_seq_max=1), bench.vocab) as drafter:
            answer = _answer(bench, drafter, sampling)
        drawn = set(answer.tokens) & set(banned)
        assert not drawn, f"banned tokens were drafted, and said: {sorted(drawn)}"

    def test_one_batch_for_a_draft(self, bench: Bench) -> None:
        """Generation: a draft of seven right tokens is decoded in one batch, and saves seven."""
        bench.requires(EditLevel.TRUNCATE)
        script = [token for token in bench.tokens(30, seed=5) if token not in bench.vocab.eog_ids][:17]
        speculation = _speculation(DraftFunction(lambda tokens, n: script[len(tokens) - N_PROMPT :][:n]), n_max=7)
        session = _session(bench)
        lengths = []
        for _ in session.generate(Sampling(max_tokens=len(script)), sampler=Script(script), speculation=speculation):
            lengths.append(session.context.length(session.seq_id) - N_PROMPT)
        # The first token follows from the prompt's batch; then each batch decodes a token and its draft.
        expected = [0, *[8] * 8, *[16] * 8]
        assert lengths == expected, f"after each token, {lengths} were decoded after the prompt, expected {expected}"

    def test_nothing_stays_of_a_draft(self, bench: Bench) -> None:
        """Generation: an answer that ends inside a draft leaves only the history in the context."""
        script = [token for token in bench.tokens(30, seed=5) if token not in bench.vocab.eog_ids]
        for n in (2, 3, 6):
            session = _session(bench)
            session.generate(
                Sampling(),
                sampler=Script(script),
                speculation=_speculation(DraftFunction(lambda tokens, n: script[len(tokens) - N_PROMPT :][:n])),
                stopping_criteria=[_at(n, StoppingAction.FINISH)],
            ).run()
            tokens_of_context = session.context.tokens(session.seq_id)
            assert tokens_of_context == session.tokens[: len(tokens_of_context)], (
                f"an answer of {n} tokens within a draft ended, but the context holds {len(tokens_of_context)} tokens,"
                f" the history {session.n_tokens}"
            )
            session.append_tokens(bench.tokens(3, seed=7))
            bench.agree(next_row(session), fresh_row(bench, session), "the next logits after an end within a draft")

    def test_drawn_drafts_keep_the_shares(self, bench: Bench) -> None:
        """Generation: drafts drawn from another distribution keep the model's distribution, by chi-square."""
        row = np.asarray(bench.feed(bench.context(), bench.tokens(N_PROMPT))[-1], np.float32)
        drafts = SamplerChain(Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=1.5, seed=2))
        chain = SamplerChain(Sampling(top_k=8, top_p=1.0, min_p=0.0, temperature=0.8, seed=3))
        draft_probabilities = drafts.distribution(row)
        ids, shares = chain.distribution(row)
        drawn = [accept_or_draw(chain, row, drafts.sample(row), draft_probabilities) for _ in range(N_DRAWS)]
        strangers = set(drawn) - set(ids.tolist())
        assert not strangers, f"with drawn drafts, tokens came that the chain excludes: {sorted(strangers)}"
        counts = np.array([drawn.count(token) for token in ids.tolist()])
        statistic = float(((counts - N_DRAWS * shares) ** 2 / (N_DRAWS * shares)).sum())
        # Mean k and variance 2k for k degrees of freedom; the last term covers rare tokens.
        limit = len(ids) - 1 + SIGMAS * float(np.sqrt(2 * len(ids))) + SIGMAS
        assert statistic < limit, (
            f"with drawn drafts, the chi-square of {N_DRAWS} draws is {statistic:.0f} (allowed: {limit:.0f})"
        )

    def test_a_constraint_rules_drafts(self, bench: Bench) -> None:
        """Generation: drafts do not change a constrained answer: it fits, and is complete."""
        letters = bench.vocab.encode("abcabcabcabc", add_special=False, parse_special=False)
        drafters = self._drafters(bench)
        drafters["what is allowed"] = DraftFunction(lambda tokens, n: letters[len(tokens) - N_PROMPT :][:n])
        for name, drafter in drafters.items():
            text = _answer(bench, drafter, Sampling(temperature=0), constraints.Regex("[a-c]{12}")).text
            assert re.fullmatch("[a-c]{12}", text), f"drafts of {name}: the constraint [a-c]{{12}} gave {text!r}"

    def test_dumped_within_a_draft(self, bench: Bench) -> None:
        """Session: an answer that is dumped inside a draft continues elsewhere with the same draws and drafts.

        Of three letters, all equally likely, many drafts are right, and no draw depends on a logit (clause 16).
        """
        rule, session = constraints.Regex("[a-c]{12}"), _session(bench)
        drafts = _speculation(SuffixIndex(1), n_max=6)
        for _ in session.generate(
            UNIFORM, speculation=drafts, constraint=rule, stopping_criteria=[_at(5, StoppingAction.PAUSE)]
        ):
            pass
        restored = Session.restore(bench.context(), bench.vocab, session.dump())
        original, resumed = (either.generate(stopping_criteria=()).run() for either in (session, restored))
        assert resumed.tokens == original.tokens, "an answer that was dumped within a draft goes on with other tokens"
        assert resumed.speculation is not None, "an answer that was dumped within a draft goes on without drafts"
        bench.same(next_row(restored), next_row(session), "the next logits of an answer that was dumped within a draft")

    def test_in_a_full_context(self, bench: Bench) -> None:
        """Generation: an answer that fills the context is as long with drafts as without."""
        script = [token for token in bench.tokens(60, seed=5) if token not in bench.vocab.eog_ids]
        lengths = []
        for speculation in (None, _speculation(DraftFunction(lambda tokens, n: script[len(tokens) - N_PROMPT :][:n]))):
            session = Session(bench.context(n_ctx=32), bench.vocab)
            session.append_tokens(bench.tokens(N_PROMPT))
            answer = session.generate(Sampling(), sampler=Script(script), speculation=speculation).run()
            lengths.append(len(answer.tokens))
        assert lengths[0] == lengths[1], (
            f"an answer in a context with room for 12 tokens has {lengths[0]} of them, {lengths[1]} with drafts"
        )

    def test_a_draft_model(self, bench: Bench) -> None:
        """Generation: a model with a draft model gives the same answers, also after the history was changed."""
        bench.requires(EditLevel.TRUNCATE)
        with DraftModel(bench.context(n_seq_max=1), bench.vocab) as drafter:
            for seed in (0, 1, 0):
                tokens = [*bench.tokens(N_PROMPT - 4), *bench.tokens(4, seed=seed)]
                drafted = list(drafter.draft(tokens, 5).tokens)
                bench.chosen(tokens, drafted, "a draft")

    def test_below_truncate(self, bench: Bench) -> None:
        """Generation: at edit level REPLAY, drafting is off and says why; at higher levels it is on."""
        answer = _answer(bench, PromptLookup(2, 1), GREEDY)
        assert answer.speculation is not None, "an answer with drafts has no counts of them"
        off = f"edit level {EditLevel.REPLAY.name}" in answer.speculation.reason
        below = bench.edit_level < EditLevel.TRUNCATE
        assert off == below, (
            f"at edit level {bench.edit_level.name}, the reason why drafts are off is {answer.speculation.reason!r}"
        )

    @staticmethod
    def _drafters(bench: Bench) -> dict[str, Drafter]:
        """Drafters with right drafts, wrong drafts, both alternately, and repetitions of earlier text."""
        plain = _answer(bench, None, GREEDY).tokens
        second = [int(token) for token in np.argsort(_plain_rows(bench, plain), axis=1)[:, -2]]

        def right(tokens: Sequence[int], n: int) -> Sequence[int]:
            return plain[len(tokens) - N_PROMPT :][:n]

        def mixed(tokens: Sequence[int], n: int) -> Sequence[int]:
            return [0 if (len(tokens) + i) % 3 == 0 else token for i, token in enumerate(right(tokens, n))]

        return {
            "the plain answer": DraftFunction(right),
            "every third token wrong": DraftFunction(mixed),
            "the second best": DraftFunction(lambda tokens, n: second[len(tokens) - N_PROMPT :][:n]),
            "random tokens": DraftFunction(lambda tokens, n: bench.tokens(n, seed=len(tokens))),
            "prompt lookup": PromptLookup(3, 1),
        }


def _session(bench: Bench) -> Session:
    session = Session(bench.context(), bench.vocab)
    session.append_tokens(bench.tokens(N_PROMPT))
    return session


def _speculation(drafter: Drafter, n_max: int = 4) -> Speculation:
    return Speculation(drafter, n_max=n_max, adaptive=False)


def _answer(bench: Bench, drafter: Drafter | None, sampling: Sampling, spec: constraints.Spec | None = None) -> Answer:
    with _session(bench) as session:
        speculation = None if drafter is None else _speculation(drafter)
        return session.generate(sampling, speculation=speculation, constraint=spec).run()


def _plain_rows(bench: Bench, tokens: Sequence[int]) -> Rows:
    """The row before each token, decoded one by one after the prompt."""
    context = bench.context()
    first = bench.feed(context, bench.tokens(N_PROMPT))[-1:]
    return np.concatenate([first, bench.feed(context, tokens, chunk=1)])[:-1]


def _at(n: int, action: StoppingAction) -> StoppingCriterion:
    def decide(event: Event, draft: Draft) -> StoppingAction:
        return action if len(draft.tokens) == n else StoppingAction.NEXT

    return decide
