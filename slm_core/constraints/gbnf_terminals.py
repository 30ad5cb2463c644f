"""Finds the parts of a GBNF grammar that can become regular expressions without changing its language.

GBNF matches character by character; llguidance matches terminals, each as long as possible. A terminal of several
characters is fast (a finite automaton checks its tokens), but changes the language if its end is ambiguous:
``[a-z]+ "x"`` would never match its x. Making each character a terminal is always correct, but slow.

So the largest regular parts are tried first. A part is divided while some complete terminal A may be followed by a
character that could also continue a terminal B that began at the same position. FOLLOW sets and position automata
(Glushkov 1961) are as in textbooks on compilers. Whether A and B can begin at the same position, and how often
something repeats, is ignored: this can only divide more parts than necessary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from slm_core.constraints.gbnf_syntax import Alt, Chars, Node, Ref, Repeat, Seq

_LARGEST_TERMINAL = 1000
_MOST_PAIRS = 20_000
_MOST_STEPS = 500_000


class Terminals:
    """The terminals of a grammar.

    Args:
        rules: the rules.
        root: the start rule.
    """

    def __init__(self, rules: Mapping[str, Node], root: str) -> None:
        self._rules = rules
        self._root = root
        self._regular = _regular_rules(rules)
        self._divided: set[Node] = set()
        self._all_divided = False
        self._sizes: dict[str, int] = {}
        self._nullable: set[str] = set()
        self._first = dict.fromkeys(rules, 0)
        self._automata: dict[Node, _Automaton] = {}
        self._steps_left = _MOST_STEPS
        try:
            self._alphabet = _Alphabet(rules)
            self._find_nullable()
            self._find_first()
            self._settle()
        except _TooMuchWorkError:
            self._all_divided = True
        self._steps_left = sys.maxsize  # later queries are cheap

    def is_terminal(self, node: Node) -> bool:
        """Whether a node is a terminal; a reference is one if the rule's body is."""
        body = self.body(node)
        if isinstance(body, Chars):
            return True
        return (
            not self._all_divided
            and body not in self._divided
            and self._is_regular(body)
            and self._size(body) <= _LARGEST_TERMINAL
        )

    def body(self, node: Node) -> Node:
        """A node, or the body of the rule that it refers to."""
        while isinstance(node, Ref) and node.name in self._regular:
            node = self._rules[node.name]
        return node

    def is_nullable(self, node: Node) -> bool:
        """Whether a node may be empty."""
        self._step()
        match node:
            case Chars():
                return False
            case Ref(name=name):
                return name in self._nullable
            case Seq(items=items):
                return all(self.is_nullable(item) for item in items)
            case Alt(items=items):
                return any(self.is_nullable(item) for item in items)
            case Repeat(item=item, least=least):
                return least == 0 or self.is_nullable(item)

    # Properties of nodes.

    def _is_regular(self, node: Node) -> bool:
        return all(ref in self._regular for ref in _references(node))

    def _size(self, node: Node) -> int:
        """Characters of a node with all references expanded; counting stops soon after the limit."""
        match node:
            case Chars():
                return 1
            case Ref(name=name):
                if name not in self._sizes:
                    self._sizes[name] = self._size(self._rules[name])
                return self._sizes[name]
            case Seq(items=items) | Alt(items=items):
                total = 0
                for item in items:
                    total += self._size(item)
                    if total > _LARGEST_TERMINAL:
                        break
                return total
            case Repeat(item=item):
                return self._size(item)

    def _find_nullable(self) -> None:
        while nullable := {n for n, body in self._rules.items() if n not in self._nullable and self.is_nullable(body)}:
            self._nullable |= nullable

    def _find_first(self) -> None:
        changed = True
        while changed:
            changed = False
            for name, body in self._rules.items():
                first = self._first_of(body)
                changed |= first != self._first[name]
                self._first[name] = first

    def _first_of(self, node: Node) -> int:
        """The first characters of a node."""
        self._step()
        match node:
            case Chars():
                return self._alphabet.mask(node)
            case Ref(name=name):
                return self._first[name]
            case Alt(items=items):
                first = 0
                for item in items:
                    first |= self._first_of(item)
                return first
            case Seq(items=items):
                first = 0
                for item in items:
                    first |= self._first_of(item)
                    if not self.is_nullable(item):
                        break
                return first
            case Repeat(item=item, most=most):
                return 0 if most == 0 else self._first_of(item)

    # Dividing terminals.

    def _settle(self) -> None:
        """Divide terminals until each is unambiguous or a character."""
        while ambiguous := self._ambiguous():
            self._divided |= ambiguous

    def _ambiguous(self) -> set[Node]:
        """Terminals that could consume characters of the next terminal."""
        follow = self._follow_sets()
        longer = [node for node in follow if not isinstance(node, Chars)]
        followed = [(node, after) for node, after in follow.items() if after]
        return {long for long in longer if any(self._swallows(long, node, after) for node, after in followed)}

    def _swallows(self, long: Node, short: Node, after: int) -> bool:
        """Whether ``long`` may continue with a character of ``after`` when ``short`` is complete."""
        self._step()
        a, b = self._automaton(short), self._automaton(long)
        pairs = [(p, q) for p in _bits(a.first) for q in _bits(b.first) if a.masks[p] & b.masks[q]]
        visited = set(pairs)
        while pairs:
            p, q = pairs.pop()
            self._step()
            if len(visited) > _MOST_PAIRS:
                return True
            if a.last >> p & 1 and any(b.masks[r] & after for r in _bits(b.follow[q])):
                return True
            for r in _bits(b.follow[q]):
                new = {(s, r) for s in _bits(a.follow[p]) if a.masks[s] & b.masks[r]} - visited
                visited |= new
                pairs.extend(new)
        return False

    def _automaton(self, node: Node) -> _Automaton:
        if node not in self._automata:
            self._automata[node] = _Automaton(node, self._rules, self._alphabet)
        return self._automata[node]

    def _follow_sets(self) -> dict[Node, int]:
        """The characters that may follow each terminal in use."""
        rules: dict[str, int] = {self._root: 0}
        follow: dict[Node, int] = {}
        while True:
            before = (dict(rules), dict(follow))
            for name in list(rules):
                self._propagate(self._rules[name], rules[name], rules, follow)
            if before == (rules, follow):
                return follow

    def _propagate(self, node: Node, after: int, rules: dict[str, int], follow: dict[Node, int]) -> None:
        self._step()
        if self.is_terminal(node):
            body = self.body(node)
            follow[body] = follow.get(body, 0) | after
            return
        match node:
            case Ref(name=name):
                rules[name] = rules.get(name, 0) | after
            case Alt(items=items):
                for item in items:
                    self._propagate(item, after, rules, follow)
            case Seq(items=items):
                for item in reversed(items):
                    self._propagate(item, after, rules, follow)
                    after = self._first_of(item) | (after if self.is_nullable(item) else 0)
            case Repeat(item=item, most=most):
                again = 0 if most is not None and most <= 1 else self._first_of(item)
                self._propagate(item, after | again, rules, follow)

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise _TooMuchWorkError


class _TooMuchWorkError(Exception):
    """The analysis takes too long: the grammar is matched character by character."""


class _Alphabet:
    """The characters of a grammar in equivalence classes; sets of classes are bit masks."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        nodes = [node for body in rules.values() for node in _characters(body)]
        edges = sorted({edge for node in nodes for first, last in node.ranges for edge in (first, last + 1)})
        self._index = {edge: i for i, edge in enumerate(edges)}

    def mask(self, node: Chars) -> int:
        """The classes of a node's characters."""
        mask = 0
        for first, last in node.ranges:
            mask |= (1 << self._index[last + 1]) - (1 << self._index[first])
        return mask


class _Automaton:
    """The position automaton of a terminal; counted repetitions become unbounded.

    Attributes:
        masks: the characters of each position.
        follow: for each position, the next positions, as a bit mask.
        first: the first positions.
        last: the last positions.
    """

    def __init__(self, node: Node, rules: Mapping[str, Node], alphabet: _Alphabet) -> None:
        self.masks: list[int] = []
        self.follow: list[int] = []
        self._rules = rules
        self._alphabet = alphabet
        _, self.first, self.last = self._add(node)

    def _add(self, node: Node) -> tuple[bool, int, int]:
        """Add a node's positions; returns whether it may be empty, its first and its last positions."""
        match node:
            case Chars():
                self.masks.append(self._alphabet.mask(node))
                self.follow.append(0)
                bit = 1 << len(self.masks) - 1
                return False, bit, bit
            case Ref(name=name):
                return self._add(self._rules[name])
            case Alt(items=items):
                parts = [self._add(item) for item in items]
                return any(p[0] for p in parts), _union(p[1] for p in parts), _union(p[2] for p in parts)
            case Repeat(item=item, least=least, most=most):
                if most == 0:
                    return True, 0, 0
                empty, first, last = self._add(item)
                if most != 1:
                    self._link(last, first)
                return empty or least == 0, first, last
            case Seq(items=items):
                empty, first, last = True, 0, 0
                for item in items:
                    item_empty, item_first, item_last = self._add(item)
                    self._link(last, item_first)
                    first |= item_first if empty else 0
                    last = item_last | (last if item_empty else 0)
                    empty = empty and item_empty
                return empty, first, last

    def _link(self, before: int, after: int) -> None:
        for p in _bits(before):
            self.follow[p] |= after


def _union(masks: Iterator[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Seq(items=items) | Alt(items=items):
            return items
        case Repeat(item=item):
            return (item,)
        case _:
            return ()


def _characters(node: Node) -> Iterator[Chars]:
    if isinstance(node, Chars):
        yield node
    for child in _children(node):
        yield from _characters(child)


def _references(node: Node) -> set[str]:
    """Names of the rules that a node refers to directly."""
    names = {node.name} if isinstance(node, Ref) else set()
    for child in _children(node):
        names |= _references(child)
    return names


def _regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """Rules without recursion: they refer only to regular rules."""
    references = {name: _references(body) for name, body in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, refs in references.items():
        for ref in refs:
            users[ref].append(name)
    n_open = {name: len(refs) for name, refs in references.items()}
    ready = [name for name, n in n_open.items() if not n]
    regular: set[str] = set()
    while ready:
        regular.add(name := ready.pop())
        for user in users[name]:
            n_open[user] -= 1
            if not n_open[user]:
                ready.append(user)
    return regular
