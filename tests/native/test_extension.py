"""The C++ extension and its stub: the one must be what the other says."""

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
    """Names, and which may be left out. An object's own is not among them."""
    given = definition.args
    needed = len(given.args) - len(given.defaults)
    names = [arg.arg + ("" if i < needed else "=") for i, arg in enumerate(given.args) if arg.arg != "self"]
    return names + [f"*{arg.arg}" for arg in given.kwonlyargs]


def _told() -> dict[str, list[str]]:
    """What the stub says there is: parameters of each function, an attribute's as none."""
    told = {}
    for scope, body in _scopes(ast.parse(STUB.read_text())):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
                told[scope + node.name] = [] if is_property else _parameters(node)
            elif isinstance(node, ast.AnnAssign):
                told[scope + ast.unparse(node.target)] = []
    return told


def _scopes(tree):
    yield "", tree.body
    yield from ((node.name + ".", node.body) for node in tree.body if isinstance(node, ast.ClassDef))


def _made(extension: ModuleType) -> dict[str, list[str]]:
    """What the extension has, as nanobind writes it down."""
    made = {}
    for scope, holder in [("", extension), *((f"{n}.", c) for n, c in vars(extension).items() if isinstance(c, type))]:
        for name, value in vars(holder).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, (property, str)):
                made[scope + name] = []
            elif (value := getattr(holder, name)) and hasattr(value, "__nb_signature__"):
                made[scope + name] = _parameters(_signature(value.__nb_signature__[0][0]))
    return made


def _signature(text: str) -> ast.FunctionDef:
    """Parse what nanobind writes, without what stands in brackets: ``ndarray[dtype=uint8]`` is no Python."""
    while (plain := re.sub(r"\[[^][]*\]", "", text)) != text:
        text = plain
    return ast.parse(f"{text}: ...").body[0]


def test_the_stub_says_what_the_extension_has():
    told, made = _told(), _made(_extension.load())
    assert len(told) > 20
    assert told == made


@pytest.fixture
def changed_stub(tmp_path, monkeypatch):
    stub = tmp_path / "_native.pyi"
    stub.write_text(STUB.read_text() + "def one_more() -> None: ...\n")
    monkeypatch.setattr(_extension, "_STUB", stub)
    return stub


@pytest.mark.usefixtures("changed_stub")
def test_an_extension_of_another_interface_is_refused():
    with pytest.raises(BackendUnavailable, match=r"does not fit the Python sources .* build it again") as caught:
        _extension.load()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("changed_stub")
def test_a_status_tells_of_it():
    assert "build it again" in NativeBackend().status().reason


def test_one_that_says_nothing_of_its_interface_is_refused(monkeypatch):
    old = ModuleType("slm_native._native")
    old.__file__ = "old.so"
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(BackendUnavailable, match="build it again"):
        _extension.load()


def test_without_stubs_there_is_nothing_to_compare(changed_stub):
    changed_stub.unlink()
    assert _extension.load().available_isas()
