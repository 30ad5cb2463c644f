"""The state of speculation in dumps."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from slm_core.container import is_count
from slm_core.errors import InvalidOption, InvalidSnapshot, SessionError
from slm_core.generation.events import SpeculationStats
from slm_core.generation.speculation.proposal import DraftProbabilities, Proposal, never
from slm_core.generation.speculation.settings import Speculation, drafter_of

_COUNTED = tuple(field.name for field in fields(SpeculationStats) if field.name != "reason")
MISSING = (
    "this answer is drafted for by code or a model, which no dump holds: give it again,"
    " generate(speculation=Speculation(...))"
)


class MissingDrafter:
    """A placeholder for a drafter that dumps do not contain: code or a model."""

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """Raise ``SessionError``."""
        raise SessionError(MISSING)

    def settings(self) -> None:
        """None: the settings are unknown."""
        return


@dataclass(frozen=True, slots=True)
class DumpedSpeculation:
    """The speculation of an answer, and its state.

    Attributes:
        speculation: the speculation, with a ``MissingDrafter`` if the caller has to set the drafter again.
        queue: drafted tokens that are not verified yet, each with its draft probabilities.
        stats: its statistics.
        in_round: whether the next token belongs to a draft, or directly follows one.
    """

    speculation: Speculation
    queue: tuple[tuple[int, DraftProbabilities | None], ...]
    stats: SpeculationStats
    in_round: bool

    def meta(self) -> dict[str, object]:
        """The state without draft probabilities, as JSON values."""
        settings = self.speculation.drafter.settings()
        return {
            "drafter": None if settings is None else dict(settings),
            "n_max": self.speculation.n_max,
            "adaptive": self.speculation.adaptive,
            "queue": [token for token, _ in self.queue],
            "drawn": [draft_probabilities is not None for _, draft_probabilities in self.queue],
            "in_round": self.in_round,
            "stats": {name: getattr(self.stats, name) for name in _COUNTED},
        }

    def draft_probabilities(self) -> bytes:
        """The draft probabilities as bytes; for each token: n, int32 tokens [n], float64 probabilities [n]."""
        return b"".join(
            struct.pack("<I", len(ids)) + ids.astype("<i4").tobytes() + probabilities.astype("<f8").tobytes()
            for ids, probabilities in (
                draft_probabilities for _, draft_probabilities in self.queue if draft_probabilities is not None
            )
        )


def read_speculation(meta: object, data: bytes, n_vocab: int) -> DumpedSpeculation:
    """Restore speculation from ``DumpedSpeculation.meta`` and ``draft_probabilities``.

    Raises:
        InvalidSnapshot: the data are malformed.
    """
    names = {"drafter", "n_max", "adaptive", "queue", "drawn", "in_round", "stats"}
    if not isinstance(meta, dict) or set(meta) != names or not isinstance(meta["in_round"], bool):
        raise InvalidSnapshot("the dump's speculation is malformed")
    queue, drawn = meta["queue"], meta["drawn"]
    is_valid = isinstance(queue, list) and isinstance(drawn, list) and len(queue) == len(drawn) <= 64
    if not is_valid or not all(is_count(token) and token < n_vocab for token in queue):
        raise InvalidSnapshot("the dump's draft is malformed")
    draft_probabilities = _read_draft_probabilities(data, sum(map(bool, drawn)), n_vocab)
    try:
        drafter = MissingDrafter() if meta["drafter"] is None else drafter_of(_mapping(meta["drafter"]))
        speculation = Speculation(drafter, meta["n_max"], meta["adaptive"])
    except InvalidOption as error:
        raise InvalidSnapshot(f"the dump's speculation does not fit: {error}") from error
    pairs = tuple(
        (token, draft_probabilities.pop(0) if is_drawn else None) for token, is_drawn in zip(queue, drawn, strict=True)
    )
    return DumpedSpeculation(speculation, pairs, _read_stats(meta["stats"]), meta["in_round"])


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidSnapshot("the dump's drafter is malformed")
    return value


def _read_stats(meta: object) -> SpeculationStats:
    stats = _mapping(meta)
    is_valid = set(stats) == set(_COUNTED) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        for value in stats.values()
    )
    if not is_valid or not all(is_count(value) for name, value in stats.items() if not name.endswith("_s")):
        raise InvalidSnapshot("the dump's counts of drafts are malformed")
    return SpeculationStats(**stats)  # type: ignore[arg-type]  # checked above


def _read_draft_probabilities(data: bytes, n: int, n_vocab: int) -> list[DraftProbabilities]:
    draft_probabilities, at = [], 0
    for _ in range(n):
        size = int.from_bytes(data[at : at + 4], "little")
        ids_at, end = at + 4, at + 4 + 12 * size
        if not 0 < size <= n_vocab or end > len(data):
            raise InvalidSnapshot("the dump's distributions are malformed")
        ids = np.frombuffer(data[ids_at : ids_at + 4 * size], "<i4").astype(np.int64)
        probabilities = np.frombuffer(data[ids_at + 4 * size : end], "<f8").astype(np.float64)
        if not ((ids >= 0) & (ids < n_vocab)).all() or not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise InvalidSnapshot("the dump's distributions hold no probabilities of this vocabulary")
        draft_probabilities.append((ids, probabilities))
        at = end
    if at != len(data):
        raise InvalidSnapshot("the dump's distributions are malformed")
    return draft_probabilities
