"""Converts GBNF to an equivalent grammar in llguidance's Lark."""

from __future__ import annotations

from slm_core.constraints.gbnf_syntax import Alt, Chars, Node, Ref, Repeat, Seq, parse
from slm_core.constraints.gbnf_terminals import Terminals
from slm_core.errors import ConstraintError


def gbnf_to_lark(text: str, root: str, depth: int) -> str:
    """Convert a grammar in llama.cpp's notation to a Lark grammar.

    Args:
        text: the grammar.
        root: the start rule.
        depth: how deep groups may nest.

    Raises:
        ConstraintError: the grammar is invalid; with line and column.
    """
    try:
        return _Writer(parse(text, root, depth), root).write()
    except RecursionError as error:
        raise ConstraintError("the grammar's rules refer to one another in too long a chain") from error


class _Writer:
    def __init__(self, rules: dict[str, Node], root: str) -> None:
        self._rules = rules
        self._root = root
        self._terminals = Terminals(rules, root)
        self._names: dict[str, str] = {}  # names of rules, in the order of the output
        self._terminal_names: dict[str, str] = {}  # names of terminals by their definitions

    def write(self) -> str:
        lines = [f"start: {self._expression(Ref(self._root))}"]
        done = 0
        while done < len(self._names):
            name = list(self._names)[done]
            lines.append(f"{self._names[name]}: {self._expression(self._rules[name])}")
            done += 1
        lines += [f"{name}: {terminal}" for terminal, name in self._terminal_names.items()]
        return "\n".join(lines)

    def _expression(self, node: Node) -> str:
        if self._terminals.is_terminal(node):
            return self._terminal(self._terminals.body(node))
        match node:
            case Ref(name=name):
                return self._names.setdefault(name, f"r{len(self._names)}")
            case Seq(items=items):
                return " ".join(self._grouped(item) for item in items) or '""'
            case Alt(items=items):
                return " | ".join(dict.fromkeys(self._grouped(item) for item in items))
            case Repeat(item=item, least=least, most=most):
                return f"{self._grouped(item)}{_times(least, most)}"
            case Chars():
                raise AssertionError("a character is always a terminal")

    def _grouped(self, node: Node) -> str:
        expression = self._expression(node)
        simple = expression.isalnum() or expression == '""'
        return expression if simple else f"({expression})"

    def _terminal(self, node: Node) -> str:
        """A terminal's name; a terminal that may be empty becomes an optional terminal that may not."""
        pattern = self._pattern(node)
        if not pattern:
            return '""'
        nullable = self._terminals.is_nullable(node)
        definition = f"/{pattern}/ & /(?s:.+)/" if nullable else f"/{pattern}/"
        name = self._terminal_names.setdefault(definition, f"T{len(self._terminal_names)}")
        return f"{name}?" if nullable else name

    def _pattern(self, node: Node) -> str:
        """A regular expression; "" for an empty node."""
        match node:
            case Chars(ranges=ranges):
                return "[" + "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges) + "]"
            case Ref(name=name):
                return self._pattern(self._rules[name])
            case Seq(items=items):
                return "".join(self._pattern(item) for item in items)
            case Alt(items=items):
                return f"(?:{'|'.join(self._pattern(item) for item in items)})"
            case Repeat(item=item, least=least, most=most):
                inner = self._pattern(item)
                return f"(?:{inner}){_times(least, most)}" if inner and most != 0 else ""


def _times(least: int, most: int | None) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
