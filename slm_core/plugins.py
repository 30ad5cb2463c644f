"""The registry: finds plugins, checks what they provide, and imports a target when it is first used."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import pluggy

from slm_core import hookspecs
from slm_core.errors import PluginError, TemplateError, UnknownBackend
from slm_core.hookspecs import PROJECT, Entry
from slm_core.protocols import Backend, Formatter
from slm_core.types import BackendStatus

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class FormatterSource:
    """What a chat format can be made from.

    Attributes:
        template: the model's own template text, or None.
        bos_token: text of the token that begins a sequence, or "".
        eos_token: text of the token that ends one, or "".
    """

    template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


class Registry:
    """Backends and chat formats by name.

    Args:
        plugins: modules or objects with hook implementations, by plugin name.
        broken: plugins that could not be imported, with the reason.

    Raises:
        PluginError: a hook that does not exist, a malformed entry, or a name given twice.
    """

    def __init__(self, plugins: Mapping[str, object], broken: Mapping[str, str] = MappingProxyType({})) -> None:
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        for name, plugin in plugins.items():
            manager.register(plugin, name=name)
        try:
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"a plugin has a hook that does not exist: {error}") from error
        self.broken = dict(broken)
        self.backends = _collect("backend", cast("Iterable[Sequence[Entry]]", manager.hook.slm_backends()))
        self.formatters = _collect("formatter", cast("Iterable[Sequence[Entry]]", manager.hook.slm_formatters()))
        self._created: dict[str, Backend] = {}

    def backend(self, name: str) -> Backend:
        """The backend of that name; created once.

        Raises:
            UnknownBackend: no plugin provides it.
            PluginError: its target cannot be imported.
        """
        if name not in self.backends:
            known = ", ".join(sorted(self.backends)) or "none"
            raise UnknownBackend(f"unknown backend {name!r} (registered: {known})")
        if name not in self._created:
            self._created[name] = cast("Backend", _target(self.backends[name])())
        return self._created[name]

    def formatter(self, name: str, source: FormatterSource) -> Formatter:
        """The chat format of that name, made from ``source``.

        Raises:
            TemplateError: no plugin provides it, or the source does not suit it.
        """
        if name not in self.formatters:
            known = ", ".join(sorted(self.formatters)) or "none"
            raise TemplateError(f"unknown chat format {name!r} (registered: {known})")
        return cast("Formatter", _target(self.formatters[name])(source))

    def statuses(self) -> list[BackendStatus]:
        """The status of every backend, and of every plugin that could not be imported; never raises."""
        found = [self._status(entry) for entry in self.backends.values()]
        return found + [
            BackendStatus(name, installed=False, reason=f"its plugin failed to import: {reason}")
            for name, reason in self.broken.items()
        ]

    def _status(self, entry: Entry) -> BackendStatus:
        try:
            return self.backend(entry.name).status()
        except Exception as error:  # a plugin of anybody's: whatever it raises is its status
            return BackendStatus(
                entry.name, installed=False, reason=f"{type(error).__name__}: {error}", hint=entry.hint
            )


@functools.cache
def registry() -> Registry:
    """The registry of all installed plugins (entry-point group ``slm_core``), built on first use."""
    plugins: dict[str, object] = {}
    broken: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=PROJECT):
        if point.name in plugins or point.name in broken:
            raise PluginError(f"two installed packages provide a plugin named {point.name!r}")
        try:
            plugins[point.name] = point.load()
        except Exception as error:  # one broken plugin must not take the others away
            _log.warning("plugin %r failed to import: %s", point.name, error)
            broken[point.name] = f"{type(error).__name__}: {error}"
    return Registry(plugins, broken)


def _collect(kind: str, provided: Iterable[Sequence[Entry]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for entry in (entry for several in provided for entry in several):
        if not _NAME.fullmatch(entry.name):
            raise PluginError(f"{kind} name {entry.name!r} (accepted: lower case letters, digits, underscores)")
        if not _TARGET.fullmatch(entry.target):
            raise PluginError(
                f"target {entry.target!r} of {kind} {entry.name!r} (accepted: 'package.module:attribute')"
            )
        if entry.name in entries:
            raise PluginError(f"{kind} {entry.name!r} is provided by {entries[entry.name].target} and {entry.target}")
        entries[entry.name] = entry
    return dict(sorted(entries.items()))


def _target(entry: Entry) -> Callable[..., object]:
    module, attribute = entry.target.split(":")
    try:
        return cast("Callable[..., object]", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        hint = f" (to install what it needs: {entry.hint})" if entry.hint else ""
        raise PluginError(f"{entry.target}, the target of {entry.name!r}, cannot be imported: {error}{hint}") from error
