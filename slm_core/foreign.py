"""What other libraries raise, as errors of ours: an extension in Rust panics with what is no ``Exception``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slm_core.errors import SlmError

_LONGEST = 200


@contextmanager
def reported(kind: Callable[[str], SlmError], what: str) -> Iterator[None]:
    """Turn whatever a library raises in the block into an error of ours, in one line.

    Ours pass, and so do an interrupt, an exit and a lack of memory.

    Args:
        kind: the error.
        what: its message begins with.
    """
    try:
        yield
    except (SlmError, MemoryError):
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise kind(f"{what}: {one_line(error)}") from None


def is_failure(error: BaseException) -> bool:
    """Whether it is an error: an ``Exception``, or a panic in Rust, whose class (of pyo3) cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """Its message, or the name of its class where it has none."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__
