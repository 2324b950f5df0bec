"""Compares the math grader with sympy and math-verify on generated pairs of answers.

    python -m tests.evidence.grading_fuzz [--pairs 100000] [--peer-pairs 5000] [--seed 0]

A pair is an expression written twice: the second time in other notation, with its terms reordered, rewritten
to an equal form, or with one number changed. The expressions decide the truth, not their text: sympy expands
the difference of polynomials and evaluates numbers to 50 digits. Pairs whose numbers differ by less than 1 %
are left out, because graders accept rounded numbers. Prints, for each kind of expression, the wrong verdicts
of both graders, and the CPU time of each; exits with 1 if ours has one. math-verify, which is slower, grades
the first ``--peer-pairs``.

    python -m tests.evidence.grading_fuzz --golds math_train_deepscaler.jsonl

grades the answer of one problem for another, as a model early in training gives it, and each answer in other
notation: 1,000 pairs each, at least half of them with LaTeX commands.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import sympy
from math_verify import parse, verify

from grpo_dist.rewards.math import grade

X = sympy.Symbol("x")
_SHOWN = 20  # wrong verdicts of a grader that are printed


@dataclass(frozen=True)
class Node:
    """One expression: ``kind`` is number, pi, x, add, multiply, divide, power, root, negative, tuple, set,
    interval (``name``: its brackets) or matrix (rows of ``columns`` parts)."""

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""
    columns: int = 0


Pair = tuple[str, str, str, bool]  # kind, gold, answer, whether they are equal
STRUCTURES = ("tuple", "set", "interval", "matrix")


def number(value: int | Fraction) -> Node:
    return Node("number", value=Fraction(value))


class Writer:
    """Writes a node as LaTeX, with random notation."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def write(self, node: Node, tight: bool = False) -> str:
        """Return LaTeX. ``tight``: the text is a factor or a base, so sums and quotients get parentheses."""
        text = getattr(self, f"_{node.kind}")(node)
        loose = node.kind in ("add", "negative") or (node.kind == "number" and text.startswith("-"))
        loose = loose or "/" in text or (tight and node.kind in ("multiply", "divide", "power"))
        return self._parenthesize(text) if tight and loose else text

    def _parenthesize(self, text: str) -> str:
        return f"\\left({text}\\right)" if self._rng.random() < 0.5 else f"({text})"

    def _number(self, node: Node) -> str:
        value = node.value
        sign, size = ("-" if value < 0 else ""), abs(value)
        if size.denominator == 1:
            return f"{sign}{size}"
        finite = size.denominator in (2, 4, 5, 8, 10, 20, 25, 50, 100)
        if finite and self._rng.random() < 0.3:
            return f"{sign}{float(size):.4f}".rstrip("0")
        if self._rng.random() < 0.2:
            return f"{sign}{size.numerator}/{size.denominator}"
        factor = self._rng.choice((1, 1, 2, 3))
        return f"{sign}{self._command('frac')}{{{size.numerator * factor}}}{{{size.denominator * factor}}}"

    def _command(self, name: str) -> str:
        return "\\" + self._rng.choice((name, f"d{name}", f"t{name}"))

    def _pi(self, node: Node) -> str:
        return "\\pi"

    def _x(self, node: Node) -> str:
        return "x"

    def _add(self, node: Node) -> str:
        parts = list(node.parts)
        self._rng.shuffle(parts)
        text = self.write(parts[0])
        for part in parts[1:]:
            written = self.write(part)
            text += written if written.startswith("-") else f"+{written}"
        return text.replace("+", " + ") if self._rng.random() < 0.5 else text

    def _multiply(self, node: Node) -> str:
        # A number first, as everybody writes it; between two numbers there must be a sign.
        parts = sorted(node.parts, key=lambda part: (part.kind != "number", self._rng.random()))
        text = self.write(parts[0], tight=True)
        for part in parts[1:]:
            written = self.write(part, tight=True)
            sign = (
                self._rng.choice((" \\cdot ", " \\times "))
                if written[0].isdigit() or part.kind == "number"
                else " "
            )
            text += sign + written
        return text

    def _divide(self, node: Node) -> str:
        over, under = node.parts
        if self._rng.random() < 0.2:
            return f"{self.write(over, tight=True)}/{self.write(under, tight=True)}"
        return f"{self._command('frac')}{{{self.write(over)}}}{{{self.write(under)}}}"

    def _power(self, node: Node) -> str:
        base, exponent = (self.write(node.parts[0], tight=True), self.write(node.parts[1]))
        if base[0] != "(" and base[0] != "\\" and len(base) > 1 and not base.isdigit():
            base = self._parenthesize(base)
        if base.startswith("\\") and not base.startswith(("\\left", "\\pi")):
            base = self._parenthesize(base)
        return (
            f"{base}^{exponent}"
            if len(exponent) == 1 and self._rng.random() < 0.5
            else f"{base}^{{{exponent}}}"
        )

    def _root(self, node: Node) -> str:
        degree = "" if node.value == 2 else f"[{node.value}]"
        inner = self.write(node.parts[0])
        return f"\\sqrt{degree}{{{inner}}}"

    def _negative(self, node: Node) -> str:
        return f"-{self.write(node.parts[0], tight=node.parts[0].kind in ('add', 'negative', 'number'))}"

    def _join_parts(self, node: Node) -> str:
        return self._rng.choice((",", ", ")).join(self.write(part) for part in node.parts)

    def _tuple(self, node: Node) -> str:
        return self._parenthesize(self._join_parts(node))

    def _set(self, node: Node) -> str:
        parts = list(node.parts)
        self._rng.shuffle(parts)
        return f"\\{{{self._join_parts(Node('set', tuple(parts)))}\\}}"

    def _interval(self, node: Node) -> str:
        left, right = node.name[0], node.name[1]
        if self._rng.random() < 0.5:
            left, right = f"\\left{left}", f"\\right{right}"
        return f"{left}{self._join_parts(node)}{right}"

    def _matrix(self, node: Node) -> str:
        rows = [node.parts[i : i + node.columns] for i in range(0, len(node.parts), node.columns)]
        body = " \\\\ ".join(" & ".join(self.write(part) for part in row) for row in rows)
        return f"\\begin{{pmatrix}} {body} \\end{{pmatrix}}"


def to_sympy(node: Node) -> Any:
    """Return the value of a node that is not a structure."""
    parts = [to_sympy(part) for part in node.parts]
    match node.kind:
        case "number":
            return sympy.Rational(node.value.numerator, node.value.denominator)
        case "pi":
            return sympy.pi
        case "x":
            return X
        case "add":
            return sympy.Add(*parts)
        case "multiply":
            return sympy.Mul(*parts)
        case "divide":
            return parts[0] / parts[1]
        case "power":
            return parts[0] ** parts[1]
        case "root":
            return sympy.root(parts[0], int(node.value))
        case "negative":
            return -parts[0]
    raise ValueError(node.kind)


def are_equal(ours: Node, theirs: Node) -> bool | None:
    """Return whether two nodes are equal; None if their gap may be rounding, and for empty intervals, which
    are all the same set."""
    if any(node.kind == "interval" and _is_empty(node) for node in (ours, theirs)):
        return None
    if ours.kind in STRUCTURES or theirs.kind in STRUCTURES:
        if (ours.kind, ours.name, ours.columns, len(ours.parts)) != (
            theirs.kind, theirs.name, theirs.columns, len(theirs.parts),
        ):  # fmt: skip
            return False
        if ours.kind != "set":
            return _all([are_equal(a, b) for a, b in zip(ours.parts, theirs.parts, strict=True)])
        rows = [[are_equal(a, b) for b in theirs.parts] for a in ours.parts]
        if any(equal is None for row in rows for equal in row):
            return None
        return all(any(row) for row in rows) and all(any(column) for column in zip(*rows, strict=True))
    values = to_sympy(ours), to_sympy(theirs)
    difference = values[0] - values[1]
    if any(value.free_symbols for value in values):
        return bool(sympy.cancel(difference) == 0)
    size = max(abs(sympy.N(value, 50)) for value in values)
    distance = abs(sympy.N(difference, 50, maxn=200))
    if size == 0 or distance < size * sympy.Float("1e-40"):
        return True
    return False if distance > size / 100 else None


def _is_empty(interval: Node) -> bool:
    low, high = (to_sympy(part) for part in interval.parts)
    return bool(low >= high)


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


class Maker:
    """Makes random expressions, and changes them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def whole(self, largest: int = 60) -> Node:
        return number(self._rng.choice((1, 1, 1, -1)) * self._rng.randint(1, largest))

    def rational(self) -> Node:
        return number(
            Fraction(self._rng.randint(-60, 60) or 1, self._rng.choice((2, 3, 4, 5, 6, 7, 9, 10, 12, 25)))
        )

    def root(self) -> Node:
        return Node("root", (number(self._rng.randint(2, 60)),), Fraction(self._rng.choice((2, 2, 2, 3, 4))))

    def surd(self) -> Node:
        """Return a quotient of a rational number plus a multiple of a root."""
        term = Node("multiply", (number(self._rng.randint(2, 9)), self.root()))
        top = Node("add", (self.whole(20), term)) if self._rng.random() < 0.7 else term
        return Node("divide", (top, number(self._rng.randint(2, 12)))) if self._rng.random() < 0.6 else top

    def multiple_of_pi(self) -> Node:
        value = self.whole() if self._rng.random() < 0.4 else self.rational()
        return Node("multiply", (value, Node("pi"))) if value.value != 1 else Node("pi")

    def power(self) -> Node:
        exponent = self._rng.choice((2, 3, 5, 7, 10, -1, -2, -3))
        base = self.whole(12) if self._rng.random() < 0.6 else self.rational()
        return Node("power", (base, number(exponent)))

    def polynomial(self) -> Node:
        degree = self._rng.randint(1, 4)
        terms = [self.whole(20)]
        for exponent in range(1, degree + 1):
            monomial = Node("x") if exponent == 1 else Node("power", (Node("x"), number(exponent)))
            coefficient = self.whole(12) if self._rng.random() < 0.8 else self.rational()
            terms.append(monomial if coefficient.value == 1 else Node("multiply", (coefficient, monomial)))
        return Node("add", tuple(terms))

    def product_of_polynomials(self) -> Node:
        factors = [Node("add", (Node("x"), self.whole(9))) for _ in range(self._rng.randint(2, 3))]
        return Node("multiply", tuple(factors))

    def quotient_of_polynomials(self) -> Node:
        return Node("divide", (self.polynomial(), Node("add", (Node("x"), self.whole(9)))))

    def scalar(self) -> Node:
        return self._rng.choice((self.whole, self.whole, self.rational, self.surd, self.multiple_of_pi))()

    def tuples(self) -> Node:
        return Node("tuple", tuple(self.scalar() for _ in range(self._rng.randint(2, 4))))

    def sets(self) -> Node:
        return Node("set", tuple(self.scalar() for _ in range(self._rng.randint(2, 4))))

    def interval(self) -> Node:
        low, high = sorted((self.scalar(), self.scalar()), key=lambda node: float(sympy.N(to_sympy(node))))
        return Node("interval", (low, high), name=self._rng.choice(("[]", "[)", "(]", "()")))

    def matrix(self) -> Node:
        rows, columns = self._rng.randint(2, 3), self._rng.randint(1, 3)
        return Node("matrix", tuple(self.scalar() for _ in range(rows * columns)), columns=columns)

    def rewrite(self, node: Node) -> Node:
        """Return an equal expression of another form."""
        node = Node(
            node.kind, tuple(self.rewrite(part) for part in node.parts), node.value, node.name, node.columns
        )
        if self._rng.random() < 0.5:
            return node
        match node.kind, node.parts:
            case "root", (Node(kind="number", value=inner),) if node.value == 2:
                factor = self._rng.randint(2, 5)
                return Node(
                    "divide", (Node("root", (number(inner * factor**2),), node.value), number(factor))
                )
            case "divide", (over, under):
                scale = number(self._rng.randint(2, 5))
                return Node("divide", (Node("multiply", (scale, over)), Node("multiply", (scale, under))))
            case "power", (base, Node(kind="number", value=exponent)) if exponent < 0:
                return Node("divide", (number(1), Node("power", (base, number(-exponent)))))
            case "multiply", parts if all(part.kind == "add" for part in parts):
                return _from_polynomial(sympy.Poly(sympy.expand(to_sympy(node)), X))
            case "add", parts if len(parts) > 1:
                return Node("negative", (Node("add", tuple(_negated(part) for part in parts)),))
        return node

    def change(self, node: Node) -> Node:
        """Return the expression with one number, one sign, one bracket or the order of its parts changed."""
        if node.kind == "interval" and self._rng.random() < 0.3:
            return Node(node.kind, node.parts, name=self._rng.choice(("[]", "[)", "(]", "()")))
        if node.kind in ("tuple", "matrix") and self._rng.random() < 0.2:
            return Node(node.kind, node.parts[::-1], columns=node.columns)
        if node.kind == "number":
            changed = node.value + self._rng.choice((1, -1, 2, 10, -node.value * 2))
            return number(changed or 3)
        if not node.parts:
            return Node("multiply", (number(2), node))
        if node.kind == "root":  # keep it positive: otherwise real and principal roots differ
            return Node("root", (number(abs(self.change(node.parts[0]).value)),), node.value)
        index = self._rng.randrange(len(node.parts))
        parts = [self.change(part) if i == index else part for i, part in enumerate(node.parts)]
        return Node(node.kind, tuple(parts), node.value, node.name, node.columns)


def _negated(node: Node) -> Node:
    return number(-node.value) if node.kind == "number" else Node("negative", (node,))


def _from_polynomial(polynomial: Any) -> Node:
    terms = []
    for (exponent,), coefficient in polynomial.terms():
        factor = number(Fraction(int(coefficient.p), int(coefficient.q)))
        monomial = Node("x") if exponent == 1 else Node("power", (Node("x"), number(exponent)))
        if exponent == 0:
            terms.append(factor)
        else:
            terms.append(monomial if factor.value == 1 else Node("multiply", (factor, monomial)))
    return Node("add", tuple(terms))


KINDS = (
    "whole", "rational", "root", "surd", "multiple_of_pi", "power", "polynomial", "product_of_polynomials",
    "quotient_of_polynomials", "tuples", "sets", "interval", "matrix",
)  # fmt: skip


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Return ``count`` pairs of random expressions."""
    rng = random.Random(seed)
    maker, writer = Maker(rng), Writer(rng)
    pairs: list[Pair] = []
    while len(pairs) < count:
        kind = rng.choice(KINDS)
        gold = getattr(maker, kind)()
        answer = maker.rewrite(gold) if rng.random() < 0.5 else gold
        if rng.random() < 0.5:
            answer = maker.change(answer)
        equal = are_equal(gold, answer)
        if equal is not None:
            pairs.append((kind, writer.write(gold), writer.write(answer), equal))
    return pairs


def ours(gold: str, answer: str) -> bool:
    return grade(f"The answer is $\\boxed{{{answer}}}$.", gold, accept_arithmetic=True).outcome == "correct"


def math_verify(gold: str, answer: str) -> bool:
    golds = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    answers = parse(f"The answer is $\\boxed{{{answer}}}$.", parsing_timeout=None)
    return bool(verify(golds, answers, timeout_seconds=None))


def judge(name: str, grader: Callable[[str, str], bool], pairs: Sequence[Pair]) -> int:
    """Print a row for each kind of expression, and the first wrong verdicts; return how many are wrong."""
    wrong: Counter[tuple[str, bool]] = Counter()
    begin = time.process_time()
    for kind, gold, answer, equal in pairs:
        if grader(gold, answer) != equal:
            wrong[kind, equal] += 1
            if wrong.total() <= _SHOWN:
                print(f"{name} {'rejects' if equal else 'accepts'} {kind} {gold!r} <- {answer!r}", flush=True)
    cpu_ms = 1e3 * (time.process_time() - begin) / len(pairs)
    print(f"\n{name}: {len(pairs)} pairs, {wrong.total()} wrong verdicts, {cpu_ms:.2f} ms of CPU a pair\n")
    print("| expression | pairs | accepted wrongly | rejected wrongly |\n" + "|---" * 4 + "|")
    for kind in KINDS:
        print(f"| {kind} | {sum(p[0] == kind for p in pairs)} | {wrong[kind, False]} | {wrong[kind, True]} |")
    return wrong.total()


def compare_on_golds(path: Path, count: int, seed: int) -> None:
    """Print the CPU time of both graders on answers of real problems, and their different verdicts."""
    rows = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    with_commands = [row for row in rows if "\\" in row]
    rng = random.Random(seed)
    golds = [rng.choice(pool) for pool in (rows, with_commands) for _ in range(count // 2)]
    others = [rng.choice(pool) for pool in (rows, with_commands) for _ in range(count // 2)]
    answers = {
        "of another problem": others,
        "in other notation": [g.replace("\\frac", "\\dfrac") for g in golds],
    }
    for gold, answer in zip(golds[-50:], others, strict=False):  # warm up the parser
        math_verify(gold, answer)
    for name, texts in answers.items():
        seconds = {ours: 0.0, math_verify: 0.0}
        for gold, answer in zip(golds, texts, strict=True):
            verdicts = []
            for grader in seconds:
                begin = time.process_time()
                verdicts.append(grader(gold, answer))
                seconds[grader] += time.process_time() - begin
            if len(set(verdicts)) > 1:
                print(f"grpo-dist {verdicts[0]}, math-verify {verdicts[1]}: {gold!r} <- {answer!r}")
        mean, peer = (1e3 * total / count for total in seconds.values())
        print(
            f"answers {name}: {mean:.2f} ms of CPU, math-verify {peer:.2f}: {peer / mean:.1f} times as long"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence.grading_fuzz", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--peer-pairs", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--golds", type=Path, help="JSON Lines with the answers of real problems")
    arguments = parser.parse_args()
    for grader in (ours, math_verify):  # imports
        grader("\\frac{1}{2}", "x")
    if arguments.golds:
        compare_on_golds(arguments.golds, 1000, arguments.seed)
        return 0
    pairs = make_pairs(arguments.pairs, arguments.seed)
    wrong = judge("grpo-dist", ours, pairs)
    if arguments.peer_pairs:
        judge("math-verify", math_verify, pairs[: arguments.peer_pairs])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
