"""The slips: changes of a function's syntax tree that a person might make, too.

What only changes the text of an error is left out, as are assertions, annotations and defaults of arguments.
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
_TWINS = {"min": "max", "any": "all", "argmin": "argmax", "minimum": "maximum", "floor": "ceil", "append": "extend"}
_TWINS |= {"startswith": "endswith", "lstrip": "rstrip", "partition": "rpartition", "find": "rfind"}
_TWINS |= {other: one for one, other in _TWINS.items() if one != "append"}
_COPIES = ("list", "tuple", "dict", "set", "bytes", "copy", "deepcopy", "array", "frozenset")
_COPY_METHODS = ("copy", "clone")

Found = Iterator[tuple[ast.stmt, Change]]


def changes_of_function(function: Function) -> Found:
    """Each statement of a function that could be wrong, with the change that makes it so."""
    twins = _names_of_one_type(function)
    returns_nothing = not any(isinstance(node, ast.Return) and node.value for node in ast.walk(function))
    if returns_nothing and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        yield from _early_returns(function)
    yield from _of_block(function.body, {argument.arg for argument in _arguments(function)}, twins)


def _of_block(block: list[ast.stmt], bound: set[str], twins: dict[str, list[str]]) -> Found:
    """The changes of a block of statements; ``bound`` are the names that have a value before it."""
    for index, statement in enumerate(block):
        if isinstance(statement, ast.Assert) or _is_text(statement):
            continue
        yield from ((statement, change) for change in _of_statement(block, index, bound))
        if isinstance(statement, ast.Raise):
            continue  # the rest of it is the text of an error
        for field, value in ast.iter_fields(statement):
            if field in ("annotation", "returns", "decorator_list", "args", "type_params"):
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from _of_block(value, bound, twins)
            elif isinstance(value, list) and value and isinstance(value[0], ast.ExceptHandler):
                for handler in value:
                    yield from _of_block(handler.body, bound, twins)
            else:
                for node in value if isinstance(value, list) else [value]:
                    if isinstance(node, ast.AST):
                        yield from ((statement, change) for change in _of_expression(statement, field, node, twins))
        bound |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_stored(node)}


def _of_statement(block: list[ast.stmt], index: int, bound: set[str]) -> Iterator[Change]:
    statement = block[index]

    def put(operator: str, *new: ast.stmt) -> Change:
        return Change(operator, statement, block, slice(index, index + 1), list(new))

    if _can_be_dropped(statement, bound):
        yield put("dropped statement", _never(statement))
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            if not orelse and all(isinstance(node, ast.Raise) for node in body):
                yield put("dropped check", _never(statement))
            if not isinstance(test, ast.Compare | ast.BoolOp) and not _is_not(test):
                yield Change("negated condition", statement, statement, "test", _not(test))
        case ast.While(test=test) if not isinstance(test, ast.Constant | ast.Compare):
            yield Change("negated condition", statement, statement, "test", _not(test))
        case ast.Break():
            yield put("break and continue", ast.Continue())
        case ast.Continue():
            yield put("break and continue", ast.Break())
        case ast.Raise(exc=None):
            yield put("error swallowed", ast.Pass())
        case ast.Try(finalbody=[_, *_]):
            yield Change("dropped finally", statement, statement, "finalbody", [_never(n) for n in statement.finalbody])
        case ast.With(items=[ast.withitem(optional_vars=None)], body=body):
            yield put("dropped with", *body)
        case ast.AugAssign(op=op, target=target, value=value):
            other = _ARITHMETIC.get(type(op))
            if other is not None:
                yield Change("arithmetic", statement, statement, "op", other())
            yield put("augmented assignment", ast.Assign([target], value, lineno=statement.lineno))


def _of_expression(owner: ast.AST, key: str | int, node: ast.AST, twins: dict[str, list[str]]) -> Iterator[Change]:
    """The changes of an expression and of all in it; ``owner`` holds it at ``key``."""
    if isinstance(node, ast.expr):
        for operator, new in _replacements(node, twins):
            yield Change(operator, node, owner, key, new)
    if isinstance(node, ast.comprehension) and node.ifs:
        yield Change("dropped filter", node.iter, node, "ifs", [])
    if isinstance(node, ast.JoinedStr):
        return  # text for people, or a name: what is in it is used elsewhere, too
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from _inside_list(value, index, item, twins)
        elif isinstance(value, ast.AST):
            yield from _of_expression(node, field, value, twins)


def _inside_list(items: list[ast.expr], index: int, item: ast.AST, twins: dict[str, list[str]]) -> Iterator[Change]:
    for change in _of_expression(ast.Expr(), "value", item, twins):
        if isinstance(change.owner, ast.Expr):  # of the item itself: it is in the list, not in a field
            change = Change(change.operator, change.node, items, index, change.new)
        yield change


def _replacements(node: ast.expr, twins: dict[str, list[str]]) -> Iterator[tuple[str, ast.expr]]:
    """An expression's kinds of slips, and what would stand there."""
    match node:
        case ast.Compare(left, [op, *ops], comparators):
            for place, one in enumerate(node.ops):
                other = _COMPARISONS.get(type(one))
                if other is not None:
                    changed = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield "comparison", ast.Compare(left, changed, comparators)
            if not ops and isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and not _is_zero(comparators[0]):
                one_more = ast.BinOp(comparators[0], ast.Add(), ast.Constant(1))
                yield "off by one", ast.Compare(left, [op], [one_more])
        case ast.BoolOp(op, values):
            yield "and and or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield "dropped condition", rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
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
        case ast.Attribute(value, name, ctx) if name in _TWINS:
            yield "twin", ast.Attribute(value, _TWINS[name], ctx)
        case ast.Name(name, ctx) if isinstance(ctx, ast.Load):
            yield from (("wrong variable", ast.Name(other, ctx)) for other in twins.get(name, ()))
            if name in _TWINS:
                yield "twin", ast.Name(_TWINS[name], ctx)
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
        if _is_variable(left) and _is_variable(right) and name != "isinstance":
            swapped = [*call.args[:index], right, left, *call.args[index + 2 :]]
            yield "swapped arguments", ast.Call(call.func, swapped, call.keywords)
    if name in _COPIES and len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.GeneratorExp):
        yield "missing copy", call.args[0]
    if name in _COPY_METHODS and not call.args and isinstance(call.func, ast.Attribute):
        yield "missing copy", call.func.value


def _early_returns(function: Function) -> Found:
    """In a function that returns nothing: leave it before each of its statements but the first."""
    for index in range(1, len(function.body)):
        statement = function.body[index]
        if not _is_text(function.body[index - 1]) or index > 1:
            leave = ast.If(ast.Constant(value=True), [ast.Return()], [])
            yield statement, Change("early return", statement, function.body, slice(index, index), [leave])


def _can_be_dropped(statement: ast.stmt, bound: set[str]) -> bool:
    match statement:
        case ast.Expr(value):
            return not isinstance(value, ast.Yield | ast.YieldFrom | ast.Constant)
        case ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=targets):
            return all(_has_value_before(target, bound) for target in targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return not isinstance(target, ast.Name)
    return False


def _has_value_before(target: ast.expr, bound: set[str]) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(_has_value_before(item, bound) for item in target.elts)
    return not isinstance(target, ast.Name) or target.id in bound


def _names_of_one_type(function: Function) -> dict[str, list[str]]:
    """For each name, others of its type: arguments with the same annotation, targets of one assignment or loop."""
    groups: dict[str, set[str]] = defaultdict(set)
    for argument in _arguments(function):
        if argument.annotation is not None:
            groups[ast.unparse(argument.annotation)].add(argument.arg)
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and _is_stored(node):
            groups[f"line {node.lineno}, {node.col_offset}"] |= {n.id for n in node.elts if isinstance(n, ast.Name)}
    twins: dict[str, list[str]] = {}
    for group in groups.values():
        for name in sorted(group):
            twins.setdefault(name, []).extend(sorted(group - {name, *twins.get(name, ())})[:1])
    return twins


def _arguments(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _never(statement: ast.stmt) -> ast.stmt:
    """A statement that is not run, but still makes its names local and its function a generator."""
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
    """A name or an attribute, but not a class or something of a library's namespace, as np.int32 is."""
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return owner not in ("np", "torch") and not owner[:1].isupper()
    return isinstance(node, ast.Name) and not node.id[0].isupper()


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
