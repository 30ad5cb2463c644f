"""Calls of the ``tokenizers`` library, whose errors and panics become ours."""

from __future__ import annotations

from typing import Any

from slm_core.errors import VocabError
from slm_core.foreign import is_failure, one_line


def encoding(tokenizer: Any, text: str, *, add_special: bool = False) -> Any:
    """What a tokenizer makes of a text, with ``ids`` and ``tokens``.

    Raises:
        VocabError: the library fails, as it does where a vocabulary contradicts itself.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special)
    except BaseException as error:
        if isinstance(error, MemoryError) or not is_failure(error):
            raise
        raise VocabError(f"the tokenizer cannot encode this text: {one_line(error)}") from None
