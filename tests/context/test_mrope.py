"""M-RoPE positions, counted by hand: an image of 2 rows of 3 patches between the texts of two sequences."""

from __future__ import annotations

import numpy as np

from slm_core.context.batch import TokenBatch
from slm_core.context.inputs import batch_inputs
from slm_core.context.mrope import MropePositions, mrope_positions_of
from slm_core.types import Pos

IMAGE = np.array([(0, y, x) for y in range(2) for x in range(3)])
ROWS = np.ones((6, 4), np.float32)
HELD: dict[int, list[int]] = {}


def text_and_image() -> TokenBatch:
    """Two tokens of one sequence, one token of another, then the image and a token of the first."""
    batch = TokenBatch(32)
    batch.extend([7, 8], Pos(0, 0))
    batch.add(9, Pos(1, 4))
    batch.add_embeddings(ROWS, Pos(0, 2), offsets=IMAGE)
    batch.add(7, Pos(0, 8))
    return batch


def positions_after(batch: TokenBatch) -> MropePositions:
    """M-RoPE positions of two sequences with 0 and 4 tokens before this batch."""
    inputs = batch_inputs(batch)
    HELD.clear()
    HELD.update(
        {0: [one for one, seq_id in zip(inputs, batch.seq_ids, strict=True) if seq_id == 0], 1: [1, 2, 3, 4, 9]}
    )
    return MropePositions(lambda seq_id: HELD[seq_id])


def test_text_after_an_image_begins_after_its_largest_position() -> None:
    image = [[2, 2 + y, 2 + x] for _, y, x in IMAGE.tolist()]
    batch = text_and_image()
    assert positions_after(batch).of(batch).tolist() == [[0] * 3, [1] * 3, [4] * 3, *image, [5] * 3]


def test_held_inputs_have_the_positions_of_their_batch() -> None:
    batch = text_and_image()
    positions = positions_after(batch).of(batch)
    assert mrope_positions_of(HELD[0]).tolist() == positions[batch.seq_ids == 0].tolist()
    assert mrope_positions_of(HELD[1]).tolist() == [[i] * 3 for i in range(5)]
    assert mrope_positions_of([]).shape == (0, 3)


def test_the_next_batch_continues_the_positions_after_an_edit() -> None:
    positions, batch = positions_after(text_and_image()), text_and_image()
    positions.of(batch)
    for _ in range(2):
        after = TokenBatch(4)
        after.extend([3, 4], Pos(0, 9))
        after.add(5, Pos(1, 5))
        assert positions.of(after).tolist() == [6, 7, 5]
        positions.forget(0)
    HELD[0] = HELD[0][:6]  # the first row and one patch of the second
    shorter = TokenBatch(4)
    shorter.add(3, Pos(0, 6))
    assert positions.of(shorter).tolist() == [5]


def test_a_part_of_an_image_takes_the_positions_that_it_adds() -> None:
    positions = positions_after(text_and_image())
    assert [positions.between(0, *part) for part in ((0, 9), (2, 8), (2, 4), (4, 8), (5, 8))] == [6, 3, 2, 1, 0]
