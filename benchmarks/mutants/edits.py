"""Every single edit of a module's syntax tree that a careless hand could make.

Edited are the code's own decisions: comparisons, constants, arithmetic, conditions, slices, the order of arguments, defaults, names in
strings, and whole statements. Left alone are docstrings, annotations, `__all__`, and the words of messages (a string with a blank in it);
what stands in a message's braces is code and is edited.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
#: Functions whose arguments have no order.
_SYMMETRIC = ("promote_types", "min", "max", "equal", "differ")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One edit.

    Attributes:
        module: dotted name, without the package.
        scope: the function or class edited, by its dotted name in the module; empty for the module itself.
        function: the outermost function edited, which is what is swapped in a running process; None where that would not do.
        lines: first and last line of the statement edited, or of its header.
        text: the statement, with the edit shown as [old => new]; together with the scope it names the mutant.
        index: the edit's number among the module's.
    """

    module: str
    scope: str
    function: str | None
    lines: tuple[int, int]
    text: str
    index: int

    @property
    def key(self) -> str:
        """Names the mutant whatever its line."""
        return f"{self.scope}: {self.text}" if self.scope else self.text

    def __str__(self) -> str:
        return f"{self.module}:{self.lines[0]}: {self.key}"


def mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module's text, in the order of its lines; of two with one key only the first."""
    found: dict[str, Mutant] = {}
    for index, edit in enumerate(_edits(ast.parse(source))):
        mutant = Mutant(
            module=module,
            scope=edit.place.scope,
            function=edit.place.function,
            lines=edit.place.lines,
            text=_shown(edit),
            index=index,
        )
        key, count = mutant.key, 2
        while key in found:
            key, count = f"{mutant.key} ({count})", count + 1
        if key != mutant.key:
            mutant = Mutant(**{**vars(mutant), "text": key.removeprefix(f"{mutant.scope}: ") if mutant.scope else key})
        found[key] = mutant
    return sorted(found.values(), key=lambda each: each.lines)


def mutated(source: str, index: int) -> ast.Module:
    """The module's tree with one of its edits made."""
    tree = ast.parse(source)
    for number, edit in enumerate(_edits(tree)):
        if number == index:
            edit.make()
            return ast.fix_missing_locations(tree)
    raise IndexError(index)


# --- building blocks ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in the module an edit is: see Mutant. `statement` holds it."""

    scope: str
    function: str | None
    statement: ast.stmt

    @property
    def lines(self) -> tuple[int, int]:
        body = getattr(self.statement, "body", None)
        if not body:
            return self.statement.lineno, self.statement.end_lineno or self.statement.lineno
        return self.statement.lineno, max(self.statement.lineno, body[0].lineno - 1)

    def header(self) -> str:
        """The statement's text, of a compound one the header alone."""
        statement = copy.deepcopy(self.statement)
        for name in ("body", "orelse", "finalbody", "handlers", "decorator_list"):
            if getattr(statement, name, None):
                setattr(statement, name, [ast.Pass()] if name == "body" else [])
        return " ".join(ast.unparse(ast.fix_missing_locations(statement)).removesuffix("pass").split())


@dataclass(frozen=True, kw_only=True)
class _Edit:
    """`owner.field`, or its entry `at`, becomes `new`."""

    place: _Place
    owner: ast.AST
    field: str
    at: int | None
    new: object

    def make(self) -> object:
        """Make the edit; returns what was there."""
        if self.at is None:
            old = getattr(self.owner, self.field)
            setattr(self.owner, self.field, self.new)
            return old
        entries = getattr(self.owner, self.field)
        old, entries[self.at] = entries[self.at], self.new
        return old

    def undo(self, old: object) -> None:
        """Take the edit back."""
        if self.at is None:
            setattr(self.owner, self.field, old)
        else:
            getattr(self.owner, self.field)[self.at] = old


def _shown(edit: _Edit) -> str:
    if isinstance(edit.new, ast.stmt):
        old = " ".join(ast.unparse(edit.place.statement).split())
        new = " ".join(ast.unparse(ast.fix_missing_locations(edit.new)).split())
        return f"[{_short(old)} => {new}]"
    before = edit.place.header()
    old = edit.make()
    after = edit.place.header()
    edit.undo(old)
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    # Whole words, and enough before and after them to know the place.
    while start > 0 and (before[start - 1].isalnum() or before[start - 1] in "_."):
        start -= 1
    while end > 0 and (before[-end].isalnum() or before[-end] in "_."):
        end -= 1
    last = len(before) - end
    head, tail = before[max(0, start - 40) : start], before[last : last + 30]
    return f"{head}[{before[start:last]} => {after[start : len(after) - end]}]{tail}"


def _short(text: str) -> str:
    return text if len(text) <= 90 else f"{text[:60]}…{text[-28:]}"


def _edits(tree: ast.Module) -> Iterator[_Edit]:
    yield from _of_body(tree, "body", "", None)


def _of_body(owner: ast.AST, field: str, scope: str, function: str | None) -> Iterator[_Edit]:
    for at, statement in enumerate(getattr(owner, field)):
        if _is_docstring(statement) or _is_exports(statement) or isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(owner, ast.FunctionDef) and at == len(owner.body) - 1 and _is_return_of_none(statement):
            continue
        place = _Place(scope=scope, function=function, statement=statement)
        new = _instead(statement, function is not None)
        if new is not None:
            yield _Edit(place=place, owner=owner, field=field, at=at, new=new)
        yield from _of_statement(statement, place)


def _of_statement(statement: ast.stmt, place: _Place) -> Iterator[_Edit]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        inner = f"{place.scope}.{statement.name}" if place.scope else statement.name
        inside = inner if isinstance(statement, ast.FunctionDef) and place.function is None else place.function
        if isinstance(statement, ast.FunctionDef):
            # Defaults are made where the function is defined.
            at_function = _Place(scope=inner, function=place.function, statement=statement)
            for field in ("defaults", "kw_defaults"):
                for at, default in enumerate(getattr(statement.args, field)):
                    if default is not None:
                        yield from _of_expression(statement.args, field, at, at_function)
        yield from _of_body(statement, "body", inner, inside)
        return
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "decorator_list", "targets", "target"):
            continue
        if field in ("body", "orelse", "finalbody"):
            yield from _of_body(statement, field, place.scope, place.function)
        elif isinstance(value, ast.expr):
            if isinstance(statement, (ast.If, ast.While)) and field == "test":
                yield from _conditions(statement, field, None, place)
            yield from _of_expression(statement, field, None, place)
        elif isinstance(value, list):
            for at, each in enumerate(value):
                if isinstance(each, ast.expr):
                    yield from _of_expression(statement, field, at, place)
                elif isinstance(each, (ast.withitem, ast.ExceptHandler)):
                    yield from _of_children(each, place)
    if isinstance(statement, ast.AugAssign):
        new = _ARITHMETIC.get(type(statement.op))
        if new is not None:
            yield _Edit(place=place, owner=statement, field="op", at=None, new=new())


def _of_children(node: ast.AST, place: _Place) -> Iterator[_Edit]:
    for field, value in ast.iter_fields(node):
        if field == "annotation":
            continue
        if field == "body" and isinstance(value, list):
            yield from _of_body(node, "body", place.scope, place.function)
        elif isinstance(value, ast.AST):
            yield from _of_expression(node, field, None, place)
        elif isinstance(value, list):
            for at, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from _of_expression(node, field, at, place)


def _of_expression(owner: ast.AST, field: str, at: int | None, place: _Place) -> Iterator[_Edit]:
    value = getattr(owner, field)
    node = value if at is None else value[at]

    def edit(new: object, *, of: ast.AST = owner, name: str = field, entry: int | None = at) -> _Edit:
        return _Edit(place=place, owner=of, field=name, at=entry, new=new)

    if isinstance(node, ast.Constant):
        yield from (edit(ast.copy_location(new, node)) for new in _constants(node))
    elif isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            for new in _COMPARISONS[type(operator)]:
                yield edit(new(), of=node, name="ops", entry=number)
    elif isinstance(node, ast.BoolOp):
        yield edit(ast.Or() if isinstance(node.op, ast.And) else ast.And(), of=node, name="op", entry=None)
        for number in range(len(node.values)):
            rest = [each for index, each in enumerate(node.values) if index != number]
            yield edit(rest[0] if len(rest) == 1 else ast.BoolOp(op=node.op, values=rest))
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield edit(_ARITHMETIC[type(node.op)](), of=node, name="op", entry=None)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        # -1 becomes -2 and 0 by its constant; 1 is too often the same axis.
        if not isinstance(node.operand, ast.Constant):
            yield edit(node.operand)
    elif isinstance(node, ast.IfExp):
        yield edit(node.body)
        yield edit(node.orelse)
    elif isinstance(node, ast.Slice):
        for bound in ("lower", "upper", "step"):
            if getattr(node, bound) is not None:
                yield edit(None, of=node, name=bound, entry=None)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] not in _SYMMETRIC:
        for number in range(len(node.args) - 1):
            one, two = node.args[number : number + 2]
            if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred) and ast.dump(one) != ast.dump(two):
                swapped = [*node.args[:number], two, one, *node.args[number + 2 :]]
                yield edit(swapped, of=node, name="args", entry=None)
    elif isinstance(node, ast.comprehension):
        for number in range(len(node.ifs)):
            yield edit(ast.Constant(value=True), of=node, name="ifs", entry=number)
    yield from _of_children(node, place)


def _conditions(owner: ast.AST, field: str, at: int | None, place: _Place) -> Iterator[_Edit]:
    for new in (True, False):
        yield _Edit(place=place, owner=owner, field=field, at=at, new=ast.Constant(value=new))


def _constants(node: ast.Constant) -> Iterator[ast.Constant]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(value=not value)
    elif isinstance(value, int):
        yield ast.Constant(value=value + 1)
        if value:
            # As an index -1 is often where 0 is.
            yield ast.Constant(value=value - 1)
    elif isinstance(value, float):
        yield ast.Constant(value=value + 1.0)
        yield ast.Constant(value=value * 0.5 if value else -1.0)
    elif isinstance(value, str) and _NAME.fullmatch(value):
        yield ast.Constant(value=f"{value}_x")


def _instead(statement: ast.stmt, inside: bool) -> ast.stmt | None:
    """What stands in for a whole statement that is left out."""
    # A return that is left out lets the function go on, or gives None at its end.
    if isinstance(statement, (ast.Raise, ast.Return, ast.Expr)) or (inside and isinstance(statement, ast.AugAssign)):
        return ast.Pass()
    if isinstance(statement, ast.Assign) and all(isinstance(each, ast.Subscript) for each in statement.targets):
        return ast.Pass()
    return None


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_return_of_none(statement: ast.stmt) -> bool:
    """What a function does at its end anyway."""
    return isinstance(statement, ast.Return) and (statement.value is None or ast.unparse(statement.value) == "None")


def _is_exports(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
