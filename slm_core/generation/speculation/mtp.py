"""Drafts of the answering model's own layers for multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from slm_core.context_queue import queue_of
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation.speculation.proposal import NOTHING, Proposal, never
from slm_core.protocols import Context
from slm_core.types import Capability

if TYPE_CHECKING:
    from slm_core.generation.speculation.settings import Speculation

MTP: Final = "mtp"
"""The name of the drafter in ``Speculation`` and in dumps."""


class MtpDrafter:
    """Drafts with the MTP layers of the model that answers; ``Speculation("mtp")`` makes one.

    A session or an engine sets the sequence of the answer, which holds all tokens of the history but the last.
    Drafts are greedy: each token is the one with the largest logit.

    Args:
        context: the context of the answer; None until an answer begins.
        seq_id: the sequence of the answer.

    Raises:
        InvalidOption: the context does not declare ``MTP``.
    """

    def __init__(self, context: Context | None = None, seq_id: int = 0) -> None:
        if context is not None and Capability.MTP not in context.capabilities:
            raise InvalidOption(
                "drafter 'mtp': this context does not declare mtp: the model has no layer for multi-token prediction,"
                " or it is not loaded (accepted: a model with such a layer, loaded with mtp=True; or another drafter)"
            )
        self._context = context
        self._seq_id = seq_id

    def __repr__(self) -> str:
        return "MtpDrafter()"

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """The tokens that the MTP layers predict; fewer than ``n`` if the context is nearly full."""
        context = self._context
        if context is None:
            raise SessionError("the drafter 'mtp' drafts in answers of sessions and engines only")
        if cancelled():
            return NOTHING
        with queue_of(context):
            n = min(n, context.n_free)
            if n < 1:
                return NOTHING
            top = context.draft(self._seq_id, tokens[-1], n)
        return Proposal(top.tokens[:, 0].tolist())

    def settings(self) -> Mapping[str, object]:
        """The name: the layers are the model's."""
        return {"drafter": MTP}


def in_sequence(speculation: Speculation, context: Context, seq_id: int) -> Speculation:
    """The speculation of an answer in a sequence: drafters other than ``MtpDrafter`` do not depend on it.

    Raises:
        InvalidOption: the context does not declare ``MTP``, which the drafter needs.
    """
    if not isinstance(speculation.drafter, MtpDrafter):
        return speculation
    return replace(speculation, drafter=MtpDrafter(context, seq_id))
