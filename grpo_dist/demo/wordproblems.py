"""Real word problems for a small model taught from scratch: SVAMP and MAWPS, made ready for cold start and GRPO.

    python -m grpo_dist.demo.wordproblems SOURCE_DIR OUT_DIR

reads ``svamp.jsonl`` and ``mawps.jsonl`` (``problem``, ``answer``; SVAMP's ``Equation`` too) and writes

    train.jsonl, test.jsonl   problem, answer: the problems as they are
    sft.jsonl                 prompt, completion: demonstrations on half of the training problems
    model/                    a Qwen2-shaped model with random weights and its tokenizer, made from the training text

    problem      There are 87 oranges and 290 bananas in Philip's collection. If the bananas are organized into 2 ...
    completion   \\boxed{290/2}

The model is asked for the expression, not for its value: what it has to learn is to read, and arithmetic is left to
the grader, for which ``\\boxed{290/2}`` is as good as ``\\boxed{145}``.

Only half of the training problems are demonstrated. The model would know the others by heart as well, and no group
would hold a wrong answer to learn from. A demonstration is given once as it is and a few times with other numbers,
which teaches copying. Problems that differ in numbers or punctuation alone fall on the same side of every split.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from pathlib import Path

FILES = ("svamp.jsonl", "mawps.jsonl")
VARIANTS = 9  # of a demonstrated problem, beside itself, with other numbers
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+")
_EXPRESSION = re.compile(r"[\d.+\-*/() ]+")


@dataclass(frozen=True, slots=True)
class WordProblem:
    """``expression`` over the numbers of the text, "" where none is known."""

    problem: str
    answer: str
    expression: str

    @property
    def template(self) -> str:
        """The text without its numbers, case and punctuation: what near copies share."""
        return " ".join(re.findall(r"[a-z#]+", NUMBER.sub("#", self.problem.lower())))

    def share(self, purpose: str) -> float:
        """A number in [0, 1) that follows from the template."""
        digest = hashlib.sha256(f"{purpose} {self.template}".encode()).digest()
        return int.from_bytes(digest[:7], "big") / 2**56

    @property
    def is_test(self) -> bool:
        return self.share("split") < 0.2

    @property
    def is_demonstrated(self) -> bool:
        return bool(self.expression) and not self.is_test and self.share("demonstration") < 0.5


def load(source_dir: Path) -> list[WordProblem]:
    """All problems with an exact answer, each text once. Raises ValueError for a missing or malformed file."""
    from grpo_dist.config import DataSource
    from grpo_dist.data.readers import read

    found: dict[str, WordProblem] = {}
    for name in FILES:
        columns = ("Equation",) if name == "svamp.jsonl" else ()
        for row in read(DataSource(path=str(source_dir / name), columns=columns)):
            # A rounded answer, as 0.8333333333 for 5/6, has no exact expression.
            if re.fullmatch(r"-?\d+(\.\d{1,4})?", row.answer):
                numbers = numbers_in(row.problem)
                equation = row.columns.get("Equation")
                expression = simplify(equation) if equation else search(numbers, Fraction(row.answer))
                if not expression or evaluate(expression) != Fraction(row.answer):
                    expression = ""
                problem = " ".join(row.problem.split())
                found.setdefault(problem, WordProblem(problem, row.answer, expression))
    return list(found.values())


def numbers_in(text: str) -> list[str]:
    """As written, commas removed: "712,261 of $2.73" -> ["712261", "2.73"]."""
    return [n.replace(",", "") for n in NUMBER.findall(text)]


def simplify(equation: str) -> str:
    """SVAMP's notation to ours: "( ( 28.0 + 14.0 ) / 6.0 )" -> "(28+14)/6"."""
    text = re.sub(r"(\d+)\.0\b", r"\1", equation.replace(" ", ""))
    return text[1:-1] if text.startswith("(") and _closes_at_end(text) else text


def evaluate(expression: str) -> Fraction | None:
    """Exact value of digits, + - * / and parentheses; None for anything else and for a division by zero.

    "7.5/2" -> Fraction(15, 4)
    """
    if not _EXPRESSION.fullmatch(expression) or "**" in expression or "//" in expression:
        return None
    exact = re.sub(r"\d*\.?\d+", lambda number: f"Fraction('{number[0]}')", expression)
    try:
        return Fraction(eval(exact, {"__builtins__": {}, "Fraction": Fraction}))
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None


def search(numbers: Sequence[str], value: Fraction) -> str:
    """The expression over two, else three, of ``numbers`` that has ``value``; "" if there is none or no single one.

    ["2", "2"], 4 is "": 2+2 and 2*2 are different readings of the problem. ["8", "3", "4"], 20 is "(8-3)*4".
    """
    for size in (2, 3):
        if len(numbers) < size:
            break
        readings: dict[tuple[Fraction | None, ...], str] = {}
        for places in permutations(range(len(numbers)), size):
            for form in _forms(places):
                if evaluate(form.format(*numbers)) == value:
                    readings.setdefault(_signature(form, len(numbers)), form)
        if readings:
            return next(iter(readings.values())).format(*numbers) if len(readings) == 1 else ""
    return ""


def _forms(places: Sequence[int]) -> Iterator[str]:
    """Expressions over ``places``, as format strings, those that read most naturally first."""
    first, *rest = (f"{{{place}}}" for place in places)
    if len(rest) == 1:
        yield from (f"{first}{op}{rest[0]}" for op in "+-*/")
        return
    second, third = rest
    for op in "+-*/":
        for then in "+-*/":
            loose = op in "+-" and then in "*/"
            yield f"({first}{op}{second}){then}{third}" if loose else f"{first}{op}{second}{then}{third}"
            if loose or (op == "*" and then in "+-"):
                continue
            if op in "-/" and then in "+-":
                yield f"{first}{op}({second}{then}{third})"


def _signature(form: str, count: int) -> tuple[Fraction | None, ...]:
    """Values at fixed other numbers: equal for expressions that are algebraically the same."""
    trials = ([7 + 11 * i + i**3 for i in range(count)], [1013 - 17 * i + i**4 for i in range(count)])
    return tuple(evaluate(form.format(*trial)) for trial in trials)


def vary(problem: WordProblem, rng: random.Random) -> WordProblem | None:
    """The same problem with other numbers of the same length and order of size, used likewise in the expression.

    None where the expression's value would be negative or undefined.
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
    """``prompt`` and ``completion`` of each demonstrated problem and its variants, in an order from ``seed``."""
    rng = random.Random(f"word problems {seed}")
    shown: list[WordProblem] = []
    for problem in (p for p in problems if p.is_demonstrated):
        variants = (vary(problem, rng) for _ in range(VARIANTS))
        shown += [problem, *(v for v in variants if v is not None)]
    rng.shuffle(shown)
    return [{"prompt": p.problem, "completion": f"\\boxed{{{p.expression}}}"} for p in shown]


def write(source_dir: Path, out_dir: Path) -> dict[str, int]:
    """Writes what the module says into ``out_dir``; returns the rows of each file."""
    from grpo_dist.demo.model import write_word_model

    problems = load(source_dir)
    train = [p for p in problems if not p.is_test]
    files: dict[str, list[dict[str, str]]] = {
        "train.jsonl": [{"problem": p.problem, "answer": p.answer} for p in train],
        "test.jsonl": [{"problem": p.problem, "answer": p.answer} for p in problems if p.is_test],
        "sft.jsonl": demonstrations(problems),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out_dir / name).write_text(lines, encoding="utf-8")
    write_word_model([p.problem for p in train], out_dir / "model", seed=0)
    return {name: len(rows) for name, rows in files.items()}


def _closes_at_end(text: str) -> bool:
    """Whether the parenthesis that opens ``text`` closes with its last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return place == len(text) - 1
    return False


def _like(number: str, rng: random.Random) -> str:
    """As many digits, in the same places; 1 to 9 stand for each other, but 0 and 1 are more than numbers and stay."""
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
