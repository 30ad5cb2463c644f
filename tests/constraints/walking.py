"""Random walks through a constraint, over a vocabulary of bytes."""

from __future__ import annotations

import numpy as np

from scripted import END, N_VOCAB, ByteVocab
from slm_core.constraints import GrammarConstraint, Spec, compile  # noqa: A004
from slm_core.protocols import Stop

VOCAB = ByteVocab()


def walk(spec: Spec, seed: int, *, likely: bytes = b"", n_steps: int = 400) -> bytes | None:
    """Random text under a spec, or None if it does not end; bytes of ``likely`` and END are likelier than others."""
    draw = np.random.default_rng(seed)
    bias = np.zeros(N_VOCAB, np.float32)
    bias[list(likely)] = 4
    bias[END] = 4
    rule, generated = compile(spec, VOCAB), bytearray()
    for _ in range(n_steps):
        token = int(rule.mask(draw.gumbel(size=N_VOCAB).astype(np.float32) + bias).argmax())
        if token == END:
            return bytes(generated)
        ended = isinstance(rule.advance(token), Stop)
        generated += VOCAB.token_bytes(token, special=True)
        if ended:
            return bytes(generated)
    return None


def accepts(spec: Spec, text: str | bytes) -> bool:
    """Whether a spec allows exactly this text, byte by byte."""
    rule = compile(spec, VOCAB)
    return accepts_next(rule, text) and rule.is_complete


def accepts_next(rule: GrammarConstraint, text: str | bytes) -> bool:
    """Whether a constraint allows this text next; the constraint advances up to the first forbidden byte."""
    for byte in text.encode() if isinstance(text, str) else text:
        if not rule.allowed[byte]:
            return False
        rule.advance(byte)
    return True
