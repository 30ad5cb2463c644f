"""Generation over the backend's logits: stopping criteria, limits, stop texts, whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import fresh_row, next_row
from slm_core.chat import Session
from slm_core.errors import ContextFull
from slm_core.generation import Answer, Draft, Event, FinishReason, StoppingAction, StoppingCriterion
from slm_core.sampling import Sampling

N_PROMPT = 20
GREEDY = Sampling(temperature=0, max_tokens=12)
EOG_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>")
"""Control tokens that end an answer in every family that has them."""


class Script:
    """A sampler that returns given tokens and ignores the logits."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._n_said = 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token."""
        token = self._tokens[self._n_said % len(self._tokens)]
        self._n_said += 1
        return token

    def accept(self, token: int) -> None:
        """Do nothing."""

    def set_history(self, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Go back to the first token."""
        self._n_said = 0

    def clone(self) -> Self:
        """A copy at the same token."""
        copied = type(self)(self._tokens)
        copied.set_state(self.state())
        return copied

    def state(self) -> bytes:
        """The number of sampled tokens."""
        return str(self._n_said).encode()

    def set_state(self, state: bytes) -> None:
        """Continue at a state."""
        self._n_said = int(state)


class TestGeneration(Scenarios):
    """Generation: tokens, text and limits follow from the logits and options; text has whole characters."""

    above_contract = True

    def test_greedy_is_the_largest_logit(self, bench: Bench) -> None:
        """Clause 9: each greedy token has the largest logit, if its lead exceeds the allowed error."""
        bench.chosen(bench.tokens(N_PROMPT), _session(bench).generate(GREEDY).run().tokens, "a greedy answer")

    def test_log_probabilities(self, bench: Bench) -> None:
        """Generation: an event's logprob is the log softmax of the raw row, whatever the sampling options."""
        session = _session(bench)
        events = list(session.generate(Sampling(temperature=1.5, top_k=5, seed=3, max_tokens=8)))
        logprobs = [event.logprob for event in events if event.token is not None]
        tokens = [event.token for event in events if event.token is not None]
        bench.log_probabilities_agree(bench.tokens(N_PROMPT), tokens, logprobs, "the events of an answer")

    @staticmethod
    def _plain(bench: Bench, n: int) -> list[int]:
        """Tokens that are plain text: single letters, for any model."""
        letters = [bench.vocab.encode(letter, add_special=False, parse_special=False) for letter in "abcdefghij"]
        return [letters[i % len(letters)][-1] for i in range(n)]

    def test_stopping_criteria(self, bench: Bench) -> None:
        """Generation: FINISH ends as ``stop``, STOP as ``cancelled``, CONTINUE and NEXT end nothing."""
        script = self._plain(bench, 6)
        ends = {
            StoppingAction.FINISH: (3, FinishReason.STOP),
            StoppingAction.STOP: (3, FinishReason.CANCELLED),
            StoppingAction.CONTINUE: (6, FinishReason.LENGTH),
            StoppingAction.NEXT: (6, FinishReason.LENGTH),
        }
        for action, (n_tokens, reason) in ends.items():
            answer = _say(bench, script, stopping_criteria=[_at(3, action)])
            assert (len(answer.tokens), answer.finish_reason) == (n_tokens, reason), (
                f"a stopping criterion that says {action.name} after token 3 of 6: {len(answer.tokens)} tokens,"
                f" ended with {answer.finish_reason.value}; expected {n_tokens}, {reason.value}"
            )

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
            for several in (stops, stops[::-1]):
                answer = _say(bench, [script[0], token, script[-1]], stop=several)
                text = _text(bench, [script[0], token, script[-1]])
                _, start = min((text.find(stop) + len(stop), text.find(stop)) for stop in several if stop in text)
                assert answer.text == text[:start], (
                    f"with stop texts {several}, {text!r} ended as {answer.text!r}, expected {text[:start]!r}"
                )

    def test_a_criterion_that_raises_at_the_end(self, bench: Bench) -> None:
        """Generation: an answer that has ended stays ended if a stopping criterion then raises."""
        letters, (end, *_) = self._plain(bench, 2), sorted(bench.vocab.eog_ids)

        def burst(event: Event, draft: Draft) -> StoppingAction:
            if draft.tokens[-1] == end:
                raise KeyError("a stopping criterion's own error")
            return StoppingAction.NEXT

        script = [*letters, end, *letters]
        running = _session(bench).generate(Sampling(max_tokens=5), sampler=Script(script), stopping_criteria=[burst])
        with pytest.raises(KeyError):
            list(running)
        assert not list(running), "an answer goes on after its end, where a stopping criterion raised there"
        answer = running.answer
        assert (answer.tokens, answer.finish_reason) == ((*letters, end), FinishReason.STOP), (
            f"after a stopping criterion raised at its end, an answer has tokens {answer.tokens},"
            f" ended with {answer.finish_reason}"
        )

    def test_stopping_criteria_stay_after_a_pause(self, bench: Bench) -> None:
        """Generation: after a pause, stopping criteria and ``on_event`` stay unless they are given again."""
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
        assert running.answer.finish_reason is FinishReason.STOP, (
            f"stop text {stop!r}: ended with {running.answer.finish_reason.value}, expected stop"
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
        n_held = session.context.length(session.seq_id)
        assert n_held == batches[-1] <= 24, f"cancelled after 3 batches of 8, but {n_held} tokens were decoded"
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
    """An answer of given tokens in a new session."""
    return _run(_session(bench), script, stopping_criteria=stopping_criteria, stop=stop, limit=limit)


def _shown(bench: Bench, script: Sequence[int]) -> list[str]:
    running = _session(bench).generate(Sampling(max_tokens=len(script)), sampler=Script(script))
    return [event.text for event in running]


def _tokens_to(seen: list[int | None]) -> Callable[[Event], None]:
    return lambda event: seen.append(event.token)


def _at(n: int, action: StoppingAction) -> StoppingCriterion:
    """A stopping criterion that has an opinion after token ``n`` only."""
    return lambda event, draft: action if len(draft.tokens) == n else StoppingAction.NEXT


def _always(action: StoppingAction) -> StoppingCriterion:
    return lambda event, draft: action


def _text(bench: Bench, tokens: Sequence[int]) -> str:
    return b"".join(bench.vocab.token_bytes(token) for token in tokens).decode()
