"""A question whose greedy answer by the demo model is the same on every engine: each token has a clear gap."""

from __future__ import annotations

import numpy as np

from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.tolerance import Precision, Tolerance
from slm_core.loading import demo_model_path
from slm_core.protocols import Vocab
from slm_core.types import KvType, Segment

ANSWER = "I can remember facts, add and subtract, spell words, write JSON and call a weather tool."
_TURN = "<|im_start|>user\nWhat can you do?<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [Segment(f"{_TURN}{ANSWER}<|im_end|>\n{_TURN}", control=True)]
"""The history contains the question and its answer, so that prompt lookup finds the answer."""

PENALTY = 1.1
"""A repeat penalty with which the answer still has clear gaps."""


def smallest_gap(vocab: Vocab) -> tuple[float, float]:
    """The smallest gap between a token of the answer and the second best, and the gap from which a choice is clear.

    Both are relative to the norm of the row, from the float64 reference, with ``PENALTY``. The largest error is that of
    quantized activations and a KV cache in 16 bit (clause 9); a penalty of p multiplies it by at most p.
    """
    weights = Weights.read(demo_model_path())
    prompt = vocab.encode(QUESTION[0].text, add_special=False, parse_special=True)
    answer = vocab.encode(f"{ANSWER}<|im_end|>", add_special=False, parse_special=True)
    rows = reference_of(weights).decode([*prompt, *answer])[len(prompt) - 1 : -1]
    leads = []
    for i, row in enumerate(rows):
        occurred = np.isin(np.arange(len(row)), [*prompt, *answer[:i]])
        penalized = np.where(occurred, np.where(row > 0, row / PENALTY, row * PENALTY), row)
        others = np.delete(penalized, answer[i])
        leads.append((penalized[answer[i]] - others.max()) / np.linalg.norm(row))
    return min(leads), PENALTY * Tolerance(weights, Precision.QUANTIZED, KvType.F16).gap
