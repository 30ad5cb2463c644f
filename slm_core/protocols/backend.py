"""The noun Backend: an adapter to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slm_core.protocols.model import BackendModel
from slm_core.types import BackendStatus, ModelOptions, ModelSource, SourceKind, Support


class Backend(Protocol):
    """An engine that loads model files. Importing and creating one is cheap: runtimes are imported when used."""

    @property
    def name(self) -> str:
        """The name of the backend: lower case letters, digits and underscores."""
        ...

    @property
    def load_options(self) -> Mapping[str, str]:
        """The options accepted in ``ModelOptions.backend_options``: from name to a one-line description."""
        ...

    @property
    def source_kinds(self) -> frozenset[SourceKind]:
        """The kinds of sources that ``supports`` and ``load`` take; slm-core never calls them with another kind."""
        ...

    def status(self) -> BackendStatus:
        """Report whether the engine is installed, its version and devices, and why it is unavailable. Never raises."""
        ...

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether this backend can run ``source`` on ``device`` here; reads only headers.

        The kind of ``source`` is one of ``source_kinds``. The answer is no if the engine is not installed, and if the
        device is missing.

        Raises:
            InvalidModelFile: the file is missing or damaged, or a ``TensorSource`` is damaged.
        """
        ...

    def load(self, source: ModelSource, options: ModelOptions) -> BackendModel:
        """Load a model; the backend never closes the caller's source.

        A ``TensorSource`` gives the same logits and the same fingerprint as a file with the same tensors.

        Raises:
            BackendUnavailable: the engine is not installed, or the requested device is missing.
            InvalidModelFile: the file is damaged, or a ``TensorSource`` raises or returns other tensors than it
                declares.
            UnsupportedModel: the file is valid, but this backend cannot run it.
            UnknownOption: a backend option that ``load_options`` does not list.
            InvalidOption: an invalid value.
        """
        ...
