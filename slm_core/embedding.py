"""Embeddings of texts: pooled hidden states of their tokens, over any context with ``EMBEDDINGS``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slm_core.display import count, joined, signature, table
from slm_core.display.blocks import number_grid
from slm_core.display.html import card, note
from slm_core.errors import InvalidOption, InvalidSequence
from slm_core.protocols import Batch, Context
from slm_core.types import Capability, Pooling, Pos, States


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Embeddings:
    """The embeddings of texts.

    Attributes:
        vectors: a row for each text, float32 [n, E].
        pooling: the pooling.
        n_tokens: the number of tokens of each text, [n].
    """

    vectors: States
    pooling: Pooling
    n_tokens: tuple[int, ...]

    def __repr__(self) -> str:
        n, width = self.vectors.shape
        return signature(self, f"{count(n, 'vector')} of {count(width, 'dimension')}", f"pooling {self.pooling}")

    def _repr_html_(self) -> str:
        n, width = self.vectors.shape
        shown = normalized(self.vectors[:_SHOWN].astype(np.float64))
        cosines = joined([note("cosine of each pair"), number_grid((shown @ shown.T).tolist())])
        left_out = [note(f"{count(n - _SHOWN, 'more vector')} not shown")] if n > _SHOWN else []
        facts = table([("pooling", self.pooling), ("tokens", f"{sum(self.n_tokens):,}")])
        return card(f"Embeddings: {count(n, 'vector')} of {count(width, 'dimension')}", facts, cosines, *left_out)


_SHOWN = 12
"""The largest number of vectors whose cosines HTML shows."""


def embed(
    context: Context, texts: Sequence[Sequence[int]], pooling: Pooling | str | None = None, *, normalize: bool = True
) -> Embeddings:
    """Embed texts, several per batch if they fit; the context is empty before and after.

    Args:
        context: a context that declares ``EMBEDDINGS``.
        texts: token ids, including the special tokens that the vocabulary adds to a text.
        pooling: the pooling; None for the mean of an encoder, and for the last token of other models.
        normalize: divide vectors by their length, so that their dot products are cosines.

    Raises:
        InvalidOption: an unknown pooling, a text without tokens, or a text longer than an encoder's batch.
        UnsupportedOutput: the context does not declare ``EMBEDDINGS``.
        ContextFull: a text is longer than the context.
    """
    how = checked_pooling(pooling) or default_pooling(context)
    vectors = [pool(states, how) for states in token_states(context, texts, only_last=how is Pooling.LAST)]
    matrix = np.stack(vectors) if vectors else np.empty((0, context.n_embd), np.float32)
    return Embeddings(normalized(matrix) if normalize else matrix, how, tuple(map(len, texts)))


def token_states(context: Context, texts: Iterable[Sequence[int]], *, only_last: bool = False) -> Iterator[States]:
    """The hidden states of each text's tokens, float32 [T, E]; with ``only_last``, of its last token, [1, E].

    Raises:
        InvalidOption, UnsupportedOutput, ContextFull: see ``embed``.
        InvalidSequence: the context is not empty.
    """
    yield from _states(context, texts, context.embed, only_last)


def layer_states(
    context: Context, texts: Iterable[Sequence[int]], layers: Sequence[int], *, only_last: bool = False
) -> Iterator[States]:
    """Like ``token_states``, after each of these layers: float32 [len(layers), T, E].

    Raises:
        UnsupportedOutput: the context does not declare ``LAYER_STATES``.
        InvalidOption: no layers, or one that the model lacks.
        InvalidOption, ContextFull, InvalidSequence: see ``token_states``.
    """

    def run(batch: Batch) -> States:
        return context.layer_states(batch, layers).swapaxes(0, 1)

    for states in _states(context, texts, run, only_last):
        yield states.swapaxes(0, 1)


def _states(
    context: Context, texts: Iterable[Sequence[int]], run: Callable[[Batch], States], only_last: bool
) -> Iterator[States]:
    """The rows of each text that ``run`` returns for the tokens of a batch, [T, ...]."""
    if any(context.length(seq_id) for seq_id in range(context.n_seq_max)):
        raise InvalidSequence("the context holds tokens (accepted: an empty one)")
    group: list[Sequence[int]] = []
    for i, tokens in enumerate(texts):
        _check(context, i, tokens)
        full = len(group) == context.n_seq_max or sum(map(len, group)) + len(tokens) > context.n_batch
        if group and full:
            yield from _run_group(context, group, run, only_last)
            group = []
        group.append(tokens)
    if group:
        yield from _run_group(context, group, run, only_last)


def pool(states: States, pooling: Pooling) -> States:
    """Pool the states [T, E] of a text to one vector [E]."""
    if pooling is Pooling.MEAN:
        mean: States = states.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean
    if pooling is Pooling.MAX:
        largest: States = states.max(axis=0)
        return largest
    row: States = states[0 if pooling is Pooling.CLS else -1]
    return row.copy()


def normalized(vectors: States) -> States:
    """Vectors [n, E], scaled to length 1; zero vectors stay zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: States = (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
    return scaled


def checked_pooling(pooling: Pooling | str | None) -> Pooling | None:
    """The pooling with a name.

    Raises:
        InvalidOption: an unknown name.
    """
    if pooling is None:
        return None
    try:
        return Pooling(pooling)
    except ValueError:
        raise InvalidOption(f"unknown pooling {pooling!r} (accepted: {', '.join(Pooling)})") from None


def default_pooling(context: Context) -> Pooling:
    """The default pooling: the mean for encoders; otherwise the last token, which alone attends to the whole text."""
    return Pooling.MEAN if Capability.ENCODER in context.capabilities else Pooling.LAST


def _check(context: Context, i: int, tokens: Sequence[int]) -> None:
    if not len(tokens):
        raise InvalidOption(f"text {i} has no tokens: there is nothing to embed")
    if len(tokens) > context.n_batch and Capability.ENCODER in context.capabilities:
        raise InvalidOption(
            f"text {i} has {len(tokens)} tokens, and an encoder takes whole texts, of at most {context.n_batch} here"
            " (create the context with a larger n_batch)"
        )


def _run_group(
    context: Context, group: Sequence[Sequence[int]], run: Callable[[Batch], States], only_last: bool
) -> list[States]:
    """States of texts that fit into a batch; a single text may be longer, and is run in chunks."""
    batch, rows = context.new_batch(), []
    try:
        for seq_id, tokens in enumerate(group):
            for first in range(0, len(tokens), context.n_batch):
                chunk = tokens[first : first + context.n_batch]
                if len(batch) + len(chunk) > context.n_batch:
                    rows.append(run(batch).copy())
                    batch.clear()
                at_end = first + len(chunk) == len(tokens)
                batch.extend(chunk, Pos(seq_id, first), logits=("last" if at_end else "none") if only_last else "all")
        rows.append(run(batch).copy())
    finally:
        for seq_id in range(len(group)):
            context.drop(seq_id)
    ends = np.cumsum([1 if only_last else len(tokens) for tokens in group])
    return np.split(np.concatenate(rows), ends[:-1])
