"""A mutant, and its change of a syntax tree, which can be undone."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one field of a syntax tree.

    Attributes:
        operator: the kind of mistake, as "comparison".
        node: the changed node; its line is the line of the mutant.
        owner: the node or list with the changed field.
        key: the field of the node, or the index in the list.
        new: the new value.
    """

    operator: str
    node: ast.expr | ast.stmt
    owner: ast.AST | list[ast.stmt] | list[ast.expr]
    key: str | int | slice
    new: object

    def apply(self) -> Callable[[], None]:
        """Make the change; returns a function that undoes it."""
        if isinstance(self.owner, list):
            owner, before = self.owner, list(self.owner)
            owner[self.key] = self.new  # type: ignore[index, call-overload]

            def undo() -> None:
                owner[:] = before  # type: ignore[assignment]

            return undo
        assert isinstance(self.key, str)
        target, key, old = self.owner, self.key, getattr(self.owner, self.key)
        setattr(target, key, self.new)
        return lambda: setattr(target, key, old)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one function of one file.

    Attributes:
        id: eight hexadecimal digits; they depend on the function's line, its text and the change.
        path: the file, relative to the repository.
        line: line of the change.
        function: the qualified name of the outermost function around it.
        operator: the kind of mistake.
        before: the source of the statement, in one line.
        after: the same with the change.
        index: index of the change among all changes of the file.
        first: first line of the statement; a test reaches the mutant if it runs one of the lines.
        last: last line of the statement, without its body.
    """

    id: str
    path: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    index: int
    first: int
    last: int


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    tree, name = ast.parse(path.read_text()), path.relative_to(root).as_posix()
    known: dict[str, int] = {}
    for index, (function, statement, change) in enumerate(_changes_of(tree)):
        before = one_line(statement)
        undo = change.apply()
        after = one_line(statement)
        undo()
        if after == before:
            after = f"({change.operator})"
        text = "\0".join((name, function, change.operator, before, after))
        known[text] = known.get(text, -1) + 1
        digest = hashlib.sha256(f"{text}\0{known[text]}".encode()).hexdigest()[:8]
        first, last = _lines_of(statement)
        yield Mutant(digest, name, change.node.lineno, function, change.operator, before, after, index, first, last)


def mutated(source: str, filename: str, index: int) -> ast.Module:
    """The syntax tree of a file with one change."""
    tree = ast.parse(source, filename)
    for number, (_, _, change) in enumerate(_changes_of(tree)):
        if number == index:
            change.apply()
            return ast.fix_missing_locations(tree)
    raise IndexError(f"{filename} has no change {index}")


def one_line(node: ast.AST, width: int = 160) -> str:
    """The source of a node, without the bodies of compound statements."""
    shown = copy.copy(node)
    if isinstance(shown, ast.Try):
        return "try: ..."
    if isinstance(shown, Function):
        shown.body = [ast.Expr(ast.Constant(...))]
        shown.decorator_list = []
    for field in ("body", "orelse"):
        if isinstance(getattr(shown, field, None), list) and getattr(shown, field):
            setattr(shown, field, [ast.Expr(ast.Constant(...))] if field == "body" else [])
    text = " ".join(ast.unparse(shown).split())
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    if isinstance(body, list):
        return statement.lineno, max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The outermost functions of a file, with their qualified names."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    return walk(tree.body, "")


def _changes_of(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, Change]]:
    from mutants.operators import changes_of_function

    for name, function in functions(tree):
        for statement, change in changes_of_function(function):
            yield name, statement, change
