"""Evaluates expressions of tables and shell arithmetic: numbers, comparisons, choices, a few functions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

PLACE = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Not: operator.not_,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_LARGEST_POWER = 64


class Uncomputable(ValueError):
    """An expression without a value."""


def slug(text: Any) -> str:
    """Return a name for a directory: `qwen3 8b_$(date)` -> qwen3-8b."""
    plain = re.sub(r"\$\([^)]*\)|\$\{[^}]*\}", "", str(text))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-_.") or "run"


def count_gpus(value: Any) -> int:
    """Return the number of devices for a list, `list(range(0,16))`, or a number."""
    if isinstance(value, int):
        return value
    if isinstance(value, list):
        return len(value)
    spans = re.findall(r"range\(\s*(\d+)\s*,\s*(\d+)\s*\)", str(value))
    if not spans:
        raise Uncomputable(f"no devices: {value}")
    return sum(int(end) - int(start) for start, end in spans)


def parallel(backend: Any, letter: str) -> int:
    """Return one size of AReaL's backends: parallel("fsdp:d4p1t2", "t") is 2."""
    match = re.search(rf"{letter}(\d+)", str(backend).rpartition(":")[2])
    return int(match[1]) if match else 1


def name_the_problem(text: Any) -> Any:
    """Fill an OpenRLHF template's braces with the problem's name: "Q: {}" -> "Q: {problem}"."""
    return str(text).replace("{}", "{problem}") if text else None


def listed(value: Any) -> list[Any]:
    """Return a single value or several values as a list."""
    return value if isinstance(value, list) else [value]


def sources(value: Any) -> list[str]:
    """Return the data sets of ms-swift's list: ["org/data#500"] -> ["org/data"]."""
    return [str(one).partition("#")[0] for one in listed(value)]


def rows(value: Any) -> list[int | None]:
    """Return their numbers of rows: ["org/data#500", "org/other"] -> [500, None]."""
    numbers = [str(one).partition("#")[2] for one in listed(value)]
    return [int(number) if number else None for number in numbers]


def names(paths: Any) -> list[str]:
    """Return model names from their paths: "org/RM-8B" -> ["RM-8B"]."""
    return [slug(str(path).rstrip("/").rpartition("/")[2]) for path in listed(paths)]


def prose(text: Any) -> Any:
    """Return ``text`` unless it is a file name. Raises Uncomputable."""
    if str(text).endswith(".txt"):
        raise Uncomputable(f"a file: {text}")
    return text


def beside(names: Any, name: str, value: Any) -> list[Any]:
    """Return a list with ``value`` where ``names`` has ``name``, and None elsewhere."""
    return [value if one == name else None for one in listed(names)]


def bounds(threshold: Any) -> list[Any]:
    """Return kind and bounds of verl's importance weights: 2.0 -> [None, None, 2.0]; "0.5_5.0" ->
    ["icepop", 0.5, 5.0].
    """
    low, sign, high = str(threshold).rpartition("_")
    return ["icepop", float(low), float(high)] if sign else [None, None, float(high)]


def rules(names: Any, thresholds: Any) -> list[dict[str, Any]]:
    """Convert verl's rejection rules to ours; our k1 is the ratio, verl's its inverse.

    "token_k1,seq_max_k2", "0.5_4,2.5" -> {rule: token_k1, low: 0.25, high: 2}, {rule: seq_max_k2, high: 2.5}
    """
    rule_names = [name.strip() for name in str(names).split(",") if name.strip()]
    numbers = [text.strip() for text in str(thresholds).split(",")]
    numbers *= len(rule_names) if len(numbers) == 1 else 1  # one for all
    converted: list[dict[str, Any]] = []
    for name, text in zip(rule_names, numbers, strict=True):
        low, sign, high = text.rpartition("_")
        if name.endswith("k1"):
            lowest = float(low) if sign else 1 / float(high)
            converted.append({"rule": name, "low": round(1 / float(high), 6), "high": round(1 / lowest, 6)})
        else:
            converted.append({"rule": name, "high": float(high)})
    return converted


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "slug": slug, "gpus": count_gpus, "parallel": parallel, "template": name_the_problem, "max": max,
    "min": min, "int": int, "text": str, "before": lambda text, sign: str(text).partition(sign)[0],
    "sources": sources, "listed": listed, "bounds": bounds, "rules": rules, "rows": rows, "prose": prose,
    "beside": beside, "names": names,
    "total": lambda value: sum(value) if isinstance(value, list) else value,
}  # fmt: skip


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression in which ``{name}`` stands for an entry of ``values``.

    Raises Uncomputable if it has none.
    """
    places = dict[str, Any]()

    def name_of(match: re.Match[str]) -> str:
        places[f"_{len(places)}"] = values.get(match[1])
        return f"_{len(places) - 1}"

    try:
        return _value(ast.parse(PLACE.sub(name_of, expression).strip(), mode="eval").body, places)
    except (SyntaxError, TypeError, LookupError, ArithmeticError, ValueError, RecursionError) as error:
        raise Uncomputable(str(error)) from error


def _value(node: ast.AST, places: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return {"true": True, "false": False, "null": None, **places}[name]
        case ast.List(items):
            return [_value(item, places) for item in items]
        case ast.Dict(keys, items):
            return {_value(k, places): _value(v, places) for k, v in zip(keys, items, strict=True) if k}
        case ast.UnaryOp(op, operand):
            return _OPERATIONS[type(op)](_value(operand, places))
        case ast.BinOp(left, ast.Pow(), right):
            base, power = _value(left, places), _value(right, places)
            if abs(power) > _LARGEST_POWER or abs(base) > 1e9:
                raise Uncomputable("a power that is too large")
            return base**power
        case ast.BinOp(left, op, right):
            one, other = _value(left, places), _value(right, places)
            if not isinstance(op, ast.Add) and not isinstance(one, int | float):
                raise Uncomputable(f"{one!r} is no number")
            return _whole(_OPERATIONS[type(op)](one, other))
        case ast.Compare(left, [op], [right]):
            return _OPERATIONS[type(op)](_value(left, places), _value(right, places))
        case ast.BoolOp(op, parts):
            result: Any = None
            for part in parts:
                result = _value(part, places)
                if bool(result) == isinstance(op, ast.Or):
                    break
            return result
        case ast.IfExp(test, then, other):
            return _value(then if _value(test, places) else other, places)
        case ast.Subscript(inner, ast.Slice(lower, None, step)):
            first, stride = (_value(part, places) if part else None for part in (lower, step))
            return _value(inner, places)[first::stride]
        case ast.Subscript(inner, index):
            return _value(inner, places)[_value(index, places)]
        case ast.Call(ast.Name(name), arguments, []):
            return _FUNCTIONS[name](*(_value(argument, places) for argument in arguments))
    raise Uncomputable(ast.dump(node))


def _whole(value: Any) -> Any:
    """Return an exact quotient as an integer, others without rounding errors: 0.2 for 1e-6 / 5e-6."""
    if not isinstance(value, float) or abs(value) >= 1e15:
        return value
    return int(value) if value.is_integer() else float(f"{value:.12g}")
