"""Drafts of a model with another vocabulary: tokens are translated through text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from slm_core.closing import Closing
from slm_core.errors import InvalidOption
from slm_core.generation.speculation.model import DraftModel, same_tokens
from slm_core.generation.speculation.proposal import NOTHING, Proposal, never
from slm_core.numerics import common_prefix
from slm_core.protocols import Context, Vocab
from slm_core.sampling import Sampling


class TranslatedDraftModel(Closing):
    """Drafts with a model of another vocabulary (universal assisted generation, Gat et al. 2024).

    New text is encoded separately from the text before it, so the smaller model may see an unusual tokenization. This
    makes drafts worse, but never changes the answer.

    Args:
        context: a context of the smaller model; the drafter uses its sequence 0 and closes it.
        vocab: the smaller model's vocabulary.
        target: the vocabulary of the target model.

    Raises:
        InvalidOption: the context cannot truncate.
    """

    def __init__(self, context: Context, vocab: Vocab, target: Vocab) -> None:
        self._model = DraftModel(context, vocab)
        self._vocab = vocab
        self._target = target
        self._tokens: list[int] = []
        self._translated: list[int] = []
        self._n_translated: list[int] = []  # length of the translation after each of _tokens
        self._pending = b""

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """The next tokens of the model, as tokens of the target; empty in the middle of a character."""
        self._follow(tokens)
        if self._pending or not self._translated:
            return NOTHING
        drafted = self._model.draft(self._translated, n, cancelled).tokens
        ends = bool(drafted) and drafted[-1] in self._vocab.eog_ids
        data = b"".join(self._vocab.token_bytes(token) for token in drafted)
        back = self._encoded(codecs.getincrementaldecoder("utf-8")("ignore").decode(data), tokens[-1])
        if ends and self._target.eos is not None:
            back.append(self._target.eos)
        return Proposal(back[:n])

    def settings(self) -> None:
        """None: dumps do not contain models."""
        return

    def close(self) -> None:
        """Close the context. A second call does nothing."""
        self._model.close()

    def _follow(self, tokens: Sequence[int]) -> None:
        """Translate new tokens. After a change within a character, all tokens are translated again."""
        n = common_prefix(self._tokens, tokens)
        if n < len(self._tokens):
            n = n if self._is_whole(n) else 0
            del self._tokens[n:], self._n_translated[n:]
            del self._translated[self._n_translated[-1] if n else 0 :]
            self._pending = b""
        for token in tokens[n:]:
            self._translate(token)

    def _is_whole(self, n: int) -> bool:
        """Whether the first ``n`` tokens end with a complete character."""
        return n == 0 or self._n_translated[n - 1] > (self._n_translated[n - 2] if n > 1 else 0)

    def _translate(self, token: int) -> None:
        plain = self._target.token_bytes(token)
        named = b"" if token == self._target.bos else self._target.token_bytes(token, special=True)
        data = self._pending + (plain or named)
        try:
            text, self._pending = data.decode(), b""
        except UnicodeDecodeError as error:
            is_incomplete = error.reason == "unexpected end of data" and len(data) - error.start < 4
            text, self._pending = ("", data) if is_incomplete else (data.decode("utf-8", "replace"), b"")
        self._translated += self._vocab.encode(text, add_special=not self._translated, parse_special=not plain)
        self._tokens.append(token)
        self._n_translated.append(len(self._translated))

    def _encoded(self, text: str, last: int) -> list[int]:
        """Target tokens of the text after the token ``last``; encoded together with ``last`` if possible."""
        before = self._target.token_bytes(last).decode("utf-8", "replace")
        anchor = self._target.encode(before, add_special=False, parse_special=False)
        tokens = self._target.encode(before + text, add_special=False, parse_special=False)
        if tokens[: len(anchor)] == anchor:
            return tokens[len(anchor) :]
        return self._target.encode(text, add_special=False, parse_special=False)


def draft_model(
    context: Context, vocab: Vocab, target: Vocab, *, sampling: Sampling | None = None
) -> DraftModel | TranslatedDraftModel:
    """A drafter for a model with the vocabulary ``target``: by tokens if the vocabularies agree, else through text.

    Args:
        context: a context of the smaller model; closed with the drafter.
        vocab: the smaller model's vocabulary.
        target: the vocabulary of the target model.
        sampling: see ``DraftModel``.

    Raises:
        InvalidOption: the context cannot truncate, or ``sampling`` is set though the vocabularies differ.
    """
    if same_tokens(vocab, target):
        return DraftModel(context, vocab, n_vocab=target.size, sampling=sampling)
    if sampling is not None:
        raise InvalidOption(
            "sampling for a draft model with another vocabulary: its draft probabilities cannot be translated"
            " (leave sampling out)"
        )
    return TranslatedDraftModel(context, vocab, target)
