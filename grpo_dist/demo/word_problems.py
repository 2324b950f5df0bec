"""Prepares SVAMP and MAWPS word problems for a cold start and GRPO of a small model.

    python -m grpo_dist.demo.word_problems SOURCE_DIR OUT_DIR

reads ``svamp.jsonl`` and ``mawps.jsonl`` (``problem``, ``answer``; SVAMP's ``Equation`` too) and writes

    train.jsonl, test.jsonl   problem, answer: the unchanged problems
    sft.jsonl                 prompt, completion: demonstrations on some of the training problems
    gsm8k_easier.jsonl        problem, answer: of ``gsm8k_test.jsonl``, where that is there, problems whose
                              solution has at most two steps; for evaluation alone

    problem      There are 87 oranges and 290 bananas in Philip's collection. If the bananas are organized ...
    completion   <think>87,290,2,93</think>\\boxed{290/2}

The model answers with the expression, not its value: it has to learn to read, and the grader does the
arithmetic (`rewards.accept_arithmetic` accepts ``\\boxed{290/2}`` for ``\\boxed{145}``). SVAMP states its
expressions. For MAWPS they are searched, and a problem with several possible expressions is not demonstrated.

The numbers of the text come first, because copying is hardest for a small model. Only seven in ten of the
training problems are demonstrated. The model memorises demonstrated problems, and a group without a wrong
answer teaches nothing. Each demonstration occurs once unchanged and a few times with other numbers. Problems
that differ only in numbers, case or punctuation are on the same side of every split.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import operator
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import TypeAlias

from grpo_dist.config import DataSourceConfig
from grpo_dist.data.readers import read

FILES = ("svamp.jsonl", "mawps.jsonl")
GSM8K = "gsm8k_test.jsonl"
EASY_STEPS = 2  # of a solution of GSM8K, marked <<16-3-4=9>>
DEMONSTRATED = 0.7  # share of the training problems
VARIANTS = 12  # copies of a demonstrated problem with other numbers
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+")
# An operation on two expressions, or the index of a number.
Tree: TypeAlias = "int | tuple[str, Tree, Tree]"
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_SYMBOLS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A problem with an ``expression`` over the numbers of its text, "" if none is known."""

    problem: str
    answer: str
    expression: str

    @property
    def template(self) -> str:
        """Text without numbers, case and punctuation, which near copies share."""
        return " ".join(re.findall(r"[a-z#]+", NUMBER.sub("#", self.problem.lower())))

    def share(self, purpose: str) -> float:
        """Hash the template to a number in [0, 1)."""
        digest = hashlib.sha256(f"{purpose} {self.template}".encode()).digest()
        return int.from_bytes(digest[:7], "big") / 2**56

    @property
    def demonstration(self) -> str:
        """Completion: the numbers of the text, then the expression."""
        return f"<think>{','.join(numbers_in(self.problem))}</think>\\boxed{{{self.expression}}}"

    @property
    def is_test(self) -> bool:
        return self.share("split") < 0.2

    @property
    def is_demonstrated(self) -> bool:
        return bool(self.expression) and not self.is_test and self.share("demonstration") < DEMONSTRATED


def load(source_dir: Path) -> list[WordProblem]:
    """Read all problems with an exact answer, each once. Raises ValueError for an invalid file."""
    found: dict[str, WordProblem] = {}
    for name in FILES:
        columns = ("Equation",) if name == "svamp.jsonl" else ()
        for row in read(DataSourceConfig(path=str(source_dir / name), columns=columns)):
            # A rounded answer, such as 0.8333333333 for 5/6, has no exact expression.
            if re.fullmatch(r"-?\d+(\.\d{1,4})?", row.answer):
                numbers = numbers_in(row.problem)
                equation = row.columns.get("Equation")
                expression = simplify(equation) if equation else search(numbers, Fraction(row.answer))
                if not expression or evaluate(expression) != Fraction(row.answer):
                    expression = ""
                problem = " ".join(row.problem.split())
                found.setdefault(problem, WordProblem(problem, row.answer, expression))
    return list(found.values())


def easier(path: Path) -> list[dict[str, str]]:
    """Return the problems of GSM8K's file ``path`` whose solution has at most two steps."""
    rows = read(DataSourceConfig(path=str(path), columns=("solution",)))
    easy = (row for row in rows if row.columns["solution"].count("<<") <= EASY_STEPS)
    return [{"problem": row.problem, "answer": row.answer} for row in easy]


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text without commas: "712,261 of $2.73" -> ["712261", "2.73"]."""
    return [n.replace(",", "") for n in NUMBER.findall(text)]


def simplify(equation: str) -> str:
    """Simplify SVAMP's notation: "( ( 28.0 + 14.0 ) / 6.0 )" -> "(28+14)/6"."""
    text = re.sub(r"(\d+)\.0\b", r"\1", equation.replace(" ", ""))
    return text[1:-1] if text.startswith("(") and _closes_at_end(text) else text


def evaluate(expression: str) -> Fraction | None:
    """Evaluate numbers, + - * / and parentheses exactly; None for anything else and for division by zero.

    "7.5/2" -> Fraction(15, 4)
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        return _APPLY[_SYMBOLS[type(node.op)]](_value(node.left), _value(node.right))
    raise SyntaxError("neither a number nor an operation")


def search(numbers: Sequence[str], value: Fraction) -> str:
    """Find the expression over two, else three, of ``numbers`` with ``value``; "" for none or several.

    ["9", "3", "5"], 30 is "(9-3)*5". ["2", "2"], 4 is "": 2+2 and 2*2 are different readings of a problem.
    """
    exact = [Fraction(n) for n in numbers]
    for size in (2, 3):
        readings: dict[tuple[Fraction | None, ...], Tree] = {}
        for places in permutations(range(len(numbers)), size):
            for tree in _trees(places):
                if _compute(tree, exact) == value:
                    readings.setdefault(_signature(tree, len(numbers)), tree)
        if readings:
            return _render(next(iter(readings.values())), numbers) if len(readings) == 1 else ""
    return ""


def _trees(places: Sequence[int]) -> Iterator[Tree]:
    """Yield expressions over two or three indices in this order, left-associative first."""
    first, second, *rest = places
    for op in "+-*/":
        if not rest:
            yield op, first, second
            continue
        for then in "+-*/":
            yield then, (op, first, second), rest[0]
            yield op, first, (then, second, rest[0])


def _compute(tree: Tree, numbers: Sequence[Fraction]) -> Fraction | None:
    if isinstance(tree, int):
        return numbers[tree]
    left, right = _compute(tree[1], numbers), _compute(tree[2], numbers)
    if left is None or right is None or (tree[0] == "/" and right == 0):
        return None
    return _APPLY[tree[0]](left, right)


def _render(tree: Tree, numbers: Sequence[str]) -> str:
    """Write an expression with parentheses only where they change the value."""
    if isinstance(tree, int):
        return numbers[tree]
    op, left, right = tree
    loose = {"*": "+-", "/": "+-"}.get(op, "")
    looser = {"-": "+-", "*": "+-", "/": "+-*/"}.get(op, "")
    texts = [_render(child, numbers) for child in (left, right)]
    if not isinstance(left, int) and left[0] in loose:
        texts[0] = f"({texts[0]})"
    if not isinstance(right, int) and right[0] in looser:
        texts[1] = f"({texts[1]})"
    return op.join(texts)


def _signature(tree: Tree, count: int) -> tuple[Fraction | None, ...]:
    """Evaluate at fixed other numbers: equal for algebraically equal expressions."""
    trials = ([7 + 11 * i + i**3 for i in range(count)], [1013 - 17 * i + i**4 for i in range(count)])
    return tuple(_compute(tree, [Fraction(n) for n in trial]) for trial in trials)


def vary(problem: WordProblem, rng: random.Random) -> WordProblem | None:
    """Replace the numbers, in text and expression, by others of the same length and relative order.

    None if the value of the expression would be negative or undefined.
    """
    values = sorted(set(numbers_in(problem.problem)), key=Fraction)
    drawn = sorted((_like(v, rng) for v in values), key=Fraction)
    if len(set(drawn)) < len(drawn):
        return None
    new = dict(zip(values, drawn, strict=True))
    text = NUMBER.sub(lambda n: new[n[0].replace(",", "")], problem.problem)
    expression = NUMBER.sub(lambda n: new.get(n[0], n[0]), problem.expression)
    value = evaluate(expression)
    return WordProblem(text, str(value), expression) if value is not None and value >= 0 else None


def demonstrations(problems: Iterable[WordProblem], seed: int = 0) -> list[dict[str, str]]:
    """Return ``prompt`` and ``completion`` of demonstrated problems and variants, shuffled by ``seed``."""
    rng = random.Random(f"word problems {seed}")
    shown: list[WordProblem] = []
    for problem in (p for p in problems if p.is_demonstrated):
        variants = (vary(problem, rng) for _ in range(VARIANTS))
        shown += [problem, *(v for v in variants if v is not None)]
    rng.shuffle(shown)
    return [{"prompt": p.problem, "completion": p.demonstration} for p in shown]


def write(source_dir: Path, out_dir: Path) -> dict[str, int]:
    """Write all files to ``out_dir``. Returns the number of rows of each file."""
    problems = load(source_dir)
    train = [p for p in problems if not p.is_test]
    files: dict[str, list[dict[str, str]]] = {
        "train.jsonl": [{"problem": p.problem, "answer": p.answer} for p in train],
        "test.jsonl": [{"problem": p.problem, "answer": p.answer} for p in problems if p.is_test],
        "sft.jsonl": demonstrations(problems),
    }
    if (source_dir / GSM8K).exists():
        files["gsm8k_easier.jsonl"] = easier(source_dir / GSM8K)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out_dir / name).write_text(lines, encoding="utf-8")
    return {name: len(rows) for name, rows in files.items()}


def _closes_at_end(text: str) -> bool:
    """Return whether the first parenthesis of ``text`` closes at its last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return place == len(text) - 1
    return False


def _like(number: str, rng: random.Random) -> str:
    """Draw a number with as many digits before and after the point. 0 and 1 stay: they may be special."""
    if number in ("0", "1"):
        return number
    whole, point, decimals = number.partition(".")
    low = 2 if len(whole) == 1 and not point else 10 ** max(len(whole) - 1, 0) if len(whole) > 1 else 0
    new = str(rng.randint(low, 10 ** len(whole) - 1)) if whole else ""
    return new + point + "".join(str(rng.randint(1, 9)) for _ in decimals)


def main() -> None:
    parser = argparse.ArgumentParser(description="Word problems for cold start and GRPO of a small model.")
    parser.add_argument("source_dir", type=Path, help="directory with svamp.jsonl and mawps.jsonl")
    parser.add_argument("out_dir", type=Path)
    arguments = parser.parse_args()
    for name, rows in write(arguments.source_dir, arguments.out_dir).items():
        print(f"{arguments.out_dir / name}: {rows} rows")


if __name__ == "__main__":
    main()
