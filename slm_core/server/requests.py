"""The request that every API is translated to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slm_core.constraints import Spec
from slm_core.engine import Conversation
from slm_core.generation import Infill
from slm_core.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate.

    Attributes:
        model: the name of the model; None for the first one.
        prompt: a text to continue, its tokens, a text with a gap, or a conversation.
        sampling: how tokens are chosen. ``logprobs`` makes pieces carry them.
        constraint: restricts the answers to a text; None for no constraint. Conversations have their own.
        prediction: a text that the answer is likely to repeat, for drafts; "" for none.
        n: the number of answers.
        best_of: generate this many, and keep the n likeliest; None for n. Not for streams.
        return_tokens: whether pieces carry the tokens.
        parallel_calls: whether an answer may call several tools; otherwise it ends after the first call.
        priority: larger ones come first; None for the default of its client.
        salt: requests share cached prefixes only with requests of the same salt.
    """

    model: str | None
    prompt: str | Sequence[int] | Infill | Conversation
    sampling: Sampling
    constraint: Spec | None = None
    prediction: str = ""
    n: int = 1
    best_of: int | None = None
    return_tokens: bool = False
    parallel_calls: bool = True
    priority: float | None = None
    salt: str = ""

    @property
    def n_answers(self) -> int:
        """The number of answers that are generated."""
        return max(self.n, self.best_of or 0)
