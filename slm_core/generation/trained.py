"""A warning for histories that are longer than the contexts of the training."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class TrainedLength:
    """Warns once when a history is longer than the contexts of the training: answers may get worse.

    Args:
        n_ctx_train: the longest context in training, in tokens; 0 if it is unknown.
    """

    __slots__ = ("_n_ctx_train",)

    def __init__(self, n_ctx_train: int) -> None:
        self._n_ctx_train = n_ctx_train

    def check(self, n_tokens: int) -> None:
        """Warn if it is the first history that is too long.

        Args:
            n_tokens: the length of a history.
        """
        if 0 < self._n_ctx_train < n_tokens:
            n_ctx_train, self._n_ctx_train = self._n_ctx_train, 0
            _log.warning(
                "the history has %d tokens, but the model was trained with at most %d: answers may get worse",
                n_tokens,
                n_ctx_train,
            )
