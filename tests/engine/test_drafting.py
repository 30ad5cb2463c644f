"""Speculative decoding in an engine: the same tokens in fewer steps, if it saves time, at no cost to other requests."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest

import slm_core as slm
from scripted import ALL, ByteVocab, Script, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import Choice, JsonSchema, Regex, Spec, compile  # noqa: A004
from slm_core.engine.core import EngineCore
from slm_core.engine.costs import StepCosts
from slm_core.engine.options import EngineOptions
from slm_core.engine.requests import Request
from slm_core.errors import ContextFull, DecodeFailed, InvalidOption, InvalidToken
from slm_core.generation import FinishReason
from slm_core.generation.speculation import (
    Drafter,
    DraftFunction,
    DraftModel,
    PromptLookup,
    Proposal,
    Speculation,
    SuffixIndex,
)
from slm_core.protocols import Batch
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Logits

VOCAB = ByteVocab()
GREEDY = Sampling(temperature=0, max_tokens=30)
REFRAIN = b"the quick brown fox. "


def refrain(data: bytes) -> int | None:
    """A script: after whole refrains, the refrain is repeated."""
    n = len(data) % len(REFRAIN)
    return REFRAIN[n] if data == (REFRAIN * len(data))[: len(data)] else None


def right(tokens: Sequence[int], n: int) -> list[int]:
    return [REFRAIN[(len(tokens) + i) % len(REFRAIN)] for i in range(n)]


def wrong(tokens: Sequence[int], n: int) -> list[int]:
    return [token ^ 1 for token in right(tokens, n)]


def half_right(tokens: Sequence[int], n: int) -> list[int]:
    return right(tokens, n // 2) + wrong(tokens, n)[n // 2 :]


def always_drafting(drafter: Drafter | None = None, n_max: int = 8) -> Speculation:
    return Speculation(drafter or PromptLookup(), n_max=n_max, adaptive=False)


def core(context: ScriptedContext | None = None, **options: object) -> EngineCore:
    context = context or ScriptedContext(refrain, n_ctx=1000, n_seq_max=8, n_batch=64)
    return EngineCore(context, EngineOptions(**options))  # type: ignore[arg-type]


def request(text: str | bytes, sampling: Sampling = GREEDY, **options: object) -> Request:
    data = text.encode() if isinstance(text, str) else text
    return Request(VOCAB, list(data), sampling, **options)  # type: ignore[arg-type]


def run(engine: EngineCore, requests: Sequence[Request]) -> None:
    for each in requests:
        engine.add(each)
    for _ in range(5000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def tokens_alone(text: str | bytes, sampling: Sampling = GREEDY, script: Script = refrain, **options: object) -> object:
    data = text.encode() if isinstance(text, str) else text
    with Session(ScriptedContext(script, n_ctx=1000), VOCAB) as session:
        session.append(data.decode())
        return session.generate(sampling, **options).run().tokens  # type: ignore[arg-type]


DRAFTERS = {
    "lookup": PromptLookup(),
    "right": DraftFunction(right),
    "wrong": DraftFunction(wrong),
    "half": DraftFunction(half_right),
}
SAMPLINGS = [
    GREEDY,
    Sampling(seed=3, max_tokens=20),
    Sampling(temperature=1.5, top_k=5, seed=8, max_tokens=25, repeat_penalty=1.3),
    Sampling(temperature=0, max_tokens=25, stop=("brown",), logprobs=2),
]
TWELVE = [(REFRAIN * (1 + i % 3) + REFRAIN[: i % 5], SAMPLINGS[i % 4]) for i in range(12)]


@functools.cache
def tokens_of_the_twelve() -> list[object]:
    """The tokens of each of ``TWELVE`` alone, which do not depend on the drafter, the edit level or the room."""
    return [tokens_alone(text, sampling) for text, sampling in TWELVE]


@pytest.mark.parametrize("n_ctx", [1000, 130])
@pytest.mark.parametrize("capabilities", [ALL, frozenset({Capability.KV_PAYLOAD})], ids=["shared", "copied"])
@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_change_the_tokens(
    name: str, level: EditLevel, capabilities: frozenset[Capability], n_ctx: int
) -> None:
    """With and without enough room; next to requests that do not draft."""
    context = ScriptedContext(refrain, n_ctx=n_ctx, n_seq_max=5, n_batch=16, level=level, capabilities=capabilities)
    engine = core(context, n_parallel=4)
    requests = [
        request(text, sampling, speculation=None if i % 5 == 4 else always_drafting(DRAFTERS[name]))
        for i, (text, sampling) in enumerate(TWELVE)
    ]
    run(engine, requests)
    assert [r.answer.tokens for r in requests] == tokens_of_the_twelve()
    assert (engine.totals.n_finished, engine.totals.n_failed) == (12, 0)
    stats = [r.answer.speculation for r in requests]
    assert [each is None for each in stats] == [i % 5 == 4 for i in range(12)]
    drafted, accepted = (sum(getattr(s, n) for s in stats if s is not None) for n in ("drafted", "accepted"))
    if level < EditLevel.TRUNCATE:
        assert (drafted, accepted) == (0, 0)
        assert all(s is None or "cannot take a wrong guess back" in s.reason for s in stats)
    else:
        assert drafted > accepted >= 0
        assert (accepted == 0) == (name == "wrong")
    assert engine.positions().own == 0


def test_an_engine_drafts_like_a_session() -> None:
    """Alone in an engine, a request decodes the same rows, drafts the same tokens and accepts the same as a session."""
    speculation = always_drafting(DraftFunction(half_right), 6)
    context = ScriptedContext(refrain, n_ctx=1000, n_batch=64)
    with Session(context, VOCAB) as session:
        session.append(REFRAIN.decode())
        expected = session.generate(GREEDY, speculation=speculation).run().speculation
    each, engine = request(REFRAIN, speculation=speculation), core()
    run(engine, [each])
    actual = each.answer.speculation
    assert actual is not None
    assert expected is not None
    assert (actual.rounds, actual.drafted, actual.accepted) == (expected.rounds, expected.drafted, expected.accepted)
    assert engine.context.n_decoded == context.n_decoded  # type: ignore[attr-defined]


def test_right_drafts_save_steps() -> None:
    steps: list[int] = []
    for speculation in (None, always_drafting(DraftFunction(right), 9)):
        engine = core(prefix_cache=False)
        run(engine, [request(REFRAIN, speculation=speculation) for _ in range(3)])
        steps.append(engine.totals.n_steps)
    assert steps == [30, 4], "one for the prompt, and one per ten tokens; the last draft has room for eight"


def test_drafts_leave_no_tokens_in_the_prefix_cache() -> None:
    """The prefix cache holds the same tokens as without drafts."""
    cached = []
    for speculation in (None, always_drafting(DraftFunction(half_right), 7)):
        engine = core()
        run(engine, [request(REFRAIN, Sampling(temperature=0, max_tokens=11), speculation=speculation)])
        cached.append((engine.positions().cached, [engine.context.tokens(i) for i in range(8)]))
    assert cached[0] == cached[1]
    assert cached[0][0] == len(REFRAIN) + 10


@pytest.mark.parametrize(
    "spec",
    [
        Regex("(the quick )+[a-z]{20}"),
        Choice(["the quick brown fox. the quick brown fox.", "something else"]),
        JsonSchema({"type": "object", "properties": {"quick": {"type": "integer"}}, "required": ["quick"]}),
    ],
    ids=["regex", "choice", "schema"],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_obey_the_constraint(name: str, spec: Spec) -> None:
    sampling = Sampling(seed=5, max_tokens=40)
    texts = [REFRAIN, REFRAIN * 2 + b"the"]
    requests = [
        request(text, sampling, constraint=compile(spec, VOCAB), speculation=always_drafting(DRAFTERS[name]))
        for text in texts
    ]
    run(core(), requests)
    assert [r.answer.tokens for r in requests] == [tokens_alone(text, sampling, constraint=spec) for text in texts]
    assert all(r.answer.speculation is not None for r in requests)


def test_forced_tokens_do_not_count_as_drafted() -> None:
    spec = Choice(["elephants and zebras"])
    each = request("a", constraint=compile(spec, VOCAB), speculation=always_drafting(DraftFunction(wrong)))
    run(core(), [each])
    assert each.answer.text == "elephants and zebras"
    assert each.answer.speculation is not None
    assert each.answer.speculation.drafted == 0


class SampledDrafter:
    """A drafter that samples its drafts, and reports their probabilities."""

    def draft(self, tokens: Sequence[int], n: int, cancelled: object = None) -> Proposal:
        """The right token and another one, with probability 0.5 each."""
        drafted = right(tokens, n) if len(tokens) % 2 else wrong(tokens, n)
        return Proposal(drafted, [(np.array([t & ~1, t | 1]), np.array([0.5, 0.5])) for t in drafted])

    def settings(self) -> None:
        """None."""
        return


def test_sampled_drafts_are_accepted_and_rejected_like_in_a_session() -> None:
    sampling, speculation = Sampling(seed=4, max_tokens=30), always_drafting(SampledDrafter(), 5)
    each = request(REFRAIN, sampling, speculation=speculation)
    run(core(), [each])
    assert each.answer.tokens == tokens_alone(REFRAIN, sampling, speculation=speculation)
    assert each.answer.speculation is not None
    assert 0 < each.answer.speculation.accepted < each.answer.speculation.drafted


# Drafts do not slow other requests.


def test_drafts_cause_no_preemptions_and_no_evictions() -> None:
    """Drafts that are all wrong cause no more preemptions and evictions than no drafts."""
    counts = []
    for speculation in (None, always_drafting(DraftFunction(wrong), 16)):
        context = ScriptedContext(refrain, n_ctx=3 * 52 + 1, n_seq_max=6, n_batch=64)
        engine = core(context, n_parallel=3)
        run(engine, [request(b"z" * 20)])
        assert engine.n_cached_sequences == 1
        requests = [request(REFRAIN, speculation=speculation) for _ in range(2)]
        run(engine, requests)
        assert [r.answer.tokens for r in requests] == [tokens_alone(REFRAIN)] * 2
        counts.append((engine.totals.n_preempted, engine.n_cached_sequences))
    assert counts[0] == counts[1]
    assert counts[0][0] == 0


def test_a_draft_is_limited_by_the_room() -> None:
    context = ScriptedContext(refrain, n_ctx=len(REFRAIN) + 30, n_batch=64)
    each = request(REFRAIN, speculation=always_drafting(DraftFunction(right), 64))
    run(core(context), [each])
    assert each.answer.tokens == tokens_alone(REFRAIN)
    assert each.answer.finish_reason is FinishReason.LENGTH


def test_a_preempted_request_resumes_with_drafts() -> None:
    context = ScriptedContext(refrain, n_ctx=110, n_seq_max=6, n_batch=32)
    engine = core(context, n_parallel=4, prefix_cache=False)
    endless = Sampling(temperature=0, max_tokens=40)
    requests = [
        request(REFRAIN + bytes([97 + i]), endless, speculation=always_drafting(DraftFunction(half_right)))
        for i in range(6)
    ]
    run(engine, requests)
    assert engine.totals.n_preempted > 0
    assert [r.answer.tokens for r in requests] == [tokens_alone(REFRAIN + bytes([97 + i]), endless) for i in range(6)]


def test_a_cancelled_request_computes_nothing_more() -> None:
    engine = core()
    cancelled, other = (request(REFRAIN, speculation=always_drafting(DraftFunction(right), 4)) for _ in range(2))
    engine.add(cancelled)
    engine.add(other)
    for _ in range(3):
        engine.step()
    n_generated = len(cancelled.history.tokens)
    cancelled.loop.cancel()
    n_before = engine.context.n_decoded  # type: ignore[attr-defined]
    engine.step()
    assert engine.context.n_decoded - n_before == 5, "the other's token and draft"  # type: ignore[attr-defined]
    assert (cancelled.over, len(cancelled.history.tokens)) == (True, n_generated)
    while engine.step():
        pass
    assert other.answer.tokens == tokens_alone(REFRAIN)


@pytest.mark.parametrize("tokens", [[-1], [VOCAB.size], [0, 10**9], ["a"], [1.5]])
def test_invalid_drafted_tokens_end_only_their_request(tokens: list[int]) -> None:
    bad = request(REFRAIN, speculation=always_drafting(DraftFunction(lambda history, n: tokens)))
    good = request(REFRAIN, speculation=always_drafting(DraftFunction(right)))
    engine = core()
    run(engine, [bad, good])
    assert good.answer.tokens == tokens_alone(REFRAIN)
    with pytest.raises(InvalidToken, match="was drafted"):
        _ = bad.answer
    assert engine.totals.n_failed == 1
    assert engine.positions().own == 0


def test_a_drafter_that_raises_ends_only_its_request() -> None:
    def burst(tokens: Sequence[int], n: int) -> Sequence[int]:
        raise RuntimeError("no idea")

    bad, good = request(REFRAIN, speculation=always_drafting(DraftFunction(burst))), request(REFRAIN)
    engine = core()
    run(engine, [bad, good])
    assert good.answer.tokens == tokens_alone(REFRAIN)
    with pytest.raises(RuntimeError, match="no idea"):
        _ = bad.answer


class DraftRefusingContext(ScriptedContext):
    """Refuses drafts of one sequence longer than ``most`` tokens, and fails at the decode number ``n_left``."""

    most = 1
    n_left = -1

    def _engine_decode(self, batch: Batch) -> Logits:
        self.n_left -= 1
        if self.n_left == 0:
            raise DecodeFailed("once")
        if len(batch) > self.most and len(set(batch.seq_ids)) == 1 and batch.positions[0] > 0:
            raise ContextFull(len(batch), self.most)
        return super()._engine_decode(batch)


def test_a_draft_that_the_context_refuses_costs_no_token() -> None:
    each = request(REFRAIN, speculation=always_drafting(DraftFunction(right)))
    run(core(DraftRefusingContext(refrain, n_batch=64)), [each])
    assert each.answer.tokens == tokens_alone(REFRAIN)
    assert each.answer.speculation is not None
    assert each.answer.speculation.drafted == 0


def test_a_failed_decode_is_retried_with_the_drafts() -> None:
    context = DraftRefusingContext(refrain, n_ctx=1000, n_batch=64)
    context.most, context.n_left = 1000, 4
    requests = [request(REFRAIN, speculation=always_drafting(DraftFunction(half_right))) for _ in range(3)]
    engine = core(context)
    run(engine, requests)
    assert [r.answer.tokens for r in requests] == [tokens_alone(REFRAIN)] * 3


# Drafts are as long as they save time.


class FixedCosts(StepCosts):
    """Fixed step costs."""

    def __init__(self, constant: float, per_token: float) -> None:
        super().__init__()
        self.constant, self.per_token = constant, per_token

    def growing(self, n_tokens: int, n_attended: int, depth: int, n_times: int) -> list[float]:
        """The linear law of the two constants."""
        return [self.constant + self.per_token * (n_tokens + n) for n in range(n_times)]

    def has_measured(self, n_tokens: int) -> bool:
        """True: all times are known."""
        return True


def steps_and_drafted_tokens(constant: float, per_token: float, n: int, drafter: DraftFunction) -> tuple[int, int]:
    """The number of steps and of drafted tokens of ``n`` requests, if steps have these costs."""
    engine = core(ScriptedContext(refrain, n_ctx=4000, n_seq_max=2 * n, n_batch=256))
    engine._costs = engine._drafts._costs = FixedCosts(constant, per_token)
    sampling = Sampling(temperature=0, max_tokens=200)
    requests = [request(REFRAIN, sampling, speculation=Speculation(drafter)) for _ in range(n)]
    run(engine, requests)
    assert all(r.answer.tokens == requests[0].answer.tokens for r in requests)
    stats = [r.answer.speculation for r in requests]
    return engine.totals.n_steps, sum(s.drafted for s in stats if s is not None)


def test_drafts_grow_if_tokens_cost_nothing() -> None:
    n_steps, _ = steps_and_drafted_tokens(1.0, 0.0, 1, DraftFunction(right))
    assert n_steps < 200 / 10


def test_no_drafts_if_they_save_no_time() -> None:
    _, n_drafted = steps_and_drafted_tokens(0.0, 1.0, 1, DraftFunction(half_right))
    assert n_drafted < 40, "drafting is tried again from time to time"


def test_wrong_drafts_are_given_up() -> None:
    _, n_drafted = steps_and_drafted_tokens(1.0, 0.01, 1, DraftFunction(wrong))
    assert n_drafted < 100, "drafting is tried again from time to time"


def test_many_requests_draft_less_than_one() -> None:
    """More requests share the constant cost of a step, so a draft saves less time per request."""
    one, eight = (steps_and_drafted_tokens(1.0, 0.08, n, DraftFunction(half_right))[1] / n for n in (1, 8))
    assert eight < one / 2


def test_drafts_respect_step_ms() -> None:
    """A step of two requests and their drafts takes at most ``step_ms``; half of the spare time is left to prompts."""
    engine = core(ScriptedContext(refrain, n_ctx=4000, n_seq_max=4, n_batch=256), step_ms=101)
    engine._costs = engine._drafts._costs = FixedCosts(0.05, 0.01)
    sizes: list[int] = []
    decode = engine.context._engine_decode  # type: ignore[attr-defined]

    def counted(batch: Batch) -> Logits:
        if len(set(batch.seq_ids.tolist())) == 2:
            sizes.append(len(batch))
        return decode(batch)  # type: ignore[no-any-return]

    engine.context._engine_decode = counted  # type: ignore[attr-defined]
    sampling = Sampling(temperature=0, max_tokens=60)
    run(engine, [request(REFRAIN, sampling, speculation=Speculation(DraftFunction(right))) for _ in range(2)])
    assert max(sizes[1:]) == 5


def test_requests_take_turns_drafting() -> None:
    """Each step has time for the drafts of one of three requests, and all three progress equally."""
    engine = core(ScriptedContext(refrain, n_ctx=4000, n_seq_max=6, n_batch=256), step_ms=101)
    engine._costs = engine._drafts._costs = FixedCosts(0.05, 0.01)
    requests = [
        request(REFRAIN, Sampling(temperature=0, max_tokens=90), speculation=Speculation(DraftFunction(right)))
        for _ in range(3)
    ]
    for each in requests:
        engine.add(each)
    for _ in range(25):
        engine.step()
    n_generated = [len(each.history.tokens) - each.n_prompt for each in requests]
    assert min(n_generated) > 30
    assert max(n_generated) - min(n_generated) <= 4


def test_drafts_leave_half_of_the_time_to_prompts() -> None:
    engine = core(ScriptedContext(refrain, n_ctx=4000, n_seq_max=4, n_batch=256), step_ms=101)
    engine._costs = engine._drafts._costs = FixedCosts(0.02, 0.001)
    sampling, speculation = Sampling(temperature=0, max_tokens=700), Speculation(DraftFunction(right), n_max=64)
    drafting, prompt = request(REFRAIN, sampling, speculation=speculation), request(b"z" * 1500)
    engine.add(drafting)
    for _ in range(8):
        engine.step()
    engine.add(prompt)
    for _ in range(5):
        before, n_generated = engine._length(prompt) if prompt.seq_id is not None else 0, len(drafting.history.tokens)
        engine.step()
        assert len(drafting.history.tokens) - n_generated > 20
        assert engine._length(prompt) - before >= 39


CURVES = {  # seconds of steps of some sizes, by machine, in steps of one token; others are interpolated
    "AVX2": {1: 1.0, 2: 1.55, 3: 1.99, 4: 2.34, 5: 2.6, 8: 2.93, 16: 4.36, 17: 6.17, 64: 8.0, 512: 26.0},
    "compute-bound": {1: 1.0, 2: 1.7, 17: 9.0, 64: 30.0, 512: 230.0},
    "AVX-512": {1: 1.0, 17: 2.6, 64: 5.0, 512: 23.0},
    "a GPU": {1: 1.0, 17: 1.3, 64: 1.6, 512: 5.0},
}


class CurveCosts(StepCosts):
    """Step costs that take the time of each step from a curve, and sum these times."""

    def __init__(self, curve: dict[int, float]) -> None:
        super().__init__()
        self.curve = curve
        self.total_s = 0.0
        self.sizes: list[int] = []

    def note(self, n_tokens: int, n_attended: int, seconds: float) -> None:
        """Record the time on the curve, 20 ms for a token."""
        on_curve_s = 0.02 * float(np.interp(n_tokens, list(self.curve), list(self.curve.values())))
        self.total_s += on_curve_s
        self.sizes.append(n_tokens)
        super().note(n_tokens, n_attended, on_curve_s)


def texts_that_copy(share: float, n_copied: int, seed: int) -> tuple[bytes, bytes]:
    """A prompt, and an answer that copies runs of it with the probability ``share``; the other tokens are random."""
    random = np.random.default_rng(seed)
    prompt, answer = random.bytes(300), b""
    while len(answer) < 150:
        start = int(random.integers(0, len(prompt) - n_copied))
        answer += prompt[start : start + n_copied] if random.random() < share else random.bytes(1)
    return prompt, answer[:150]


def seconds_on_curve(costs: CurveCosts, texts: Sequence[tuple[bytes, bytes]], speculation: Speculation | None) -> float:
    """Seconds of steps in which an engine with these costs gives these answers, all at once."""
    by_prompt = dict(texts)

    def script(data: bytes) -> int | None:
        answer = by_prompt.get(data[:300], b"")
        return answer[len(data) - 300] if 300 <= len(data) < 300 + len(answer) else None

    context = ScriptedContext(script, n_ctx=4000, n_seq_max=2 * len(texts), n_batch=512)
    engine, before_s = core(context, step_ms=400), costs.total_s
    engine._costs = engine._drafts._costs = costs
    sampling = Sampling(temperature=0, max_tokens=150)
    requests = [request(prompt, sampling, speculation=speculation) for prompt, _ in texts]
    run(engine, requests)
    assert [bytes(r.answer.tokens) for r in requests] == [answer for _, answer in texts]
    return costs.total_s - before_s


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("machine", CURVES)
def test_prompt_lookup_costs_little_where_it_does_not_pay(machine: str, n: int) -> None:
    """Also while the engine does not know the times of steps yet. After short copies, drafts are soon wrong."""
    plain, drafting = CurveCosts(CURVES[machine]), CurveCosts(CURVES[machine])
    for share, n_copied in [(0.0, 3), (0.3, 6), (1.0, 3), (1.0, 30)]:
        texts = [texts_that_copy(share, n_copied, 100 * i + n_copied) for i in range(n)]
        ratio = seconds_on_curve(plain, texts, None) / seconds_on_curve(drafting, texts, Speculation(PromptLookup()))
        assert ratio >= 0.97, (share, n_copied)
        if n_copied == 30 and (n == 1 or machine != "compute-bound"):
            assert ratio > 1.1, "it pays"
    assert plain.total_s / drafting.total_s >= 0.99


def test_a_step_is_measured_without_drafts_before_it_has_drafts() -> None:
    """Otherwise the engine would never learn that a step without drafts is faster."""
    engine = core(ScriptedContext(refrain, n_ctx=4000, n_seq_max=4, n_batch=256), prefix_cache=False)
    engine._costs = engine._drafts._costs = costs = CurveCosts(CURVES["a GPU"])
    speculation = Speculation(DraftFunction(right))
    run(engine, [request(REFRAIN, speculation=speculation)])
    costs.sizes.clear()
    run(engine, [request(REFRAIN * n, speculation=speculation) for n in (1, 2)])
    assert costs.sizes[:2] == [3 * len(REFRAIN), 2]
    assert costs.sizes[2] > 10, "then both draft"


# Options.


def test_drafters_bound_to_one_history_are_refused() -> None:
    draft_model = DraftModel(ScriptedContext(), VOCAB)
    for drafter in (SuffixIndex(), draft_model):
        with pytest.raises(InvalidOption, match=r"accepted by an engine: PromptLookup, 'mtp', DraftFunction, or"):
            request("a", speculation=Speculation(drafter))


def test_each_request_has_its_own_prompt_lookup() -> None:
    lookup = PromptLookup(3, 1)
    a, b = (request(REFRAIN, speculation=Speculation(lookup, n_max=5)) for _ in range(2))
    assert a.drafts is not None
    assert b.drafts is not None
    assert len({id(lookup), id(a.drafts.speculation.drafter), id(b.drafts.speculation.drafter)}) == 3
    assert a.drafts.speculation.drafter.settings() == lookup.settings()
    assert a.drafts.speculation.n_max == 5


def test_generate_and_engines_accept_speculation() -> None:
    """On a real model, each request gets the same tokens as without drafts."""
    options = Sampling(temperature=0, max_tokens=40)
    prompts = ["one two three one two three one two", "My dog is called Rex. My dog is called"]
    with slm.load(slm.demo_model_path(), backend="native") as model:
        plain = [answer.tokens for answer in model.generate(prompts, options)]
        drafted = model.generate(prompts, options, speculation=always_drafting())
        assert [answer.tokens for answer in drafted] == plain
        assert all(answer.speculation is not None for answer in drafted)
        assert sum(answer.speculation.drafted for answer in drafted) > 0
        with model.engine(n_ctx=512) as engine:
            streams = [engine.submit(prompt, options, speculation=always_drafting()) for prompt in prompts]
            assert [stream.run().tokens for stream in streams] == plain
            (completion,) = engine.completions(prompts[0], 1, options, speculation=always_drafting()).run()
            assert completion.answer.tokens == plain[0]
            drafts = [*(stream.run().speculation for stream in streams), completion.answer.speculation]
            assert engine.stats().drafted_tokens == sum(each.drafted for each in drafts if each is not None) > 0
            with pytest.raises(InvalidOption, match="speculation='lookup'"):
                engine.submit("a", speculation="lookup")  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="speculation=4"):
            model.generate(["a"], speculation=4)  # type: ignore[call-overload]
