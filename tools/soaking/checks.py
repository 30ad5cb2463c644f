"""Checks against a fresh context: bit for bit, or within clause 9 of the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_conformance.suite.bench import contents_of
from slm_conformance.suite.tolerance import Tolerance
from slm_core.chat import Session
from slm_core.errors import SlmError
from slm_core.generation import Answer
from slm_core.protocols import Context
from soaking.site import Site

STRICTEST = 1e-4
"""The error bound of float32. No tolerance is below it, and deriving one for quantized weights takes seconds."""


class Wrong(AssertionError):
    """A backend, or the library, violates the contract."""


def require(condition: bool, message: str) -> None:
    """Raise ``Wrong`` unless a condition holds."""
    if not condition:
        raise Wrong(message)


def next_row(session: Session) -> NDArray[np.float32]:
    """A copy of a session's next logits, float32 [V]."""
    row = session.next_logits()
    if row is None:
        raise Wrong("next_logits() gave nothing, though nobody cancelled")
    return row.copy()


def fresh_row(site: Site, name: str, tokens: Sequence[int]) -> NDArray[np.float32]:
    """The logits after some tokens in a fresh context, float32 [V]."""
    with site.fresh_session(name) as session:
        session.append_tokens(tokens)
        return next_row(session)


def same_row(site: Site, name: str, tokens: Sequence[int], row: NDArray[np.float32], what: str) -> None:
    """Require logits after some tokens to equal those of a fresh context, within clause 9.

    Both may differ from the float32 reference by the tolerance, so they differ by at most twice the tolerance.
    """
    expected = fresh_row(site, name, tokens).astype(np.float64)
    error = float(np.linalg.norm(row - expected) / np.linalg.norm(expected))
    if error <= STRICTEST:
        return
    allowed = 2 * tolerance(site, name).row
    require(
        error <= allowed,
        f"{what}: after {len(tokens)} tokens the logits differ from a fresh context's by {error:.1e} of their norm"
        f" (allowed: {allowed:.1e})",
    )


def same_greedy(site: Site, name: str, prompt: Sequence[int], actual: Answer, expected: Answer, what: str) -> None:
    """Require two greedy answers to be equal, up to a token whose two best logits are too close for clause 9.

    If an answer has ended, its next token is an EOG token.
    """
    if (actual.tokens, actual.finish_reason) == (expected.tokens, expected.finish_reason):
        return
    texts = [f"{list(answer.tokens)} ({answer.finish_reason.value})" for answer in (actual, expected)]
    require(actual.tokens != expected.tokens, f"{what} ended for another reason: {texts[0]}, expected {texts[1]}")
    n_equal = _n_equal(actual.tokens, expected.tokens)
    row = fresh_row(site, name, [*prompt, *actual.tokens[:n_equal]]).astype(np.float64)
    eog = sorted(site.model(name).vocab.eog_ids)
    first, second = (
        row[answer.tokens[n_equal]] if n_equal < len(answer.tokens) else row[eog].max() for answer in (actual, expected)
    )
    gap, allowed = abs(first - second) / np.linalg.norm(row), 2 * tolerance(site, name).gap
    require(
        bool(gap <= allowed),
        f"{what}: token {n_equal} of the answer differs from a fresh context's, and the logits of the two are"
        f" {gap:.1e} of the row's norm apart (allowed: {allowed:.1e}): {texts[0]}, expected {texts[1]}",
    )
    site.counts["near ties"] += 1


def refused(context: Context, call: Callable[[], object], what: str, *errors: type[SlmError]) -> None:
    """Require a call to raise one of ``errors``, in one line, and to leave the context as it was."""
    before, expected = contents_of(context), " or ".join(error.__name__ for error in errors)
    try:
        call()
    except errors as error:
        require(bool(str(error)) and "\n" not in str(error), f"{what}: the message is not one line: {str(error)!r}")
    except Exception as error:
        raise Wrong(f"{what}: raised {type(error).__name__} ({error}), expected {expected}") from error
    else:
        raise Wrong(f"{what}: accepted, expected {expected}")
    require(contents_of(context) == before, f"{what}: refused, but the context changed")


def _n_equal(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def tolerance(site: Site, name: str) -> Tolerance:
    """The tolerance of a model's numbers."""
    return site.workshop.tolerance(name, site.workshop.kv_types(name)[0])
