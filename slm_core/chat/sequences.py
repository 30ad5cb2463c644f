"""Ownership of the sequences of a context by sessions and their branches."""

from __future__ import annotations

import threading
import weakref

from slm_core.errors import InvalidSequence
from slm_core.protocols import Context

_claiming = threading.Lock()
_owners: weakref.WeakKeyDictionary[Context, dict[int, weakref.ref[object]]] = weakref.WeakKeyDictionary()


def free_sequences(context: Context) -> list[int]:
    """Empty sequences without an owner."""
    owners = _owners.setdefault(context, {})
    owned = {seq_id for seq_id, owner in owners.items() if owner() is not None}
    return [s for s in range(context.n_seq_max) if s not in owned and context.length(s) == 0]


def claim(context: Context, seq_id: int | None, owner: object) -> int:
    """Claim an empty sequence; None for the first free one.

    Raises:
        InvalidSequence: the sequence is taken, or none is free.
    """
    with _claiming:
        free = free_sequences(context)
        if seq_id is None and not free:
            raise InvalidSequence(
                f"no sequence is left (n_seq_max is {context.n_seq_max}): close a session, or create the context with"
                " more"
            )
        chosen = free[0] if seq_id is None else seq_id
        if chosen not in free:
            taken = f"sequence {chosen} is taken or does not exist (free: {free or 'none'})"
            raise InvalidSequence(taken, seq_id=chosen)
        _owners[context][chosen] = weakref.ref(owner)
        return chosen


def check_free(context: Context, n: int, what: str) -> None:
    """Refuse work that needs ``n`` sequences if fewer are free.

    Raises:
        InvalidSequence: fewer are free; the message says how many the context would need.
    """
    n_free = len(free_sequences(context))
    if n > n_free:
        raise InvalidSequence(
            f"{what} takes {n} free sequences, there are {n_free}: close a session, or create the context with"
            f" n_seq_max={context.n_seq_max + n - n_free}"
        )


def release(context: Context, seq_id: int) -> None:
    """Release a sequence."""
    _owners.get(context, {}).pop(seq_id, None)
