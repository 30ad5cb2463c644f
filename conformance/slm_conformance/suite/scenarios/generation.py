"""Generation over the backend's logits: stopping criteria, limits, stop texts, whole characters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench, contents_of, log_softmax
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import fresh_row, next_row
from slm_conformance.suite.scripted import Script, SlowScript
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.errors import ContextFull, InvalidOption
from slm_core.generation import Answer, Draft, Event, FinishReason, StoppingAction, StoppingCriterion, TokenLogprob
from slm_core.generation.scoring import score_windows
from slm_core.sampling import LogitsProcessor, Sampling

N_PROMPT = 20
GREEDY = Sampling(temperature=0, max_tokens=12)
EOG_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>")
"""Control tokens that end an answer in every family that has them."""


class TestGeneration(Scenarios):
    """Generation: tokens, text and limits follow from the logits and options; text has whole characters."""

    above_contract = True

    def test_greedy_is_the_largest_logit(self, bench: Bench) -> None:
        """Clause 9: each greedy token has the largest logit, if its lead exceeds the allowed error."""
        bench.chosen(bench.tokens(N_PROMPT), _session(bench).generate(GREEDY).run().tokens, "a greedy answer")

    def test_log_probabilities(self, bench: Bench) -> None:
        """Generation: an event's logprob is the log softmax of the raw row, whatever the sampling options."""
        sampling, observed = Sampling(temperature=1.5, top_k=5, seed=3, max_tokens=8), []

        def look(event: Event, draft: Draft) -> StoppingAction:
            if event.token is not None:
                observed.append(event.logprob)
            return StoppingAction.NEXT

        events = list(_session(bench).generate(sampling))
        _session(bench).generate(sampling, stopping_criteria=[look]).run()
        logprobs = [event.logprob for event in events if event.token is not None]
        tokens = [event.token for event in events if event.token is not None]
        bench.log_probabilities_agree(bench.tokens(N_PROMPT), tokens, logprobs, "the events of an answer")
        assert observed == logprobs, "a stopping criterion sees other log probabilities than who reads the events"

    def test_likeliest_tokens(self, bench: Bench) -> None:
        """Generation: with ``logprobs``, events and answer have the likeliest tokens, before and after sampling."""
        rows: list[NDArray[np.float32]] = []
        histories: list[list[int]] = []

        def ban_the_best(tokens: Sequence[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
            rows.append(row.copy())
            histories.append(list(tokens))
            row[row.argmax()] = -np.inf
            return row

        for n, k in ((0, 5), (3, 5), (5, 2)):
            rows.clear()
            histories.clear()
            sampling = Sampling(temperature=1.5, top_k=k, top_p=1, min_p=0, seed=3, max_tokens=6, logprobs=n)
            running = _session(bench).generate(sampling, logits_processors=[ban_the_best])
            events = list(running)
            tokens = [*bench.tokens(N_PROMPT), *(event.token for event in events if event.token is not None)]
            expected_histories = [tokens[: N_PROMPT + i] for i in range(len(events))]
            assert histories == expected_histories, f"a logits processor got the tokens {histories}"
            assert running.answer.logprobs is not None, f"an answer with logprobs={n} has none"
            for event, row, answered in zip(events, rows, running.answer.logprobs, strict=True):
                ranked = np.argsort(-row, kind="stable")
                remaining = ranked[1:]  # after the processor
                model, sampled = log_softmax(row), np.full(len(row), -np.inf)
                sampled[remaining[:k]] = log_softmax(row[remaining[:k]] / 1.5)
                assert event.token is not None and event.logprobs is not None, f"{event!r} has no token or logprobs"
                chosen = (event.logprob, event.logprobs.chosen)
                expected = (float(model[event.token]), float(sampled[event.token]))
                assert chosen == pytest.approx(expected, abs=1e-5), (
                    f"{chosen} before and after sampling, not {expected}"
                )
                for name, pairs, best, values in (
                    ("model", event.logprobs.model, ranked[:n].tolist(), model),
                    ("sampled", event.logprobs.sampled, remaining[: min(n, k)].tolist(), sampled),
                ):
                    assert [token for token, _ in pairs] == best, f"the likeliest tokens, {name}, are {pairs}"
                    assert [value for _, value in pairs] == pytest.approx(values[best].tolist(), abs=1e-5), name
                top = tuple((token, _spelled(bench, token), value) for token, value in event.logprobs.model)
                whole = TokenLogprob(event.token, _spelled(bench, event.token), event.logprob, top)
                assert answered == whole, f"the answer has {answered}, the event {whole}"
        rule = Regex("[ab]{4}")
        equal: LogitsProcessor = lambda tokens, row: np.zeros(len(row), np.float64)  # noqa: E731
        text = _session(bench).generate(Sampling(seed=1), constraint=rule, logits_processors=[equal]).run().text
        assert set(text) <= set("ab") and len(text) == 4, f"a processor gave tokens back that {rule} excludes: {text!r}"
        wrong: tuple[LogitsProcessor, ...] = (
            lambda tokens, row: row[:-1],
            lambda tokens, row: row.astype(np.int32),
            lambda tokens, row: np.where(row == row.max(), np.float32(np.nan), row),
        )
        for processor in wrong:
            with bench.refused("a logits processor that returns no row of floats", InvalidOption):
                _session(bench).generate(GREEDY, logits_processors=[processor]).run()
        for processors in (equal, "abc", [None]):
            with bench.refused(f"the logits processors {processors!r}", InvalidOption):
                _session(bench).generate(GREEDY, logits_processors=processors)  # type: ignore[arg-type]
        session = _session(bench)
        paused = session.generate(
            Sampling(temperature=0, max_tokens=4, logprobs=1), stopping_criteria=[_at(2, StoppingAction.PAUSE)]
        )
        for _event in paused:
            pass
        restored = Session.restore(bench.context(), bench.vocab, session.dump())
        logprobs = restored.generate(stopping_criteria=()).run().logprobs
        assert logprobs is None, f"an answer that was restored from a dump has the logprobs {logprobs}"
        plain = _session(bench).generate(Sampling(temperature=0, max_tokens=2)).run()
        assert plain.logprobs is None, "an answer without logprobs has some"

    @staticmethod
    def _plain(bench: Bench, n: int) -> list[int]:
        """Tokens that are plain text: single letters, for any model."""
        letters = [bench.vocab.encode(letter, add_special=False, parse_special=False) for letter in "abcdefghij"]
        return [letters[i % len(letters)][-1] for i in range(n)]

    def test_stopping_criteria(self, bench: Bench) -> None:
        """Generation: FINISH ends as ``stop``, STOP as ``cancelled``, CONTINUE and NEXT end nothing."""
        script = self._plain(bench, 6)
        ends: dict[StoppingAction | bool, tuple[int, FinishReason]] = {
            StoppingAction.FINISH: (3, FinishReason.STOP),
            StoppingAction.STOP: (3, FinishReason.CANCELLED),
            StoppingAction.CONTINUE: (6, FinishReason.LENGTH),
            StoppingAction.NEXT: (6, FinishReason.LENGTH),
            True: (3, FinishReason.STOP),
            False: (6, FinishReason.LENGTH),
        }
        for action, (n_tokens, reason) in ends.items():
            answer = _say(bench, script, stopping_criteria=[_at(3, action)])
            assert (len(answer.tokens), answer.finish_reason) == (n_tokens, reason), (
                f"a stopping criterion that says {action} after token 3 of 6: {len(answer.tokens)} tokens,"
                f" ended with {answer.finish_reason.value}; expected {n_tokens}, {reason.value}"
            )
        with bench.refused("a stopping criterion that says 1", InvalidOption):
            _say(bench, script, stopping_criteria=[lambda event, draft: 1])  # type: ignore[list-item, return-value]

    def test_stopping_criteria_in_order(self, bench: Bench) -> None:
        """Generation: after NEXT the next stopping criterion is asked; after any other result it is not."""
        for action, n_asked in ((StoppingAction.NEXT, 4), (StoppingAction.CONTINUE, 0), (StoppingAction.FINISH, 0)):
            calls: list[int] = []

            def second(event: Event, draft: Draft, calls: list[int] = calls) -> StoppingAction:
                calls.append(len(draft.tokens))
                return StoppingAction.NEXT

            _say(bench, self._plain(bench, 4), stopping_criteria=[_always(action), second])
            assert len(calls) == n_asked, (
                f"the stopping criterion after one that says {action.name} was asked {len(calls)} times, not {n_asked}"
            )

    def test_a_criterion_does_not_lift_the_limit(self, bench: Bench) -> None:
        """Generation: no result of a stopping criterion disables the token limit."""
        for action in (StoppingAction.CONTINUE, StoppingAction.PAUSE):
            answer = _run(_session(bench), self._plain(bench, 6), stopping_criteria=[_always(action)])
            assert (len(answer.tokens), answer.finish_reason) == (6, FinishReason.LENGTH), (
                f"with a stopping criterion that says {action.name}, 6 tokens at most became {len(answer.tokens)},"
                f" ended with {answer.finish_reason.value}"
            )

    def test_paused_anywhere(self, bench: Bench) -> None:
        """Generation: PAUSE after any token, then ``generate()``: events, text and next logits are unchanged.

        Nothing is decoded again, so the calls are the same, and clause 9 makes the draws the same.
        """
        sampling = Sampling(temperature=0.9, seed=5, max_tokens=9)
        session = _session(bench)
        uninterrupted = session.generate(sampling).run()
        after = next_row(session)
        for n in range(1, len(uninterrupted.tokens)):
            session = _session(bench)
            paused = session.generate(sampling, stopping_criteria=[_at(n, StoppingAction.PAUSE)])
            first = "".join(event.text for event in paused)
            assert paused.paused, f"a stopping criterion said PAUSE after token {n}, but the generation is not paused"
            remainder = "".join(event.text for event in session.generate())
            assert paused.answer.tokens == uninterrupted.tokens, f"paused after token {n}, the answer has other tokens"
            assert first + remainder == uninterrupted.text, (
                f"paused after token {n}, the text is {first + remainder!r}, not {uninterrupted.text!r}"
            )
            bench.same(next_row(session), after, f"the next logits of an answer that was paused after token {n}")

    def test_paused_in_a_character(self, bench: Bench) -> None:
        """Generation: a pause inside a character or a partial stop text does not change the text."""
        script = bench.vocab.encode("aé日🙂 bcdé🙂x", add_special=False, parse_special=False)
        text = _text(bench, script)
        for stop in (), (text[7:-1],), (text[5:] + "!",):
            expected = _say(bench, script, stop=stop).text
            answer = _say(bench, script, stop=stop, stopping_criteria=[_always(StoppingAction.PAUSE)])
            assert answer.text == expected, (
                f"paused after each token, with stop texts {stop}, {text!r} came out as {answer.text!r},"
                f" expected {expected!r}"
            )

    def test_limits(self, bench: Bench) -> None:
        """Generation: ``max_tokens`` of 0, 1 and 2 give 0, 1 and 2 tokens, and end with ``length``."""
        for limit in (0, 1, 2):
            answer = _say(bench, self._plain(bench, 5), limit=limit)
            assert (len(answer.tokens), answer.finish_reason) == (limit, FinishReason.LENGTH), (
                f"max_tokens={limit} gave {len(answer.tokens)} tokens, ended with {answer.finish_reason.value}"
            )
            assert answer.usage.completion_tokens == limit, f"usage counts {answer.usage.completion_tokens} of {limit}"
            speed, first = answer.prefill_tokens_per_second, answer.timings.first_token_s
            assert (speed > 0) == (first is not None) == (limit > 0), f"{answer.timings} of {limit} tokens"
            assert answer.logprobs is None, f"an answer of {limit} tokens without logprobs has {answer.logprobs}"

    def test_cancelled_and_timed_out(self, bench: Bench) -> None:
        """Generation: ``cancel`` and a timeout end an answer as ``cancelled``, with the text that was held back."""
        script = bench.vocab.encode("abcdefgh", add_special=False, parse_special=False)
        held_back = _text(bench, script[:3])[-2:]
        for way in ("a call of cancel()", "a timeout"):
            session, sampling = _session(bench), Sampling(max_tokens=8, stop=(held_back + "!",))
            pause = [_at(3, StoppingAction.PAUSE)]
            running = session.generate(sampling, sampler=Script(script), stopping_criteria=pause)
            texts = [event.text for event in running]
            if way == "a timeout":
                last = list(session.generate(timeout=1e-9))
            else:
                session.generate()
                running.cancel()
                last = list(running)
            answer, text = running.answer, _text(bench, script[:3])
            assert "".join(texts) == text[:-2], (
                f"before its end, an answer with the stop text {held_back + '!'!r} is {texts}"
            )
            assert [(event.token, event.text) for event in last] == [(None, held_back)], (
                f"{way} gives the events {last}"
            )
            end = (answer.tokens, answer.text, answer.finish_reason, answer.timed_out, answer.stop)
            expected = (tuple(script[:3]), text, FinishReason.CANCELLED, way == "a timeout", None)
            assert end == expected, f"after {way}, an answer has {end}, expected {expected}"
        paused = _session(bench).generate(
            Sampling(max_tokens=2), timeout=60, stopping_criteria=[_at(1, StoppingAction.PAUSE)]
        )
        list(paused)
        assert 0 < paused.time_left_s < 60, f"after a token, {paused.time_left_s} of 60 seconds are left"
        time_left_s = paused.time_left_s
        time.sleep(0.002)
        assert paused.time_left_s == time_left_s, "the timeout of a paused answer runs"
        for seconds in (0, -1, math.inf, math.nan, True, "1"):
            with bench.refused(f"timeout={seconds!r}", InvalidOption):
                _session(bench).generate(GREEDY, timeout=seconds)  # type: ignore[arg-type]

    def test_stop_text_across_tokens(self, bench: Bench) -> None:
        """Generation: a stop text ends the answer and is not shown, however tokens split it."""
        script = bench.vocab.encode("abcdefghi", add_special=False, parse_special=False)
        text = _text(bench, script)
        for first in range(1, len(text) - 1):
            for last in range(first + 1, len(text) + 1):
                stop = text[first:last]
                self._stops(bench, script, stop, text.partition(stop)[0])

    def test_the_first_of_several_stop_texts(self, bench: Bench) -> None:
        """Generation: with several stop texts, the answer ends before the one that is complete first."""
        script = bench.vocab.encode("hello dog, the assistant", add_special=False, parse_special=False)
        words = [token for token in script if len(_text(bench, [token])) > 2]
        for token in words:
            word = _text(bench, [token])
            stops = (word[-1:], word[1:], word[:2] + "!")
            for several in (stops, stops[::-1], (word[1:], word[-2:-1])):
                answer = _say(bench, [script[0], token, script[-1]], stop=several)
                text = _text(bench, [script[0], token, script[-1]])
                _, start = min((text.find(stop) + len(stop), text.find(stop)) for stop in several if stop in text)
                assert answer.text == text[:start], (
                    f"with stop texts {several}, {text!r} ended as {answer.text!r}, expected {text[:start]!r}"
                )

    def test_a_criterion_that_raises_at_the_end(self, bench: Bench) -> None:
        """Generation: an answer that has ended stays ended if a stopping criterion then raises."""
        letters, (end, *_) = self._plain(bench, 2), sorted(bench.vocab.eog_ids)

        def raise_at_end(event: Event, draft: Draft) -> StoppingAction:
            if draft.tokens[-1] == end:
                raise KeyError("a stopping criterion's own error")
            return StoppingAction.NEXT

        script = [*letters, end, *letters]
        running = _session(bench).generate(
            Sampling(max_tokens=5), sampler=Script(script), stopping_criteria=[raise_at_end]
        )
        with pytest.raises(KeyError):
            list(running)
        assert not list(running), "an answer continues after its end, where a stopping criterion raised there"
        answer = running.answer
        assert (answer.tokens, answer.finish_reason) == ((*letters, end), FinishReason.STOP), (
            f"after a stopping criterion raised at its end, an answer has tokens {answer.tokens},"
            f" ended with {answer.finish_reason}"
        )

    def test_stopping_criteria_stay_after_a_pause(self, bench: Bench) -> None:
        """Generation: after a pause, stopping criteria and ``on_event`` stay unless they are passed again."""
        reported: list[int | None] = []
        session, script = _session(bench), self._plain(bench, 6)
        stopping_criteria = [_at(2, StoppingAction.PAUSE), _at(4, StoppingAction.FINISH)]
        events = session.generate(
            Sampling(max_tokens=6),
            sampler=Script(script),
            stopping_criteria=stopping_criteria,
            on_event=_tokens_to(reported),
        )
        for _event in events:
            pass
        answer = session.generate().run()
        assert len(answer.tokens) == 4, (
            f"a stopping criterion that ends an answer at token 4 was lost: it has {len(answer.tokens)}"
        )
        assert reported == script[:4], f"on_event saw {len(reported)} of 4 tokens of an answer that was paused"

    def _stops(self, bench: Bench, script: Sequence[int], stop: str, before: str) -> None:
        texts = []
        session = _session(bench, n=2)
        running = session.generate(Sampling(max_tokens=len(script), stop=(stop,)), sampler=Script(script))
        for event in running:
            texts.append(event.text)
        session.close()
        assert "".join(texts) == before, f"stop text {stop!r}: {''.join(texts)!r} was shown, expected {before!r}"
        assert running.answer.text == before, f"stop text {stop!r}: the answer's text is {running.answer.text!r}"
        assert (running.answer.finish_reason, running.answer.stop) == (FinishReason.STOP, stop), (
            f"stop text {stop!r}: ended with {running.answer.finish_reason.value} at {running.answer.stop!r}"
        )

    def test_what_only_begins_a_stop_text(self, bench: Bench) -> None:
        """Generation: text that only begins like a stop text is shown."""
        script = bench.vocab.encode("abcdefgh", add_special=False, parse_special=False)
        text = _text(bench, script)
        answer = _say(bench, script, stop=(text[4:] + "!", text[2:5] + "?"))
        assert answer.text == text, f"nothing stopped it, but of {text!r} only {answer.text!r} came out"

    def test_characters_are_whole(self, bench: Bench) -> None:
        """Generation: joined events are the tokens' bytes as UTF-8, and no event ends inside a character."""
        script = bench.vocab.encode("Grüße, 日本語 🙂🙃 é", add_special=False, parse_special=False)
        data = b"".join(bench.vocab.token_bytes(token) for token in script)
        texts = _shown(bench, script)
        assert "".join(texts) == data.decode(), f"{''.join(texts)!r} came out of {data!r}"
        assert not any("\ufffd" in part for part in texts), f"an event shows a part of a character: {texts}"

    def test_random_bytes(self, bench: Bench) -> None:
        """Generation: the text of any bytes equals their UTF-8 decoding with replacement."""
        script = [token for token in bench.tokens(150, seed=21) if token not in bench.vocab.eog_ids]
        data = b"".join(bench.vocab.token_bytes(token) for token in script)
        text, expected = "".join(_shown(bench, script)), data.decode("utf-8", "replace")
        assert text == expected, f"random tokens came out as {text!r}, their bytes are {expected!r}"

    def test_every_end_of_generation(self, bench: Bench) -> None:
        """Generation: each EOG token ends the answer with ``stop`` and adds no text."""
        encode = bench.vocab.encode
        spelled = [encode(text, add_special=False, parse_special=True) for text in EOG_TEXTS]
        control = {ids[0] for ids in spelled if len(ids) == 1 and not bench.vocab.token_bytes(ids[0])}
        eog = control | set(bench.vocab.eog_ids) | ({bench.vocab.eos} if bench.vocab.eos is not None else set())
        assert eog, "the model has no token that ends an answer"
        letters = self._plain(bench, 2)
        for token in sorted(eog):
            name = bench.vocab.token_bytes(token, special=True)
            answer = _say(bench, [*letters, token, *letters], limit=5)
            assert answer.finish_reason is FinishReason.STOP, f"{name!r} ({token}) does not end an answer"
            assert answer.tokens == (*letters, token), f"{name!r} ({token}) is not the last token of its answer"
            assert answer.text == _text(bench, letters), f"{name!r} ({token}) became text: {answer.text!r}"

    def test_cancelled_in_prefill(self, bench: Bench) -> None:
        """Generation: after a cancellation in prefill, only the running batch is finished."""
        session = Session(bench.context(n_batch=8), bench.vocab)
        session.append_tokens(bench.tokens(60))
        batches: list[int] = []

        def cancelled() -> bool:
            batches.append(session.context.length(session.seq_id))
            return len(batches) > 3

        assert session.next_logits(cancelled) is None, "a prefill that was cancelled gave logits"
        n_decoded = session.context.length(session.seq_id)
        assert n_decoded == batches[-1] <= 24, f"cancelled after 3 batches of 8, but {n_decoded} tokens were decoded"
        bench.agree(next_row(session), fresh_row(bench, session), "the next logits after a prefill cancelled half-way")

    def test_a_full_context(self, bench: Bench) -> None:
        """Generation: an answer that fills the context ends with ``length``; the context stays usable."""
        context = bench.context(n_ctx=32, n_seq_max=2)
        session = Session(context, bench.vocab, seq_id=0)
        session.append_tokens(bench.tokens(N_PROMPT))
        answer = session.generate(Sampling(), sampler=Script(self._plain(bench, 3))).run()
        assert answer.finish_reason is FinishReason.LENGTH, f"it ended with {answer.finish_reason.value}"
        assert len(answer.tokens) >= 12, f"with room for 12 tokens after the prompt, it has {len(answer.tokens)}"
        with bench.refused("a prompt where there is no room", ContextFull, context=context):
            context.decode(bench.batch(context, (1, 0, bench.tokens(1))))
        session.close()
        rows = bench.feed(context, bench.tokens(8), seq_id=1)
        bench.agree(rows, bench.reference().decode(bench.tokens(8)), "a prompt in a context that was full")

    def test_usage(self, bench: Bench) -> None:
        """Generation: usage counts the prompt's tokens, how many of them were cached, and the answer's tokens."""
        session = _session(bench)
        session.next_logits()
        session.append_tokens(bench.tokens(5, seed=2))
        usage = _run(session, self._plain(bench, 4)).usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        assert counts == (N_PROMPT + 5, N_PROMPT, 4), f"prompt, cached and answer count {counts}, expected (25, 20, 4)"

    def test_scores(self, bench: Bench) -> None:
        """Generation: scores are log probabilities with the likeliest tokens; a text of any length has windows."""
        tokens, context = bench.tokens(45, seed=4), bench.context(n_batch=8)
        session = Session(context, bench.vocab)
        session.append_tokens(tokens[:3])
        before = (session.tokens, contents_of(context))
        for n in (0, 3):
            score = session.score(tokens[3:], top=n)
            what = f"a score with top={n}"
            bench.log_probabilities_agree(tokens[:3], tokens[3:], score.logprobs, what)
            total = math.fsum(score.logprobs)
            counts = (score.tokens, score.n_scored)
            assert counts == (tuple(tokens[3:]), 42), f"{what} has tokens and scored tokens {counts}"
            assert math.isclose(score.total, total), f"{what} has the total {score.total}, not {total}"
            perplexity = math.exp(-total / 42)
            assert math.isclose(score.perplexity, perplexity), f"{what} has {score.perplexity}, not {perplexity}"
            self._check_top(bench, tokens, score.top, 3 if n else 45, n)
            assert (session.tokens, contents_of(context)) == before, f"{what} changed the session"
        alone = score_windows(bench.context(n_ctx=256), tokens, top=2)
        assert math.isnan(alone.logprobs[0]) and alone.n_scored == 44, f"the first token of a text is in {alone!r}"
        self._check_top(bench, tokens, alone.top, 0, 2)
        one_by_one = score_windows(bench.context(n_batch=1), tokens[:6]).logprobs[1:]
        what = "a score in a context that decodes one token at a time"
        bench.log_probabilities_agree(tokens[:1], tokens[1:6], one_by_one, what)
        few = bench.context(n_ctx=16)
        n_ctx, half, text = few.n_ctx, few.n_ctx // 2, bench.tokens(3 * few.n_ctx - 3, seed=6)
        windowed = score_windows(few, text, top=1)
        assert windowed.tokens == tuple(text), "the score of a long text has other tokens"
        assert len(windowed.top) == len(text), f"of {len(text)} tokens, {len(windowed.top)} have likeliest tokens"
        for i, (logprob, pairs) in enumerate(zip(windowed.logprobs, windowed.top, strict=True)):
            is_likeliest = bool(pairs) and pairs[0][0] == text[i]
            less = (
                i == 0 or logprob < pairs[0][1] or (is_likeliest and math.isclose(logprob, pairs[0][1], abs_tol=1e-6))
            )
            assert less, f"token {text[i]} at {i} has log probability {logprob}, the likeliest is {pairs}"
        for start in range(0, len(text), half):
            window = text[start : start + n_ctx]
            first = start + (half if start else 1)
            part = windowed.logprobs[first : start + n_ctx]
            if part:
                what = f"the window of {n_ctx} tokens from {start} on"
                bench.log_probabilities_agree(window[: first - start], window[first - start :], part, what)
        for top in (-1, 1001, True, 1.0):
            with bench.refused(f"top={top}", InvalidOption):
                session.score(tokens, top=top)  # type: ignore[arg-type]

    @staticmethod
    def _check_top(bench: Bench, tokens: Sequence[int], top: Sequence[Any], start: int, n: int) -> None:
        """Require the n likeliest tokens, in order, for each token from ``start`` on; () for the first of a text."""
        expected_length = len(tokens) - start if n else 0
        assert len(top) == expected_length, f"{len(top)} positions have likeliest tokens, not {expected_length}"
        rows = log_softmax(bench.feed(bench.context(), tokens))
        for i, pairs in enumerate(top, start):
            if i == 0:
                assert pairs == (), f"before the first token, {pairs} are likely"
                continue
            values = np.array([value for _, value in pairs])
            row_values = rows[i - 1][[token for token, _ in pairs]]
            allowed = 4 * bench.tolerance.gap * float(np.linalg.norm(rows[i - 1])) + 1e-5
            assert len(pairs) == n and (np.diff(values) <= 0).all(), f"the {n} likeliest tokens at {i} are {pairs}"
            assert np.abs(values - np.sort(rows[i - 1])[::-1][:n]).max() <= allowed, f"at {i}, {pairs} are likely"
            assert np.abs(values - row_values).max() <= allowed, (
                f"at {i}, {pairs} are likely, their row has {row_values}"
            )

    def test_timings(self, bench: Bench) -> None:
        """Generation: timings divide the time of an answer into queue, prefill and decode; a reader adds none."""
        session, nap = _session(bench), 0.004
        session.next_logits()
        session.append_tokens(bench.tokens(5, seed=2))
        called = time.perf_counter()
        running = session.generate(Sampling(max_tokens=4), sampler=SlowScript(self._plain(bench, 4), nap))
        time.sleep(nap)
        started = time.perf_counter()
        with pytest.raises(KeyError):
            running.run()
        assert not math.isnan(next(running).logprob), "after run() raised, events have no log probabilities"
        first = time.perf_counter()
        for _event in running:
            time.sleep(nap)
        ended = time.perf_counter()
        answer = running.answer
        timings = answer.timings
        assert nap <= timings.queue_s <= first - called - nap, f"{timings} of an answer that waited {nap} s"
        assert 2 * nap <= timings.prefill_s <= first - started, f"{timings}, the first token took {first - started} s"
        spent = ended - first - 3 * nap
        assert 3 * nap <= timings.decode_s <= spent, f"{timings}, the other tokens took {spent} s"
        assert timings.first_token_s is not None, f"{timings} without the first token"
        assert 3 * nap <= timings.first_token_s <= first - called, (
            f"{timings}: the first token was after {first - called} s"
        )
        speeds = (answer.prefill_tokens_per_second, answer.tokens_per_second)
        expected = (5 / timings.prefill_s, 3 / timings.decode_s)
        assert speeds == pytest.approx(expected), f"tokens per second are {speeds}, by {timings} they are {expected}"
        short = _session(bench).generate(Sampling(max_tokens=1)).run()
        assert (short.tokens_per_second, short.timings.decode_s) == (0, 0), f"one token counts {short.timings}"


def _session(bench: Bench, n: int = N_PROMPT) -> Session:
    session = Session(bench.context(), bench.vocab)
    session.append_tokens(bench.tokens(n))
    return session


def _run(
    session: Session,
    script: Sequence[int],
    *,
    stopping_criteria: Sequence[StoppingCriterion] = (),
    stop: tuple[str, ...] = (),
    limit: int | None = None,
) -> Answer:
    """An answer with scripted tokens; it continues after every pause."""
    sampling = Sampling(max_tokens=len(script) if limit is None else limit, stop=stop)
    running = session.generate(sampling, sampler=Script(script), stopping_criteria=stopping_criteria)
    for _ in range(2 * len(script) + 2):
        for _event in running:
            pass
        if running.finished:
            return running.answer
        running = session.generate()
    return pytest.fail(f"an answer of {len(script)} tokens at most did not end", pytrace=False)


def _say(
    bench: Bench,
    script: Sequence[int],
    *,
    stopping_criteria: Sequence[StoppingCriterion] = (),
    stop: tuple[str, ...] = (),
    limit: int | None = None,
) -> Answer:
    """An answer with scripted tokens in a new session."""
    return _run(_session(bench), script, stopping_criteria=stopping_criteria, stop=stop, limit=limit)


def _shown(bench: Bench, script: Sequence[int]) -> list[str]:
    running = _session(bench).generate(Sampling(max_tokens=len(script)), sampler=Script(script))
    return [event.text for event in running]


def _tokens_to(tokens: list[int | None]) -> Callable[[Event], None]:
    return lambda event: tokens.append(event.token)


def _at(n: int, action: StoppingAction | bool) -> StoppingCriterion:
    """A stopping criterion that returns ``action`` after token ``n``, and otherwise NEXT."""
    return lambda event, draft: action if len(draft.tokens) == n else StoppingAction.NEXT


def _always(action: StoppingAction) -> StoppingCriterion:
    return lambda event, draft: action


def _spelled(bench: Bench, token: int) -> str:
    return bench.vocab.token_bytes(token, special=True).decode("utf-8", "replace")


def _text(bench: Bench, tokens: Sequence[int]) -> str:
    return b"".join(bench.vocab.token_bytes(token) for token in tokens).decode()
