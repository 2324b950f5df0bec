"""The environments and tools of this package: `calculator` and `python`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from grpo_dist.environments.base import Environment, Tool

_MAX_CHARACTERS = 1000
_MAX_BITS = 20_000  # in a numerator or denominator: about 6,000 digits, milliseconds for any operation here
_MAX_DIGITS = 4000  # below Python's default limit for converting integers to text, 4300
_MAX_ARGUMENT = 1000  # maximum argument of a factorial or a binomial coefficient

Number = Fraction | float


def python(code: str) -> str:
    """Run Python code. Returns what it prints and the value of its last line; variables stay for later calls.

    Args:
        code: the code to run
    """
    raise NotImplementedError("runs in the sandbox, never in the process of an environment")


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / // % **, parentheses, and abs, min, max, round, floor, ceil, sqrt, gcd,
            lcm, factorial, comb
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} are computed"
        )
    text = (
        expression.strip()
        .replace("^", "**")
        .replace("×", "*")
        .replace("·", "*")
        .replace("÷", "/")
        .replace("−", "-")
    )
    try:
        tree = ast.parse(text, mode="eval")
        return _format(_value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("a number is too large") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression.strip()!r} is not an arithmetic expression") from None


class Python(Environment):
    """Answers calls of `python`; an action without calls ends the episode."""

    tools: ClassVar[Sequence[Tool]] = (python,)


class Calculator(Environment):
    """Answers calls of `calculator`; an action without calls ends the episode."""

    tools: ClassVar[Sequence[Tool]] = (calculator,)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator != 1:
        return _finite(float(base) ** float(exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > _MAX_BITS and abs(base) not in (0, 1):
        raise ValueError(f"the power is too large: at most {_MAX_BITS} bits are computed")
    return base ** int(exponent)


def _root(value: Number) -> Number:
    if value < 0:
        raise ValueError("the square root of a negative number is not real")
    if isinstance(value, Fraction):
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def _whole(value: Number, limit: int | None = None) -> int:
    if isinstance(value, float) or value.denominator != 1:
        raise ValueError(f"{_format(value)} must be an integer")
    if limit is not None and not 0 <= value <= limit:
        raise ValueError(f"{_format(value)} must be between 0 and {limit}")
    return int(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    places = _whole(digits)
    if abs(places) > 100:
        raise ValueError("round takes at most 100 digits")
    return Fraction(round(Fraction(value), places))


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": _root,
    "gcd": lambda *values: math.gcd(*map(_whole, values)),
    "lcm": lambda *values: math.lcm(*map(_whole, values)),
    "factorial": lambda value: math.factorial(_whole(value, _MAX_ARGUMENT)),
    "comb": lambda n, k: math.comb(_whole(n, _MAX_ARGUMENT), _whole(k, _MAX_ARGUMENT)),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def _value(node: ast.expr, text: str) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # Exact decimals: 0.1 is a tenth, not the nearest float.
        return _bounded(_literal((ast.get_source_segment(text, node) or "").replace("_", "")))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left, text), _value(node.right, text)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise ValueError(f"{node.func.id} takes plain numbers")
        arguments = [_value(argument, text) for argument in node.args]
        try:
            return _bounded(_FUNCTIONS[node.func.id](*arguments))
        except TypeError:
            raise ValueError(f"{node.func.id} does not take {len(arguments)} numbers") from None
    part = ast.get_source_segment(text, node) or text
    raise ValueError(f"{part[:80]!r} cannot be computed; write numbers with + - * / // % ** and parentheses")


def _literal(digits: str) -> Fraction:
    exponent = digits.lower().partition("e")[2]
    if digits[:2].lower() not in ("0x", "0b", "0o"):
        if exponent and abs(int(exponent)) > _MAX_DIGITS:
            raise ValueError(f"{digits} is too large or too small")
        return Fraction(digits)
    return Fraction(int(digits, 0))


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, float):
        return _finite(value)
    exact = Fraction(value)
    if max(exact.numerator.bit_length(), exact.denominator.bit_length()) > _MAX_BITS:
        raise ValueError(f"the number is too large: at most {_MAX_BITS} bits are computed")
    return exact


def _finite(value: Any) -> float:
    if isinstance(value, complex) or not math.isfinite(value):
        raise ValueError("the result is not a finite real number")
    return value


def _format(value: Number) -> str:
    """Write a number: 20126, 0.125, "1/3 (about 0.333333333333)", or 1.41421356237 for an irrational one."""
    if isinstance(value, float):
        return f"{value:.12g}"
    if value.denominator == 1:
        if value.numerator.bit_length() > 3.3 * _MAX_DIGITS:
            raise ValueError(f"the result is longer than {_MAX_DIGITS} digits")
        return str(value.numerator)
    rest, places = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        places = max(places, count)
    if rest == 1 and places <= 30:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 200:
        return f"about {_approximate(value)}"
    return f"{value} (about {_approximate(value)})"


def _approximate(value: Fraction) -> str:
    return f"{float(value):.12g}"
