"""A backend whose models live in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from slm_core.errors import InvalidOption
from slm_core.isolation.model import IsolatedModel
from slm_core.isolation.options import Isolation
from slm_core.protocols import Backend
from slm_core.types import BackendStatus, ModelOptions, ModelSource, SourceKind, Support


def isolated(backend: Backend, target: str, isolation: Isolation | None = None) -> IsolatedBackend:
    """The backend, with each of its models in a process of its own.

    Args:
        backend: the backend; it answers ``status`` and ``supports`` in this process.
        target: where another process imports it: "package.module:attribute", which is called without arguments.
        isolation: the timeouts; None for the defaults.

    Raises:
        InvalidOption: on Windows, which has no way to pass the sockets of contexts.
    """
    if sys.platform == "win32":
        raise InvalidOption("isolated models need Linux or macOS: Windows has no Unix sockets to pass to a process")
    return IsolatedBackend(backend, target, Isolation() if isolation is None else isolation)


def refuse_object(source: ModelSource) -> None:
    """Refuse a source that cannot be passed to a process.

    Raises:
        InvalidOption: it is an object.
    """
    if not isinstance(source, Path | bytes):
        raise InvalidOption(
            f"a {type(source).__name__} cannot be passed to the process of an isolated model (accepted: a path, bytes)"
        )


class IsolatedBackend:
    """A backend whose models live in processes of their own; see ``isolated``."""

    def __init__(self, backend: Backend, target: str, isolation: Isolation) -> None:
        self._backend = backend
        self._target = target
        self._isolation = isolation

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def load_options(self) -> Mapping[str, str]:
        """The backend's options."""
        return self._backend.load_options

    @property
    def source_kinds(self) -> frozenset[SourceKind]:
        """The backend's kinds without ``TENSORS``: an object cannot be passed to a process."""
        return self._backend.source_kinds - {SourceKind.TENSORS}

    def status(self) -> BackendStatus:
        """The backend's status. Never raises."""
        return self._backend.status()

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether the backend can run ``source``; reads headers, in this process."""
        return self._backend.supports(source, device)

    def load(self, source: ModelSource, options: ModelOptions) -> IsolatedModel:
        """Load a model in a new process; see ``protocols.Backend.load``.

        Raises:
            BackendCrashed: the process ended, or did not load the model in time.
            InvalidOption: ``source`` is an object.
        """
        refuse_object(source)
        return IsolatedModel.load(self.name, self._target, source, options, self._isolation)
