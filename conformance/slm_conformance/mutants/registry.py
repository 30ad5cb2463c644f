"""The list of mutants, and the decorator that registers one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.toy.backend import ToyBackend
from slm_conformance.toy.context import ToyContext


@dataclass(frozen=True, slots=True)
class Mutant:
    """A toy that breaks one promise of the contract.

    Attributes:
        backend: the spec of its backend, ``module:attribute``.
        breaks: the wrong behaviour, in one sentence.
        killed_by: the scenario that must fail, ``TestClass::test_name``.
        kv_types: the KV types that the backend has.
        volume: the share of repetitions that is enough to notice; see ``BackendFixtures.volume``.
    """

    backend: str
    breaks: str
    killed_by: str
    kv_types: tuple[str, ...] = ("f32",)
    volume: float = 1.0

    @property
    def name(self) -> str:
        """The name of the mutant's class."""
        return self.backend.partition(":")[2]

    def fixtures(self) -> BackendFixtures:
        """The fixtures that the mutant is played with."""
        adopted = {
            "backend": self.backend,
            "models": ("llama-f32",),
            "kv_types": self.kv_types,
            "volume": self.volume,
        }
        fixtures: type[BackendFixtures] = type(self.name, (BackendFixtures,), adopted)
        return fixtures()


MUTANTS: list[Mutant] = []
_BACKENDS: set[type] = set()


def mutant(
    killed_by: str, kv_types: tuple[str, ...] = ("f32",), volume: float = 1.0
) -> Callable[[type], type[ToyBackend]]:
    """Register a broken context, model or backend; the class's name becomes the name of a backend.

    Args:
        killed_by: the scenario that must fail, ``TestClass::test_name``.
        kv_types: the KV types that the backend has.
        volume: the share of repetitions that is enough to notice; see ``BackendFixtures.volume``.

    Raises:
        TypeError: the class derives from another mutant. A registered mutant is a backend, so the class would not be
            used as a context or model.
    """

    def register(broken: type) -> type[ToyBackend]:
        if not _BACKENDS.isdisjoint(broken.__mro__):
            raise TypeError(f"{broken.__name__} derives from another mutant (derive both from a class that is none)")
        backend = f"{broken.__module__}:{broken.__name__}"
        MUTANTS.append(Mutant(backend, str(broken.__doc__), killed_by, kv_types, volume))
        if not issubclass(broken, ToyBackend):
            attribute = "context_type" if issubclass(broken, ToyContext) else "model_type"
            broken = type(broken.__name__, (ToyBackend,), {attribute: broken})
        _BACKENDS.add(broken)
        return broken

    return register
