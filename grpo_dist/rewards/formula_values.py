"""Evaluates formulas: exact fractions, else 60 digits. A function that is not known has values of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import blake2b
from typing import Any

from mpmath import mp, mpc, mpf

from grpo_dist.rewards.formula import Formula, Unread

DIGITS = 60
_SAME = mpf(10) ** -35  # relative difference of equal numbers that are not exact
_MAX_BITS = 400_000  # largest exact number
_MAX_EXPONENT = 10**9  # largest float, in bits
_MAX_TERMS = 10_000  # longest sum or product


class TooLarge(Unread):
    """A number has more digits than can be computed: ``9^{9^{9^{9}}}``."""


Number = Any  # Fraction, mpf, mpc
Values = dict[str, Number]


def close(a: Number, b: Number) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    x, y = inexact(a), inexact(b)
    if mp.isinf(x) or mp.isinf(y):
        return bool(x == y)
    return bool(abs(x - y) <= _SAME * max(abs(x), abs(y)))


def is_zero(a: Number) -> bool:
    return a == 0 if isinstance(a, Fraction) else bool(abs(inexact(a)) < mpf(10) ** -45)


def inexact(a: Number) -> Any:
    if isinstance(a, Fraction):
        return mpf(a.numerator) / a.denominator
    if isinstance(a, (mpf, mpc)):
        return a.real if isinstance(a, mpc) and abs(a.imag) <= _SAME * abs(a) else a
    raise Unread("no number")


def real(a: Number) -> Any:
    number = inexact(a)
    if isinstance(number, mpc):
        raise Unread("no real number")
    return number


def evaluate(node: Formula, values: Values) -> Number:
    """Return the value of a formula. Raises Unread, and ArithmeticError where it has none."""
    kind, parts = node.kind, node.parts
    if kind == "number":
        return node.value
    if kind == "symbol":
        return _symbol(node.name, values)
    if kind == "constant":
        return _constant(node.name)
    if kind in ("sum", "prod"):
        return _repeated(node, values)
    if kind == "call":
        return _call(node, values)
    if kind == "add":
        total: Number = Fraction(0)
        for part in parts:
            total = combined(total, evaluate(part, values), lambda a, b: a + b)
        return total
    if kind not in ("multiply", "divide", "power", "negative"):
        raise Unread(kind)
    numbers = [evaluate(part, values) for part in parts]
    if kind == "negative":
        return -numbers[0]
    if kind == "multiply":
        return combined(numbers[0], numbers[1], lambda a, b: a * b)
    if kind == "divide":
        if is_zero(numbers[1]):
            raise Unread("division by zero")
        return combined(numbers[0], numbers[1], lambda a, b: a / b)
    return _power(numbers[0], numbers[1])


def combined(a: Number, b: Number, operation: Callable[[Any, Any], Any]) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction) and _bits(a) + _bits(b) < _MAX_BITS:
        return operation(a, b)
    result = operation(inexact(a), inexact(b))
    if mp.isnan(result):
        raise Unread("not a number")
    return result


def _bits(a: Fraction) -> int:
    return a.numerator.bit_length() + a.denominator.bit_length()


def _symbol(name: str, values: Values) -> Number:
    if name in values:
        return values[name]
    if name in ("e", "i"):
        return +mp.e if name == "e" else mpc(0, 1)
    raise Unread(name)


def _constant(name: str) -> Number:
    if name == "pi":
        return +mp.pi
    if name == "infty":
        return mp.inf
    raise Unread(name)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if base == 0 and exponent < 0:
            raise Unread("division by zero")
        if base in (0, 1, -1) or abs(exponent) * _bits(base) < _MAX_BITS:
            return base ** int(exponent)
    if (
        isinstance(base, Fraction)
        and isinstance(exponent, Fraction)
        and base > 0
        and 1 < exponent.denominator < 100
    ):
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return _power(root, Fraction(exponent.numerator))
    if (
        isinstance(exponent, Fraction)
        and exponent.denominator % 2
        and exponent.denominator < 100
        and _is_negative(base)
    ):
        root = _power(-base, exponent)  # the real one
        return -root if exponent.numerator % 2 else root
    x, y = inexact(base), inexact(exponent)
    if x == 0:
        return Fraction(0) if real(y) > 0 else _undefined()
    if abs(y) * abs(mp.log(abs(x), 2)) > _MAX_EXPONENT or mp.isinf(x) or mp.isinf(y):
        raise TooLarge("too large")
    return mp.power(x, y)


def _is_negative(number: Number) -> bool:
    real = inexact(number)
    return not isinstance(real, mpc) and bool(real < 0)


def _undefined() -> Number:
    raise Unread("undefined")


def _exact_root(number: Fraction, degree: int) -> Fraction | None:
    if _bits(number) > 4000:
        return None
    roots = []
    for part in (number.numerator, number.denominator):
        root = math.isqrt(part) if degree == 2 else round(mp.root(part, degree))
        if root**degree != part:
            return None
        roots.append(root)
    return Fraction(*roots)


def _root(number: Number, degree: Number) -> Number:
    """Return a root, the real one of a negative number if the degree is odd."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree < 1000:
        return _power(number, combined(Fraction(1), degree, lambda a, b: a / b))
    return _power(number, 1 / degree)


def _repeated(node: Formula, values: Values) -> Number:
    """Evaluate a finite sum or product."""
    low, high = (evaluate(part, values) for part in node.parts[:2])
    if (
        not (isinstance(low, Fraction) and isinstance(high, Fraction))
        or low.denominator * high.denominator != 1
    ):
        raise Unread("bounds")
    if high - low > _MAX_TERMS:
        raise Unread("many terms")
    total: Number = Fraction(0 if node.kind == "sum" else 1)
    for index in range(int(low), int(high) + 1):
        term = evaluate(node.parts[2], {**values, node.name: Fraction(index)})
        total = combined(total, term, (lambda a, b: a + b) if node.kind == "sum" else (lambda a, b: a * b))
    return total


def _call(node: Formula, values: Values) -> Number:
    name = node.name
    if name == "degree":
        return mp.pi / 180
    if name == "det" and node.parts[0].kind == "matrix":
        return _determinant([[evaluate(x, values) for x in row.parts] for row in node.parts[0].parts])
    numbers = [evaluate(part, values) for part in node.parts]
    function = FUNCTIONS.get(name)
    if function is None:
        return _opaque(name, numbers)
    return function(*numbers)


def _determinant(rows: list[list[Number]]) -> Number:
    if len(rows) > 5 or any(len(row) != len(rows) for row in rows):
        raise Unread("a determinant")
    if not rows:
        return Fraction(1)
    total: Number = Fraction(0)
    for column, first in enumerate(rows[0]):
        minor = _determinant([row[:column] + row[column + 1 :] for row in rows[1:]])
        total = total + (-1) ** column * first * minor
    return total


def _opaque(name: str, numbers: Sequence[Number]) -> Number:
    """Return a value of a function that is not known: equal for equal arguments, and only for those."""
    total = mpf(int.from_bytes(blake2b(name.encode(), digest_size=5).digest(), "big")) / 2**36
    for place, number in enumerate(numbers):
        x = inexact(number)
        if mp.isinf(x) or abs(x) > mpf(10) ** 20:
            raise TooLarge("too large")
        total += x * mp.sqrt(place + 2 + len(name))
    return mp.sin(total) + 2


def _function(of: Callable[..., Any]) -> Callable[..., Number]:
    def evaluate(*numbers: Number) -> Number:
        result = of(*(inexact(number) for number in numbers))
        if mp.isnan(result) or (mp.isinf(result) and not any(mp.isinf(inexact(n)) for n in numbers)):
            raise Unread("undefined")
        return result

    return evaluate


def _exactly(of: Callable[..., Any], otherwise: str) -> Callable[..., Number]:
    """Return a function of whole numbers; of others, it is opaque."""

    def evaluate(*numbers: Number) -> Number:
        if all(isinstance(number, Fraction) and number.denominator == 1 for number in numbers):
            return Fraction(of(*(int(number) for number in numbers)))
        return _opaque(otherwise, sorted(numbers, key=lambda n: str(inexact(n))))

    return evaluate


def _logarithm(number: Number, base: Number | None = None) -> Number:
    """Return a logarithm, by default natural; exact for powers of a whole base."""
    if is_zero(number):
        raise Unread("undefined")
    logarithm = mp.log(inexact(number)) / (mp.log(inexact(base)) if base is not None else 1)
    if isinstance(number, Fraction) and isinstance(base, Fraction) and not isinstance(logarithm, mpc):
        nearest = round(logarithm)
        if abs(nearest) < 10_000 and _bits(base) * abs(nearest) < _MAX_BITS and base**nearest == number:
            return Fraction(nearest)
    return logarithm


def _factorial(number: Number) -> Number:
    if isinstance(number, Fraction) and number.denominator == 1 and 0 <= number <= 20_000:
        return Fraction(math.factorial(int(number)))
    x = inexact(number)
    if abs(x) > 10**12:
        raise TooLarge("too large")
    return mp.gamma(x + 1)


def _binomial(n: Number, k: Number) -> Number:
    if all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= 20_000 for x in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    return mp.binomial(inexact(n), inexact(k))


def _double_factorial(number: Number) -> Number:
    if not isinstance(number, Fraction) or number.denominator != 1 or not -1 <= number <= 5000:
        raise Unread("double factorial")
    return Fraction(math.prod(range(int(number), 0, -2)))


def _absolute(number: Number) -> Number:
    return abs(number) if isinstance(number, Fraction) else abs(inexact(number))


def _extreme(pick: Callable[..., Any]) -> Callable[..., Number]:
    return lambda *numbers: pick(numbers, key=real)


def _rounded(of: Callable[[Any], Any]) -> Callable[[Number], Number]:
    return lambda number: Fraction(int(of(number if isinstance(number, Fraction) else real(number))))


_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch")
FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: _function(getattr(mp, name)) for name in _TRIGONOMETRIC},
    **{f"arc{name}": _function(getattr(mp, f"a{name}")) for name in _TRIGONOMETRIC},
    "exp": lambda number: _power(+mp.e, number), "ln": _logarithm, "log": _logarithm, "root": _root,
    "abs": _absolute, "floor": _rounded(math.floor), "ceil": _rounded(math.ceil),
    "gcd": _exactly(math.gcd, "gcd"), "lcm": _exactly(math.lcm, "lcm"),
    "mod": _exactly(lambda a, b: a % b, "mod"), "max": _extreme(max), "min": _extreme(min),
    "!": _factorial, "!!": _double_factorial, "binom": _binomial,
    "sgn": lambda number: Fraction((real(number) > 0) - (real(number) < 0)),
}  # fmt: skip
