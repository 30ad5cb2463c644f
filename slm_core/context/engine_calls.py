"""What a backend writes: the calls that ``ContextBase`` makes of an engine."""

from __future__ import annotations

import abc

from slm_core.closing import Closing
from slm_core.container import Pieces
from slm_core.context.checks import Declaration
from slm_core.context.payload import PayloadWriter
from slm_core.errors import InvalidSnapshot, UnsupportedOutput
from slm_core.protocols import Batch
from slm_core.types import Logits, States, TopLogits


class EngineCalls(Closing):
    """The calls of an engine; see ``ContextBase`` for when they are made.

    Those that are not abstract have a default that is right for an engine without more to offer.
    """

    _declared: Declaration

    @abc.abstractmethod
    def _engine_decode(self, batch: Batch) -> Logits:
        """Run a checked, non-empty batch; rows float32 [n_rows, V] in batch order."""

    def _engine_decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a checked, non-empty batch; 1 <= k <= V; called where ``DEVICE_SAMPLING`` is declared."""
        raise UnsupportedOutput(f"{type(self).__name__} declares sampling on the device, and has none")

    def _engine_embed(self, batch: Batch) -> States:
        """Run a checked, non-empty batch; hidden states float32 [n_rows, E]; called where ``EMBEDDINGS`` is declared.

        Of an encoder, every sequence in the batch is whole, and nothing is kept.
        """
        raise UnsupportedOutput(f"{type(self).__name__} declares hidden states, and has none")

    def _n_copied_by_fork(self, src: int, end: int) -> int:
        """Tokens at the end of ``src[:end]`` whose cells a fork cannot share, where it shares others."""
        return 0

    def _engine_fork_cost(self, src: int, end: int) -> int:
        """Tokens that ``_engine_fork`` decodes again, end > 0: what it copies, unless the engine says otherwise."""
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

        None where the engine gives whole sequences alone.
        """
        return None

    def _engine_tail_writer(self, seq_id: int, src: int, start: int, end: int, n_bytes: int) -> PayloadWriter:
        """What takes in such a payload for an empty sequence, which shares ``start`` positions with ``src`` then.

        Raises:
            InvalidSnapshot: a payload of this format does not have so many bytes.
        """
        raise InvalidSnapshot(f"the backend {self._declared.backend} gives no payloads of parts of sequences")

    @abc.abstractmethod
    def _engine_export(self, seq_id: int) -> bytes | Pieces:
        """The KV payload of a sequence, not empty; called only where ``KV_PAYLOAD`` is declared.

        ``Pieces`` are made while other sequences change, never this one. They depend on the sequence alone.
        """

    @abc.abstractmethod
    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        """Refuse a payload of this format that does not fit: ``InvalidSnapshot``.

        ``restore`` asks before it drops what the sequence holds: shared storage that was dropped does not come back.
        """

    @abc.abstractmethod
    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        """Fill an empty sequence with a payload that was checked."""

    def _engine_writer(self, seq_id: int, n_tokens: int, n_bytes: int) -> PayloadWriter | None:
        """What takes in a payload for a sequence that still holds what it is to be replaced for.

        None where the engine has no room for both, or takes whole payloads alone: then the base joins the pieces.

        Raises:
            InvalidSnapshot: a payload of this format does not have so many bytes.
        """
        return None

    @abc.abstractmethod
    def _engine_close(self) -> None:
        """Free the engine's memory."""
