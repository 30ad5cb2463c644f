"""The bytes of a dumped session."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slm_core.errors import ContextFull, InvalidSnapshot, OptionError
from slm_core.generation.loop import Progress
from slm_core.sampling import Sampling
from slm_core.snapshot import is_count, pack, unpack


@dataclass(frozen=True, slots=True)
class OwnSampler:
    """A sampler chain that an answer has to itself: options and state."""

    sampling: Sampling
    state: bytes


@dataclass(frozen=True, slots=True)
class UnfinishedAnswer:
    """An answer that is to go on.

    Attributes:
        progress: where it stands.
        sampler: its own, or None where it uses the session's.
        special: whether control tokens become text.
    """

    progress: Progress
    sampler: OwnSampler | None
    special: bool


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a dump of a session holds.

    Attributes:
        sequence: the context's dump of its sequence.
        tokens: the history, decoded or not.
        sampling: its options.
        sampler: the state of its sampler.
        answer: the one that is unfinished, or None.
    """

    sequence: bytes
    tokens: tuple[int, ...]
    sampling: Sampling
    sampler: bytes
    answer: UnfinishedAnswer | None


def write(state: SessionState) -> bytes:
    """The container, kind "session"."""
    tokens = struct.pack(f"<{len(state.tokens)}i", *state.tokens)
    meta = {
        "sampling": state.sampling.to_dict(),
        "answer": None if state.answer is None else _answer_meta(state.answer),
    }
    pending = b"" if state.answer is None else state.answer.progress.pending
    own = b"" if state.answer is None or state.answer.sampler is None else state.answer.sampler.state
    return pack("session", meta, (state.sequence, tokens, state.sampler, pending, own))


def read(data: bytes) -> SessionState:
    """Read a container; every value is checked.

    Raises:
        InvalidSnapshot, SnapshotMismatch: see ``snapshot.unpack``.
    """
    meta, sections = unpack("session", data)
    if set(meta) != {"sampling", "answer"} or len(sections) != 5 or len(sections[1]) % 4 or len(sections[3]) > 3:
        raise InvalidSnapshot("the dump of a session lacks a part")
    sequence, tokens, sampler, pending, own = sections
    answer = None if meta["answer"] is None else _read_answer(meta["answer"], pending, own)
    history = struct.unpack(f"<{len(tokens) // 4}i", tokens)
    return SessionState(sequence, history, read_sampling(meta["sampling"]), sampler, answer)


def read_sampling(meta: object) -> Sampling:
    """Sampling options from a dump.

    Raises:
        InvalidSnapshot: they are malformed or do not fit.
    """
    if not isinstance(meta, dict):
        raise InvalidSnapshot("the dump's sampling options are malformed")
    try:
        return Sampling.from_dict(meta)
    except OptionError as error:
        raise InvalidSnapshot(f"the dump's sampling options do not fit: {error}") from error


def check_history(state: SessionState, held: Sequence[int], n_vocab: int, n_free: int) -> None:
    """Refuse a history that does not continue what the context holds.

    Raises:
        InvalidSnapshot: it contradicts the restored sequence, or holds no tokens of this vocabulary.
        ContextFull: what is yet to be decoded does not fit.
    """
    if tuple(held) != state.tokens[: len(held)]:
        raise InvalidSnapshot("the dump's history contradicts its sequence")
    if not all(0 <= token < n_vocab for token in state.tokens):
        raise InvalidSnapshot("the dump's history holds tokens outside the vocabulary")
    if state.answer is not None and len(state.answer.progress.tokens) > len(state.tokens):
        raise InvalidSnapshot("the dump's answer is longer than its history")
    if len(state.tokens) - len(held) > n_free:
        raise ContextFull(len(state.tokens) - len(held), n_free)


def _answer_meta(answer: UnfinishedAnswer) -> dict[str, object]:
    names = ("n_prompt", "n_cached", "max_tokens", "tokens", "text", "held", "prefill_s", "decode_s")
    progress = {"stops": list(answer.progress.stops), **{name: getattr(answer.progress, name) for name in names}}
    own = None if answer.sampler is None else answer.sampler.sampling.to_dict()
    return {"progress": progress, "sampling": own, "special": answer.special}


def _read_answer(meta: object, pending: bytes, own: bytes) -> UnfinishedAnswer:
    if not isinstance(meta, dict) or set(meta) != {"progress", "sampling", "special"}:
        raise InvalidSnapshot("the dump's unfinished answer is malformed")
    progress = meta["progress"]
    if not isinstance(progress, dict) or not _is_progress(progress) or not isinstance(meta["special"], bool):
        raise InvalidSnapshot("the dump's unfinished answer is malformed")
    sampler = None if meta["sampling"] is None else OwnSampler(read_sampling(meta["sampling"]), own)
    whole = Progress(**{**progress, "stops": tuple(progress["stops"])}, pending=pending)
    return UnfinishedAnswer(whole, sampler, special=meta["special"])


def _is_progress(meta: Mapping[str, object]) -> bool:
    names = {"n_prompt", "n_cached", "max_tokens", "stops", "tokens", "text", "held", "prefill_s", "decode_s"}
    if set(meta) != names:
        return False
    tokens, stops, max_tokens = meta["tokens"], meta["stops"], meta["max_tokens"]
    return (
        isinstance(tokens, list)
        and isinstance(stops, list)
        and all(is_count(n) for n in (meta["n_prompt"], meta["n_cached"], *tokens))
        and (max_tokens is None or is_count(max_tokens))
        and all(isinstance(text, str) for text in (meta["text"], meta["held"], *stops))
        and all(isinstance(stop, str) and stop for stop in stops)
        and all(isinstance(meta[name], float | int) for name in ("prefill_s", "decode_s"))
    )
