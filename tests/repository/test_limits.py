"""No test fails because the machine is slow: only a hang reaches the limits in tests."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "time", "perf_counter"}
WAITS = {"run", "wait", "communicate", "join", "wait_procs", "check_output", "check_call"}
SHORT_S = 600.0
# The first runs on a simulated clock, the second polls in a loop.
HARMLESS = {"tools/plan/test_plan_simulation.py", "chaos/verdict.py"}


def too_short(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and 0 < node.value < SHORT_S


def reads_the_clock(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def short_limits(source):
    """Return the lines that compare elapsed time with a few seconds, or wait a few seconds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for (left, right), order in zip(pairwise(sides), node.ops, strict=True):
                passed = isinstance(left, ast.BinOp) and reads_the_clock(left.left)
                if passed and isinstance(order, ast.Lt | ast.LtE) and too_short(right):
                    found.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            limits = [k.value for k in node.keywords if k.arg == "timeout"] if node.func.attr in WAITS else []
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "asyncio":
                limits += node.args[:1] if node.func.attr == "timeout" else []
                limits += node.args[1:2] if node.func.attr == "wait_for" else []
            if any(too_short(limit) for limit in limits):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("assert time.monotonic() - begin < 5", True),
        ("assert 6 <= time.monotonic() - begin < 10", True),
        ("assert time.monotonic() - begin >= 5", False),
        ("assert time.monotonic() - begin < HANG_S", False),
        ("subprocess.run(command, timeout=60)", True),
        ("process.wait(timeout=3000)", False),
        ("asyncio.wait_for(work, 20)", True),
        ("asyncio.timeout(HANG_S)", False),
    ],
)
def test_a_short_limit_is_found(line, short):
    assert bool(short_limits(line)) == short


def test_no_limit_is_so_short_that_a_busy_machine_reaches_it():
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if str(path.relative_to(TESTS)) not in HARMLESS
        for line in short_limits(path.read_text())
    }
    assert found == set()


def test_the_limit_of_a_test_is_above_those_within_it(pytestconfig):
    assert float(pytestconfig.getini("timeout")) > HANG_S > SHORT_S
