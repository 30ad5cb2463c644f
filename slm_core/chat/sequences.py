"""The sequences of a context that are in use by sessions and their branches."""

from __future__ import annotations

import weakref

from slm_core.errors import InvalidSequence
from slm_core.protocols import Context

_owners: weakref.WeakKeyDictionary[Context, dict[int, weakref.ref[object]]] = weakref.WeakKeyDictionary()


def free_sequences(context: Context) -> list[int]:
    """Sequences that are empty and have no owner."""
    owners = _owners.setdefault(context, {})
    owned = {seq_id for seq_id, owner in owners.items() if owner() is not None}
    return [s for s in range(context.n_seq_max) if s not in owned and context.length(s) == 0]


def claim(context: Context, seq_id: int | None, owner: object) -> int:
    """Take an empty sequence, the first one where ``seq_id`` is None.

    Raises:
        InvalidSequence: it is taken, or none is left.
    """
    free = free_sequences(context)
    if seq_id is None and not free:
        raise InvalidSequence(
            f"no sequence is left (n_seq_max is {context.n_seq_max}): close a session, or create the context with more"
        )
    chosen = free[0] if seq_id is None else seq_id
    if chosen not in free:
        raise InvalidSequence(f"sequence {chosen} is taken or does not exist (free: {free or 'none'})", seq_id=chosen)
    _owners[context][chosen] = weakref.ref(owner)
    return chosen


def check_free(context: Context, n: int, what: str) -> None:
    """Refuse work that needs ``n`` sequences if fewer are free.

    Raises:
        InvalidSequence: it says how many the context would need.
    """
    n_free = len(free_sequences(context))
    if n > n_free:
        raise InvalidSequence(
            f"{what} takes {n} free sequences, there are {n_free}: close a session, or create the context with"
            f" n_seq_max={context.n_seq_max + n - n_free}"
        )


def release(context: Context, seq_id: int) -> None:
    """Give a sequence back."""
    _owners.get(context, {}).pop(seq_id, None)
