"""Workloads on sessions: all ways to generate, edits, dumps, cancellation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slm_core.chat import Session
from slm_core.constraints import Choice, Gbnf, JsonSchema, Lark, Regex, Spec
from slm_core.generation import Answer, Beams, Draft, Event, FinishReason, StoppingAction, StoppingCriterion
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import Drafter, DraftFunction, DraftModel, PromptLookup, Speculation, SuffixIndex
from slm_core.sampling import Sampling
from soaking.checks import next_row, require, same_greedy, same_row
from soaking.site import MODELS, N_CTX, Site

N_OLD_DUMPS = 12
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 7, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_SPECS: tuple[tuple[Spec, Callable[[str], bool]], ...] = (
    (JsonSchema(_PERSON, compact=True), lambda text: set(json.loads(text)) == {"name", "age"}),
    (Regex("(no|yes){2}[0-9]{3}"), lambda text: bool(re.fullmatch("(no|yes){2}[0-9]{3}", text))),
    (Choice(["left", "right", "straight on"]), lambda text: text in ("left", "right", "straight on")),
    (Lark('start: "<" ("a" | "b"){2} ">"'), lambda text: bool(re.fullmatch("<[ab]{2}>", text))),
    (Gbnf('root ::= [0-9] op [0-9] "="\nop ::= [+*/-]'), lambda text: bool(re.fullmatch("[0-9][-+*/][0-9]=", text))),
)


def greedy(site: Site, rng: random.Random) -> None:
    """A greedy answer in an hours-old context equals that of a fresh one."""
    name = rng.choice(MODELS)
    prompt, options = site.prompt(name, rng), _greedy(rng)
    with site.old_session(name) as session:
        _append_in_pieces(session, prompt, rng)
        answer = session.generate(options).run()
    same_greedy(site, name, prompt, answer, _fresh_answer(site, name, prompt, options), "a greedy answer")


def sampled(site: Site, rng: random.Random) -> None:
    """The same seed and calls in two fresh contexts give the same tokens and log probabilities, bit for bit."""
    name = rng.choice(MODELS)
    prompt, options = site.prompt(name, rng), _random_sampling(rng)
    runs = []
    for _ in range(2):
        with site.fresh_session(name) as session:
            session.append_tokens(prompt)
            runs.append([(event.token, event.text, event.logprob) for event in session.generate(options)])
    require(runs[0] == runs[1], f"two fresh contexts gave other draws with {options}")


def constrained(site: Site, rng: random.Random) -> None:
    """An answer under a constraint matches it."""
    name = rng.choice(MODELS)
    spec, fits = rng.choice(_SPECS)
    options = Sampling(temperature=rng.choice([0, 1.0]), seed=rng.getrandbits(32), max_tokens=200)
    with site.old_session(name) as session:
        session.append_tokens(site.prompt(name, rng))
        drafts = Speculation(PromptLookup()) if rng.random() < 0.3 else None
        answer = session.generate(options, constraint=spec, speculation=drafts).run()
    reason = answer.finish_reason
    require(reason is FinishReason.CONSTRAINT and fits(answer.text), f"under {spec}: {reason.value}, {answer.text!r}")


def speculated(site: Site, rng: random.Random) -> None:
    """A greedy answer with a drafter, in an hours-old context, equals that of a fresh context without one."""
    name = rng.choice(MODELS)
    prompt, options = site.prompt(name, rng), _greedy(rng)
    with site.old_session(name) as session, _drafter(site, name, rng) as drafter:
        session.append_tokens(prompt)
        speculation = Speculation(drafter, n_max=rng.randint(1, 9), adaptive=rng.random() < 0.3)
        answer = session.generate(options, speculation=speculation).run()
    same_greedy(site, name, prompt, answer, _fresh_answer(site, name, prompt, options), "a drafted answer")


def beams(site: Site, rng: random.Random) -> None:
    """Beam search gives the same bits in two fresh contexts, and frees its positions in an old one."""
    name = rng.choice(MODELS)
    prompt = site.prompt(name, rng)
    options = Beams(width=rng.randint(2, 5), max_tokens=rng.randint(1, 10), length_penalty=rng.choice([0.5, 1.0]))
    results = []
    for _ in range(2):
        with site.fresh_session(name) as session:
            session.append_tokens(prompt)
            results.append([(best.tokens, best.score) for best in session.beam_search(options).hypotheses])
    require(results[0] == results[1], f"two fresh contexts found other beams with {options}: {results}")
    with _check_no_trace(site, name) as session:
        session.append_tokens(prompt)
        session.beam_search(options)


def completions(site: Site, rng: random.Random) -> None:
    """Completions are the same in two fresh contexts; abandoned ones in an old context free their positions."""
    name = rng.choice(MODELS)
    prompt, options, n = site.prompt(name, rng), _random_sampling(rng), rng.randint(1, 5)
    results = []
    for _ in range(2):
        with site.fresh_session(name) as session:
            session.append_tokens(prompt)
            results.append([completion.answer.tokens for completion in session.completions(n, options).run()])
    require(results[0] == results[1], f"two fresh contexts gave other completions with {options}: {results}")
    with _check_no_trace(site, name) as session:
        session.append_tokens(prompt)
        with session.completions(n, options) as running:
            for _, _event in zip(range(rng.randint(0, 10)), running, strict=False):
                pass


def endless(site: Site, rng: random.Random) -> None:
    """An answer three times as long as its context is the same in two fresh contexts."""
    name = rng.choice(MODELS)
    vocab = site.model(name).vocab
    never = dict.fromkeys(vocab.eog_ids, float("-inf"))
    options = Sampling(seed=rng.getrandbits(32), max_tokens=150, logit_bias=never)
    prompt, answers = site.tokens(name, rng, rng.randint(1, 40)), []
    for _ in range(2):
        with site.fresh_session(name, n_ctx=64) as session:
            session.append_tokens(prompt)
            answers.append(session.generate(options, shift=TokenShift(keep=4)).run().tokens)
    require(answers[0] == answers[1] and len(answers[0]) == 150, f"two fresh contexts said {answers}")


def edited(site: Site, rng: random.Random) -> None:
    """After truncations, rollbacks, forks and cuts, a session's next answer equals that of a fresh one."""
    name = rng.choice(MODELS)
    with site.old_session(name) as session:
        session.append_tokens(site.tokens(name, rng, rng.randint(5, 60)))
        for _ in range(rng.randint(2, 6)):
            _edit(site, name, session, rng)
        same_row(site, name, session.tokens, next_row(session), "a session after edits")


def _edit(site: Site, name: str, session: Session, rng: random.Random) -> None:
    """One edit; at least one token remains."""
    kind = rng.choice(["append", "truncate", "remove", "rollback", "fork", "scratch_branch", "generate"])
    mark, n = session.mark(), session.n_tokens
    if kind == "append":
        session.append_tokens(site.tokens(name, rng, rng.randint(1, min(40, session.context.n_free - 100))))
    elif kind == "truncate":
        session.truncate(rng.randint(1, n))
    elif kind == "remove" and n > 2:
        start = rng.randint(1, n - 1)
        session.remove_span(start, rng.randint(start, n), exact=True)
    elif kind == "rollback":
        session.generate(_greedy(rng)).run()
        session.rollback(mark)
    elif kind == "fork":
        with session.fork() as twin:
            twin.append_tokens(site.tokens(name, rng, 9))
            same_row(site, name, twin.tokens, next_row(twin), "a fork")
    elif kind == "scratch_branch":
        with session.scratch_branch() as elsewhere:
            elsewhere.append_tokens(site.tokens(name, rng, 5))
            elsewhere.generate(_greedy(rng)).run()
    elif kind == "generate":
        session.generate(_greedy(rng)).run()


def dumped(site: Site, rng: random.Random) -> None:
    """A session that is dumped during an answer continues in a fresh context, now and later, as without the dump."""
    name = rng.choice(MODELS)
    prompt, at = site.prompt(name, rng), rng.randint(1, 8)
    options = Sampling(temperature=0, max_tokens=at + rng.randint(1, 12))
    with site.old_session(name) as session:
        session.append_tokens(prompt)
        for _event in session.generate(options, stopping_criteria=[pause_at(at)]):
            pass
        data = session.dump()
        expected = session.generate(stopping_criteria=()).run()
    dumps: list[OldDump] = site.kept.setdefault("dumps", [])  # type: ignore[assignment]
    dumps.append(OldDump(name, prompt, data, expected))
    for dump in {0: dumps[-1], 1: rng.choice(dumps)}.values():
        _check_continuation(site, dump)
    if len(dumps) > N_OLD_DUMPS:
        dumps.pop(rng.randrange(len(dumps)))


@dataclass(frozen=True, slots=True)
class OldDump:
    """A dump, and the continuation of its answer.

    Attributes:
        name: name of the model.
        prompt: the tokens before the answer.
        data: the dump.
        expected: the whole answer.
    """

    name: str
    prompt: list[int]
    data: bytes
    expected: Answer


def _check_continuation(site: Site, dump: OldDump) -> None:
    context = site.new_context(dump.name)
    with context, Session.restore(context, site.model(dump.name).vocab, dump.data) as twin:
        generation = (
            twin.generate(stopping_criteria=())
            if twin.n_tokens < len(dump.prompt) + len(dump.expected.tokens)
            else None
        )
        if generation is not None:
            same_greedy(site, dump.name, dump.prompt, generation.run(), dump.expected, "a restored answer")


def cancelled(site: Site, rng: random.Random) -> None:
    """An answer that is cancelled by a thread, a timeout or a task is a beginning of the whole answer."""
    name = rng.choice(MODELS)
    prompt, options = site.prompt(name, rng), Sampling(temperature=0, max_tokens=30)
    with site.old_session(name) as session:
        session.append_tokens(prompt)
        mark = session.mark()
        tokens = rng.choice([_by_thread, _by_timeout, _by_task])(session, options, rng)
        session.rollback(mark)
        full = session.generate(options).run()
    n = len(tokens)
    if tokens != full.tokens[:n]:  # a near tie, or wrong: one of the two is not a fresh context's
        beginning = Sampling(temperature=0, max_tokens=max(1, n))
        expected = _fresh_answer(site, name, prompt, beginning)
        same_greedy(site, name, prompt, _with_tokens(expected, tokens), expected, "a cancelled answer")
    expected = _fresh_answer(site, name, prompt, options)
    same_greedy(site, name, prompt, full, expected, "an answer after a cancelled one")


def _by_thread(session: Session, options: Sampling, rng: random.Random) -> tuple[int, ...]:
    generation = session.generate(options)
    timer = threading.Timer(rng.uniform(0, 0.02), generation.cancel)
    timer.start()
    try:
        return generation.run().tokens
    finally:
        timer.join()


def _by_timeout(session: Session, options: Sampling, rng: random.Random) -> tuple[int, ...]:
    return session.generate(options, timeout=rng.uniform(1e-5, 0.02)).run().tokens


def _by_task(session: Session, options: Sampling, rng: random.Random) -> tuple[int, ...]:
    tokens: list[int] = []

    async def read() -> None:
        async for event in session.generate(options):
            if event.token is not None:
                tokens.append(event.token)

    async def interrupt() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(rng.uniform(0, 0.02))
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(interrupt())
    return tuple(tokens)


def pause_at(n: int) -> StoppingCriterion:
    """A stopping criterion that pauses an answer after ``n`` tokens."""

    def criterion(event: Event, draft: Draft) -> StoppingAction:
        return StoppingAction.PAUSE if len(draft.tokens) == n else StoppingAction.NEXT

    return criterion


def _with_tokens(answer: Answer, tokens: Sequence[int]) -> Answer:
    return dataclasses.replace(answer, tokens=tuple(tokens))


def _append_in_pieces(session: Session, tokens: Sequence[int], rng: random.Random) -> None:
    """Append tokens in pieces, and decode some pieces before the next is appended."""
    first = 0
    while first < len(tokens):
        n = rng.randint(1, 40)
        session.append_tokens(tokens[first : first + n])
        first += n
        if rng.random() < 0.5:
            next_row(session)


def _fresh_answer(site: Site, name: str, prompt: Sequence[int], options: Sampling) -> Answer:
    with site.fresh_session(name) as session:
        session.append_tokens(prompt)
        return session.generate(options).run()


def _greedy(rng: random.Random) -> Sampling:
    return Sampling(temperature=0, max_tokens=rng.randint(1, 24))


def _random_sampling(rng: random.Random) -> Sampling:
    options = rng.choice(
        [
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.5, "top_k": 0, "min_p": 0.02},
            {"mirostat": 2, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            {"typical_p": 0.8, "repeat_penalty": 1.2},
            {"dry_multiplier": 0.8, "xtc_probability": 0.5},
            {"top_n_sigma": 1.5, "logprobs": 3, "dynatemp_range": 0.3},
        ]
    )
    return Sampling(seed=rng.getrandbits(32), max_tokens=rng.randint(1, 24), **options)


@contextmanager
def _drafter(site: Site, name: str, rng: random.Random) -> Iterator[Drafter]:
    """A random drafter; if it is a model, it is closed afterwards."""
    vocab = site.model(name).vocab
    if rng.random() < 0.3:
        with site.new_context(name) as context:
            yield DraftModel(context, vocab)
        return
    noise = rng.choices(range(vocab.size), k=N_CTX + 20)
    noisy = DraftFunction(lambda tokens, n: noise[len(tokens) :][:n])
    yield rng.choice([PromptLookup(3, 1), SuffixIndex(1), noisy])


@contextmanager
def _check_no_trace(site: Site, name: str) -> Iterator[Session]:
    """A session in the old context; afterwards the number of free positions must be as before."""
    context = site.context(name)
    before = context.n_free
    with site.old_session(name) as session:
        yield session
    require(context.n_free == before, f"{context.n_free} positions are free, before there were {before}")
