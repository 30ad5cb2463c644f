"""Converts exceptions of other libraries to ``SlmError``; panics of Rust extensions are not ``Exception``s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slm_core.errors import SlmError

_LONGEST = 200


@contextmanager
def reported(kind: Callable[[str], SlmError], what: str) -> Iterator[None]:
    """Convert exceptions of a library in the block to an ``SlmError`` with a message of one line.

    ``SlmError``, interrupts, exits and ``MemoryError`` pass through.

    Args:
        kind: makes the error.
        what: the beginning of its message.
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
    """Whether it is an ``Exception`` or a panic in Rust, whose class (of pyo3) cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """The message of an error, or the name of its class if the message is empty."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def class_and_message(error: BaseException) -> str:
    """An error in one line: the message of an ``SlmError``, the class and the message of any other."""
    return str(error) if isinstance(error, SlmError) else f"{type(error).__name__}: {one_line(error)}"
