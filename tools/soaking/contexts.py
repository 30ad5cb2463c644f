"""Workloads on contexts: random programs, errors, models that open and close, threads, repeated calls."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from slm_conformance.suite.programs.context_programs import Player
from slm_conformance.suite.programs.random_context_programs import SIZES, ProgramMaker
from slm_core.errors import (
    ContextClosed,
    ContextFull,
    InvalidPosition,
    InvalidSequence,
    InvalidSnapshot,
    InvalidToken,
    ModelClosed,
    SlmError,
    SnapshotMismatch,
)
from slm_core.protocols import BackendModel, Context
from slm_core.types import ContextOptions, EditLevel, ModelSource, Pos
from soaking.checks import Wrong, next_row, refused, require, same_row
from soaking.site import MODELS, N_BATCH, N_CTX, N_SEQ_MAX, Site

N_THREADS = 8
_DIGEST_SIZE = 32  # of a dump, at its end


def random_program(site: Site, rng: random.Random) -> None:
    """A random program of legal and illegal calls agrees with the float64 reference and a model of the contract."""
    with site.bench(rng.choice(MODELS[:-1])) as bench:
        seed, sizes = rng.getrandbits(32), rng.choice(SIZES)
        declared = bench.model.info.n_vocab, bench.edit_level, bench.capabilities
        program = ProgramMaker(*declared, seed=seed, sizes=sizes).make()
        Player(bench, "model = ...", sizes).play(program)


def illegal_calls(site: Site, rng: random.Random) -> None:
    """Illegal calls (full context, bad tokens, wrong positions) are refused, and the sequence continues as before."""
    name = rng.choice(MODELS)
    with site.old_session(name) as session, site.old_session(name) as neighbour:
        session.append_tokens(site.prompt(name, rng))
        next_row(session)
        context, seq_id, n = session.context, session.seq_id, session.n_tokens
        for what, call, error in rng.sample(_illegal(context, seq_id, n, site.model(name).vocab.size), 3):
            refused(context, call, what, error)
        must_raise(lambda: fill(context, neighbour.seq_id, rng), ContextFull, "decodes without end")
        require(context.n_free < context.n_batch, f"the context is full, but {context.n_free} positions are free")
        context.drop(neighbour.seq_id)
        session.append_tokens(site.tokens(name, rng, 3))
        same_row(site, name, session.tokens, next_row(session), "a sequence after refused calls")


def _illegal(
    context: Context, seq_id: int, n: int, vocab_size: int
) -> list[tuple[str, Callable[[], object], type[SlmError]]]:
    """Illegal calls for a sequence with ``n`` tokens: description, call, error."""
    return [
        ("a token out of range", lambda: decode(context, seq_id, n, [0, vocab_size]), InvalidToken),
        ("a wrong position", lambda: decode(context, seq_id, n + 1, [0]), InvalidPosition),
        ("an unknown sequence", lambda: decode(context, N_SEQ_MAX, 0, [0]), InvalidSequence),
        ("a fork into itself", lambda: context.fork(seq_id, seq_id), InvalidSequence),
        ("a fork past the end", lambda: context.fork(seq_id, N_SEQ_MAX - 1, n + 1), InvalidPosition),
        ("a restore of text", lambda: context.restore(seq_id, b"not a dump"), InvalidSnapshot),
    ]


def bad_dumps(site: Site, rng: random.Random) -> None:
    """Damaged, truncated and forged dumps, and dumps of other models, are refused and change nothing."""
    name = rng.choice(MODELS)
    other = rng.choice([other for other in MODELS if other != name])
    with site.old_session(name) as session, site.fresh_session(name) as victim:
        session.append_tokens(site.prompt(name, rng))
        next_row(session)
        victim.append_tokens(site.tokens(name, rng, 9))
        next_row(victim)
        data = session.context.dump(session.seq_id)
        context = victim.context
        cut = data[: rng.randrange(len(data))]
        refused(context, lambda: context.restore(0, cut), "a truncated dump", InvalidSnapshot)
        flipped = flip(data, rng)
        refused(context, lambda: context.restore(0, flipped), "a damaged dump", InvalidSnapshot)
        with site.fresh_session(other) as stranger:
            other_context = stranger.context
            refused(other_context, lambda: other_context.restore(0, data), "a dump of another model", SnapshotMismatch)
        restore_forged(site, data, rng, context)
        same_row(site, name, victim.tokens, next_row(victim), "a sequence after dumps were refused")


def restore_forged(site: Site, data: bytes, rng: random.Random, context: Context) -> None:
    """Restore a changed dump with a valid checksum: it is refused, or accepted if only numbers changed."""
    forged = flip(data[:-_DIGEST_SIZE], rng)
    forged += hashlib.blake2b(forged, digest_size=_DIGEST_SIZE).digest()
    try:
        context.restore(1, forged)
    except (InvalidSnapshot, SnapshotMismatch, ContextFull):
        site.counts["forged dumps refused"] += 1
        require(context.length(1) == 0, "a forged dump was refused, but the sequence is not empty")
    else:
        site.counts["forged dumps taken"] += 1
        context.drop(1)


def flip(data: bytes, rng: random.Random) -> bytes:
    """The data with one bit flipped; half of the time near the beginning, in the header."""
    index = rng.randrange(min(len(data), 400) if rng.random() < 0.5 else len(data))
    return data[:index] + bytes([data[index] ^ 1 << rng.randrange(8)]) + data[index + 1 :]


def open_and_close(site: Site, rng: random.Random) -> None:
    """Models (from a file or bytes) and contexts of random sizes close in any order, and then refuse calls."""
    name = rng.choice(MODELS)
    backend, path = site.workshop.backend, site.path(name)
    source: ModelSource = path
    in_memory = path.read_bytes()
    if rng.random() < 0.3 and backend.supports(in_memory, site.engine.device).supported:
        source = in_memory
    with backend.load(source, site.workshop.options()) as model:
        contexts = [model.new_context(random_options(site, name, rng)) for _ in range(rng.randint(1, 4))]
        for context in contexts:
            decode(context, 0, 0, site.tokens(name, rng, min(5, context.n_batch, context.n_ctx)))
        rng.shuffle(contexts)
        for context in contexts[rng.randint(0, len(contexts)) :]:
            context.close()
    for context in contexts:
        must_raise(lambda closed=context: closed.length(0), ContextClosed, "length() of a closed context")
    must_raise(lambda: model.new_context(ContextOptions()), ModelClosed, "new_context() of a closed model")


def random_options(site: Site, name: str, rng: random.Random) -> ContextOptions:
    """Random sizes and KV types of a context."""
    kv_type = rng.choice(site.workshop.kv_types(name))
    n_ctx = rng.choice([8, 100, 256, 2048])
    return ContextOptions(n_ctx, rng.randint(1, 4), rng.choice([1, 16, N_BATCH]), kv_type, kv_type)


def parallel_threads(site: Site, rng: random.Random) -> None:
    """Eight threads with a context each, over one model, get bit for bit the results of a single thread."""
    name = rng.choice(MODELS)
    seeds = [rng.getrandbits(32) for _ in range(N_THREADS)]
    options = random_options(site, name, rng)
    model = site.workshop.model(name)
    before = sys.getswitchinterval()
    sys.setswitchinterval(rng.choice([before, 1e-5]))
    try:
        with ThreadPoolExecutor(N_THREADS) as pool:
            together = list(pool.map(lambda seed: fingerprint(model, options, seed), seeds))
    finally:
        sys.setswitchinterval(before)
    for seed, digest in zip(seeds, together, strict=True):
        alone = fingerprint(model, options, seed)
        require(digest == alone, f"a thread beside {N_THREADS - 1} others got other logits than alone (seed {seed})")


def same_calls_again(site: Site, rng: random.Random) -> None:
    """Fixed calls in a fresh context give the same bits as at the beginning of the run (clause 9)."""
    name, seed = rng.choice(MODELS), rng.randrange(4)
    if rng.random() < 0.3:
        with site.workshop.load(site.path(name)) as model:
            digest = fingerprint(model, _fixed_options(site, name), seed)
    else:
        digest = fingerprint(site.workshop.model(name), _fixed_options(site, name), seed)
    first = site.first_digests.setdefault((name, seed), digest)
    require(digest == first, f"the same calls on {name} gave other logits than earlier in the run (calls {seed})")


def _fixed_options(site: Site, name: str) -> ContextOptions:
    kv_type = site.workshop.kv_types(name)[0]
    return ContextOptions(N_CTX, 2, N_BATCH, kv_type, kv_type)


def fingerprint(model: BackendModel, options: ContextOptions, seed: int) -> bytes:
    """A digest of all logits of random decodes, forks and truncates in a fresh context."""
    rng, digest = random.Random(seed), hashlib.blake2b()
    with model.new_context(options) as context:
        for _ in range(6):
            n = min(rng.randint(1, 20), context.n_batch, context.n_free)
            if n:
                tokens = rng.choices(range(model.vocab.size), k=n)
                digest.update(decode(context, 0, context.length(0), tokens))
            digest.update(struct.pack("<i", context.length(0)))
            if context.length(0) and context.edit_level >= EditLevel.TRUNCATE and rng.random() < 0.3:
                context.truncate(Pos(0, rng.randrange(context.length(0))))
    return digest.digest()


def decode(context: Context, seq_id: int, first: int, tokens: list[int]) -> bytes:
    """The logits after each token, as bytes."""
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, first), logits="all")
    return bytes(context.decode(batch).tobytes())


def fill(context: Context, seq_id: int, rng: random.Random) -> None:
    """Decode until the context is full, then one more token."""
    while True:
        n = rng.randint(1, context.n_batch)
        decode(context, seq_id, context.length(seq_id), [1] * n)


def must_raise(call: Callable[[], object], error: type[SlmError], what: str) -> None:
    """Require a call to raise."""
    try:
        call()
    except error:
        return
    raise Wrong(f"{what}: accepted, expected {error.__name__}")
