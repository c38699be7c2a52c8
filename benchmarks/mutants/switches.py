"""A source in which each of several changes can be switched on while the program runs.

An expression that a change replaces becomes `changed if __mutant__(number) else original`, so the tests of all changes
can be collected once, and each change is tried in a fork of that process. A change that is part of no expression (of a
pattern of `match`, say) switches its whole statement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["SWITCH", "Switched", "names_that_use", "switched"]

SWITCH = '''"""Which change is switched on, and which changes the running test reaches."""
import os

active = {int(os.environ.get("TWOFOLD_MUTANT", "-1"))}
recording = "TWOFOLD_TOUCHED" in os.environ
seen = set()


def is_active(number):
    if recording and number not in seen:
        seen.add(number)
        with open(os.environ["TWOFOLD_TOUCHED"], "a") as file:
            file.write(f"{number}\\n")
    return number in active
'''
"""The module `mutant_switch` of a tree with switched sources."""

_Place = tuple[tuple[str, int | None], ...]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """A source with switches.

    Args:
        text: of the source.
        imported: numbers of the changes that act while their module is imported, and the names that depend on each.
    """

    text: str
    imported: Mapping[int, frozenset[str]]


def switched(source: str, changes: Mapping[int, str], reached: Mapping[int, frozenset[str]] | None = None) -> Switched:
    """Put switches into a source.

    Args:
        source: text of a module.
        changes: the complete changed texts, by number.
        reached: functions that mention one of these names reach the change of this number.

    >>> print(switched("def f(a):\\n    return a + 1", {3: "def f(a):\\n    return a - 1"}).text)
    from mutant_switch import is_active as __mutant__
    <BLANKLINE>
    def f(a):
        return a - 1 if __mutant__(3) else a + 1
    """
    tree = ast.parse(source)
    at: dict[_Place, list[tuple[int, ast.AST]]] = {}
    imported: dict[int, frozenset[str]] = {}
    for number, changed in changes.items():
        place, node = _difference(tree, ast.parse(changed))
        at.setdefault(place, []).append((number, node))
        if not _is_in_function(tree, place):
            imported[number] = _names(tree, place)
    tree = _rebuilt(tree, at, ())
    for number, names in (reached or {}).items():
        _mark(tree, number, names)
    is_after = [isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body]
    first = is_after.index(True) + 1 if True in is_after else int(ast.get_docstring(tree) is not None)
    tree.body.insert(first, ast.parse("from mutant_switch import is_active as __mutant__").body[0])
    return Switched(text=ast.unparse(ast.fix_missing_locations(tree)), imported=imported)


def names_that_use(source: str, names: frozenset[str]) -> frozenset[str]:
    """These names, and those that the module makes of them while it is imported.

    >>> sorted(names_that_use("A = 1\\nB = A + 1\\nC = 2", frozenset({"A"})))
    ['A', 'B']
    """
    while True:
        more = names
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and _mentions(node, names):
                more |= _targets(node)
        if more == names:
            return names
        names = more


def _children(node: ast.AST) -> Iterator[tuple[tuple[str, int | None], ast.AST]]:
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield (name, None), value
        elif isinstance(value, list):
            yield from (((name, index), item) for index, item in enumerate(value) if isinstance(item, ast.AST))


def _at(node: ast.AST, place: _Place) -> list[ast.AST]:
    """The nodes from a root to a place."""
    nodes = [node]
    for name, index in place:
        value = getattr(nodes[-1], name)
        nodes.append(value if index is None else value[index])
    return nodes


def _difference(tree: ast.AST, other: ast.AST) -> tuple[_Place, ast.AST]:
    """The smallest expression or statement that can be replaced to turn one tree into the other."""
    place: list[tuple[str, int | None]] = []
    one, two = tree, other
    while type(one) is type(two):
        left, right = dict(_children(one)), dict(_children(two))
        differ = [step for step in left if step in right and ast.dump(left[step]) != ast.dump(right[step])]
        if left.keys() != right.keys() or len(differ) != 1:
            break
        place.append(differ[0])
        one, two = left[differ[0]], right[differ[0]]
    nodes = _at(tree, tuple(place))
    while not _can_switch(nodes):
        nodes.pop()
        place.pop()
    return tuple(place), _at(other, tuple(place))[-1]


def _can_switch(nodes: list[ast.AST]) -> bool:
    node = nodes[-1]
    if isinstance(node, ast.stmt):
        return True
    if not isinstance(node, ast.expr) or isinstance(node, ast.Starred | ast.Slice | ast.FormattedValue):
        return False
    if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return False
    return not any(isinstance(above, ast.pattern) for above in nodes) and not isinstance(nodes[-2], ast.JoinedStr)


def _is_in_function(tree: ast.AST, place: _Place) -> bool:
    nodes = _at(tree, place)
    return any(isinstance(node, _Function) and step[0] == "body" for node, step in zip(nodes, place, strict=False))


def _names(tree: ast.AST, place: _Place) -> frozenset[str]:
    """The names that a statement outside of functions defines, and the classes that it is in."""
    found: set[str] = set()
    for node in _at(tree, place):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= _targets(node)
    return frozenset(found)


def _targets(node: ast.Assign | ast.AnnAssign) -> frozenset[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return frozenset(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _rebuilt(node: ast.AST, at: Mapping[_Place, list[tuple[int, ast.AST]]], place: _Place) -> ast.Module:
    for step, child in [*_children(node)]:
        name, index = step
        new = _rebuilt(child, at, (*place, step))
        if index is None:
            setattr(node, name, new)
        else:
            getattr(node, name)[index] = new
    for number, changed in at.get(place, ()):
        test = ast.Call(func=ast.Name(id="__mutant__", ctx=ast.Load()), args=[ast.Constant(value=number)], keywords=[])
        if isinstance(node, ast.stmt):
            node = ast.If(test=test, body=[changed], orelse=[node])
        else:
            node = ast.IfExp(test=test, body=changed, orelse=node)
    return node  # type: ignore[return-value]


def _mentions(node: ast.AST, names: frozenset[str]) -> bool:
    for each in ast.walk(node):
        found = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg", ast.FunctionDef: "name"}.get(type(each))
        if found is not None and getattr(each, found) in names:
            return True
    return False


def _mark(tree: ast.AST, number: int, names: frozenset[str]) -> None:
    """Let functions that mention names report that they reach a change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _mentions(node, names):
            first = int(ast.get_docstring(node) is not None)
            node.body.insert(first, ast.parse(f"__mutant__({number})").body[0])
