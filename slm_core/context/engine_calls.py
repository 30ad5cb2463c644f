"""The methods that a backend writes. ``ContextBase`` calls them."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from slm_core.adapters import AdapterSet
from slm_core.closing import Closing
from slm_core.container import Pieces
from slm_core.context.checks import Declaration
from slm_core.context.payload import PayloadWriter
from slm_core.errors import InvalidSnapshot, UnsupportedInput, UnsupportedOutput
from slm_core.protocols import Batch
from slm_core.types import Logits, States, TopLogits


class EngineCalls(Closing):
    """The calls of an engine, made by ``ContextBase``.

    A backend writes the abstract methods. The others have defaults for an engine without the optional feature.
    """

    _declared: Declaration

    @abc.abstractmethod
    def _engine_decode(self, batch: Batch) -> Logits:
        """Run a checked batch, not empty; returns rows of logits in batch order, float32 [n_rows, V]."""

    def _engine_decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a checked batch, not empty, with 1 <= k <= V. Called only with ``DEVICE_SAMPLING``."""
        raise UnsupportedOutput(f"{type(self).__name__} declares sampling on the device, and has none")

    def _engine_embed(self, batch: Batch) -> States:
        """Run a checked batch, not empty; returns hidden states, float32 [n_rows, E]. Called only with ``EMBEDDINGS``.

        For an encoder, the batch has whole sequences, and the context stores nothing.
        """
        raise UnsupportedOutput(f"{type(self).__name__} declares hidden states, and has none")

    def _engine_layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Like ``_engine_embed``, after each of these layers, float32 [n_rows, len(layers), E].

        Called only with ``LAYER_STATES``; the layers are checked.
        """
        raise UnsupportedOutput(f"{type(self).__name__} declares hidden states of layers, and has none")

    def _engine_draft(self, seq_id: int, token: int, n: int, k: int) -> TopLogits:
        """See ``protocols.Context.draft``; the arguments are checked. Called only with ``MTP``."""
        raise UnsupportedOutput(f"{type(self).__name__} declares multi-token prediction, and has none")

    def _engine_use(self, adapters: AdapterSet) -> None:
        """Compute with these adapters from now on, and with no others. Called only with ``ADAPTERS``."""
        raise UnsupportedInput(f"{type(self).__name__} declares adapters, and has none")

    def _engine_take_back(self, seq_id: int, length: int) -> None:
        """Forget the tokens after ``length`` that were decoded in a call that then failed for other sequences.

        Called only with ``ADAPTERS``, for sequences with different adapters in one batch. A context whose edit level is
        ``REPLAY`` writes it; the ledger has the sequence without these tokens.
        """
        if length:
            self._engine_truncate(seq_id, length)
        else:
            self._engine_drop(seq_id)

    def _n_copied_by_fork(self, src: int, end: int) -> int:
        """The number of tokens at the end of ``src[:end]`` that a fork copies, if it shares the others."""
        return 0

    def _engine_fork_cost(self, src: int, end: int) -> int:
        """The number of tokens that ``_engine_fork`` decodes again, end > 0; by default the number that it copies."""
        return self._n_copied_by_fork(src, end)

    @abc.abstractmethod
    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        """Make the empty ``dst`` a copy of ``src[:end]``, end > 0."""

    @abc.abstractmethod
    def _engine_truncate(self, seq_id: int, length: int) -> None:
        """Forget the tail from ``length`` on, 0 <= length < the sequence's length."""

    @abc.abstractmethod
    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        """Forget [start, end), start < end, and move later tokens down, keys re-rotated."""

    @abc.abstractmethod
    def _engine_drop(self, seq_id: int) -> None:
        """Forget a sequence."""

    def _engine_export_tail(self, seq_id: int, start: int) -> Pieces | None:
        """The KV payload of a sequence from position ``start`` on, 0 < start < its length, for ``_engine_tail_writer``.

        None if the engine exports whole sequences only.
        """
        return None

    def _engine_tail_writer(self, seq_id: int, src: int, start: int, end: int, n_bytes: int) -> PayloadWriter:
        """A writer of a payload of ``_engine_export_tail``, for an empty sequence that shares the start of ``src``.

        Raises:
            InvalidSnapshot: the number of bytes is wrong for this format.
        """
        raise InvalidSnapshot(f"the backend {self._declared.backend} gives no payloads of parts of sequences")

    @abc.abstractmethod
    def _engine_export(self, seq_id: int) -> bytes | Pieces:
        """The KV payload of a sequence, not empty. Called only with ``KV_PAYLOAD``.

        ``Pieces`` may be read while other sequences change, but not while this one does. They depend on this sequence
        only.
        """

    @abc.abstractmethod
    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        """Raise ``InvalidSnapshot`` if a payload of this format does not fit.

        ``restore`` calls it before it drops the old contents: shared storage cannot be restored after a drop.
        """

    @abc.abstractmethod
    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        """Fill an empty sequence from a checked payload."""

    def _engine_writer(self, seq_id: int, n_tokens: int, n_bytes: int) -> PayloadWriter | None:
        """A writer of a payload for a sequence that still has its old contents.

        None if the engine has no room for both, or loads whole payloads only. Then the base class joins the pieces.

        Raises:
            InvalidSnapshot: the number of bytes is wrong for this format.
        """
        return None

    def _engine_reserving_writer(self, seq_id: int, n_tokens: int, n_bytes: int) -> PayloadWriter | None:
        """A writer of a payload for an empty sequence, which other calls may interrupt between two pieces.

        Its storage stays reserved until ``undo``, however other sequences change. None if the engine reserves nothing,
        or loads whole payloads only. Then the base class joins the pieces, and imports them at the last step.

        Raises:
            InvalidSnapshot: the number of bytes is wrong for this format.
        """
        return None

    @abc.abstractmethod
    def _engine_close(self) -> None:
        """Free the engine's memory."""
