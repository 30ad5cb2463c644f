"""The list of broken toys, and how one gets onto it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.toy.backend import ToyBackend
from slm_conformance.toy.context import ToyContext


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken toy.

    Attributes:
        backend: how the adopter of it is to call it, ``module:attribute``.
        breaks: what is wrong with it.
        killed_by: the scenario that must fail, ``TestClass::test_name``.
        kv_types: the KV types that it has.
    """

    backend: str
    breaks: str
    killed_by: str
    kv_types: tuple[str, ...] = ("f32",)

    @property
    def name(self) -> str:
        """Of the broken toy."""
        return self.backend.partition(":")[2]

    def fixtures(self) -> BackendFixtures:
        """The fixtures with which it is played."""
        adopted = {"backend": self.backend, "models": ("llama-f32",), "kv_types": self.kv_types}
        fixtures: type[BackendFixtures] = type(self.name, (BackendFixtures,), adopted)
        return fixtures()


FAULTS: list[Fault] = []
_BACKENDS: set[type] = set()


def fault(killed_by: str, kv_types: tuple[str, ...] = ("f32",)) -> Callable[[type], type[ToyBackend]]:
    """Register a broken context, model or backend; the name of the class becomes that of a backend.

    Raises:
        TypeError: the class derives from another fault, which is a backend by now: nothing of its own would be played.
    """

    def register(broken: type) -> type[ToyBackend]:
        if not _BACKENDS.isdisjoint(broken.__mro__):
            raise TypeError(f"{broken.__name__} derives from another fault (derive both from a class that is none)")
        FAULTS.append(Fault(f"{broken.__module__}:{broken.__name__}", str(broken.__doc__), killed_by, kv_types))
        if not issubclass(broken, ToyBackend):
            place = "context_type" if issubclass(broken, ToyContext) else "model_type"
            broken = type(broken.__name__, (ToyBackend,), {place: broken})
        _BACKENDS.add(broken)
        return broken

    return register
