"""Prefix reuse: forks without recomputation, kept ends of messages, and cuts of ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from scripted import ALL, END, ByteVocab, ScriptedContext, TagFormatter
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.prefixes import LEAST_AFTER_GAP, gaps_between, n_common
from slm_core.engine.prompts import encode
from slm_core.engine.requests import Request
from slm_core.errors import ContextFull, InvalidOption, UnsupportedEdit
from slm_core.protocols import Batch
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Logits, Message, Pos, Role

VOCAB, FORMATTER = ByteVocab(), TagFormatter()
GREEDY = Sampling(temperature=0, max_tokens=8)
COPIES = frozenset({Capability.KV_PAYLOAD})
SYSTEM = Message(Role.SYSTEM, "You answer all questions in one short sentence.")


class WholeForks(ScriptedContext):
    """Like recurrent layers without checkpoints: only whole sequences can be forked, and nothing can be truncated."""

    def __init__(self, **options: object) -> None:
        super().__init__(level=EditLevel.REPLAY, **options)  # type: ignore[arg-type]

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._engine_fork_cost(src, end)
        super()._engine_fork(src, dst, end)

    def _engine_fork_cost(self, src: int, end: int) -> int:
        if end < self._ledger.length(src):
            raise UnsupportedEdit("a fork of a part")
        return 0


class Checkpoints(ScriptedContext):
    """Like recurrent layers with checkpoints at the ends of batches: a fork recomputes the tokens after a checkpoint.

    Attributes:
        n_again: number of tokens that edits have recomputed.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(level=EditLevel.TRUNCATE, **options)  # type: ignore[arg-type]
        self.ends: list[set[int]] = [{0} for _ in range(self.n_seq_max)]
        self.n_again = 0

    def _engine_decode(self, batch: Batch) -> Logits:
        rows = super()._engine_decode(batch)
        for seq_id in set(batch.seq_ids.tolist()):
            self.ends[seq_id].add(len(self.states[seq_id]))
        return rows

    def _engine_fork_cost(self, src: int, end: int) -> int:
        return end - max(place for place in self.ends[src] if place <= end)

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self.n_again += self._engine_fork_cost(src, end)
        self.ends[dst] = {place for place in self.ends[src] if place <= end}
        super()._engine_fork(src, dst, end)

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self.n_again += self._engine_fork_cost(seq_id, length)
        self.ends[seq_id] = {place for place in self.ends[seq_id] if place <= length}
        super()._engine_truncate(seq_id, length)

    def _engine_drop(self, seq_id: int) -> None:
        self.ends[seq_id] = {0}
        super()._engine_drop(seq_id)


def chat(*messages: Message, **options: object) -> Request:
    prompt = encode(VOCAB, lambda: FORMATTER, messages, None)
    return Request(VOCAB, prompt.tokens, GREEDY, message_ends=prompt.message_ends, **options)  # type: ignore[arg-type]


def text(prompt: str, max_tokens: int = 8, **options: object) -> Request:
    sampling = Sampling(temperature=0, max_tokens=max_tokens, logit_bias={END: -1e9} if max_tokens > 8 else {})
    return Request(VOCAB, list(prompt.encode()), sampling, **options)  # type: ignore[arg-type]


def core(context: ScriptedContext, **options: object) -> EngineCore:
    return EngineCore(context, EngineOptions(**options))  # type: ignore[arg-type]


def run(engine: EngineCore, *requests: Request) -> None:
    for each in requests:
        engine.add(each)
    for _ in range(2000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def tokens_alone(request: Request) -> tuple[int, ...]:
    return greedy_tokens(ScriptedContext(n_ctx=1000), request.history.tokens[: request.n_prompt])


def greedy_tokens(context: ScriptedContext, tokens: Sequence[int]) -> tuple[int, ...]:
    """The greedy answer of sequence 0 after more tokens, one decode per token."""
    generated = list[int]()
    while len(generated) < (GREEDY.max_tokens or 0) and not VOCAB.eog_ids & {*generated}:
        tokens = [int(np.argmax(feed(context, tokens)))]
        generated += tokens
    return tuple(generated)


def feed(context: ScriptedContext, tokens: Sequence[int]) -> NDArray[np.float32]:
    row = np.empty(0, np.float32)
    for token in tokens:
        batch = context.new_batch()
        batch.extend([token], Pos(0, context.length(0)), logits="last")
        row = np.array(context.decode(batch)[0])
    return row


def n_tokens(*messages: Message) -> int:
    """The number of tokens of the messages, without the generation prompt."""
    return sum(len(f"{message.role}:{message.content}") + 2 for message in messages)


def user(content: str) -> Message:
    return Message(Role.USER, content)


# Ends of messages.


def test_message_ends_are_prefixes_of_the_prompt() -> None:
    """The tokens of the first messages alone are a prefix of the conversation's tokens."""
    messages = [SYSTEM, user("What is <|end|> there?"), Message(Role.ASSISTANT, ""), user("And then?")]
    prompt = encode(VOCAB, lambda: FORMATTER, messages, None)
    with_content = (1, 2, 4)  # a message without content ends with the next one
    for n, end in zip(with_content, prompt.message_ends, strict=True):
        shorter = "".join(s.text for s in FORMATTER.render(messages[:n], add_generation_prompt=False))
        assert VOCAB.decode(prompt.tokens[:end], special=True) == shorter


@pytest.mark.parametrize("capabilities", [ALL, COPIES], ids=["shared", "copied"])
def test_contexts_with_whole_forks_keep_message_ends(capabilities: frozenset[Capability]) -> None:
    engine = core(WholeForks(n_ctx=1000, n_seq_max=8, capabilities=capabilities))
    first, other = chat(SYSTEM, user("What is a fork?")), chat(SYSTEM, user("What is a spoon?"))
    again = chat(SYSTEM, user("What is a fork?"), Message(Role.ASSISTANT, "A tool."), user("And a knife?"))
    third = chat(SYSTEM, user("What is a cup?"))
    for each in (
        first,
        other,
        again,
        third,
    ):  # `again` has another answer than the cached one, as if the template had dropped reasoning
        run(engine, each)
        assert each.answer.tokens == tokens_alone(each)
    cached = [each.answer.usage.cached_tokens for each in (first, other, again, third)]
    assert cached == [0, n_tokens(SYSTEM), n_tokens(SYSTEM, user("What is a fork?")), n_tokens(SYSTEM)]


def test_kept_prefixes_take_no_room_from_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Copies of prefixes would not fit next to the requests: none is tried, and no request is preempted."""
    engine = core(WholeForks(n_ctx=200, n_seq_max=8, capabilities=COPIES))
    requests = [chat(SYSTEM, user(f"{i}?")) for i in range(2)]
    run(engine, *requests)
    assert [each.answer.tokens for each in requests] == [tokens_alone(each) for each in requests]
    assert (engine.totals.n_preempted, engine.totals.n_failed) == (0, 0)
    assert not caplog.records


@pytest.mark.parametrize("make", [WholeForks, Checkpoints])
@pytest.mark.parametrize("capabilities", [ALL, COPIES], ids=["shared", "copied"])
def test_common_prefixes_are_computed_once_if_partial_forks_cost(
    make: type[WholeForks | Checkpoints], capabilities: frozenset[Capability]
) -> None:
    """Simultaneous prompts: the first stops its prefill at the end of the common prefix, and the others fork there."""
    context = make(n_ctx=4000, n_seq_max=16, n_batch=64, capabilities=capabilities)
    engine = core(context)
    shared = "a long beginning that all of them have " * 5
    requests = [text(f"{shared}{i}{i}") for i in range(6)]
    run(engine, *requests)
    assert [each.answer.tokens for each in requests] == [tokens_alone(each) for each in requests]
    n_answers = sum(len(each.answer.tokens) for each in requests)
    assert engine.totals.computed_tokens <= len(shared) + 2 * 6 + n_answers
    assert [each.answer.usage.cached_tokens for each in requests] == [0] + [len(shared)] * 5
    assert getattr(context, "n_again", 0) == 0


def test_forks_recompute_no_tokens() -> None:
    """Recomputation in a fork would delay all requests: a prompt forks at a checkpoint and prefills the rest itself."""
    context = Checkpoints(n_ctx=1000, n_seq_max=8, n_batch=16)
    engine = core(context)
    first, second = text("What is the answer to everything? 42"), text("What is the answer to everything? 43")
    run(engine, first)
    run(engine, second)
    assert second.answer.tokens == tokens_alone(second)
    assert second.answer.usage.cached_tokens == 32
    assert context.n_again == 0


# Cuts.


TOKENS = st.lists(st.integers(0, 3), max_size=150).map(lambda tokens: np.array(tokens, np.int32))


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_cutting_the_gaps_leaves_a_prefix_of_the_prompt(
    head: NDArray[np.int32], removed: NDArray[np.int32], tail: NDArray[np.int32], more: NDArray[np.int32]
) -> None:
    cached, tokens = np.concatenate([head, removed, tail]), np.concatenate([head, tail, more, [0]])
    n_same = min(n_common(cached, tokens), len(tokens) - 1)
    gaps, n_shared = gaps_between(cached, tokens, n_same)
    remaining = cut(cached, gaps)
    assert remaining[:n_shared].tolist() == tokens[:n_shared].tolist()
    assert n_shared < len(tokens)
    if len(head) + len(tail) - n_same >= LEAST_AFTER_GAP:
        assert n_shared >= n_same + LEAST_AFTER_GAP


def test_the_last_token_is_computed() -> None:
    """The cache holds the whole prompt, except a gap. Its last token is decoded anyway, to get logits."""
    head, removed, tail = np.arange(10, dtype=np.int32), np.full(5, 99, np.int32), np.arange(10, 60, dtype=np.int32)
    gaps, n_shared = gaps_between(np.concatenate([head, removed, tail]), np.concatenate([head, tail]), 10)
    assert (gaps, n_shared) == (((10, 15),), 59)


def cut(cached: NDArray[np.int32], gaps: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    for start, end in reversed(gaps):
        cached = np.concatenate([cached[:start], cached[end:]])
    return cached


THOUGHT = "<think>That is a hard one, let me see what I know of it.</think>"
ANSWER = "It is a tool with which people eat what is not liquid."
QUESTION, NEXT = "What is a fork, and what is it for?", "And what is a knife for?"


def conversation() -> tuple[str, str]:
    """The computed tokens, and the next prompt, from which the template has dropped the reasoning."""
    begin = f"<|start|>user:{QUESTION}<|end|><|start|>assistant:"
    return f"{begin}{THOUGHT}{ANSWER}", f"{begin}{ANSWER}<|end|><|start|>user:{NEXT}<|end|><|start|>assistant:"


def test_a_template_drops_thinking() -> None:
    """Without ``reuse="cut"`` all later tokens are computed again; with it, they are shifted, and the usage says so."""
    computed, prompt = conversation()
    same = len(computed) - len(THOUGHT) - len(ANSWER)
    for reuse, cached, shifted in [("prefix", same, 0), ("cut", same + len(ANSWER), len(ANSWER))]:
        engine = core(ScriptedContext(n_ctx=1000, n_seq_max=4), reuse=reuse)
        run(engine, text(computed))
        each = text(prompt)
        run(engine, each)
        usage = each.answer.usage
        assert (usage.cached_tokens, usage.shifted_tokens) == (cached, shifted)
        assert each.answer.tokens == (
            tokens_alone(each) if reuse == "prefix" else tokens_after_a_cut(computed, same, prompt)
        )
        n_first = len(computed) + GREEDY.max_tokens - 1  # type: ignore[operator]
        n_second = len(prompt) - cached + len(each.answer.tokens) - 1
        assert engine.totals.computed_tokens == n_first + n_second


def tokens_after_a_cut(computed: str, start: int, prompt: str) -> tuple[int, ...]:
    """The answer of a context after a manual cut of the reasoning."""
    context = ScriptedContext(n_ctx=1000)
    feed(context, computed.encode())
    context.cut(Pos(0, start), Pos(0, start + len(THOUGHT)))
    return greedy_tokens(context, prompt.encode()[context.length(0) :])


def test_later_requests_report_shifted_tokens() -> None:
    computed, prompt = conversation()
    same = len(computed) - len(THOUGHT) - len(ANSWER)
    engine = core(ScriptedContext(n_ctx=2000, n_seq_max=4), reuse="cut")
    run(engine, text(computed))
    run(engine, text(prompt))
    later, elsewhere = text(prompt + "It cuts."), text(prompt[:same] + "Another answer to the question")
    run(engine, later)
    run(engine, elsewhere)
    assert later.answer.usage.cached_tokens >= len(prompt)
    assert later.answer.usage.shifted_tokens == later.answer.usage.cached_tokens - same
    assert (elsewhere.answer.usage.cached_tokens, elsewhere.answer.usage.shifted_tokens) == (same, 0)


def test_shifted_tokens_are_reported_after_a_preemption() -> None:
    """A request with a cut history is preempted and dumped: the dump holds the shifted tokens."""
    computed, prompt = conversation()
    same = len(computed) - len(THOUGHT) - len(ANSWER)
    engine = core(ScriptedContext(n_ctx=440, n_seq_max=4, n_batch=64), reuse="cut")
    run(engine, text(computed))
    moved, other = text(prompt, 100, priority=-5), text("y" * 200, 60)
    engine.add(moved)
    engine.step()
    run(engine, other)
    assert (engine.totals.n_preempted, engine.totals.n_swapped) == (1, 1)
    later = text(prompt + "It cuts.")
    run(engine, later)
    assert later.answer.usage.shifted_tokens == later.answer.usage.cached_tokens - same > 0


def test_a_cut_without_room_keeps_the_common_prefix() -> None:
    computed, prompt = conversation()
    context = ScriptedContext(n_ctx=1000, n_seq_max=4)
    engine = core(context, reuse="cut")
    run(engine, text(computed))

    def refuse(seq_id: int, start: int, end: int) -> None:
        raise ContextFull(100, 0)

    context._engine_cut = refuse  # type: ignore[method-assign]
    each = text(prompt)
    run(engine, each)
    assert each.answer.tokens == tokens_alone(each)
    assert each.answer.usage.cached_tokens == len(computed) - len(THOUGHT) - len(ANSWER)
    assert each.answer.usage.shifted_tokens == 0


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(InvalidOption, match="TRUNCATE"):
        core(ScriptedContext(level=EditLevel.TRUNCATE), reuse="cut")
    with pytest.raises(InvalidOption, match="accepted: prefix, cut"):
        EngineOptions(reuse="all")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="prefix_cache"):
        EngineOptions(reuse="cut", prefix_cache=False)
