"""The noun Backend: an adapter to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slm_core.protocols.model import BackendModel
from slm_core.types import BackendStatus, ModelOptions, ModelSource, Support


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

    def status(self) -> BackendStatus:
        """Report whether the engine is installed, its version and devices, and why it is unavailable. Never raises."""
        ...

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether this backend can run ``source`` on ``device`` here; reads only headers.

        A source is a file, a directory, or the content of a file as bytes. The answer is no if the backend does not
        support this kind of source, if the engine is not installed, and if the device is missing.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        ...

    def load(self, source: ModelSource, options: ModelOptions) -> BackendModel:
        """Load a model.

        Raises:
            BackendUnavailable: the engine is not installed, or the requested device is missing.
            InvalidModelFile: the file is damaged.
            UnsupportedModel: the file is valid, but this backend cannot run it.
            UnknownOption: a backend option that ``load_options`` does not list.
            InvalidOption: an invalid value.
        """
        ...
