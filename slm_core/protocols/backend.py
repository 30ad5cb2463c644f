"""The noun Backend: an engine, or the way to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slm_core.protocols.model import Model
from slm_core.types import BackendStatus, ModelOptions, ModelSource, Support


class Backend(Protocol):
    """An engine that loads model files. Importing and creating one is cheap: runtimes are imported when used."""

    @property
    def name(self) -> str:
        """The name users choose it by: lower case letters, digits and underscores."""
        ...

    @property
    def load_options(self) -> Mapping[str, str]:
        """What ``ModelOptions.backend_options`` may hold: option name to a one-line description."""
        ...

    def status(self) -> BackendStatus:
        """Report whether the engine is installed, its version and devices, and why not. Never raises."""
        ...

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Say whether this backend can run ``source`` on ``device`` here, reading headers only.

        A source is a file, a directory, or the content of a file as bytes. No where this backend takes none of that
        kind, where the engine is not installed, and where the device is missing.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        ...

    def load(self, source: ModelSource, options: ModelOptions) -> Model:
        """Load a model.

        Raises:
            BackendUnavailable: the engine is not installed, or the device asked for is missing.
            InvalidModelFile: the file is damaged.
            UnsupportedModel: the file is sound, but not for this backend.
            UnknownOption: a backend option that ``load_options`` does not list.
            InvalidOption: a value that does not fit.
        """
        ...
