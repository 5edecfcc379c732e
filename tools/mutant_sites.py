"""Where `tools/mutants.py` changes a module: one small change each of a guard, a comparison, a table row or an effect.

A site is found by walking the syntax tree in a fixed order, so the same source always has the same sites. Its name has the
function, the kind of change, the text before and after, and no line number: the list of equivalent mutants names sites, and
survives edits elsewhere in the file.

Left out, because no rule of the protocol depends on them: logs, notes for timelines, counters (`*_total`), the texts of
reasons, annotations, defaults of fields, the first values in constructors, names that are deleted as unused, and cases that
the type checker excludes (`assert_never`).
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Site", "find_sites", "mutate"]

_SILENT_CALLS = re.compile(r"^(log\.\w+|self\._note|self\._observe)\(")
_OBSERVED = re.compile(r"^self\._observe is (not )?no_observer$")
_COUNTER = re.compile(r"\w+_total\b")
_SILENT_FUNCTIONS = frozenset({"__repr__", "__str__", "_note", "_why_late", "_stats", "_count_wire", "__post_init__"})

_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
}
_SWAPPED = {"min": "max", "max": "min", "all": "any", "any": "all"}


@dataclass(frozen=True, slots=True)
class Site:
    """One change: its name, its kind, its line, and the function that it is in (empty: the module itself)."""

    name: str
    kind: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class _Change:
    kind: str
    line: int
    function: str
    before: str
    after: str
    apply: Callable[[], None]


Put = Callable[[ast.AST], None]


def find_sites(source: str) -> list[Site]:
    """All sites of a module, in the order in which `mutate` numbers them."""
    seen: Counter[str] = Counter()
    sites: list[Site] = []
    for change in _Walk(ast.parse(source)).changes():
        name = f"{change.function or '<module>'}: {change.kind}: {change.before} -> {change.after}"
        seen[name] += 1
        again = f" #{seen[name]}" if seen[name] > 1 else ""
        sites.append(Site(name + again, change.kind, change.line, change.function))
    return sites


def mutate(source: str, number: int) -> ast.Module:
    """The syntax tree of a module with the change of one site."""
    tree = ast.parse(source)
    for index, change in enumerate(_Walk(tree).changes()):
        if index == number:
            change.apply()
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


def _text(node: ast.AST, limit: int = 100) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Walk:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._function = ""

    def changes(self) -> Iterator[_Change]:
        """Every change, outermost first. None of them is applied while the tree is being walked."""
        yield from list(self._block(self._tree.body, ""))

    def _change(self, kind: str, node: ast.AST, after: str, apply: Callable[[], None], before: str = "") -> _Change:
        line = getattr(node, "lineno", 0)
        return _Change(kind, line, self._function, before or _text(node), after, apply)

    # Statements.

    def _block(self, body: list[ast.stmt], path: str) -> Iterator[_Change]:
        for index, statement in enumerate(body):
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if statement.name not in _SILENT_FUNCTIONS:
                        outer, name = self._function, f"{path}{statement.name}"
                        # A function inside a function is changed as a part of the outer one.
                        self._function = outer or name
                        yield from self._block(statement.body, f"{name}.")
                        self._function = outer
                case ast.ClassDef():
                    yield from self._block(statement.body, f"{path}{statement.name}.")
                case _:
                    yield from self._statement(body, index, statement, path)

    def _statement(self, body: list[ast.stmt], index: int, statement: ast.stmt, path: str) -> Iterator[_Change]:
        text = ast.unparse(statement)
        is_count = isinstance(statement, ast.AugAssign) and _COUNTER.search(ast.unparse(statement.target)) is not None
        is_silent = _SILENT_CALLS.match(text) is not None or is_count
        if is_silent or isinstance(statement, ast.Raise | ast.Import | ast.ImportFrom | ast.AnnAssign | ast.Assert):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Dict) and self._function:
                yield from self._rows(statement.value)
            return
        if self._function and not self._function.endswith("__init__") and self._is_effect(statement):

            def skip() -> None:
                body[index] = ast.copy_location(ast.Pass(), statement)

            yield self._change("effect", statement, "pass", skip)
        for field, value in ast.iter_fields(statement):
            if isinstance(value, list):
                for position, child in enumerate(value):
                    if isinstance(child, ast.stmt | ast.match_case):
                        continue
                    if isinstance(child, ast.AST):
                        yield from self._node(child, _putter(value, position), is_test=False)
                if value and isinstance(value[0], ast.stmt):
                    yield from self._block(value, path)
                for case in value if isinstance(statement, ast.Match) else ():
                    yield from self._block(case.body, path)
            elif isinstance(value, ast.AST):
                is_test = field == "test" or (isinstance(statement, ast.Return) and _is_boolean(value))
                yield from self._node(value, _setter(statement, field), is_test=is_test)

    def _is_effect(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Delete(targets=targets):
                # A name that is deleted was an argument or a local that is not used: nothing can notice that.
                return not all(isinstance(target, ast.Name) for target in targets)
            case ast.Expr(value=ast.Call()):
                return not ast.unparse(statement).startswith("assert_never(")
            case ast.Assign(targets=targets):
                return any(_is_kept(target) for target in targets)
            case ast.AugAssign():
                return True
            case _:
                return False

    # Expressions.

    def _node(self, node: ast.AST, put: Put, *, is_test: bool) -> Iterator[_Change]:
        if isinstance(node, ast.JoinedStr | ast.Constant | ast.Name):
            if is_test:
                yield from self._forced(node, put)
            return
        if _OBSERVED.match(_text(node)):
            return
        if is_test:
            yield from self._forced(node, put)
        match node:
            case ast.BoolOp():
                yield from self._operands(node, put)
            case ast.Compare():
                yield from self._comparison(node, is_test)
            case ast.BinOp(op=ast.Add() | ast.Sub()) if self._function and not _is_text(node):
                yield self._arithmetic(node)
            case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED:
                func = node.func
                assert isinstance(func, ast.Name)  # noqa: S101

                def swap() -> None:
                    func.id = _SWAPPED[name]

                yield self._change("bound", node, f"{_SWAPPED[name]}(...)", swap)
            case ast.Call(func=ast.Name(id="Row")):
                yield from self._row(node)
            case ast.Dict() if self._function:
                yield from self._rows(node)
                return
        yield from self._children(node)

    def _children(self, node: ast.AST) -> Iterator[_Change]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            if isinstance(value, list):
                for position, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        is_condition = isinstance(node, ast.comprehension) and field == "ifs"
                        yield from self._child(node, child, _putter(value, position), is_condition)
            elif isinstance(value, ast.AST):
                is_condition = isinstance(node, ast.IfExp) and field == "test"
                yield from self._child(node, value, _setter(node, field), is_condition)

    def _child(self, parent: ast.AST, child: ast.AST, put: Put, is_test: bool) -> Iterator[_Change]:
        if isinstance(child, ast.Compare) and isinstance(parent, ast.BoolOp | ast.UnaryOp):
            # To leave it out, or to negate the whole, is the same change, or nearly so.
            yield from self._comparison(child, is_test=True)
            yield from self._children(child)
        else:
            yield from self._node(child, put, is_test=is_test)

    def _forced(self, node: ast.AST, put: Put) -> Iterator[_Change]:
        for value in (False, True):

            def force(value: bool = value) -> None:
                put(ast.copy_location(ast.Constant(value), node))

            yield self._change("guard", node, "always" if value else "never", force)

    def _operands(self, node: ast.BoolOp, put: Put) -> Iterator[_Change]:
        word = "and" if isinstance(node.op, ast.And) else "or"
        for index, operand in enumerate(node.values):
            rest = [value for other, value in enumerate(node.values) if other != index]

            def drop(rest: list[ast.expr] = rest) -> None:
                put(rest[0] if len(rest) == 1 else ast.copy_location(ast.BoolOp(node.op, rest), node))

            yield self._change("guard", operand, f"left out of '{word}' of {len(node.values)}", drop)

    def _comparison(self, node: ast.Compare, is_test: bool) -> Iterator[_Change]:
        for index, operator in enumerate(node.ops):
            boundary = _BOUNDARY.get(type(operator))
            if boundary is not None:

                def shift(index: int = index, boundary: type[ast.cmpop] = boundary) -> None:
                    node.ops[index] = boundary()

                yield self._change("boundary", node, boundary.__name__, shift)
            if not is_test or len(node.ops) > 1:
                opposite = _OPPOSITE[type(operator)]

                def turn(index: int = index, opposite: type[ast.cmpop] = opposite) -> None:
                    node.ops[index] = opposite()

                yield self._change("comparison", node, opposite.__name__, turn)

    def _arithmetic(self, node: ast.BinOp) -> _Change:
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()

        def turn() -> None:
            node.op = other

        return self._change("arithmetic", node, type(other).__name__, turn)

    # Tables.

    def _rows(self, table: ast.Dict) -> Iterator[_Change]:
        for index, (key, value) in enumerate(zip(table.keys, table.values, strict=True)):
            if key is None:
                continue

            def drop(index: int = index) -> None:
                del table.keys[index], table.values[index]

            if isinstance(key, ast.Tuple):
                yield self._change("row", key, "no row", drop)
                yield from self._stays(key, value)
            else:
                yield self._change("entry", key, "no entry", drop)
            yield from self._node(value, _putter(table.values, index), is_test=False)

    def _stays(self, key: ast.Tuple, value: ast.expr) -> Iterator[_Change]:
        """A row that leads nowhere: it stays in the state of its key."""
        if isinstance(value, ast.Call) and value.args and ast.unparse(value.args[0]) != ast.unparse(key.elts[0]):

            def stay() -> None:
                value.args[0] = key.elts[0]

            yield self._change("row", key, "stays", stay)

    def _row(self, row: ast.Call) -> Iterator[_Change]:
        for argument in row.args[1:]:
            if isinstance(argument, ast.Tuple):
                for index, effect in enumerate(argument.elts):

                    def drop(elements: list[ast.expr] = argument.elts, index: int = index) -> None:
                        del elements[index]

                    yield self._change("row effect", row, f"without {_text(effect)}", drop)


def _putter(items: list[ast.expr] | list[ast.AST], index: int) -> Put:
    def put(node: ast.AST) -> None:
        items[index] = node  # type: ignore[call-overload]

    return put


def _setter(owner: ast.AST, field: str) -> Put:
    return lambda node: setattr(owner, field, node)


def _is_kept(target: ast.expr) -> bool:
    """Whether an assignment changes more than a local name."""
    if isinstance(target, ast.Tuple):
        return any(map(_is_kept, target.elts))
    return isinstance(target, ast.Attribute | ast.Subscript)


def _is_boolean(node: ast.AST) -> bool:
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.BoolOp | ast.Compare)


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in ast.walk(node)
    )
