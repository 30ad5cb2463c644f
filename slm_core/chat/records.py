"""Checks that a context takes embedding rows and bidirectional blocks, before a history contains them."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.context.inputs import Held, HeldInput, row_inputs
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import InvalidEmbedding, InvalidOption, UnsupportedInput
from slm_core.protocols import Context
from slm_core.types import Capability


def context_inputs(context: Context, rows: EmbeddingRows) -> list[Held]:
    """Embedding rows as inputs that the context takes.

    Raises:
        UnsupportedInput: the context takes no rows, no blocks, no offsets or no bias.
        InvalidEmbedding: the rows have another width than the model.
        InvalidOption: a block is longer than ``n_batch``.
    """
    inputs = row_inputs(rows)
    check_records(context, inputs)
    return inputs


def check_records(context: Context, inputs: Sequence[Held]) -> None:
    """Check embedding rows and blocks among inputs; for the errors see ``context_inputs``."""
    records = [one for one in inputs if isinstance(one, HeldInput)]
    if not records:
        return
    _check_supported(context, records)
    width = next((len(one.row) for one in records if one.row is not None and len(one.row) != context.n_embd), None)
    if width is not None:
        raise InvalidEmbedding(f"embedding rows are {width} wide (accepted: {context.n_embd}, the model's width)")
    longest = max(one.ahead for one in records) + 1
    if longest > context.n_batch:
        raise InvalidOption(
            f"a bidirectional block of {longest} rows (accepted: up to {context.n_batch}, the context's n_batch)"
        )


def _check_supported(context: Context, records: Sequence[HeldInput]) -> None:
    needed = (
        (Capability.EMBEDDING_INPUT, any(one.row is not None for one in records), "embedding rows"),
        (Capability.BIDIRECTIONAL_BLOCKS, any(one.ahead for one in records), "bidirectional blocks"),
        (Capability.MROPE_POSITIONS, any(any(one.offset) for one in records), "offsets of rows"),
        (Capability.ATTENTION_BIAS, any(one.bias for one in records), "attention bias of rows"),
    )
    for capability, used, what in needed:
        if used and capability not in context.capabilities:
            raise UnsupportedInput(f"the context takes no {what} for this model: it does not declare {capability}")
