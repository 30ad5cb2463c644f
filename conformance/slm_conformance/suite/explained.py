"""One scenario, explained: its clause, a hint where to look, and a script that runs it on a backend."""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import os
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from slm_conformance.fixtures import DEFAULT_MODELS, BackendFixtures
from slm_conformance.suite import scenarios
from slm_conformance.suite.hints import HINTS
from slm_conformance.suite.meta import scenario_names
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.workshop import Workshop
from slm_core.errors import InvalidOption

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Chosen:
    """A scenario, and its backend and model.

    Attributes:
        scenario: ``TestClass::test_name``.
        model: the name of a model of the suite, "demo" or the path of a file; None for the first model.
    """

    scenario: str
    model: str | None

    @property
    def scenario_class(self) -> type[Scenarios]:
        """The class that the scenario is a method of."""
        result: type[Scenarios] = getattr(scenarios, self.scenario.partition("::")[0])
        return result


def find(name: str) -> Chosen:
    """The scenario with a name.

    Args:
        name: as pytest prints it: ``TestCut::test_of_a_fork``, with ``[MODEL]`` after it and a file before it or not;
            or only the name of the test, if a single class has it.

    Raises:
        InvalidOption: there is no such scenario, or more than one.
    """
    names = scenario_names()
    plain, bracket, model = name.strip().partition("[")
    short = "::".join(plain.split("::")[-2:])
    matches = [short] if short in names else [one for one in names if one.partition("::")[2] == short]
    if len(matches) != 1:
        near = matches or _near(short, names)
        advice = f"did you mean {' or '.join(near)}?" if near else "pytest prints them: TestCut::test_of_a_fork"
        raise InvalidOption(f"{'several scenarios are' if matches else 'no scenario is'} named {name!r} ({advice})")
    return Chosen(matches[0], model.removesuffix("]") if bracket else None)


def _near(name: str, names: list[str]) -> list[str]:
    """Up to three scenarios with a similar name; the class may be right and the test wrong, or missing."""
    tests = {one.partition("::")[2]: one for one in names}
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return close or [tests[test] for test in difflib.get_close_matches(name.rpartition("::")[2], tests, n=3)]


def script(name: str, backend: str, model: str | os.PathLike[str] | None = None, device: str = "auto") -> str:
    """A Python script that begins with a scenario's docstring, and then runs it on a backend.

    The script exits with 0 if the scenario holds or is declared absent, else with a traceback.

    Args:
        name: of the scenario, see ``find``; with ``[MODEL]``, the model it runs on.
        backend: a registered backend, or "package.module:attribute".
        model: the file to run on, instead of the file in the name.
        device: passed to ``load``.

    Raises:
        InvalidOption: there is no such scenario, or its name has a file, and ``model`` is missing.
    """
    chosen = find(name)
    source = str(Path(model).resolve()) if model is not None else chosen.model
    if source is not None and source.endswith(".gguf") and model is None:
        raise InvalidOption(f"{name!r} is of a file: say where {source} is with --model")
    source = source or _first_model(chosen.scenario_class, backend, device)
    imports, *program = _program(chosen)
    blocks = [f"{_header(chosen)}\n\n{imports}", *program, _ending(chosen, backend, source, device)]
    return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _first_model(scenario_class: type[Scenarios], backend: str, device: str) -> str:
    """The first model of the suite that the backend runs; the first of all if it refuses each."""
    if scenario_class.models:
        return scenario_class.models[0]
    fixtures = type("Fixtures", (BackendFixtures,), {"backend": backend, "device": device})()
    with tempfile.TemporaryDirectory() as directory:
        workshop = Workshop(fixtures, Path(directory))
        installed = workshop.backend.status().installed
        runs = (name for name in DEFAULT_MODELS if installed and workshop.refusal(name) is None)
        return next(runs, DEFAULT_MODELS[0])


def _header(chosen: Chosen) -> str:
    """What the scenario proves, as comments."""
    class_name, _, test = chosen.scenario.partition("::")
    paragraphs = [
        f"{chosen.scenario}. {_text(getattr(chosen.scenario_class, test))}",
        f"{class_name}: {_text(chosen.scenario_class)}",
        f"Where to look: {HINTS[class_name]}.",
    ]
    if chosen.scenario_class.level:
        paragraphs.append(f"It needs the edit level {chosen.scenario_class.level.name}.")
    lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, _WIDTH)]
    return "\n".join(f"# {line}" for line in lines)


def _text(documented: object) -> str:
    return " ".join((inspect.getdoc(documented) or "").split())


def _program(chosen: Chosen) -> list[str]:
    """Imports, helpers, and the class with only this scenario, from the source of the scenario's module."""
    class_name, _, test = chosen.scenario.partition("::")
    source = inspect.getsource(sys.modules[chosen.scenario_class.__module__])
    module = ast.parse(source)
    (scenario_class,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    members = _members(scenario_class, test)
    needed = _needed(module, set().union(*(_names(node) for node in members)))
    imports = [*_imports(module, needed), *_own_imports(needed)]
    helpers = [_source(source, node) for node in module.body if _defines(node) & needed and node is not scenario_class]
    body = "\n\n".join(textwrap.indent(textwrap.dedent(_source(source, node)), "    ") for node in members)
    grouped = itertools.groupby(sorted(imports, key=_import_order), key=lambda line: _import_order(line)[0])
    header = "\n\n".join("\n".join(group) for _, group in grouped)
    return [header, *helpers, f"class {class_name}(Scenarios):\n{body}"]


def _members(scenario_class: ast.ClassDef, test: str) -> list[ast.stmt]:
    """The scenario, the methods that it calls, and the attributes of its class."""
    methods = {node.name: node for node in scenario_class.body if isinstance(node, ast.FunctionDef)}
    members, todo = {test}, [test]
    while todo:
        for node in ast.walk(methods[todo.pop()]):
            if isinstance(node, ast.Attribute) and node.attr in methods and node.attr not in members:
                members.add(node.attr)
                todo.append(node.attr)
    attributes = (ast.Assign, ast.AnnAssign)
    return [
        node for node in scenario_class.body if isinstance(node, attributes) or getattr(node, "name", None) in members
    ]


def _needed(module: ast.Module, names: set[str]) -> set[str]:
    """The names, and all names that their definitions in the module refer to."""
    while True:
        more = set().union(*(_names(node) for node in module.body if _defines(node) & names)) - names
        if not more:
            return names
        names = names | more


def _names(node: ast.AST) -> set[str]:
    """All names that a piece of source refers to, also in quoted annotations."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    constants = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
    return names | {text for text in constants if isinstance(text, str) and text.isidentifier()}


def _defines(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines, without imports."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign(targets=targets):
            return {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _imports(module: ast.Module, needed: set[str]) -> list[str]:
    lines_of_imports = []
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in needed]
            if names:
                node.names = names
                lines_of_imports.append(ast.unparse(node))
    return lines_of_imports


def _own_imports(needed: set[str]) -> list[str]:
    """Imports of the script that the scenario's module lacks."""
    ours = {
        "Scenarios": "from slm_conformance.suite.scenarios.base import Scenarios",
        "Bench": "from slm_conformance.suite.bench import Bench",
        "Path": "from pathlib import Path",
        "TemporaryDirectory": "from tempfile import TemporaryDirectory",
        "pytest": "import pytest",
    }
    lines = [line for name, line in ours.items() if name not in needed]
    lines.append("from __future__ import annotations")
    lines.append("from slm_conformance.suite.workshop import Workshop")
    return [*lines, "from slm_conformance.fixtures import BackendFixtures"]


def _import_order(line: str) -> tuple[int, str]:
    module = line.split()[1]
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return (0 if root == "__future__" else 1), line
    return (3 if root.startswith("slm_") else 2), line


def _source(source: str, node: ast.stmt) -> str:
    """The text of a statement, with its decorators and the comment on its last line."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _ending(chosen: Chosen, backend: str, model: str, device: str) -> str:
    class_name, _, test = chosen.scenario.partition("::")
    return f"""
class Fixtures(BackendFixtures):
    backend = {backend!r}
    device = {device!r}
    models = ({model!r},)


with TemporaryDirectory() as folder:
    workshop = Workshop(Fixtures(), Path(folder))
    try:
        with Bench(workshop, {model!r}) as bench:
            bench.requires({class_name}.level)
            {class_name}().{test}(bench)
        print("holds")
    except pytest.skip.Exception as why:
        print(why)
    finally:
        workshop.close()
"""
