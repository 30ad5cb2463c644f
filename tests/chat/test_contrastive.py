"""Contrastive decoding compared with the formula of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from scripted import N_VOCAB, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.chat.contrastive import ContrastiveSampler
from slm_core.constraints import Regex
from slm_core.errors import InvalidOption
from slm_core.sampling import SamplerChain, Sampling

GREEDY = Sampling(temperature=0, max_tokens=10)


def rows(salt: bytes, tokens: list[int]) -> np.ndarray:
    """The logits after tokens of the model that is a scripted context with ``salt`` before all tokens."""
    session = Session(ScriptedContext(), ByteVocab())
    session.append_tokens([*salt, *tokens])
    return session.next_logits().astype(np.float64)


class SaltedContext(ScriptedContext):
    """A scripted context that acts as another model: it puts a salt before all tokens."""

    def _row(self, state):
        return rows(b"~", [token for token, _ in state]).astype(np.float32)


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def sampler(plausibility: float, amateur: Session | None = None, **sampling) -> ContrastiveSampler:
    amateur = amateur or Session(SaltedContext(), ByteVocab())
    inner = SamplerChain(Sampling(**{"temperature": 0, **sampling}))
    return ContrastiveSampler(amateur, inner, ByteVocab(), plausibility=plausibility)


@pytest.mark.parametrize("plausibility", [0.01, 0.1, 0.5, 1.0])
def test_each_token_is_the_best_by_the_formula(plausibility) -> None:
    session = Session(ScriptedContext(), ByteVocab())
    session.append("prompt")
    answer = session.generate(GREEDY, sampler=sampler(plausibility)).run()
    history = list(b"prompt")
    for token in answer.tokens:
        expert, amateur = (log_softmax(rows(salt, history)) for salt in (b"", b"~"))
        head = expert >= expert.max() + np.log(plausibility)
        scores = np.where(head, expert - amateur, -np.inf)
        assert scores[token] == pytest.approx(scores.max(), abs=1e-5)
        history.append(token)
    if plausibility == 1.0:
        assert answer.tokens == greedy_tokens(), "with plausibility 1 only the expert's best token remains"


def greedy_tokens() -> tuple[int, ...]:
    session = Session(ScriptedContext(), ByteVocab())
    session.append("prompt")
    return session.generate(GREEDY).run().tokens


def test_the_amateur_follows_edits_and_decodes_each_token_once() -> None:
    amateur = Session(SaltedContext(), ByteVocab())
    chooser = sampler(0.1, amateur)
    session = Session(ScriptedContext(), ByteVocab())
    session.append("prompt")
    mark = session.mark()
    first = session.generate(GREEDY, sampler=chooser).run()
    assert amateur.tokens == session.tokens
    session.rollback(mark)
    assert session.generate(GREEDY, sampler=chooser).run().tokens == first.tokens
    assert amateur.context.n_decoded <= 6 + 2 * 10
    twin = chooser.clone()
    session.rollback(mark)
    assert session.generate(GREEDY, sampler=twin).run().tokens == first.tokens


def test_it_works_with_constraints_and_sampling() -> None:
    session = Session(ScriptedContext(), ByteVocab())
    session.append("prompt")
    text = session.generate(GREEDY, sampler=sampler(1e-9), constraint=Regex("[a-d]{6}")).run().text
    assert len(text) == 6 and not text.strip("abcd")
    texts = set()
    for seed in range(5):
        session = Session(ScriptedContext(), ByteVocab())
        session.append("prompt")
        drawn = sampler(0.01, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        texts.add(session.generate(GREEDY, sampler=drawn).run().tokens)
    assert len(texts) > 1


def test_invalid_options_are_refused() -> None:
    class Other(ByteVocab):
        size = N_VOCAB - 1

    for value in (0, 1.5, True, "0.1"):
        with pytest.raises(InvalidOption, match="plausibility="):
            sampler(value)
    with pytest.raises(InvalidOption, match="another vocabulary"):
        ContrastiveSampler(Session(SaltedContext(), Other()), SamplerChain(GREEDY), ByteVocab())
