"""The list of broken toys, and how one gets onto it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slm_conformance.toy import ToyBackend
from slm_conformance.toy_context import ToyContext


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken toy.

    Attributes:
        backend: how the adopter of it is to call it, ``module:attribute``.
        breaks: what is wrong with it.
        killed_by: the scenario that must fail, ``TestClass::test_name``.
    """

    backend: str
    breaks: str
    killed_by: str

    @property
    def name(self) -> str:
        """Of the broken toy."""
        return self.backend.partition(":")[2]


FAULTS: list[Fault] = []


def fault(killed_by: str) -> Callable[[type], type[ToyBackend]]:
    """Register a broken context, model or backend; the name of the class becomes that of a backend."""

    def register(broken: type) -> type[ToyBackend]:
        FAULTS.append(Fault(f"{broken.__module__}:{broken.__name__}", str(broken.__doc__), killed_by))
        if issubclass(broken, ToyBackend):
            return broken
        place = "context_type" if issubclass(broken, ToyContext) else "model_type"
        return type(broken.__name__, (ToyBackend,), {place: broken})

    return register
