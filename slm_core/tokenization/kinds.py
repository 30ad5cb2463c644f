"""The kinds of tokens."""

from __future__ import annotations

from enum import IntEnum


class TokenKind(IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
