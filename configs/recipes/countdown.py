"""Rewards for GRPO-Zero's countdown: build an equation from given numbers with a given value."""

import ast
import operator
import re
from collections.abc import Callable, Sequence

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip


def equation(completion: str, answer: str, nums: Sequence[int]) -> float:
    """Return 1 for an answer that uses each of ``nums`` once and equals ``answer``, else 0."""
    found = re.search(r"<answer>([-+*/() \d]+)</answer>", completion)
    if found is None or sorted(map(int, re.findall(r"\d+", found[1]))) != sorted(nums):
        return 0.0
    try:
        return float(abs(value(ast.parse(found[1].strip(), mode="eval").body) - float(answer)) < 1e-5)
    except (SyntaxError, ZeroDivisionError, TypeError, RecursionError):
        return 0.0


def value(node: ast.AST) -> float:
    """Return the value of an expression of whole numbers."""
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value(operand)
    raise TypeError(ast.dump(node))


def tags(completion: str) -> float:
    """Return 1 for exactly a thought and an answer, else 0.1 for a thought plus 0.5 for an answer. The prompt
    opens the thought.
    """
    if re.fullmatch(r".*?</think>\n<answer>.*?</answer>", completion, re.DOTALL):
        return 1.0
    answers = re.search(r"<answer>.*?</answer>", completion, re.DOTALL) is not None
    return 0.1 * ("</think>" in completion) + 0.5 * answers
