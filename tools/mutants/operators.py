"""Mutation operators: changes of a function's syntax tree that resemble a programmer's mistakes.

There are no mutants of error texts, assertions, annotations and default arguments.
"""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Iterator

from mutants.edits import Change, Function

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_SIMILAR = {"min": "max", "any": "all", "argmin": "argmax", "minimum": "maximum", "floor": "ceil", "append": "extend"}
_SIMILAR |= {"startswith": "endswith", "lstrip": "rstrip", "partition": "rpartition", "find": "rfind"}
_SIMILAR |= {other: name for name, other in _SIMILAR.items() if name != "append"}
_COPY_FUNCTIONS = ("list", "tuple", "dict", "set", "bytes", "copy", "deepcopy", "array", "frozenset")
_COPY_METHODS = ("copy", "clone")
_SYMMETRIC = ("min", "max", "minimum", "maximum", "array_equal", "gcd", "logaddexp")

Changes = Iterator[tuple[ast.stmt, Change]]


def changes_of_function(function: Function) -> Changes:
    """The mutated statements of a function, with the change of each."""
    others = _names_of_one_type(function)
    returns_nothing = not any(isinstance(node, ast.Return) and node.value for node in ast.walk(function))
    if returns_nothing and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        yield from _early_returns(function)
    yield from _changes_of_block(function.body, {argument.arg for argument in _arguments(function)}, others)


def _changes_of_block(block: list[ast.stmt], assigned: set[str], others: dict[str, list[str]]) -> Changes:
    """The changes of a block of statements. ``assigned``: the names that have a value before the block."""
    *before, last = block
    is_error_text = isinstance(last, ast.Raise) and all(isinstance(statement, ast.Assign) for statement in before)
    for index, statement in enumerate(block):
        if isinstance(statement, ast.Assert) or _is_text(statement):
            continue
        if is_error_text and isinstance(statement, ast.Assign):
            continue  # its value is a part of the text
        yield from ((statement, change) for change in _changes_of_statement(block, index, assigned))
        if isinstance(statement, ast.Raise):
            continue  # its expressions are the text of an error
        for field, value in ast.iter_fields(statement):
            if field in ("annotation", "returns", "decorator_list", "args", "type_params"):
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from _changes_of_block(value, assigned, others)
            elif isinstance(value, list) and value and isinstance(value[0], ast.ExceptHandler):
                for handler in value:
                    yield from _changes_of_block(handler.body, assigned, others)
            else:
                for node in value if isinstance(value, list) else [value]:
                    if isinstance(node, ast.AST):
                        yield from (
                            (statement, change) for change in _changes_of_expression(statement, field, node, others)
                        )
        assigned |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_stored(node)}


def _changes_of_statement(block: list[ast.stmt], index: int, assigned: set[str]) -> Iterator[Change]:
    statement = block[index]

    def replaced_by(operator: str, *new: ast.stmt) -> Change:
        return Change(operator, statement, block, slice(index, index + 1), list(new))

    if _can_be_dropped(statement, assigned):
        yield replaced_by("dropped statement", _disabled(statement))
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            if not orelse and all(isinstance(node, ast.Raise) for node in body):
                yield replaced_by("dropped check", _disabled(statement))
            if not isinstance(test, ast.Compare | ast.BoolOp) and not _is_not(test):
                yield Change("negated condition", statement, statement, "test", _not(test))
        case ast.While(test=test) if not isinstance(test, ast.Constant | ast.Compare):
            yield Change("negated condition", statement, statement, "test", _not(test))
        case ast.Break():
            yield replaced_by("break and continue", ast.Continue())
        case ast.Continue():
            yield replaced_by("break and continue", ast.Break())
        case ast.Raise(exc=None):
            yield replaced_by("error swallowed", ast.Pass())
        case ast.Try(finalbody=[_, *_]):
            yield Change(
                "dropped finally", statement, statement, "finalbody", [_disabled(n) for n in statement.finalbody]
            )
        case ast.With(items=[ast.withitem(optional_vars=None)], body=body):
            yield replaced_by("dropped with", *body)
        case ast.AugAssign(op=op, target=target, value=value):
            other = _ARITHMETIC.get(type(op))
            if other is not None:
                yield Change("arithmetic", statement, statement, "op", other())
            yield replaced_by("augmented assignment", ast.Assign([target], value, lineno=statement.lineno))


def _changes_of_expression(
    owner: ast.AST, key: str | int, node: ast.AST, others: dict[str, list[str]]
) -> Iterator[Change]:
    """The changes of an expression and of its subexpressions, found in ``owner`` at ``key``."""
    if isinstance(node, ast.expr):
        for operator, new in _replacements(node, others):
            yield Change(operator, node, owner, key, new)
    if isinstance(node, ast.comprehension) and node.ifs:
        yield Change("dropped filter", node.iter, node, "ifs", [])
    if isinstance(node, ast.JoinedStr):
        return  # a text or a name; its parts may be shared
    is_shape = isinstance(node, ast.Call) and _name_of(node.func) == "reshape"
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST) and not (is_shape and _is_negative(item)):
                    yield from _changes_in_list(value, index, item, others)
        elif isinstance(value, ast.AST):
            yield from _changes_of_expression(node, field, value, others)


def _changes_in_list(
    items: list[ast.expr], index: int, item: ast.AST, others: dict[str, list[str]]
) -> Iterator[Change]:
    for change in _changes_of_expression(ast.Expr(), "value", item, others):
        if isinstance(change.owner, ast.Expr):  # a change of the item itself, which is in the list
            change = Change(change.operator, change.node, items, index, change.new)
        yield change


def _replacements(node: ast.expr, others: dict[str, list[str]]) -> Iterator[tuple[str, ast.expr]]:
    """The operators that apply to an expression, and the new expression of each."""
    match node:
        case ast.Compare(left, [op, *ops], comparators):
            for index, comparison in enumerate(node.ops):
                other = _COMPARISONS.get(type(comparison))
                if other is not None:
                    changed = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                    yield "comparison", ast.Compare(left, changed, comparators)
            if not ops and isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and not _is_zero(comparators[0]):
                one_more = ast.BinOp(comparators[0], ast.Add(), ast.Constant(1))
                yield "off by one", ast.Compare(left, [op], [one_more])
        case ast.BoolOp(op, values):
            yield "and and or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for index in range(len(values)):
                remaining = [*values[:index], *values[index + 1 :]]
                yield "dropped condition", remaining[0] if len(remaining) == 1 else ast.BoolOp(op, remaining)
        case ast.UnaryOp(ast.Not(), operand):
            yield "dropped not", operand
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "dropped minus", operand
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC and not _is_string(left) and not _is_string(right):
            yield "arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.IfExp(_, body, orelse):
            yield "one branch", body
            yield "one branch", orelse
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() as value):
            yield "constant", ast.Constant(value + 1)
            if value == 1:
                yield "constant", ast.Constant(0)
        case ast.Subscript(value, ast.Slice(lower, upper, None), ctx) if isinstance(ctx, ast.Load):
            yield from (("slice", ast.Subscript(value, bounds, ctx)) for bounds in _other_bounds(lower, upper))
            if lower is None and upper is None:
                yield "missing copy", value
        case ast.Call():
            yield from _other_calls(node)
        case ast.Attribute(value, name, ctx) if name in _SIMILAR:
            yield "twin", ast.Attribute(value, _SIMILAR[name], ctx)
        case ast.Name(name, ctx) if isinstance(ctx, ast.Load):
            yield from (("wrong variable", ast.Name(other, ctx)) for other in others.get(name, ()))
            if name in _SIMILAR:
                yield "twin", ast.Name(_SIMILAR[name], ctx)
        case ast.List([ast.Starred(value)]) | ast.Tuple([ast.Starred(value)]):
            yield "missing copy", value


def _other_bounds(lower: ast.expr | None, upper: ast.expr | None) -> Iterator[ast.Slice]:
    if lower is not None:
        yield ast.Slice(None, upper)
        if not isinstance(lower, ast.Constant):
            yield ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), upper)
    if upper is not None:
        yield ast.Slice(lower, None)
        if not isinstance(upper, ast.Constant):
            yield ast.Slice(lower, ast.BinOp(upper, ast.Sub(), ast.Constant(1)))


def _other_calls(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = _name_of(call.func)
    for index in range(len(call.args) - 1):
        left, right = call.args[index : index + 2]
        if _is_variable(left) and _is_variable(right) and name not in (*_SYMMETRIC, "isinstance"):
            swapped = [*call.args[:index], right, left, *call.args[index + 2 :]]
            yield "swapped arguments", ast.Call(call.func, swapped, call.keywords)
    if (
        name in _COPY_FUNCTIONS
        and len(call.args) == 1
        and not call.keywords
        and not isinstance(call.args[0], ast.GeneratorExp)
    ):
        yield "missing copy", call.args[0]
    if name in _COPY_METHODS and not call.args and isinstance(call.func, ast.Attribute):
        yield "missing copy", call.func.value


def _early_returns(function: Function) -> Changes:
    """For a function without a return value: return before each statement except the first."""
    for index in range(1, len(function.body)):
        statement = function.body[index]
        if not _is_text(function.body[index - 1]) or index > 1:
            guarded_return = ast.If(ast.Constant(value=True), [ast.Return()], [])
            yield statement, Change("early return", statement, function.body, slice(index, index), [guarded_return])


def _can_be_dropped(statement: ast.stmt, assigned: set[str]) -> bool:
    match statement:
        case ast.Expr(value):
            return not isinstance(value, ast.Yield | ast.YieldFrom | ast.Constant)
        case ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=targets):
            return all(_has_value_before(target, assigned) for target in targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return not isinstance(target, ast.Name)
    return False


def _has_value_before(target: ast.expr, assigned: set[str]) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(_has_value_before(item, assigned) for item in target.elts)
    return not isinstance(target, ast.Name) or target.id in assigned


def _names_of_one_type(function: Function) -> dict[str, list[str]]:
    """For each name, another of the same type: arguments with equal annotations, targets of one assignment or loop."""
    groups: dict[str, set[str]] = defaultdict(set)
    for argument in _arguments(function):
        if argument.annotation is not None:
            groups[ast.unparse(argument.annotation)].add(argument.arg)
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and _is_stored(node):
            groups[f"line {node.lineno}, {node.col_offset}"] |= {n.id for n in node.elts if isinstance(n, ast.Name)}
    others: dict[str, list[str]] = {}
    for group in groups.values():
        for name in sorted(group):
            others.setdefault(name, []).extend(sorted(group - {name, *others.get(name, ())})[:1])
    return others


def _arguments(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _disabled(statement: ast.stmt) -> ast.stmt:
    """A disabled statement: it does not run, but it still makes its names local and its function a generator."""
    return ast.If(ast.Constant(value=False), [copy.copy(statement)], [], lineno=statement.lineno)


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _is_not(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_stored(node: ast.Name | ast.Tuple) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_variable(node: ast.expr) -> bool:
    """Whether an expression is a name or an attribute; classes and attributes of libraries (np.int32) do not count."""
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return owner not in ("np", "torch") and not owner[:1].isupper()
    return isinstance(node, ast.Name) and not node.id[0].isupper()


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _is_negative(node: ast.AST) -> bool:
    """Whether an expression is a negative number; NumPy takes any for the dimension that it computes."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
