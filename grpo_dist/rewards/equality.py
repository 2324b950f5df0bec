"""Compares two formulas by value: exact fractions, else 60 digits, with random numbers for the variables.

A formula that cannot be read whole or evaluated is not compared (None), and never in part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import product

from mpmath import mp, mpc, mpf

from grpo_dist.rewards.formula import (
    DIGITS,
    FUNCTIONS,
    Formula,
    Number,
    TooLarge,
    Unread,
    Values,
    close,
    combined,
    evaluate,
    inexact,
    is_zero,
    parse,
    real,
)

_MAX_ELEMENTS = 64  # longest list compared in any order
_ROUNDED = 1e-4  # largest relative difference of a decimal number that rounds an exact number
_PLACES, _PLACES_IN_TUPLE = 6, 4  # decimals of a rounded number, alone and as an end or coordinate


def same(gold: str, answer: str) -> bool | None:
    """Return whether two formulas are equal; None if one cannot be read whole, or their kinds cannot be
    compared.

        "x_{i}^{2}", "x_i^2"       True        "\\log_2 8", "3"              True
        "f(2)", "f'(2)"            False       "x<1 \\land x>2", "x<1 \\lor x>2"   False
        "x=y", "y=x"               True        "\\int x dx", "x"             None
    """
    ours, theirs = _tree(gold), _tree(answer)
    if ours is None or theirs is None:
        return None
    with mp.workdps(DIGITS):
        try:
            return _same_statement(*_cases_folded(*_parameters_renamed(ours, theirs)))
        except (Unread, ArithmeticError, ValueError, RecursionError):
            return None


@lru_cache(maxsize=4096)
def _tree(text: str) -> Formula | None:
    try:
        return parse(text)
    except (Unread, RecursionError):
        return None


def is_formula(text: str) -> bool:
    """Return whether a text can be read whole."""
    return _tree(text) is not None


def value(text: str) -> complex | None:
    """Return the value of a constant formula; None for any other text."""
    tree = _tree(text)
    if tree is None or any(node.kind == "symbol" for node in _nodes(tree)):
        return None
    with mp.workdps(DIGITS):
        try:
            return complex(inexact(evaluate(tree, {})))
        except (Unread, ArithmeticError, ValueError, TypeError, RecursionError):
            return None


def _nodes(tree: Formula) -> Iterator[Formula]:
    yield tree
    for part in tree.parts:
        yield from _nodes(part)


def _cases_folded(ours: Formula, theirs: Formula) -> tuple[Formula, Formula]:
    """Rename letters to lower case, if no formula has both cases: 3r^2 may mean ``3R^2``."""
    letters = [{node.name[0] for node in _nodes(tree) if _is_letter(node)} for tree in (ours, theirs)]
    folded = {
        letter
        for letter in letters[0] | letters[1]
        if not any(letter.swapcase() in s and letter in s for s in letters)
    }

    def renamed(node: Formula) -> Formula:
        name = node.name
        if _is_letter(node) and name[0] in folded:
            name = name[0].lower() + name[1:]
        return node._replace(name=name, parts=tuple(renamed(part) for part in node.parts))

    return renamed(ours), renamed(theirs)


def _parameters_renamed(ours: Formula, theirs: Formula) -> tuple[Formula, Formula]:
    """Give the whole number of a general solution one name: ``k\\pi`` and ``n\\pi``."""
    names = [
        _variables(tree.parts[1] if _is_equation(tree) and len(tree.parts) == 2 else tree)
        for tree in (ours, theirs)
    ]
    periodic = all(
        any(node.kind == "constant" and node.name == "pi" for node in _nodes(tree)) for tree in (ours, theirs)
    )
    if not periodic or names[0] == names[1] or any(len(n) != 1 or not n <= set("kmnl") for n in names):
        return ours, theirs
    return ours, _renamed(theirs, *names[1], *names[0])


def _renamed(node: Formula, old: str, new: str) -> Formula:
    name = new if node.kind == "symbol" and node.name == old else node.name
    return node._replace(name=name, parts=tuple(_renamed(part, old, new) for part in node.parts))


def _is_letter(node: Formula) -> bool:
    """Return whether a node is a variable or a function named by a letter: ``x_1``, ``f'``, not ``A^T``."""
    return (
        node.kind in ("symbol", "call")
        and node.name[0].isalpha()
        and not node.name[1:2].isalpha()
        and "^" not in node.name
    )


# Statements: equations, inequalities, congruences, and lists of them.


def _same_statement(ours: Formula, theirs: Formula) -> bool | None:
    ours, theirs = (
        _alternatives(_share_modulus(_drop_domains(_worked_out(node)))) for node in (ours, theirs)
    )
    ours, theirs = _spread(ours, theirs), _spread(theirs, ours)
    if "congruence" in (ours.kind, theirs.kind):
        return _same_congruence(ours, theirs)
    sets = _compare_as_sets(ours, theirs)
    if sets is not None:
        return sets
    if _is_equation(theirs) and not _is_statement(ours):
        return _equals_side(ours, theirs)
    if _is_equation(ours) and not _is_statement(theirs):
        return (
            _same_statement(ours.parts[1], theirs)
            if len(ours.parts) == 2 and _is_name(ours.parts[0])
            else None
        )
    if _is_equation(ours) and _is_equation(theirs):
        return _same_equation(ours, theirs)
    if ours.kind == theirs.kind == "relation":
        return _same_relation(ours, theirs)
    if ours.kind in _COLLECTIONS or theirs.kind in _COLLECTIONS:
        return _same_collection(ours, theirs)
    if _is_statement(ours) or _is_statement(theirs):
        return False
    if any(a.kind in _OF_SETS and b.kind in _OF_NUMBERS for a, b in ((ours, theirs), (theirs, ours))):
        return False
    return _same_value(ours, theirs)


_OF_SETS = ("union", "intersection", "difference")
_OF_NUMBERS = ("number", "add", "multiply", "divide", "power", "negative")
_COLLECTIONS = ("list", "set", "tuple", "interval", "matrix", "or", "and")


def _drop_domains(node: Formula) -> Formula:
    """Remove the domains of variables from a list: ``2n, n \\in \\mathbb{Z}``."""
    if node.kind != "list":
        return node
    parts = [
        p
        for p in node.parts
        if not (p.kind == "relation" and p.name == "in" and p.parts[1].kind == "constant")
    ]
    return node if not parts else parts[0] if len(parts) == 1 else node._replace(parts=tuple(parts))


def _share_modulus(node: Formula) -> Formula:
    """Turn ``x \\equiv 1, 4 \\pmod 5`` into two congruences with the same left side and modulus."""
    if node.kind != "list" or node.parts[-1].kind != "congruence":
        return node
    modulus = node.parts[-1].parts[-1]
    names: tuple[Formula, ...] = ()
    congruences = []
    for part in node.parts:
        if part.kind == "relation" and part.name == "mod":
            sides = part.parts
        elif part.kind == "congruence" and part.parts[-1] == modulus:
            sides = part.parts[:-1]
        elif _is_statement(part) or part.kind in _COLLECTIONS:
            return node
        else:
            sides = (part,)
        names = sides[:-1] or names
        congruences.append(Formula("congruence", (*names, sides[-1], modulus)))
    return node._replace(parts=tuple(congruences))


def _spread(node: Formula, other: Formula) -> Formula:
    """Turn ``(a,b)=(1,2)`` into ``a=1, b=2`` where the other formula is a list of statements, and
    ``x \\in \\{1,2\\}`` into ``x=1, x=2`` where it is a number or a list."""
    if node.kind != "relation":
        return node
    names, values = node.parts[0], node.parts[-1]
    is_list = not (_is_set(other) or other.kind in ("tuple", "matrix"))
    if node.name == "in" and _is_name(names) and values.kind == "set" and values.parts and is_list:
        names = Formula("tuple", (names,) * len(values.parts))
    elif not (
        node.name == "="
        and other.kind in ("list", "and")
        and _is_statement(other)
        and names.kind == values.kind == "tuple"
        and len(names.parts) == len(values.parts)
    ):
        return node
    pairs = zip(names.parts, values.parts, strict=True)
    equations = tuple(Formula("relation", pair, "=") for pair in pairs)
    return equations[0] if len(equations) == 1 else Formula("list", equations)


def _is_statement(node: Formula) -> bool:
    return node.kind in ("relation", "congruence", "and", "or") or (
        node.kind == "list" and any(_is_statement(part) for part in node.parts)
    )


def _is_equation(node: Formula) -> bool:
    return node.kind == "relation" and set(node.name.split()) <= {"=", "~"}


def _is_name(node: Formula) -> bool:
    """Return whether a side of an equation names the other: ``x``, ``a_{n+1}``, ``f(2)``, ``(x,y)``."""
    if node.kind == "tuple":
        return all(_is_name(part) for part in node.parts)
    return node.kind == "symbol" or (
        node.kind == "call" and node.name.rstrip("'_").isalpha() and node.name not in FUNCTIONS
    )


def _equals_side(ours: Formula, equation: Formula) -> bool | None:
    """Compare a value with the right side of an equation: a problem may ask for any left side."""
    sides = equation.parts
    numbers = {evaluate(side, {}) for side in sides if _digits(side)}
    if len([number for number in numbers if number.denominator == 1]) > 1:
        return False
    signs = equation.name.split()
    exact = signs.index("~") if "~" in signs else len(signs)  # 1/3 \approx 0.3 is 1/3
    side = sides[exact] if exact or not _is_name(sides[0]) else sides[-1]
    side = sides[0] if _is_name(side) and not _is_name(sides[0]) else side
    return _same_statement(ours, side)


def _same_equation(ours: Formula, theirs: Formula) -> bool | None:
    """Compare two-sided equations up to a factor: ``2x+4y=6``, ``x+2y=3``; longer ones by the last sides."""
    a, b = (
        Formula("relation", node.parts[-2:], "=") if len(node.parts) > 2 else node for node in (ours, theirs)
    )
    if any(part.kind in _COLLECTIONS for node in (a, b) for part in node.parts):
        same_names = _same_statement(a.parts[0], b.parts[0])
        return _same_statement(a.parts[1], b.parts[1]) if same_names else same_names
    if len(ours.parts) > 2 or len(theirs.parts) > 2:
        values = _same_statement(a.parts[1], b.parts[1])
        return values if values is not True else _same_statement(ours.parts[0], theirs.parts[0]) or None
    names = [node.parts[0] for node in (a, b)]
    if names[0].name == names[1].name and all(
        _is_letter(n) and n.kind == "call" and [p.kind for p in n.parts] == ["symbol"] for n in names
    ):
        b = _renamed(b, names[1].parts[0].name, names[0].parts[0].name)  # f(t)=t^2 is f(x)=x^2
    if _is_unsolved(a, b):
        return False
    return _proportional(_difference(a.parts), _difference(b.parts), signed=False)


def _is_unsolved(gold: Formula, answer: Formula) -> bool:
    """Return whether the gold is a solution, and the answer a relation that is yet to be solved."""
    return _is_solution(gold) and not (_is_solution(answer) or _is_moved_solution(answer))


def _is_solution(node: Formula) -> bool:
    """Return whether a relation has x or -x alone on a side, and constants on the others."""
    others = [part for part in node.parts if not _is_named(part)]
    return 0 < len(others) < len(node.parts) and not any(map(_variables, others))


def _is_moved_solution(node: Formula) -> bool:
    """Return whether a relation is a solution with the constant moved to it: ``x-2=0``, a line."""
    return len(node.parts) == 2 and any(
        _digits(zero) == "0"
        and side.kind == "add"
        and len(side.parts) == 2
        and _is_named(side.parts[0])
        and not _variables(side.parts[1])
        for side, zero in (node.parts, node.parts[::-1])
    )


def _is_named(side: Formula) -> bool:
    return _is_name(side.parts[0] if side.kind == "negative" else side)


def _difference(sides: Sequence[Formula]) -> Formula:
    return Formula("add", (sides[0], Formula("negative", (sides[1],))))


def _same_relation(ours: Formula, theirs: Formula) -> bool | None:
    """Compare chains of inequalities or other relations, sign by sign."""
    a, b = _ascending(ours), _ascending(theirs)
    signs, other_signs = a.name.split(), b.name.split()
    if signs != other_signs:
        return False if {*signs, *other_signs} <= {"<", "<=", "=", "!="} else None
    if set(signs) <= {"<", "<=", "!="} and len(signs) == 1:
        if _is_unsolved(a, b):
            return False
        return _proportional(_difference(a.parts), _difference(b.parts), signed=signs != ["!="])
    verdicts = [_same_statement(x, y) for x, y in zip(a.parts, b.parts, strict=True)]
    return None if None in verdicts else all(verdicts)


def _ascending(chain: Formula) -> Formula:
    """Turn ``a > b`` into ``b < a``."""
    signs = chain.name.split()
    if not set(signs) & {">", ">="}:
        return chain
    turned = [{">": "<", ">=": "<=", "<": ">", "<=": ">="}.get(sign, sign) for sign in reversed(signs)]
    return Formula("relation", tuple(reversed(chain.parts)), " ".join(turned))


def _proportional(ours: Formula, theirs: Formula, *, signed: bool) -> bool:
    """Return whether two formulas differ by a constant factor, which must be positive if ``signed``."""
    ratios = []
    for values in _values_of_variables(ours, theirs):
        a, b = evaluate(ours, values), evaluate(theirs, values)
        if is_zero(a) or is_zero(b):
            if is_zero(a) != is_zero(b):
                return False
            continue
        ratios.append(combined(a, b, lambda x, y: x / y))
    if not all(close(ratio, ratios[0]) for ratio in ratios):
        return False
    return not (signed and ratios and real(ratios[0]) < 0)


def _same_congruence(ours: Formula, theirs: Formula) -> bool:
    """Compare ``n = 3 (mod 5)`` with ``n = -2 (mod 5)``, or residues: ``-2 (mod 5)``."""
    if ours.kind == theirs.kind == "congruence" and len(ours.parts) != len(theirs.parts):
        ours, theirs = (
            node._replace(parts=node.parts[1:]) if len(node.parts) == 3 and _is_name(node.parts[0]) else node
            for node in (ours, theirs)
        )
    if ours.kind == theirs.kind == "congruence" and len(ours.parts) == len(theirs.parts) == 2:
        ours, theirs = (node._replace(parts=(Formula("number"), *node.parts)) for node in (ours, theirs))
    if ours.kind == theirs.kind == "congruence" and len(ours.parts) == len(theirs.parts):
        modulus = _whole(ours.parts[2])
        if modulus != _whole(theirs.parts[2]) or modulus == 0:
            return False
        a, b = (_difference(node.parts) for node in (ours, theirs))
        turned = [Formula("add", (a, b))] if _variables(a) else []  # 3 = n for n = 3
        return any(
            _is_constant_multiple(n, modulus)
            for n in (Formula("add", (a, Formula("negative", (b,)))), *turned)
        )
    return False


def _is_constant_multiple(node: Formula, modulus: int) -> bool:
    numbers = [evaluate(node, values) for values in _values_of_variables(node, node)]
    return all(close(number, numbers[0]) for number in numbers) and is_zero(
        Fraction(round(real(numbers[0]))) - numbers[0]
    ) and round(real(numbers[0])) % modulus == 0  # fmt: skip


def _whole(node: Formula) -> int:
    number = evaluate(node, {})
    if not isinstance(number, Fraction) or number.denominator != 1:
        raise Unread("no whole number")
    return abs(int(number))


# Collections.


def _alternatives(node: Formula) -> Formula:
    """Replace plus-minus by the list of its values: independent signs in tuples, one sign in a formula."""
    if not any(part.kind == "signs" for part in _nodes(node)):
        return node
    if node.kind in ("list", "set", "or", "and"):
        parts = [part for element in node.parts for part in _parts_of(_alternatives(element))]
        return Formula("set" if node.kind == "set" else "list", tuple(parts))
    if node.kind in ("tuple", "interval"):
        choices = [_parts_of(_alternatives(part)) for part in node.parts]
        alternatives = [node._replace(parts=tuple(choice)) for choice in product(*choices)]
    else:
        alternatives = [_choose_sign(node, upper) for upper in (True, False)]
    if len(alternatives) > _MAX_ELEMENTS:
        raise Unread("many signs")
    return Formula("list", tuple(alternatives))


def _parts_of(node: Formula) -> tuple[Formula, ...]:
    return node.parts if node.kind == "list" else (node,)


def _choose_sign(node: Formula, upper: bool) -> Formula:
    parts = tuple(_choose_sign(part, upper) for part in node.parts)
    if node.kind != "signs":
        return node._replace(parts=parts)
    return parts[0] if (node.name == "pm") == upper else Formula("negative", parts)


def _same_collection(ours: Formula, theirs: Formula) -> bool | None:
    ordered = ("tuple", "interval", "matrix")
    ours, theirs = (
        node.parts[0]
        if node.kind == "set" and other.kind in ordered and [part.kind for part in node.parts] == ["tuple"]
        else node
        for node, other in ((ours, theirs), (theirs, ours))
    )
    if ours.kind in ordered or theirs.kind in ordered:
        ours, theirs = _order_by_names(ours, theirs), _order_by_names(theirs, ours)
        if ours.kind != theirs.kind:
            return _matrix_and_tuple(ours, theirs)
        if ours.name != theirs.name or len(ours.parts) != len(theirs.parts):
            return False
        return _all_same(ours.parts, theirs.parts)
    if {ours.kind, theirs.kind} == {"and", "or"} and not all(
        _is_constant(part) for part in (*ours.parts, *theirs.parts)
    ):
        return False
    a, b = (node.parts if node.kind in _COLLECTIONS else (node,) for node in (ours, theirs))
    if len(a) > _MAX_ELEMENTS or len(b) > _MAX_ELEMENTS:
        return None
    return _same_in_any_order(a, b)


def _worked_out(node: Formula) -> Formula:
    """Replace sums and products of matrices by one matrix."""
    if not any(part.kind == "matrix" for part in _nodes(node)) or node.kind == "matrix":
        return node
    parts = [_worked_out(part) for part in node.parts]
    rows = [[row.parts for row in part.parts] if part.kind == "matrix" else None for part in parts]
    a, b = (rows[0], rows[-1])
    if node.kind == "multiply" and a and b:
        if len(a[0]) != len(b):
            raise Unread("shapes of matrices")
        products = [
            [
                tuple(Formula("multiply", pair) for pair in zip(row, column, strict=True))
                for column in zip(*b, strict=True)
            ]
            for row in a
        ]
        return _matrix([[Formula("add", terms) for terms in row] for row in products])
    if node.kind == "add" and all(rows) and len({(len(r), len(r[0])) for r in rows if r}) == 1:
        return _matrix(
            [
                [Formula("add", entry) for entry in zip(*same, strict=True)]
                for same in zip(*[r for r in rows if r], strict=True)
            ]
        )
    if node.kind in ("negative", "multiply", "divide") and len([r for r in rows if r]) == 1:
        at = 0 if a else 1
        if node.kind == "divide" and at:
            raise Unread("division by a matrix")
        return _matrix(
            [
                [node._replace(parts=(*parts[:at], entry, *parts[at + 1 :])) for entry in row]
                for row in rows[at] or []
            ]
        )
    return node._replace(parts=tuple(parts))


def _matrix(rows: Sequence[Sequence[Formula]]) -> Formula:
    return Formula("matrix", tuple(Formula("tuple", tuple(row)) for row in rows))


def _order_by_names(node: Formula, other: Formula) -> Formula:
    """Turn ``p=5, q=2`` into (5, 2) where the other formula is a tuple."""
    if (
        other.kind != "tuple"
        or node.kind not in ("list", "and")
        or not all(_is_equation(part) for part in node.parts)
    ):
        return node
    names = {part.parts[0] for part in node.parts}
    if len(names) < len(node.parts) or not all(_is_name(name) for name in names):
        return node
    return Formula("tuple", tuple(part.parts[-1] for part in node.parts))


def _is_constant(node: Formula) -> bool:
    """Return whether a part of "and" or "or" is a number or ``x=2``: for solutions, both words make lists."""
    return not _variables(node.parts[1] if _is_equation(node) else node)


def _matrix_and_tuple(ours: Formula, theirs: Formula) -> bool | None:
    """Compare a column with a tuple; a matrix is never a number, a set of several elements never a tuple."""
    kinds = {ours.kind, theirs.kind}
    matrix, other = (ours, theirs) if ours.kind == "matrix" else (theirs, ours)
    if any(_is_compound(part) for part in other.parts):
        return None
    if kinds == {"matrix", "tuple"}:
        column = [row.parts[0] for row in matrix.parts if len(row.parts) == 1]
        if len(column) == len(matrix.parts) == len(other.parts):
            return _all_same(column, other.parts)
        return None if sum(len(row.parts) for row in matrix.parts) == len(other.parts) else False
    if "list" in kinds and "matrix" not in kinds and len(ours.parts) != len(theirs.parts):
        return False
    if kinds in ({"set", "tuple"}, {"set", "interval"}) and all(
        len(node.parts) > 1 for node in (ours, theirs)
    ):
        return False
    if kinds & {"list", "set", "interval"} or any(part.kind == "matrix" for part in _nodes(other)):
        return None
    return False


def _all_same(ours: Sequence[Formula], theirs: Sequence[Formula]) -> bool | None:
    verdicts = [
        _same_value(a, b, places=_places(a, b))
        if not (_is_compound(a) or _is_compound(b))
        else _same_statement(a, b)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return False if False in verdicts else None if None in verdicts else True


def _is_compound(node: Formula) -> bool:
    return node.kind in _COLLECTIONS or _is_statement(node)


def _same_in_any_order(ours: Sequence[Formula], theirs: Sequence[Formula]) -> bool | None:
    unknown = False

    def covered(elements: Sequence[Formula], others: Sequence[Formula], swap: bool) -> bool:
        nonlocal unknown
        for element in elements:
            verdicts = [
                _same_statement(*((other, element) if swap else (element, other))) for other in others
            ]
            if True not in verdicts:
                unknown = unknown or None in verdicts
                return False
        return True

    if covered(ours, theirs, False) and covered(theirs, ours, True):
        return True
    return None if unknown else False


# Sets of real numbers.


@dataclass(frozen=True, slots=True)
class _Interval:
    """An interval of real numbers; ``low`` and ``high`` are infinite or numbers."""

    low: Number
    low_closed: bool
    high: Number
    high_closed: bool


def _compare_as_sets(ours: Formula, theirs: Formula) -> bool | None:
    """Compare as sets of real numbers if one side is an interval, a union or an inequality."""
    if not any(_is_set(node) for node in (ours, theirs)):
        return None
    if (
        ours.kind in ("interval", *_OF_SETS)
        and theirs.kind == "relation"
        and not any(map(_is_named, theirs.parts))
    ):
        return False if _is_set(theirs) else None  # 2x-1 > 5 is not (3, \infty) yet
    for node, other in ((ours, theirs), (theirs, ours)):
        if node.kind in ("interval", "union", "intersection", "difference") and _is_number(other):
            return False
        if node.kind == "tuple" and len(node.parts) != 2:
            return None
        if node.kind == other.kind == "relation" and len({*_variables(node), *_variables(other)}) > 1:
            return None  # sets would ignore the variables' names
    names = [_solved_for(node) for node in (ours, theirs)]
    if None not in names and names[0] != names[1]:
        return False
    verdicts = []
    for values in _values_of_variables(ours, theirs):
        try:
            sets = [_pieces(node, values) for node in (ours, theirs)]
        except Unread:
            return None
        places = _places(ours, theirs)
        verdicts.append(
            len(sets[0]) == len(sets[1])
            and all(_same_piece(a, b, places) for a, b in zip(*sets, strict=True))
        )
    return all(verdicts)


def _is_set(node: Formula) -> bool:
    if node.kind in ("and", "or", "list"):
        return any(_is_set(part) for part in node.parts)
    if node.kind == "relation":
        return bool({*node.name.split()} & {"<", ">", "<=", ">=", "!=", "in"})
    return node.kind in ("interval", "union", "intersection", "difference") or (
        node.kind == "constant" and node.name == "R"
    )


def _is_number(node: Formula) -> bool:
    """Return whether a formula is one number, whatever its value."""
    is_set = node.kind == "constant" and node.name not in ("pi", "infty")
    return not (is_set or _is_compound(node) or _is_set(node) or _variables(node))


def _variables(node: Formula) -> set[str]:
    return {part.name for part in _nodes(node) if part.kind == "symbol" and part.name not in ("e", "i")}


def _solved_for(node: Formula) -> str | None:
    names = {
        part.name for statement in _nodes(node) if statement.kind == "relation"
        for part in statement.parts if part.kind == "symbol"
    }  # fmt: skip
    return next(iter(names)) if len(names) == 1 else None


def _pieces(node: Formula, values: Values) -> list[_Interval]:
    if node.kind == "constant" and node.name == "R":
        return [_Interval(-mp.inf, False, mp.inf, False)]
    if node.kind in ("interval", "tuple") and len(node.parts) == 2:
        low, high = (_end(part, values) for part in node.parts)
        return _united([_Interval(low, node.name.startswith("["), high, node.name.endswith("]"))])
    if node.kind == "set":
        points = [_end(part, values) for part in node.parts]
        return _united([_Interval(point, True, point, True) for point in points])
    if node.kind in ("union", "or"):
        return _united([piece for part in node.parts for piece in _pieces(part, values)])
    if node.kind in ("intersection", "and"):
        pieces = _pieces(node.parts[0], values)
        for part in node.parts[1:]:
            pieces = _intersected(pieces, _pieces(part, values))
        return pieces
    if node.kind == "list":  # inequalities that exclude each other are alternatives
        both = _pieces(Formula("and", node.parts), values)
        return both or _pieces(Formula("or", node.parts), values)
    if node.kind == "difference" or (
        node.kind == "add" and len(node.parts) == 2 and node.parts[1].kind == "negative"
    ):
        other = node.parts[1] if node.kind == "difference" else node.parts[1].parts[0]
        return _intersected(_pieces(node.parts[0], values), _complement(_pieces(other, values)))
    if node.kind == "relation":
        return _pieces_of_relation(node, values)
    raise Unread("no set")


def _pieces_of_relation(node: Formula, values: Values) -> list[_Interval]:
    """Solve ``a < x <= b``, ``x != a``, ``x in S``: the variable stands alone."""
    signs = node.name.split()
    if signs == ["in"] and node.parts[0].kind == "symbol":
        return _pieces(node.parts[1], values)
    intervals = [_Interval(-mp.inf, False, mp.inf, False)]
    unknown = [part for part in node.parts if _is_name(part)]
    if len(unknown) != 1 or any(
        part == unknown[0] for side in node.parts if side is not unknown[0] for part in _nodes(side)
    ):
        raise Unread("no variable stands alone")
    at = node.parts.index(unknown[0])
    if len(node.parts) > 3 or (len(node.parts) == 3 and at != 1):
        raise Unread("a chain")
    for place, sign in enumerate(signs):
        left, right = node.parts[place], node.parts[place + 1]
        if left is not unknown[0]:
            left, right = right, left
            sign = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(sign, sign)
        end = _end(right, values)
        pieces = {
            "<": [_Interval(-mp.inf, False, end, False)], "<=": [_Interval(-mp.inf, False, end, True)],
            ">": [_Interval(end, False, mp.inf, False)], ">=": [_Interval(end, True, mp.inf, False)],
            "!=": _complement([_Interval(end, True, end, True)]), "=": [_Interval(end, True, end, True)],
        }.get(sign)  # fmt: skip
        if pieces is None:
            raise Unread(sign)
        intervals = _intersected(intervals, pieces)
    return intervals


def _end(node: Formula, values: Values) -> Number:
    number = evaluate(node, values)
    if isinstance(number, mpc) and number.imag:
        raise Unread("no real number")
    return number


def _is_empty(piece: _Interval) -> bool:
    if close(piece.low, piece.high):
        return not (piece.low_closed and piece.high_closed) or mp.isinf(inexact(piece.low))
    return bool(real(piece.low) > real(piece.high))


def _united(pieces: list[_Interval]) -> list[_Interval]:
    out: list[_Interval] = []
    nonempty = (piece for piece in pieces if not _is_empty(piece))
    for piece in sorted(nonempty, key=lambda piece: (real(piece.low), not piece.low_closed)):
        last = out[-1] if out else None
        touches = last is not None and (
            real(piece.low) < real(last.high)
            or (close(piece.low, last.high) and (piece.low_closed or last.high_closed))
        )
        if last is None or not touches:
            out.append(piece)
        elif close(piece.high, last.high):
            closed = piece.high_closed or last.high_closed
            out[-1] = _Interval(last.low, last.low_closed, last.high, closed)
        elif real(piece.high) > real(last.high):
            out[-1] = _Interval(last.low, last.low_closed, piece.high, piece.high_closed)
    return out


def _complement(pieces: list[_Interval]) -> list[_Interval]:
    out, low, closed = [], -mp.inf, False
    for piece in pieces:
        out.append(_Interval(low, closed, piece.low, not piece.low_closed))
        low, closed = piece.high, not piece.high_closed
    return _united([*out, _Interval(low, closed and low != mp.inf, mp.inf, False)])


def _intersected(ours: list[_Interval], theirs: list[_Interval]) -> list[_Interval]:
    return _complement(_united([*_complement(ours), *_complement(theirs)]))


def _same_piece(a: _Interval, b: _Interval, places: int) -> bool:
    def same_end(x: Number, closed: bool, y: Number, other_closed: bool) -> bool:
        if mp.isinf(inexact(x)) or mp.isinf(inexact(y)):
            return bool(inexact(x) == inexact(y))
        return closed == other_closed and (close(x, y) or _rounds_to(x, y, places))

    return same_end(a.low, a.low_closed, b.low, b.low_closed) and same_end(
        a.high, a.high_closed, b.high, b.high_closed
    )


# Values.


def _same_value(ours: Formula, theirs: Formula, *, places: int = _PLACES) -> bool | None:
    decimals = [len(_digits(tree).partition(".")[2]) for tree in (ours, theirs) if "." in _digits(tree)]
    decimal = bool(decimals) and min(decimals) >= places
    for values in _values_of_variables(ours, theirs):
        try:
            a, b = evaluate(ours, values), evaluate(theirs, values)
        except TooLarge:
            return ours == theirs
        if not (
            close(a, b)
            or (decimal and _rounds_to(a, b, places))
            or _both_vanish((ours, theirs), (a, b), values)
        ):
            return False
    return True


def _both_vanish(trees: Sequence[Formula], numbers: Sequence[Number], values: Values) -> bool:
    """Return whether tiny numbers are rounding errors of zero, which shrink with more digits."""
    if any(abs(inexact(number)) > mpf(10) ** -40 for number in numbers):
        return False
    with mp.workdps(2 * DIGITS):
        again = [inexact(evaluate(tree, values)) for tree in trees]
    return all(
        abs(more) <= abs(inexact(number)) * mpf(10) ** -30
        for more, number in zip(again, numbers, strict=True)
    )


def _digits(tree: Formula) -> str:
    """Return the digits of a plain number, "" for any other formula."""
    number = tree.parts[0] if tree.kind == "negative" else tree
    return number.name if number.kind == "number" else ""


def _is_decimal(tree: Formula) -> bool:
    return any(node.kind == "number" and "." in node.name for node in _nodes(tree))


def _places(ours: Formula, theirs: Formula) -> int:
    """Return the decimals to which an answer may round an end or a coordinate of the gold."""
    return _PLACES_IN_TUPLE if _is_decimal(theirs) and not _is_decimal(ours) else _PLACES


def _values_of_variables(*trees: Formula) -> Iterator[Values]:
    """Yield values of the variables: positive, negative, mixed; one empty mapping without variables."""
    names = sorted(
        {node.name for tree in trees for node in _nodes(tree) if node.kind == "symbol"} - {"e", "i"}
    )
    if not names:
        yield {}
        return
    for trial in range(3):
        values = {}
        for name in names:
            digest = int.from_bytes(blake2b(f"{trial} {name}".encode(), digest_size=4).digest(), "big")
            values[name] = Fraction(digest % 4001 + 700, 1009) * (1, -1, -1 if digest & 4096 else 1)[trial]
        yield values


def _rounds_to(exact: Number, rounded: Number, places: int) -> bool:
    """Return whether one number is the other rounded to ``places`` decimals or more."""
    a, b = inexact(exact), inexact(rounded)
    if isinstance(a, mpc) or isinstance(b, mpc) or mp.isinf(a) or mp.isinf(b):
        return False
    near = abs(a - b) <= _ROUNDED * max(abs(a), abs(b))
    return bool(near and abs(a - b) <= mpf(10) ** -places / 2)
