"""The plugin registry checks entries, imports targets lazily, and survives broken plugins."""

from __future__ import annotations

import importlib.metadata
import types
from pathlib import Path

import pytest

from slm_core import plugins
from slm_core.errors import PluginError, TemplateError, UnknownBackend
from slm_core.hookspecs import Entry, hookimpl
from slm_core.plugins import FormatterSource, Registry
from slm_core.types import BackendStatus


def plugin(*entries: Entry, formatters: tuple[Entry, ...] = ()) -> object:
    module = types.ModuleType("a_plugin")
    module.slm_backends = hookimpl(specname="slm_backends")(lambda: entries)
    module.slm_formatters = hookimpl(specname="slm_formatters")(lambda: formatters)
    return module


class Engine:
    name = "engine"

    def status(self) -> BackendStatus:
        return BackendStatus("engine", installed=True, version="1")


class Crashing:
    name = "crashing"

    def status(self) -> BackendStatus:
        raise OSError("libengine.so: cannot open")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets name this module; with import mode importlib, ``import`` does not find it."""
    module = types.ModuleType("plugins_under_test")
    module.Engine, module.Crashing = Engine, Crashing
    monkeypatch.setitem(__import__("sys").modules, "plugins_under_test", module)


def entry(name: str, target: str = "plugins_under_test:Engine", hint: str = "") -> Entry:
    return Entry(name, target, hint)


def test_a_backend_is_imported_on_request_and_created_once() -> None:
    known = Registry({"p": plugin(entry("engine"), entry("absent", "no_such_package:Engine"))})
    assert list(known.backends) == ["absent", "engine"]
    assert known.backend("engine") is known.backend("engine")
    with pytest.raises(PluginError, match=r"no_such_package:Engine.*absent.*cannot be imported"):
        known.backend("absent")


def test_the_error_of_an_unknown_name_lists_known_names() -> None:
    known = Registry({"p": plugin(entry("engine"), formatters=(entry("chatty"),))})
    with pytest.raises(UnknownBackend, match=r"'engin' \(registered: engine; did you mean 'engine'\?\)"):
        known.backend("engin")
    with pytest.raises(TemplateError, match=r"'chat' \(registered: chatty\)"):
        known.formatter("chat", FormatterSource())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("Engine")], "accepted: lower case"),
        ([entry("my-engine")], "accepted: lower case"),
        ([entry("engine", "nowhere")], "package.module:attribute"),
        ([entry("engine"), entry("engine", "other:Engine")], "provided by plugins_under_test:Engine and other:Engine"),
    ],
)
def test_a_malformed_or_duplicate_entry_is_refused(entries: list[Entry], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Registry({"p": plugin(*entries)})
    with pytest.raises(PluginError, match=message):
        Registry({"p": plugin(formatters=tuple(entries))})


def test_two_plugins_may_not_provide_one_name() -> None:
    with pytest.raises(PluginError, match="provided by"):
        Registry({"p": plugin(entry("engine")), "q": plugin(entry("engine"))})


def test_an_unknown_hook_is_refused() -> None:
    module = types.ModuleType("typo")
    module.slm_backend = hookimpl(lambda: (), specname="slm_backend")
    with pytest.raises(PluginError, match="does not exist"):
        Registry({"typo": module})


def test_statuses_report_broken_backends_and_never_raise() -> None:
    entries = [
        entry("crashing", "plugins_under_test:Crashing"),
        entry("gone", "gone:X", "pip install gone"),
        entry("engine"),
    ]
    statuses = {s.name: s for s in Registry({"p": plugin(*entries)}, {"other": "SyntaxError: oops"}).statuses()}
    assert statuses["engine"].installed
    assert statuses["crashing"].reason == "OSError: libengine.so: cannot open"
    assert "cannot be imported" in statuses["gone"].reason
    assert statuses["gone"].hint == "pip install gone"
    assert "SyntaxError: oops" in statuses["other"].reason
    assert not any(statuses[name].installed for name in ("crashing", "gone", "other"))


class Point:
    """An entry point of an installed package."""

    def __init__(self, name: str, loaded: object, package: str = "another") -> None:
        self.name, self.loaded, self.dist = name, loaded, types.SimpleNamespace(name=package)

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def installed(monkeypatch: pytest.MonkeyPatch, *points: Point) -> Registry:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    return plugins.registry.__wrapped__()


def test_a_failed_import_of_a_plugin_does_not_affect_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = installed(monkeypatch, Point("bad", ValueError("boom")), Point("good", plugin(entry("engine"))))
    assert (list(known.backends), known.broken) == (["engine"], {"bad": "ValueError: boom"})
    assert "plugin 'bad' is left out: ValueError: boom" in caplog.text
    with pytest.raises(UnknownBackend, match="the plugin 'bad' is left out: ValueError: boom"):
        known.backend("bad")


def failing() -> object:
    module = types.ModuleType("failing")

    def slm_backends() -> None:
        raise RuntimeError("no licence")

    module.slm_backends = hookimpl(specname="slm_backends")(slm_backends)
    return module


def misspelt() -> object:
    module = types.ModuleType("misspelt")
    module.slm_backend = hookimpl(lambda: (), specname="slm_backend")
    return module


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (failing(), "RuntimeError: no licence"),
        (misspelt(), "does not exist"),
        (plugin(entry("My-Engine")), "accepted: lower case letters"),
        (plugin(entry("engine")), "'engine' is provided by"),
    ],
)
def test_a_malformed_plugin_does_not_affect_others(
    monkeypatch: pytest.MonkeyPatch, broken: object, reason: str
) -> None:
    known = installed(monkeypatch, Point("a", broken), Point("z", plugin(entry("engine")), "slm-core"))
    assert (list(known.backends), list(known.broken)) == (["engine"], ["a"])
    assert reason in known.broken["a"]
    statuses = {status.name: status for status in known.statuses()}
    assert statuses["engine"].installed
    assert not statuses["a"].installed
    assert reason in statuses["a"].reason


def test_of_two_packages_with_a_plugin_of_one_name_the_first_is_used_and_slm_core_is_before_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = (
        Point("p", plugin(entry("other"))),
        Point("q", plugin(entry("two")), "old"),
        Point("q", plugin(), "renamed"),
    )
    known = installed(monkeypatch, *others, Point("p", plugin(entry("engine")), "slm-core"))
    assert list(known.backends) == ["engine", "two"]
    assert known.broken == {
        "p of another": "the package slm-core has a plugin of this name, too",
        "q of renamed": "the package old has a plugin of this name, too",
    }


def test_a_target_that_fails_is_one_error() -> None:
    def unlicensed() -> object:
        raise RuntimeError("no\nlicence")

    known = Registry({"p": plugin(Entry("mine", unlicensed), Entry("loud", lambda: Loud()))})
    with pytest.raises(PluginError, match="the target of 'mine', failed: RuntimeError: no licence"):
        known.backend("mine")
    statuses = {status.name: status for status in known.statuses()}
    assert "no licence" in statuses["mine"].reason
    assert statuses["loud"].reason == "status() of backend 'loud' returned NoneType"


class Loud:
    name = "loud"

    def status(self) -> None:
        return None


def test_a_target_whose_library_is_missing_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_a_library.py").write_text("import ctypes\nctypes.CDLL('libno-such-engine.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = Registry({"p": plugin(entry("engine", "needs_a_library:Engine", "pip install engine"))})
    with pytest.raises(PluginError, match=r"cannot be imported: OSError: .*libno-such.*\(.*pip install engine\)"):
        known.backend("engine")


def test_a_program_can_add_a_plugin_with_callables_as_targets() -> None:
    known = Registry({"p": plugin(entry("engine"))})
    engine = known.backend("engine")
    known.add("mine", plugin(Entry("crashing", Crashing)))
    assert isinstance(known.backend("crashing"), Crashing)
    assert known.backend("engine") is engine
    for name, added in (("mine", plugin()), ("other", plugin(entry("engine"))), ("third", plugin(entry("Bad")))):
        with pytest.raises(PluginError):
            known.add(name, added)
    assert list(known.backends) == ["crashing", "engine"], "refused plugins add no entries"
