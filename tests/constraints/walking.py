"""Random walks through a constraint, over a vocabulary of bytes."""

from __future__ import annotations

import numpy as np

from scripted import END, N_VOCAB, ByteVocab
from slm_core.constraints import GrammarConstraint, Spec, compile  # noqa: A004
from slm_core.protocols import Stop

VOCAB = ByteVocab()


def walk(spec: Spec, seed: int, *, likely: bytes = b"", n_steps: int = 400) -> bytes | None:
    """What noise says under a spec, if it comes to an end; bytes of ``likely`` and the end are likelier than others."""
    draw = np.random.default_rng(seed)
    bias = np.zeros(N_VOCAB, np.float32)
    bias[list(likely)] = 4
    bias[END] = 4
    rule, said = compile(spec, VOCAB), bytearray()
    for _ in range(n_steps):
        token = int(rule.mask(draw.gumbel(size=N_VOCAB).astype(np.float32) + bias).argmax())
        if token == END:
            return bytes(said)
        ended = isinstance(rule.advance(token), Stop)
        said += VOCAB.token_bytes(token, special=True)
        if ended:
            return bytes(said)
    return None


def takes(spec: Spec, text: str | bytes) -> bool:
    """Whether a spec allows exactly this text, byte by byte."""
    rule = compile(spec, VOCAB)
    return took(rule, text) and rule.is_complete


def took(rule: GrammarConstraint, text: str | bytes) -> bool:
    """Whether a constraint allows this text next; it takes it as far as it does."""
    for byte in text.encode() if isinstance(text, str) else text:
        if not rule.allowed[byte]:
            return False
        rule.advance(byte)
    return True
