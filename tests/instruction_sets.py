"""Runs a test on every instruction set of this machine, inside one pytest test.

As a parameter, ``isa`` would make several thousand more tests: collecting and reporting one takes longer than most
products do, and oracles of the same numbers would be computed again for each instruction set.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from slm_native import _extension


def every_isa(test: Callable[..., None]) -> Callable[..., None]:
    """The test, called with each value of its parameter ``isa``. A failure names the instruction set."""

    @functools.wraps(test)
    def on_each(**arguments: object) -> None:
        for isa in _extension.load().available_isas():
            try:
                test(isa=isa, **arguments)
            except BaseException as error:
                error.add_note(f"with the instruction set {isa}")
                raise

    signature = inspect.signature(test)
    others = [parameter for name, parameter in signature.parameters.items() if name != "isa"]
    on_each.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return on_each
