"""Speculative decoding over the backend's contexts: the same answers in fewer batches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import UNIFORM, fresh_row, next_row
from slm_conformance.suite.scripted import CancelsAfter, Script
from slm_conformance.suite.workshop import Rows
from slm_core import constraints
from slm_core.chat import Session
from slm_core.errors import ContextClosed, InvalidOption, InvalidSnapshot, SessionError
from slm_core.generation import Answer, Draft, Event, StoppingAction, StoppingCriterion
from slm_core.generation.events import SpeculationStats
from slm_core.generation.speculation import (
    Drafter,
    DraftFunction,
    DraftModel,
    PromptLookup,
    Speculation,
    SuffixIndex,
    accept_or_draw,
)
from slm_core.generation.speculation.dumped import DumpedSpeculation, read_speculation
from slm_core.generation.speculation.proposal import never
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel

N_PROMPT = 20
N_TOKENS = 12
GREEDY = Sampling(temperature=0, max_tokens=N_TOKENS)
N_DRAWS = 1000
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

    def test_counts(self, bench: Bench) -> None:
        """Generation: an answer counts rounds, drafted and accepted tokens; no draft exceeds ``n_max`` or the limit."""
        bench.requires(EditLevel.TRUNCATE)
        script = [token for token in bench.tokens(40, seed=5) if token not in bench.vocab.eog_ids][:19]
        for wrong in ([], [2, 3, 7, 12, 13, 17], list(range(19))):
            guesses = [(token + 1) % bench.vocab.size if i in wrong else token for i, token in enumerate(script)]

            def guessed(tokens: Sequence[int], n: int, guesses: Sequence[int] = guesses) -> Sequence[int]:
                return guesses[len(tokens) - N_PROMPT :][: n + 3]

            running = _session(bench).generate(
                Sampling(max_tokens=len(script)),
                sampler=Script(script),
                speculation=_speculation(DraftFunction(guessed)),
            )
            answer = running.run()
            assert answer.tokens == tuple(script), f"with wrong drafts at {wrong}, the answer is {answer.tokens}"
            stats, n_tokens, rounds, drafted, accepted = answer.speculation, 1, 0, 0, 0
            while n_tokens < len(script):
                n = min(4, len(script) - n_tokens - 1)
                hits = next((i for i in range(n) if n_tokens + i in wrong), n)
                rounds, drafted, accepted = rounds + (n > 0), drafted + n, accepted + hits
                n_tokens += hits + 1
            assert stats is not None, "an answer with drafts has no counts of them"
            counts = (stats.rounds, stats.drafted, stats.accepted, stats.acceptance)
            expected = (rounds, drafted, accepted, accepted / drafted)
            assert counts == expected, f"with wrong drafts at {wrong}, rounds and tokens count {counts}, not {expected}"
            assert min(stats.draft_s, stats.verify_s) > 0, f"drafts took no time: {stats}"

    def test_drafts_of_the_history(self, bench: Bench) -> None:
        """Generation: prompt lookup and the suffix index draft what followed the longest earlier match."""
        text = [token % 3 for token in bench.tokens(150, seed=9)]
        changed = [*text[:140], *(2 - token for token in text[140:])]
        growing = [text[: n + 1] for n in range(40)]
        for most, least in ((4, 2), (3, 3), (2, 1)):
            lookup = PromptLookup(most, least)
            for history in (*growing, text, changed, text[:20]):
                expected = _what_followed([history], least, most)[-1]
                drafted = list(lookup.draft(history, 5).tokens)
                assert drafted == expected, f"{lookup!r} drafts {drafted} after {history}, not {expected}"
        for least, corpus in ((2, []), (5, []), (1, [text[50:90]])):
            index = SuffixIndex(least, corpus=corpus)
            for history, before in (*((each, []) for each in growing), (text, []), (changed, [text])):
                followed = _what_followed([*corpus, *before, history], least, len(history))
                drafted = list(index.draft(tuple(history), 5).tokens)
                assert drafted in followed, f"{index!r} drafts {drafted} after {history}, not one of {followed}"
        small = SuffixIndex(2, max_tokens=256)
        for n in (100, 300, 301, 500):
            repeated = [i % 7 for i in range(n)]
            drafted, expected = list(small.draft(repeated, 9).tokens), [(n + i) % 7 for i in range(9)]
            assert drafted == expected, f"{small!r} drafts {drafted} after {n} tokens of a pattern, not {expected}"
        with bench.refused("a suffix index of 255 tokens", InvalidOption):
            SuffixIndex(max_tokens=255)
        once = list(range(1000, 1256))  # with the end of the text before, one token more than a small index holds
        for token, expected in ((1127, []), (1130, [1131, 1132, 1133])):
            drafted = list(SuffixIndex(1, max_tokens=256, corpus=[once]).draft((token,), 3).tokens)
            assert drafted == expected, f"an index that holds the last 128 of {once} drafts {drafted} after {token}"
        PromptLookup(16, 16)
        for most, least in ((3, 4), (17, 2), (2, 0)):
            with bench.refused(f"n-grams from {least} to {most}", InvalidOption):
                PromptLookup(most, least)

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
        missing = int(np.sort(np.argsort(-row)[:8])[-1])  # the last candidate of the chain; never drafted
        options = Sampling(
            top_k=20, top_p=1.0, min_p=0.0, temperature=1.5, seed=2, banned_tokens=tuple(range(missing, len(row)))
        )
        drafts, chain = (
            SamplerChain(options),
            SamplerChain(replace(options, top_k=8, temperature=0.8, seed=3, banned_tokens=())),
        )
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

        The answer has three letters, all equally likely: many drafts are right, and no draw depends on a logit (clause
        16). All drafts of the draft model are accepted, because they have the distribution of the answer.
        """
        rule = constraints.Regex("[a-c]{12}")
        cases: list[tuple[Callable[[], Drafter], constraints.Spec | None]] = [(lambda: SuffixIndex(1), rule)]
        if bench.edit_level >= EditLevel.TRUNCATE:
            drawn = replace(UNIFORM, seed=4)
            cases.append((lambda: DraftModel(bench.context(n_seq_max=1), bench.vocab, sampling=drawn), None))
        for drafter, spec in cases:
            session, drafts = _session(bench), _speculation(drafter(), n_max=6)
            pause = [_at(5, StoppingAction.PAUSE)]
            for _ in session.generate(UNIFORM, speculation=drafts, constraint=spec, stopping_criteria=pause):
                pass
            restored = Session.restore(bench.context(), bench.vocab, session.dump())
            new_drafts = None
            if spec is None:
                with bench.refused("an answer that continues without its draft model", SessionError):
                    restored.generate(stopping_criteria=())
                new_drafts = _speculation(drafter(), n_max=6)
            what = f"an answer that was dumped within a draft of {drafts.drafter!r}"
            resumed = restored.generate(stopping_criteria=(), speculation=new_drafts).run()
            original = session.generate(stopping_criteria=()).run()
            assert resumed.tokens == original.tokens, f"{what} continues with other tokens"
            counts = [
                None if stats is None else (stats.rounds, stats.drafted, stats.accepted)
                for stats in (resumed.speculation, original.speculation)
            ]
            assert counts[0] is not None, f"{what} continues without drafts"
            assert spec is not None or counts[0] == counts[1], f"{what} continues with rounds and tokens {counts}"
            bench.same(next_row(restored), next_row(session), f"the next logits of {what}")

    def test_damaged_drafts(self, bench: Bench) -> None:
        """Session: the speculation in a dump is restored as it was; a damaged one is refused."""
        n_vocab = bench.vocab.size
        drawn = (np.array([3, n_vocab - 1]), np.array([0.25, 0.75]))
        settings = Speculation(PromptLookup(5, 3), n_max=7, adaptive=False)
        stats = SpeculationStats(3, 11, 4, 0.5, 0.25, 2, 1)
        queue = ((4, None), (0, drawn), (n_vocab - 1, None), (7, (np.array([7]), np.array([1.0]))))
        dumped = DumpedSpeculation(settings, queue, stats, in_round=True)
        meta, data = dumped.meta(), dumped.draft_probabilities()
        read = read_speculation(json.loads(json.dumps(meta)), data, n_vocab)
        assert (read.meta(), read.draft_probabilities()) == (meta, data), f"{dumped} was restored as {read}"
        damaged: list[tuple[object, bytes]] = [({**meta, name: value}, data) for name, value in _damages(n_vocab)]
        counts = json.loads(json.dumps(meta))["stats"]
        damaged += [({**meta, "stats": {**counts, name: value}}, data) for name, value in _WRONG_STATS]
        damaged += [({name: value for name, value in meta.items() if name != missing}, data) for missing in meta]
        damaged += [([], data), ({**meta, "more": 1}, data), (meta, data[:-1]), (meta, data + b"\0"), (meta, b"")]
        for ids, shares in (
            ([3, n_vocab], [0.5, 0.5]),
            ([-1, 3], [0.5, 0.5]),
            ([1, 2], [-0.1, 1.0]),
            ([1, 2], [0.0, 1.1]),
        ):
            wrong = replace(dumped, queue=((0, (np.array(ids), np.array(shares))), queue[3]))
            damaged.append((meta, wrong.draft_probabilities()))
        damaged += [(meta, b"\0" * 4), (meta, (n_vocab + 1).to_bytes(4, "little") + bytes(12 * n_vocab + 12))]
        for wrong_meta, wrong_data in damaged:
            with bench.refused(f"the speculation {wrong_meta} with {len(wrong_data)} bytes", InvalidSnapshot):
                read_speculation(wrong_meta, wrong_data, n_vocab)
        longest = read_speculation({**meta, "queue": [1] * 64, "drawn": [False] * 64}, b"", n_vocab)
        assert longest.queue == ((1, None),) * 64, f"64 drafted tokens were restored as {longest.queue}"
        for accepted in (1, 64):
            assert Speculation(PromptLookup(), accepted).n_max == accepted
        for n_max, adaptive in ((0, True), (65, True), (True, True), (2.0, True), (2, 1)):
            with bench.refused(f"speculation with n_max={n_max}, adaptive={adaptive}", InvalidOption):
                Speculation(PromptLookup(), n_max, adaptive)  # type: ignore[arg-type]

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
        context = bench.context(n_ctx=64, n_seq_max=1, n_batch=8)
        with DraftModel(context, bench.vocab) as drafter:
            for seed in (0, 1, 0):
                tokens = [*bench.tokens(N_PROMPT - 4), *bench.tokens(4, seed=seed)]
                for n in (1, 5):
                    proposal = drafter.draft(tokens, n)
                    drafted = list(proposal.tokens)
                    assert not proposal.draft_probabilities, f"greedy drafts have {proposal.draft_probabilities}"
                    bench.chosen(tokens, drafted, "a draft")
                    whole = len(drafted) == n or drafted[-1] in bench.vocab.eog_ids
                    assert whole, f"a draft of {n} tokens has {len(drafted)}"
            fits, too_long = bench.tokens(context.n_ctx - 2, seed=2), bench.tokens(context.n_ctx - 1, seed=2)
            assert drafter.draft(fits, 3).tokens, "a draft that just fits the context of the draft model is empty"
            for history, cancelled in (
                (too_long, never),
                ([bench.vocab.size, *tokens], never),
                (tokens, CancelsAfter(2)),
            ):
                drafted = list(drafter.draft(history, 3, cancelled).tokens)
                assert not drafted, f"a draft of {len(history)} tokens that cannot be made has {drafted}"
            bench.chosen(tokens, list(drafter.draft(tokens, 5).tokens), "a draft after one that was cancelled")
        with bench.refused("a context that its drafter closed", ContextClosed):
            context.length(0)
        with bench.context(n_seq_max=1) as context:
            few = DraftModel(context, bench.vocab, n_vocab=9).draft(tokens, 5).tokens
            assert max(few) < 9, f"drafts for a vocabulary of 9 tokens are {few}"

    def test_drawn_drafts(self, bench: Bench) -> None:
        """Generation: a draft model with sampling draws from its chain's distribution, by seed and position alone."""
        bench.requires(EditLevel.TRUNCATE)
        tokens, drafts = bench.tokens(N_PROMPT), []
        sampling = Sampling(top_k=3, top_p=1, min_p=0, temperature=2.0, repeat_penalty=1.5, seed=1)
        for options in (sampling, UNIFORM, UNIFORM, replace(UNIFORM, seed=12)):
            context = bench.context(n_seq_max=1)
            drafts.append(DraftModel(context, bench.vocab, sampling=options).draft(tokens, 6))
        rows = bench.feed(bench.context(), [*tokens, *drafts[0].tokens])[N_PROMPT - 1 : -1]
        chain = SamplerChain(sampling)
        chain.set_history(tokens)
        for token, (ids, shares), row in zip(drafts[0].tokens, drafts[0].draft_probabilities, rows, strict=True):
            best, chain_shares = chain.distribution(np.asarray(row, np.float32))
            chain.accept(token)
            assert token in ids.tolist(), f"token {token} was drafted from {ids}"
            assert len(ids) == 3, f"with top_k=3, a token was drawn from {ids}"
            if ids.tolist() == best.tolist():  # else two logits are within the tolerance
                assert np.allclose(shares, chain_shares, atol=0.05), (
                    f"drafted from {shares}, the chain has {chain_shares}"
                )
        first, repeated, other = (draft.tokens for draft in drafts[1:])
        assert first == repeated != other, f"with two seeds, drafts are {first}, {repeated} and {other}"

    def test_below_truncate(self, bench: Bench) -> None:
        """Generation: at edit level REPLAY, drafting is off and says why; at higher levels it is on."""
        answer = _answer(bench, PromptLookup(2, 1), GREEDY)
        assert answer.speculation is not None, "an answer with drafts has no counts of them"
        off = f"edit level {EditLevel.REPLAY.name}" in answer.speculation.reason
        below = bench.edit_level < EditLevel.TRUNCATE
        if below:
            with bench.refused("a draft model that cannot take a token back", InvalidOption):
                DraftModel(bench.context(), bench.vocab)
        assert off == below, (
            f"at edit level {bench.edit_level.name}, the reason why drafts are off is {answer.speculation.reason!r}"
        )
        drafted = _answer(bench, DraftFunction(lambda tokens, n: [tokens[-1]] * n), GREEDY).speculation
        assert drafted is not None and (drafted.drafted == 0) == below, f"drafts at {bench.edit_level.name}: {drafted}"

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


def _damages(n_vocab: int) -> Iterator[tuple[str, object]]:
    """Fields of the speculation in ``test_damaged_drafts``, each with a value that is refused."""
    yield from (("in_round", 1), ("n_max", 0), ("n_max", 65), ("adaptive", 1), ("stats", []), ("drafter", "mtp"))
    for queue in ([4, 0, 5], [4, 0, 5, n_vocab], [4, -1, 5, 6], [4, True, 5, 6], [4, 0.0, 5, 6], "abcd"):
        yield "queue", queue
    yield "queue", {4: 0, 0: 0, 5: 0, 6: 0}
    yield from (("drawn", [False, True, True]), ("drawn", "abcd"), ("drawn", [True] * 4), ("drawn", [False] * 4))
    lookup = {"drafter": "prompt_lookup"}
    yield from (("drafter", {**lookup, "max_ngram": value}) for value in (True, 2.0, 99))
    yield from (("drafter", {**lookup, "other": 1}), ("drafter", {"drafter": "other"}), ("drafter", {}))
    yield from (("drafter", {"drafter": "mtp", name: 1}) for name in ("other", "seq_id"))


_WRONG_STATS = (
    *(("rounds", value) for value in (-1, 1.5, True, "1")),
    *(("draft_s", value) for value in (-0.1, True, "1", float("inf"), float("nan"))),
    ("more", 1),
)


def _what_followed(texts: Sequence[list[int]], least: int, most: int, n: int = 5) -> list[list[int]]:
    """The n tokens after each earlier match of the longest suffix of the last text; [] if no suffix matches.

    After a match in the last text, tokens past its end are copies of the tokens after the match.
    """
    history = texts[-1]
    for size in range(min(most, len(history)), least - 1, -1):
        suffix, followed = history[-size:], []
        for text in texts:
            for end in range(size, len(text) + (text is not history)):
                if text[end - size : end] == suffix:
                    followed.append(text[end : end + n] if text is not history else (text[end:] * n)[:n])
        if followed:
            return followed
    return [[]]


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
