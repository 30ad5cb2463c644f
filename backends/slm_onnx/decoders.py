"""The decoders of a context: its feeds for batches with and without bidirectional blocks, and changes of adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slm_core.adapters import Direction, LowRank
from slm_core.errors import DecodeFailed, UnsupportedModel
from slm_onnx.feeding import Feed, Inputs
from slm_onnx.ports import DIRECTION, LORA_A, LORA_B


@dataclass(frozen=True, slots=True, eq=False)
class DecoderSessions:
    """Sessions of a decoder graph.

    Attributes:
        decoder: the session.
        bidirectional: makes the session for batches with bidirectional blocks on its first call; None if not supported.
    """

    decoder: Any
    bidirectional: Callable[[], Any] | None


class Decoders:
    """The feeds of one context for one graph.

    Args:
        sessions: the sessions of the graph.
        new_feed: makes a feed for a session.

    Attributes:
        feed: the feed for batches without bidirectional blocks.
    """

    def __init__(self, sessions: DecoderSessions, new_feed: Callable[[Any], Feed]) -> None:
        self._sessions = sessions
        self._new_feed = new_feed
        self.feed = new_feed(sessions.decoder)
        self._block_feed: Feed | None = None
        self._bound: Inputs = {}

    def bind(self, changes: Mapping[str, LowRank], directions: Mapping[int, Direction], dtype: str) -> None:
        """Compute with these changes of matrices, and directions after layers, from now on."""
        self._bound = adapter_inputs(self._sessions.decoder, changes, directions, dtype)
        for feed in filter(None, (self.feed, self._block_feed)):
            feed.bind(self._bound)

    def for_blocks(self) -> Feed:
        """The feed for batches with bidirectional blocks, made on the first call.

        Raises:
            DecodeFailed: ONNX Runtime refuses its graph.
        """
        if self._block_feed is None:
            assert self._sessions.bidirectional is not None
            try:
                decoder = self._sessions.bidirectional()
            except UnsupportedModel as error:
                raise DecodeFailed(f"a decoder for bidirectional blocks could not be made: {error}") from error
            self._block_feed = self.feed if decoder is self._sessions.decoder else self._new_feed(decoder)
            self._block_feed.bind(self._bound)
        return self._block_feed

    def close(self) -> None:
        """Release the provider's memory."""
        for feed in filter(None, (self.feed, self._block_feed)):
            feed.close()


def adapter_inputs(
    session: Any, changes: Mapping[str, LowRank], directions: Mapping[int, Direction], dtype: str
) -> Inputs:
    """The inputs of a graph for adapters.

    They are A.T [in, r] and B.T [r, out] of each matrix, zeros of rank 1 for no change; and the direction [E] of each
    layer, zeros for none.
    """
    inputs = {}
    for port in session.get_inputs():
        if port.name.startswith(DIRECTION):
            direction = directions.get(int(port.name.removeprefix(DIRECTION)))
            inputs[port.name] = np.zeros(port.shape, dtype) if direction is None else direction.astype(dtype)
        for prefix in (LORA_A, LORA_B):
            if not port.name.startswith(prefix):
                continue
            change = changes.get(f"{port.name.removeprefix(prefix)}.weight")
            n_in, n_out = (size if isinstance(size, int) else 1 for size in port.shape)
            values = np.zeros((n_in, n_out), np.float32)
            if change is not None:
                values = change.a.T if prefix == LORA_A else change.b.T
            inputs[port.name] = np.ascontiguousarray(values, dtype)
    return inputs
