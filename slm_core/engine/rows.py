"""Fill the batch of a step with tokens of requests, and feed its rows of logits back to the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slm_core.engine.plan import Piece
from slm_core.engine.requests import Request
from slm_core.errors import InvalidOption
from slm_core.protocols import Batch, Context
from slm_core.types import EditLevel, Logits, Pos


def fill(batch: Batch, context: Context, work: Sequence[tuple[Request, Piece]]) -> list[int]:
    """Fill a batch with pieces of requests; returns the number of rows of logits for each piece.

    A piece that ends its history gets one row for the last token, and one row for each token ahead.
    """
    batch.clear()
    n_rows = []
    for request, piece in work:
        assert request.seq_id is not None
        start, tokens = context.length(request.seq_id), request.history.tokens
        end = start + piece.n_tokens
        last = end == len(tokens)
        batch.extend(tokens[start:end], Pos(request.seq_id, start), logits="last" if last else "none")
        if piece.n_ahead:
            batch.extend(request.ahead[: piece.n_ahead], Pos(request.seq_id, end), logits="all")
        n_rows.append(piece.n_ahead + 1 if last else 0)
    return n_rows


def feed(request: Request, rows: Logits, on_token: Callable[[Request], None]) -> None:
    """Feed a request its rows, up to the first sampled token that differs from the token decoded ahead.

    Args:
        request: the request.
        rows: logits after the history, and after each token ahead, float32 [n, V].
        on_token: called after each token.

    Raises:
        InvalidOption: a stopping criterion paused the request.
    """
    for i, row in enumerate(rows):
        request.loop.step(row, request.step_s)
        request.step_s = 0.0
        on_token(request)
        if request.loop.paused:
            raise InvalidOption("a stopping criterion paused a request of an engine (accepted: FINISH or STOP)")
        if request.loop.finished or (i + 1 < len(rows) and request.history.tokens[-1] != request.ahead[i]):
            return


def drop_rejected(context: Context, request: Request) -> None:
    """Truncate tokens that were decoded ahead and rejected.

    A context that cannot truncate has none, except after the end of an answer. The last token of the history is not
    decoded yet.
    """
    assert request.seq_id is not None
    n_accepted = len(request.history.tokens) - 1
    if context.edit_level >= EditLevel.TRUNCATE and context.length(request.seq_id) > n_accepted:
        context.truncate(Pos(request.seq_id, n_accepted))
