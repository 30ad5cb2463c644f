"""Calls of the ``tokenizers`` library; its errors and panics become ``VocabError``."""

from __future__ import annotations

from typing import Any

from slm_core.errors import VocabError
from slm_core.foreign import is_failure, one_line

_LONG = 4096
"""Characters from which a text counts as long. ``Tokenizer.encode`` holds the GIL, for a megabyte several seconds."""


def encoding(tokenizer: Any, text: str, *, add_special: bool = False) -> Any:
    """A tokenizer's encoding of a text, with ``ids`` and ``tokens``. Other threads run while a long text is encoded.

    Raises:
        VocabError: the library fails, for example on a vocabulary that contradicts itself.
    """
    try:
        if len(text) < _LONG:
            return tokenizer.encode(text, add_special_tokens=add_special)
        return tokenizer.encode_batch([text], add_special_tokens=add_special)[0]
    except BaseException as error:
        if isinstance(error, MemoryError) or not is_failure(error):
            raise
        raise VocabError(f"the tokenizer cannot encode this text: {one_line(error)}") from None
