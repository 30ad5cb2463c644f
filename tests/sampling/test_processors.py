"""Logits processors of sessions and chats, compared with the options of the chain that compute the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

import slm_core as slm
from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation import StoppingAction
from slm_core.sampling import LogitsProcessor, Sampling
from slm_core.sampling.processors import ProcessedChain
from slm_core.sampling.steps import Known

Row = NDArray[np.float32]


def session() -> Session:
    session = Session(ScriptedContext(), ByteVocab())
    session.append("abcabcab")
    return session


def halved(tokens: Sequence[int], logits: Row) -> Row:
    return logits * np.float32(0.5)


def halved_in_place(tokens: Sequence[int], logits: Row) -> Row:
    logits *= np.float32(0.5)
    return logits


def penalised(tokens: Sequence[int], logits: Row) -> Row:
    """A frequency penalty of 0.5 on the whole history."""
    return logits - np.float32(0.5) * np.bincount(tokens, minlength=len(logits)).astype(np.float32)


@pytest.mark.parametrize(
    ("processors", "options"),
    [
        ([halved], {"temperature": 8.0}),
        ([halved_in_place], {"temperature": 8.0}),
        ([halved, halved], {"temperature": 16.0}),
        ([penalised], {"temperature": 4.0, "frequency_penalty": 0.5, "penalty_window": 1000}),
    ],
)
def test_processors_and_options_give_the_same_tokens(
    processors: list[LogitsProcessor], options: dict[str, float]
) -> None:
    base = {"seed": 5, "max_tokens": 40, "ignore_eos": True}
    expected = session().generate(Sampling.preset("neutral", **base, **options)).run()
    answer = session().generate(Sampling.preset("neutral", **base, temperature=4.0), logits_processors=processors).run()
    plain = session().generate(Sampling.preset("neutral", **base, temperature=4.0)).run()
    assert answer.tokens == expected.tokens
    assert plain.tokens != expected.tokens, "the processors have something to change"


def test_processors_get_all_tokens_before_the_next() -> None:
    histories: list[list[int]] = []

    def note(tokens: Sequence[int], logits: Row) -> Row:
        histories.append(list(tokens))
        return logits

    s = session()
    prompt = list(s.tokens)
    answer = s.generate(Sampling(temperature=0, max_tokens=4), logits_processors=[note]).run()
    assert histories == [[*prompt, *answer.tokens[:n]] for n in range(4)]


def test_a_token_that_the_constraint_removed_stays_removed() -> None:
    def flat(tokens: Sequence[int], logits: Row) -> Row:
        return np.zeros_like(logits)

    answer = (
        session()
        .generate(Sampling(seed=1), constraint=slm.constraints.Regex("[xyz]{8}"), logits_processors=[flat])
        .run()
    )
    assert len(answer.text) == 8 and set(answer.text) <= set("xyz")


def test_drafts_are_judged_by_processed_rows() -> None:
    def no_c(tokens: Sequence[int], logits: Row) -> Row:
        logits[ord("c")] = -np.inf
        return logits

    options = Sampling(temperature=0, max_tokens=12)
    expected = session().generate(options, logits_processors=[no_c]).run()
    drafted = (
        session().generate(options, logits_processors=[no_c], speculation=slm.Speculation(slm.PromptLookup())).run()
    )
    assert drafted.tokens == expected.tokens
    assert ord("c") not in drafted.tokens


def test_a_paused_answer_keeps_its_processors_and_cannot_be_dumped() -> None:
    options = Sampling.preset("neutral", seed=5, temperature=4.0, max_tokens=20, ignore_eos=True)
    whole = session().generate(options, logits_processors=[penalised]).run()
    s = session()

    def pause(event: slm.Event, draft: slm.Draft) -> StoppingAction:
        return StoppingAction.PAUSE if len(draft.tokens) == 7 else StoppingAction.NEXT

    list(s.generate(options, logits_processors=[penalised], stopping_criteria=[pause]))
    with pytest.raises(SessionError, match="logits processors cannot be dumped"):
        s.dump()
    with pytest.raises(SessionError, match="without options"):
        s.generate(logits_processors=[halved])
    assert s.generate(stopping_criteria=()).run().tokens == whole.tokens


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([lambda tokens, logits: logits[1:]], r"returned float32 \[\d+\]"),
        ([lambda tokens, logits: logits * np.nan], "none of them NaN"),
        ([lambda tokens, logits: None], r"returned object \[\]"),
        ([7], r"logits_processors\[0\]=7 .accepted: a function"),
        (halved, "accepted: a list of functions"),
    ],
)
def test_invalid_processors_are_named(processors: object, message: str) -> None:
    s = session()
    with pytest.raises(InvalidOption, match=message):
        s.generate(Sampling(temperature=0), logits_processors=processors).run()  # type: ignore[arg-type]


def test_chats_take_processors_and_criteria_that_return_bools() -> None:
    with slm.load(slm.demo_model_path(), backend="native") as model:
        chat = model.chat(n_ctx=512, sampling=Sampling(temperature=0, max_tokens=24))
        plain = chat.send("What is 12 + 30?")
        first = plain.tokens[0]

        def no_first(tokens: Sequence[int], logits: Row) -> Row:
            logits[first] = -np.inf
            return logits

        other = model.chat(n_ctx=512, sampling=Sampling(temperature=0, max_tokens=24))
        assert first not in other.send("What is 12 + 30?", logits_processors=[no_first]).tokens
        third = model.chat(n_ctx=512, sampling=Sampling(temperature=0, max_tokens=24))
        stopped = third.send("What is 12 + 30?", stopping_criteria=[lambda event, draft: len(draft.tokens) == 2])
        assert stopped.tokens == plain.tokens[:2]
        assert stopped.finish_reason is slm.FinishReason.STOP
        with pytest.raises(InvalidOption, match="logits_processors and sampler together"):
            third.send("And?", sampler=slm.SamplerChain(Sampling()), logits_processors=[no_first])
        assert len(third.messages) == 2


def test_requests_and_completions_take_processors() -> None:
    """Each of several answers that are computed together is the one that a session gives."""
    options = Sampling(temperature=0, max_tokens=12)

    def no_space(tokens: Sequence[int], logits: Row) -> Row:
        logits[spaces] = -np.inf
        return logits

    def broken(tokens: Sequence[int], logits: Row) -> Row:
        raise ValueError("a defect of a processor")

    with slm.load(slm.demo_model_path(), backend="native") as model:
        spaces = [i for i in range(model.vocab.size) if b" " in model.vocab.token_bytes(i)]
        prompts = ["My dog is", "Once upon a time"]
        expected = []
        for prompt in prompts:
            with model.session(n_ctx=256) as s:
                s.append(prompt)
                (completion,) = s.completions(1, options, logits_processors=[no_space]).run()
                expected.append(s.generate(options, logits_processors=[no_space]).run().tokens)
                assert completion.answer.tokens == expected[-1]
        assert [a.tokens for a in model.generate(prompts, options, logits_processors=[no_space])] == expected
        assert not set(expected[0]) & set(spaces)
        with model.engine(n_ctx=512) as engine:
            streams = [
                engine.submit(prompt, options, logits_processors=[processor])
                for prompt, processor in zip(prompts, (broken, no_space), strict=True)
            ]
            with pytest.raises(ValueError, match="a defect of a processor"):
                streams[0].run()
            assert streams[1].run().tokens == expected[1]
            with pytest.raises(InvalidOption, match="accepted: a list of functions"):
                engine.submit(prompts[0], options, logits_processors=no_space)  # type: ignore[arg-type]


def test_a_chain_without_a_history_gives_processors_none() -> None:
    histories: list[list[int]] = []

    def record(tokens, logits):
        histories.append(list(tokens))
        return logits

    chain = ProcessedChain(Sampling.preset("neutral", seed=1), known=Known(), processors=[record])
    token = chain.sample(np.zeros(5, np.float32))
    chain.accept(token)
    chain.sample(np.zeros(5, np.float32))
    assert histories == [[], [token]]
