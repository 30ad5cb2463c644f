"""A paused answer, dumped after any token, continues in another context with the same tokens, under all options."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import slm_core as slm
from clear_answer import ANSWER, PENALTY, QUESTION, smallest_gap
from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.container import pack, unpack
from slm_core.errors import InvalidSnapshot, SlmError, SnapshotMismatch
from slm_core.generation import Generation, StoppingAction
from slm_core.generation.speculation import DraftModel, PromptLookup, Speculation, SuffixIndex
from slm_core.loading import demo_model_path
from slm_core.sampling import Sampling
from slm_core.types import EditLevel

N = 24
WIDE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.4, "seed": 9, "max_tokens": N}


def draft_model() -> Speculation:
    """A draft model that samples; with a fixed draft length, the answer depends only on the seeds."""
    drawn = Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=1.4, seed=4)
    context = ScriptedContext(lambda data: None, n_seq_max=1)
    return Speculation(DraftModel(context, ByteVocab(), sampling=drawn), n_max=4, adaptive=False)


def fixed(drafter: PromptLookup | SuffixIndex) -> Speculation:
    return Speculation(drafter, n_max=5, adaptive=False)


CASES: Mapping[str, Callable[[], dict[str, object]]] = {
    "plain": lambda: {"sampling": Sampling(**WIDE)},
    "penalties": lambda: {
        "sampling": Sampling(
            **WIDE, repeat_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.5, dry_multiplier=0.8
        )
    },
    "min tokens": lambda: {"sampling": Sampling(**WIDE, min_tokens=N, no_repeat_ngram=2)},
    "mirostat 1": lambda: {"sampling": Sampling(**WIDE, mirostat=1)},
    "mirostat 2": lambda: {"sampling": Sampling(**WIDE, mirostat=2)},
    "stops": lambda: {"sampling": Sampling(**WIDE, stop=("\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdx",))},
    "special": lambda: {"sampling": Sampling(**WIDE), "special": True},
    "constraint": lambda: {"sampling": Sampling(**WIDE), "constraint": Regex("([a-f]{3}, (yes|no)!){3,}")},
    "lookup": lambda: {"sampling": Sampling(**WIDE), "speculation": fixed(PromptLookup(2, 1))},
    "suffix": lambda: {"sampling": Sampling(**WIDE), "speculation": fixed(SuffixIndex(1))},
    "draft model": lambda: {"sampling": Sampling(**WIDE, repeat_penalty=1.2), "speculation": draft_model()},
    "constrained drafts": lambda: {
        "sampling": Sampling(**WIDE),
        "constraint": Regex("([a-f]{3}, (yes|no)!){3,}"),
        "speculation": fixed(PromptLookup(2, 1)),
    },
}


def begin() -> Session:
    session = Session(ScriptedContext(n_batch=16), ByteVocab(), sampling=Sampling(seed=1))
    session.append("abc, yes!abd, no!")
    return session


def read(generation: Generation) -> str:
    return "".join(event.text for event in generation)


@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["payload", "replay"])
@pytest.mark.parametrize("name", list(CASES))
def test_an_answer_dumped_after_any_token_continues(name: str, payload_format: str) -> None:
    whole = begin().generate(**CASES[name]()).run()
    assert len(whole.tokens) > 10
    for n in range(1, len(whole.tokens), 3 if payload_format == "2" else 1):
        s, case = begin(), CASES[name]()
        pause = [lambda event, draft, n=n: StoppingAction.PAUSE if len(draft.tokens) == n else StoppingAction.NEXT]
        text = read(s.generate(**case, stopping_criteria=pause))
        twin = Session.restore(ScriptedContext(payload_format=payload_format), ByteVocab(), s.dump())
        again = {"speculation": CASES[name]()["speculation"]} if name == "draft model" else {}
        resumed = twin.generate(stopping_criteria=[], **again)
        text += read(resumed)
        answer = resumed.answer
        assert answer.tokens == whole.tokens, f"dumped after token {n}"
        assert (text, answer.text, answer.finish_reason) == (whole.text, whole.text, whole.finish_reason)
        assert twin.tokens[-len(whole.tokens) :] == whole.tokens


def test_a_dump_of_a_restored_dump_has_the_same_bytes() -> None:
    s = begin()
    list(s.generate(**CASES["draft model"](), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]))
    twin = Session.restore(ScriptedContext(), ByteVocab(), s.dump())
    third = Session.restore(ScriptedContext(), ByteVocab(), twin.dump())
    for which in (twin, third):
        answer = which.generate(stopping_criteria=[], speculation=draft_model()).run()
        assert answer.tokens == begin().generate(**CASES["draft model"]()).run().tokens


def test_the_answer_of_the_demo_model_has_clear_gaps() -> None:
    """The tests below rely on this: no engine within the tolerance of clause 9 chooses another token."""
    with slm.load(demo_model_path(), backend="native") as model:
        lead, error = smallest_gap(model.vocab)
    assert lead > error


@pytest.mark.parametrize("target", ["native", "llamacpp"])
def test_a_paused_answer_continues_in_another_backend(target: str) -> None:
    source = "llamacpp" if target == "native" else "native"
    options = Sampling(temperature=0, repeat_penalty=PENALTY)
    with (
        slm.load(demo_model_path(), backend=source) as here,
        slm.load(demo_model_path(), backend=target) as there,
        here.session(n_ctx=256) as s,
        there.new_context(n_ctx=256) as context,
    ):
        s.append(QUESTION)
        pause = [lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == 5 else StoppingAction.NEXT]
        text = read(s.generate(options, stopping_criteria=pause, speculation=Speculation(PromptLookup())))
        with Session.restore(context, there.vocab, s.dump()) as twin:
            resumed = twin.generate(stopping_criteria=[])
            text += read(resumed)
            answer = resumed.answer
        assert answer.tokens[:5] == s.tokens[-5:]
        assert answer.text == text == ANSWER
        assert answer.tokens == s.generate(stopping_criteria=[]).run().tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.update(speculation=5),
        lambda answer: answer["speculation"].update(more=1),
        lambda answer: answer["speculation"].update(drafter={"drafter": "code"}),
        lambda answer: answer["speculation"].update(drafter=[1]),
        lambda answer: answer["speculation"].update(n_max=10**9),
        lambda answer: answer["speculation"].update(adaptive=1),
        lambda answer: answer["speculation"].update(queue=[10**6], drawn=[False]),
        lambda answer: answer["speculation"].update(queue=[1, 2], drawn=[False]),
        lambda answer: answer["speculation"].update(queue=[1] * 100, drawn=[False] * 100),
        lambda answer: answer["speculation"].update(queue=[1], drawn=[True]),
        lambda answer: answer["speculation"]["stats"].update(rounds=-1),
        lambda answer: answer["speculation"]["stats"].update(rounds=1.5),
        lambda answer: answer["speculation"]["stats"].update(draft_s=float("inf")),
        lambda answer: answer["speculation"]["stats"].pop("accepted"),
        lambda answer: answer["progress"].update(forced=[10**6]),
        lambda answer: answer["progress"].update(time_left_s=-1),
        lambda answer: answer["progress"].update(queue_s="1"),
    ],
)
def test_forged_drafts_are_refused(change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    s = begin()
    list(s.generate(**CASES["lookup"](), stopping_criteria=[lambda event, draft: StoppingAction.PAUSE]))
    meta, sections = unpack("session", s.dump())
    change(meta["answer"])
    target = ScriptedContext(n_seq_max=1)
    with pytest.raises(SlmError) as error:
        Session.restore(target, ByteVocab(), pack("session", meta, sections))
    assert isinstance(error.value, InvalidSnapshot | SnapshotMismatch)
    assert target.length(0) == 0


@pytest.mark.parametrize("level", list(EditLevel))
def test_a_dump_within_a_draft_at_every_edit_level(level: EditLevel) -> None:
    whole = begin().generate(**CASES["suffix"]()).run()
    s = Session(ScriptedContext(n_batch=16, level=level), ByteVocab(), sampling=Sampling(seed=1))
    s.append("abc, yes!abd, no!")
    pause = [lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == 9 else StoppingAction.NEXT]
    list(s.generate(**CASES["suffix"](), stopping_criteria=pause))
    twin = Session.restore(ScriptedContext(level=level), ByteVocab(), s.dump())
    assert (
        twin.generate(stopping_criteria=[]).run().tokens
        == whole.tokens
        == s.generate(stopping_criteria=[]).run().tokens
    )
