"""The bytes of a dumped session."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from slm_core import constraints
from slm_core.chat.records import check_records
from slm_core.chat.rows_dump import read_inputs, write_inputs
from slm_core.container import is_count, pack, unpack
from slm_core.context.inputs import Held, block_boundary, has_records, text_tokens, token_ids
from slm_core.errors import (
    ContextFull,
    InvalidEmbedding,
    InvalidOption,
    InvalidSnapshot,
    OptionError,
    SnapshotMismatch,
    UnsupportedInput,
)
from slm_core.generation.speculation.dumped import DumpedSpeculation, read_speculation
from slm_core.generation.token_loop import Progress
from slm_core.protocols import Constraint, Context, Vocab
from slm_core.sampling import Sampling

_PROGRESS = frozenset(field.name for field in fields(Progress)) - {"pending"}  # bytes go into a section


@dataclass(frozen=True, slots=True)
class OwnSampler:
    """The options and state of a sampler chain that only one answer uses."""

    sampling: Sampling
    state: bytes


@dataclass(frozen=True, slots=True)
class UnfinishedAnswer:
    """An unfinished answer.

    Attributes:
        progress: its tokens and counters.
        sampler: its sampler; None for the session's sampler.
        constraint: the state of its constraint, or None.
        special: whether control tokens become text.
        speculation: its speculation; None without speculation.
    """

    progress: Progress
    sampler: OwnSampler | None
    constraint: bytes | None
    special: bool
    speculation: DumpedSpeculation | None = None


@dataclass(frozen=True, slots=True)
class SessionState:
    """The content of a session's dump.

    Attributes:
        sequence: the context's dump of its sequence.
        inputs: the history, decoded or not.
        sampling: the sampling options.
        sampler: the state of its sampler.
        answer: the unfinished answer, or None.
    """

    sequence: bytes
    inputs: tuple[Held, ...]
    sampling: Sampling
    sampler: bytes
    answer: UnfinishedAnswer | None


class _AnswerParts(NamedTuple):
    """Sections of a dump that belong to an unfinished answer."""

    pending: bytes
    sampler_state: bytes
    rule: bytes
    draft_probabilities: bytes


def write(state: SessionState) -> bytes:
    """The bytes of the container, kind "session"."""
    tokens = struct.pack(f"<{len(state.inputs)}i", *token_ids(state.inputs))
    records = (write_inputs(state.inputs),) if has_records(state.inputs) else ()
    meta = {
        "sampling": state.sampling.to_dict(),
        "answer": None if state.answer is None else _answer_meta(state.answer),
    }
    pending = sampler_state = rule = draft_probabilities = b""
    if state.answer is not None:
        pending, rule = state.answer.progress.pending, state.answer.constraint or b""
        sampler_state = b"" if state.answer.sampler is None else state.answer.sampler.state
        draft_probabilities = (
            b"" if state.answer.speculation is None else state.answer.speculation.draft_probabilities()
        )
    return pack(
        "session",
        meta,
        (state.sequence, tokens, state.sampler, pending, sampler_state, rule, draft_probabilities, *records),
    )


def read(data: bytes, n_vocab: int) -> SessionState:
    """Read a container; every value is checked.

    Args:
        data: the bytes.
        n_vocab: size of the vocabulary.

    Raises:
        InvalidSnapshot, SnapshotMismatch: see ``snapshot.unpack``.
    """
    meta, sections = unpack("session", data)
    lacks_part = set(meta) != {"sampling", "answer"} or len(sections) not in (7, 8)
    if lacks_part or len(sections[1]) % 4 or len(sections[3]) > 3:
        raise InvalidSnapshot("a part of the dump of a session is missing")
    sequence, tokens, sampler, pending, sampler_state, rule, draft_probabilities, *records = sections
    parts = _AnswerParts(pending, sampler_state, rule, draft_probabilities)
    answer = None if meta["answer"] is None else _read_answer(meta["answer"], parts, n_vocab)
    ids = struct.unpack(f"<{len(tokens) // 4}i", tokens)
    inputs: Sequence[Held] = read_inputs(records[0]) if records else ids
    if records and tuple(token_ids(inputs)) != ids:
        raise InvalidSnapshot("the dump's embedding rows contradict its history")
    return SessionState(sequence, tuple(inputs), read_sampling(meta["sampling"]), sampler, answer)


def read_sampling(meta: object) -> Sampling:
    """Sampling options from a dump.

    Raises:
        InvalidSnapshot: the options are malformed or invalid.
    """
    if not isinstance(meta, dict):
        raise InvalidSnapshot("the dump's sampling options are malformed")
    try:
        return Sampling.from_dict(meta)
    except OptionError as error:
        raise InvalidSnapshot(f"the dump's sampling options do not fit: {error}") from error


def check_history(state: SessionState, context: Context, held: Sequence[int], n_vocab: int) -> None:
    """Refuse a history that does not continue the restored sequence.

    Raises:
        InvalidSnapshot: it contradicts the restored sequence, or has tokens outside the vocabulary.
        SnapshotMismatch: it has embedding rows or bidirectional blocks that the context does not take.
        ContextFull: the pending tokens do not fit.
    """
    tokens = tuple(token_ids(state.inputs))
    if tuple(held) != tokens[: len(held)]:
        raise InvalidSnapshot("the dump's history contradicts its sequence")
    forced = () if state.answer is None else state.answer.progress.forced
    if not all(0 <= token < n_vocab for token in (*text_tokens(state.inputs), *forced)):
        raise InvalidSnapshot("the dump's history holds tokens outside the vocabulary")
    if state.answer is not None and not _continues(state.answer.progress, tokens):
        raise InvalidSnapshot("the dump's unfinished answer contradicts its history")
    if block_boundary(state.inputs, len(held)) < len(held):
        raise InvalidSnapshot("the dump's history divides a bidirectional block")
    try:
        check_records(context, state.inputs)
    except (UnsupportedInput, InvalidEmbedding, InvalidOption) as error:
        raise SnapshotMismatch(f"the dump's history does not fit: {error}") from error
    if len(tokens) - len(held) > context.n_free:
        raise ContextFull(len(tokens) - len(held), context.n_free)


def restore_constraint(answer: UnfinishedAnswer, vocab: Vocab) -> Constraint | None:
    """The constraint of an unfinished answer, in its state.

    Raises:
        InvalidSnapshot: the state is malformed, or contradicts the answer.
    """
    if answer.constraint is None:
        return None
    rule, progress = constraints.restore(vocab, answer.constraint), answer.progress
    forced = tuple(progress.forced)
    if rule.tokens != tuple(progress.tokens) or rule.forced[: len(forced)] != forced:
        raise InvalidSnapshot("the dump's constraint contradicts its unfinished answer")
    return rule


def _continues(progress: Progress, history: tuple[int, ...]) -> bool:
    """Whether the history is a prompt and then the answer."""
    n_prompt, n_cached = progress.n_prompt, progress.n_cached
    return n_cached <= n_prompt <= len(history) and history[n_prompt:] == tuple(progress.tokens)


def _answer_meta(answer: UnfinishedAnswer) -> dict[str, object]:
    progress = {name: getattr(answer.progress, name) for name in _PROGRESS} | {"stops": list(answer.progress.stops)}
    sampling = None if answer.sampler is None else answer.sampler.sampling.to_dict()
    drafts = None if answer.speculation is None else answer.speculation.meta()
    return {"progress": progress, "sampling": sampling, "special": answer.special, "speculation": drafts}


def _read_answer(meta: object, parts: _AnswerParts, n_vocab: int) -> UnfinishedAnswer:
    if not isinstance(meta, dict) or set(meta) != {"progress", "sampling", "special", "speculation"}:
        raise InvalidSnapshot("the dump's unfinished answer is malformed")
    progress = meta["progress"]
    if not isinstance(progress, dict) or not _is_progress(progress) or not isinstance(meta["special"], bool):
        raise InvalidSnapshot("the dump's unfinished answer is malformed")
    sampler = None if meta["sampling"] is None else OwnSampler(read_sampling(meta["sampling"]), parts.sampler_state)
    whole = Progress(**{**progress, "stops": tuple(progress["stops"])}, pending=parts.pending)
    drafts = meta["speculation"]
    speculation = None if drafts is None else read_speculation(drafts, parts.draft_probabilities, n_vocab)
    return UnfinishedAnswer(whole, sampler, parts.rule or None, special=meta["special"], speculation=speculation)


def _is_progress(meta: Mapping[str, object]) -> bool:
    if set(meta) != _PROGRESS:
        return False
    tokens, forced, stops, max_tokens = meta["tokens"], meta["forced"], meta["stops"], meta["max_tokens"]
    return (
        isinstance(tokens, list)
        and isinstance(forced, list)
        and isinstance(stops, list)
        and all(is_count(n) for n in (meta["n_prompt"], meta["n_cached"], *tokens, *forced))
        and (max_tokens is None or is_count(max_tokens))
        and all(isinstance(text, str) for text in (meta["text"], meta["held"], *stops))
        and all(isinstance(stop, str) and stop for stop in stops)
        and all(_is_seconds(meta[name]) for name in ("prefill_s", "decode_s"))
        and all(meta[name] is None or _is_seconds(meta[name]) for name in ("queue_s", "first_token_s", "time_left_s"))
    )


def _is_seconds(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
