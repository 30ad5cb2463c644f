"""The C++ extension and its stub declare the same interface."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from slm_core.errors import BackendUnavailable
from slm_native import _extension
from slm_native.backend import NativeBackend

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the cpu tier is not tested: {_missing}", allow_module_level=True)

STUB = Path(inspect.getfile(_extension)).with_name("_native.pyi")


def _parameters(definition: ast.FunctionDef) -> list[str]:
    """Parameter names without ``self``; "=" marks an optional one, "*" a keyword-only one."""
    arguments = definition.args
    n_required = len(arguments.args) - len(arguments.defaults)
    names = [arg.arg + ("" if i < n_required else "=") for i, arg in enumerate(arguments.args) if arg.arg != "self"]
    return names + [f"*{arg.arg}" for arg in arguments.kwonlyargs]


def _stub_interface() -> dict[str, list[str]]:
    """The parameters of each function in the stub; an attribute has none."""
    interface = {}
    for scope, body in _scopes(ast.parse(STUB.read_text())):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
                interface[scope + node.name] = [] if is_property else _parameters(node)
            elif isinstance(node, ast.AnnAssign):
                interface[scope + ast.unparse(node.target)] = []
    return interface


def _scopes(tree):
    yield "", tree.body
    yield from ((node.name + ".", node.body) for node in tree.body if isinstance(node, ast.ClassDef))


def _extension_interface(extension: ModuleType) -> dict[str, list[str]]:
    """The parameters of each function in the extension, from the signatures that nanobind generates."""
    interface = {}
    for scope, holder in [("", extension), *((f"{n}.", c) for n, c in vars(extension).items() if isinstance(c, type))]:
        for name, value in vars(holder).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, (property, str)):
                interface[scope + name] = []
            elif (value := getattr(holder, name)) and hasattr(value, "__nb_signature__"):
                interface[scope + name] = _parameters(_signature(value.__nb_signature__[0][0]))
    return interface


def _signature(text: str) -> ast.FunctionDef:
    """Parse a signature of nanobind, without the text in brackets: ``ndarray[dtype=uint8]`` is not valid Python."""
    while (plain := re.sub(r"\[[^][]*\]", "", text)) != text:
        text = plain
    return ast.parse(f"{text}: ...").body[0]


def test_the_stub_equals_the_extension():
    stub, extension = _stub_interface(), _extension_interface(_extension.load())
    assert len(stub) > 20
    assert stub == extension


@pytest.fixture
def changed_stub(tmp_path, monkeypatch):
    stub = tmp_path / "_native.pyi"
    stub.write_text(STUB.read_text() + "def one_more() -> None: ...\n")
    monkeypatch.setattr(_extension, "_STUB", stub)
    return stub


@pytest.mark.usefixtures("changed_stub")
def test_an_extension_that_differs_from_the_stub_is_refused():
    with pytest.raises(BackendUnavailable, match=r"does not fit the Python sources .* build it again") as caught:
        _extension.load()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("changed_stub")
def test_the_status_reports_an_outdated_extension():
    assert "build it again" in NativeBackend().status().reason


def test_an_extension_without_signatures_is_refused(monkeypatch):
    old = ModuleType("slm_native._native")
    old.__file__ = "old.so"
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(BackendUnavailable, match="build it again"):
        _extension.load()


def test_the_extension_loads_without_a_stub(changed_stub):
    changed_stub.unlink()
    assert _extension.load().available_isas()
