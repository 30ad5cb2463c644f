"""The registry: finds plugins, validates their entries, and imports a target when it is first used."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import cast

import pluggy

from slm_core import hookspecs
from slm_core.errors import InvalidOption, PluginError, SlmError, TemplateError, UnknownBackend, UnknownOption
from slm_core.foreign import class_and_message
from slm_core.hints import did_you_mean
from slm_core.hookspecs import PROJECT, Entry
from slm_core.protocols import AnswerFormat, Backend, Converter, Formatter
from slm_core.types import BackendStatus

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_HYPHENATED_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_OWN_PACKAGE = "slm-core"
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class FormatterSource:
    """The inputs from which a chat format is made.

    Attributes:
        template: the text of the model's template, or None.
        bos_token: text of the token that begins a sequence, or "".
        eos_token: text of the token that ends a sequence, or "".
        templates: additional templates of the model by name, such as "tool_use".
        tokens: texts of additional tokens by their names in templates, such as "pad_token".
        origin: the origin of the template, for ``ModelInfo.formatter``.
        now: the time for templates; None for the real time.
        parser: the name of the answer format; None to detect it from the template.
        reasoning: the texts that open and close reasoning in answers; None to detect them from the template.
    """

    template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    origin: str = "template of the model file"
    now: datetime | None = None
    parser: str | None = None
    reasoning: tuple[str, str] | None = None


class Registry:
    """Backends, chat formats, answer formats, sampler steps, architectures, converters and commands by name.

    Args:
        plugins: modules or objects with hook implementations, by plugin name.
        broken: plugins that are left out, with the reason.

    Raises:
        PluginError: an unknown hook, a malformed entry, or a duplicate name.
    """

    def __init__(self, plugins: Mapping[str, object], broken: Mapping[str, str] = MappingProxyType({})) -> None:
        self._plugins = dict(plugins)
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
        self.sampler_steps = _collect(
            "sampler step", cast("Iterable[Sequence[Entry]]", manager.hook.slm_sampler_steps())
        )
        self.answer_formats = _collect(
            "answer format", cast("Iterable[Sequence[Entry]]", manager.hook.slm_answer_formats())
        )
        self.architectures = _collect(
            "architecture", cast("Iterable[Sequence[Entry]]", manager.hook.slm_architectures()), _HYPHENATED_NAME
        )
        self.converters = _collect("converter", cast("Iterable[Sequence[Entry]]", manager.hook.slm_converters()))
        self.commands = _collect(
            "command", cast("Iterable[Sequence[Entry]]", manager.hook.slm_commands()), _HYPHENATED_NAME
        )
        self._created: dict[str, Backend] = {}
        self._formatter_names = {_folded(name): name for name in self.formatters}

    def backend(self, name: str) -> Backend:
        """The backend ``name``; created once.

        Raises:
            UnknownBackend: no plugin provides it.
            PluginError: its target cannot be imported or called.
        """
        self._check_backend(name)
        if name not in self._created:
            self._created[name] = _new_backend(self.backends[name])
        return self._created[name]

    def backend_target(self, name: str) -> str:
        """Where another process imports the backend ``name``: "package.module:attribute".

        Raises:
            UnknownBackend: no plugin provides it.
            InvalidOption: its target is an object that another process cannot import.
        """
        self._check_backend(name)
        target = self.backends[name].target
        if isinstance(target, str):
            return target
        module, attribute = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
        if module == "__main__" or getattr(sys.modules.get(module), attribute, None) is not target:
            raise InvalidOption(
                f"another process cannot import the target of backend {name!r} (accepted: 'package.module:attribute')"
            )
        return f"{module}:{attribute}"

    def has_formatter(self, name: str) -> bool:
        """Whether there is a chat format ``name``; case, "-", "_", "." and spaces are ignored."""
        return _folded(name) in self._formatter_names

    def formatter(self, name: str, source: FormatterSource) -> Formatter:
        """The chat format ``name``, made from ``source``; "Qwen2.5" and "qwen2_5" are the same name.

        Raises:
            TemplateError: no plugin provides it, or it cannot be made from the source.
        """
        if not self.has_formatter(name):
            registered = ", ".join(sorted(self.formatters)) or "none"
            raise TemplateError(f"unknown chat format {name!r} (registered: {registered})")
        return cast("Formatter", _target(self.formatters[self._formatter_names[_folded(name)]])(source))

    def guess_formatter(self, has_token: Callable[[str], bool]) -> str | None:
        """The chat format with the most tokens, among the formats whose tokens are all in the vocabulary."""
        matching = [entry for entry in self.formatters.values() if entry.tokens and all(map(has_token, entry.tokens))]
        return max(matching, key=lambda entry: len(entry.tokens)).name if matching else None

    def answer_format(self, name: str) -> AnswerFormat:
        """The answer format ``name``.

        Raises:
            TemplateError: no plugin provides it.
            PluginError: its target cannot be imported.
        """
        _check_known("parser", name, self.answer_formats, TemplateError)
        return cast("AnswerFormat", _target(self.answer_formats[name])())

    def sampler_step(self, name: str) -> Callable[..., object]:
        """The factory of the sampler step ``name``, which takes the step's options.

        Raises:
            UnknownOption: no plugin provides it.
            PluginError: its target cannot be imported.
        """
        _check_known("sampler step", name, self.sampler_steps, UnknownOption)
        return _target(self.sampler_steps[name])

    def architecture(self, name: str) -> Callable[..., object]:
        """The reader of model metadata for the architecture ``name``, one of ``architectures``.

        Raises:
            PluginError: its target cannot be imported.
        """
        return _target(self.architectures[name])

    def converter(self, name: str) -> Converter:
        """The converter that writes models in the format ``name``.

        Raises:
            UnknownOption: no plugin provides it.
            PluginError: its target cannot be imported.
        """
        _check_known("format to convert to", name, self.converters, UnknownOption)
        return cast("Converter", _target(self.converters[name]))

    def command(self, name: str) -> object:
        """The ``typer.Typer`` of the command ``name``, one of ``commands``.

        Raises:
            PluginError: its target cannot be imported.
        """
        return _target(self.commands[name])

    def add(self, name: str, plugin: object) -> None:
        """Add a plugin.

        Raises:
            PluginError: see ``Registry``; nothing changed.
        """
        if name in self._plugins or name in self.broken:
            raise PluginError(f"there is a plugin named {name!r} already")
        extended = Registry({**self._plugins, name: plugin}, self.broken)
        vars(self).update({**vars(extended), "_created": self._created})

    def statuses(self) -> list[BackendStatus]:
        """The status of every backend, and of every plugin that is left out; never raises."""
        statuses = [self.status(name) for name in self.backends]
        return statuses + [
            BackendStatus(name, installed=False, reason=f"its plugin is left out: {reason}")
            for name, reason in self.broken.items()
        ]

    def status(self, name: str) -> BackendStatus:
        """The status of the backend ``name``, one of ``backends``; never raises."""
        try:
            status = self.backend(name).status()
            if not isinstance(status, BackendStatus):
                raise PluginError(f"status() of backend {name!r} returned {type(status).__name__}")
            return status
        except Exception as error:  # a third-party plugin may raise any exception: it becomes the status
            return BackendStatus(name, installed=False, reason=class_and_message(error), hint=self.backends[name].hint)

    def _check_backend(self, name: str) -> None:
        if name in self.broken and name not in self.backends:
            raise UnknownBackend(f"the plugin {name!r} is left out: {self.broken[name]}")
        _check_known("backend", name, self.backends, UnknownBackend)


@functools.cache
def registry() -> Registry:
    """The registry of all installed plugins (entry-point group ``slm_core``), built on first use.

    A plugin that fails, or provides a name that an earlier plugin provides, is left out: it must not affect others.
    slm-core's own plugins are first, then the others by name.
    """
    plugins: dict[str, object] = {}
    packages: dict[str, str] = {}
    broken: dict[str, str] = {}
    for point in sorted(importlib.metadata.entry_points(group=PROJECT), key=_order):
        if point.name in packages:
            name = f"{point.name} of {_package(point)}"
            broken[name] = f"the package {packages[point.name]} has a plugin of this name, too"
            continue
        packages[point.name] = _package(point)
        try:
            plugins[point.name] = point.load()
        except Exception as error:
            broken[point.name] = class_and_message(error)
    known = _registry(plugins, broken)
    for name, reason in known.broken.items():
        _log.warning("plugin %r is left out: %s", name, reason)
    return known


def _registry(plugins: Mapping[str, object], broken: Mapping[str, str]) -> Registry:
    """The registry of the plugins that can be added one after another; the others are broken."""
    try:
        return Registry(plugins, broken)
    except Exception:  # one plugin is at fault: adding them one by one finds it
        known = Registry({}, broken)
    for name, plugin in plugins.items():
        try:
            known.add(name, plugin)
        except Exception as error:
            known.broken[name] = class_and_message(error)
    return known


def _package(point: importlib.metadata.EntryPoint) -> str:
    return "unknown" if point.dist is None else point.dist.name


def _order(point: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
    return _package(point) != _OWN_PACKAGE, point.name, _package(point)


def add_plugin(name: str, plugin: object) -> None:
    """Add a plugin to the installed plugins, until the program ends.

    Args:
        name: the name of the plugin.
        plugin: a module or object with functions marked ``hookimpl``; targets of its entries may be callables.

    Raises:
        PluginError: an unknown hook, a malformed entry, or a duplicate name; nothing changed.
    """
    registry().add(name, plugin)


def _collect(kind: str, provided: Iterable[Sequence[Entry]], pattern: re.Pattern[str] = _NAME) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for entry in (entry for plugin_entries in provided for entry in plugin_entries):
        if not pattern.fullmatch(entry.name):
            also = ", hyphens" if pattern is _HYPHENATED_NAME else ""
            raise PluginError(f"{kind} name {entry.name!r} (accepted: lower case letters, digits, underscores{also})")
        if not callable(entry.target) and not _TARGET.fullmatch(entry.target):
            raise PluginError(
                f"target {entry.target!r} of {kind} {entry.name!r} (accepted: 'package.module:attribute')"
            )
        if entry.name in entries:
            raise PluginError(f"{kind} {entry.name!r} is provided by {entries[entry.name].target} and {entry.target}")
        entries[entry.name] = entry
    return dict(sorted(entries.items()))


def _check_known(kind: str, name: str, entries: Mapping[str, Entry], error: type[SlmError]) -> None:
    if name not in entries:
        registered = ", ".join(sorted(entries)) or "none"
        raise error(f"unknown {kind} {name!r} (registered: {registered}{did_you_mean(name, entries)})")


def _folded(name: str) -> str:
    """A normalized name, for comparison."""
    return re.sub(r"[-_. ]", "", name.lower())


def _target(entry: Entry) -> Callable[..., object]:
    if not isinstance(entry.target, str):
        return entry.target
    module, attribute = entry.target.split(":")
    try:
        return cast("Callable[..., object]", getattr(importlib.import_module(module), attribute))
    except Exception as error:  # a target may raise any exception: an engine's library is missing, a driver is too old
        hint = f" (to install what it needs: {entry.hint})" if entry.hint else ""
        raise PluginError(
            f"{entry.target}, the target of {entry.name!r}, cannot be imported: {class_and_message(error)}{hint}"
        ) from error


def _new_backend(entry: Entry) -> Backend:
    make = _target(entry)
    try:
        return cast("Backend", make())
    except Exception as error:
        raise PluginError(
            f"{entry.target}, the target of {entry.name!r}, failed: {class_and_message(error)}"
        ) from error
