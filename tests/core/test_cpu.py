"""The number of threads that a backend uses."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.cpu import chosen_threads, usable_cores
from slm_core.errors import InvalidOption


@pytest.mark.parametrize("asked", [0, -1, 513, 1.5, 2.0, "2", True, np.float32(2), 10**400, 10**5000], ids=type)
def test_other_values_than_a_number_of_threads_are_refused(asked: object) -> None:
    with pytest.raises(InvalidOption, match=r"^n_threads=.* \(accepted: an integer from 1 to 512\)$"):
        chosen_threads(asked)


def test_integers_of_any_type_are_numbers_of_threads() -> None:
    assert [chosen_threads(asked) for asked in (1, np.int64(2), np.uint8(3), 512)] == [1, 2, 3, 512]
    assert chosen_threads(None) == usable_cores()
