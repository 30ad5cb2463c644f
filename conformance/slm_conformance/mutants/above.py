"""Mutants of the layers above a context: a function of slm_core is replaced while the toy's model is open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyBackend, ToyModel
from slm_conformance.toy.context import ToyContext
from slm_core.types import Capability, EditLevel


class RowsContext(ToyContext):
    """A context without sampling on the device: the layers above it sample from full rows of logits."""

    capabilities = ToyContext.capabilities - {Capability.DEVICE_SAMPLING}


class Above(ToyModel):
    """A model that replaces ``owner.attribute`` with ``broken`` until it is closed."""

    owner: Any
    attribute: str
    broken: Any
    _whole: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._whole = staticmethod(getattr(cls.owner, cls.attribute))

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, RowsContext if context_type is ToyContext else context_type)
        setattr(self.owner, self.attribute, self.broken)

    def close(self) -> None:
        """Restore the original function."""
        setattr(self.owner, self.attribute, self._whole)
        super().close()


def breaks(killed_by: str, owner: Any, attribute: str) -> Callable[[Callable[..., Any]], type[ToyBackend]]:
    """Register a mutant: the decorated function replaces ``owner.attribute``; its first argument is the original.

    Args:
        killed_by: the scenario that must fail.
        owner: a class or a module.
        attribute: the name of a function of ``owner``; not of a property or class method.
    """
    original = getattr(owner, attribute)

    def register(broken: Callable[..., Any]) -> type[ToyBackend]:
        def stand_in(*args: Any, **options: Any) -> Any:
            return broken(original, *args, **options)

        members = {"owner": owner, "attribute": attribute, "broken": staticmethod(stand_in)}
        names = {"__doc__": broken.__doc__, "__module__": broken.__module__}
        return mutant(killed_by)(type(broken.__name__, (Above,), members | names))

    return register
