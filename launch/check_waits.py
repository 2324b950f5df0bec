"""Finds waits without a bound: ``python launch/check_waits.py DIRECTORY ...``; part of `make lint`.

A run must never wait forever for something that may have died. A call that blocks a thread needs a timeout.
An await needs a timeout, or a deadline around it in the same function (`asyncio.timeout`, or `deadline` of
`grpo_dist.runtime.concurrency`). A wait with neither must say on its line what ends it: ``# bounded: WHY``.
`queue.SimpleQueue` is not allowed: if a deadline passes before its ``get`` starts to wait, because the thread
was descheduled, the C code takes it for no deadline and waits forever.

Waits are found by name, so the check is incomplete: tasks, futures, locks and actor calls are awaited like
any coroutine, under the caller's deadline.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Blocking methods, with the number of positional arguments if one is a timeout. `ray.get` and collectives are
# reported with any arguments.
_BLOCKING = {
    "get": 2, "put": 3, "join": 1, "wait": 1, "wait_for": 2, "result": 1, "acquire": 2, "communicate": 2,
    "recv": 9, "accept": 9,
}  # fmt: skip
_AWAITED = {"get", "put", "join", "wait", "wait_for"}
_NEVER = {"ray.get", "ray.wait", "queue.SimpleQueue"}
_COLLECTIVE = re.compile(
    r"(torch\.distributed|dist)\.(barrier|monitored_barrier|(all_)?(reduce|gather|to_all)|broadcast|scatter|send|recv)"
)
# Functions that take a timeout only by keyword.
_NAMED_TIMEOUT = {
    "subprocess.run", "subprocess.check_call", "subprocess.check_output", "asyncio.wait",
    "concurrent.futures.wait", "concurrent.futures.as_completed",
}  # fmt: skip
_NO_QUEUE = {"ray.put"}
_FENCE = re.compile(r"(^|[._])(deadline(_of)?|timeout(_at)?)$")
_WITHIN = re.compile(r"^asyncio\.wait_for$")
_QUEUE = re.compile(r"(^|\.)\w*Queue$")
_REASON = "# bounded: "


def main(directories: list[str]) -> int:
    """Print every wait without a bound. Return 1 if there is one, else 0."""
    found = [
        f"{path}:{line}: {what} may wait forever; give it a timeout, or say what ends it ({_REASON}WHY)"
        for directory in directories
        for path in sorted(Path(directory).rglob("*.py"))
        for line, what in unbounded(path.read_text())
    ]
    print("\n".join(found) or "every wait is bounded")
    return 1 if found else 0


def unbounded(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each wait in ``source`` without a timeout, a deadline or a reason."""
    lines, tree = source.splitlines(), ast.parse(source)
    endless = _endless_queues(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in names if name in _NEVER)
    for call, awaited, fenced in _calls(tree):
        name = ast.unparse(call.func)
        receiver, _, method = name.rpartition(".")
        if fenced or (awaited and method not in _AWAITED) or (method == "put" and receiver in endless):
            continue
        said = any(_REASON in line for line in lines[call.lineno - 1 : call.end_lineno])
        if not said and _may_wait(name, call):
            yield call.lineno, name


def _calls(
    node: ast.AST, *, awaited: bool = False, fenced: bool = False
) -> Iterator[tuple[ast.Call, bool, bool]]:
    """Yield each call, whether it is awaited, and whether under a deadline."""
    if isinstance(node, ast.Call):
        yield node, awaited, awaited and fenced
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        fenced = False  # a nested function may run anywhere
    if isinstance(node, ast.AsyncWith):
        fenced = fenced or any(_is_fence(item.context_expr, _FENCE) for item in node.items)
    within = _is_fence(node, _WITHIN)
    for inner in ast.iter_child_nodes(node):
        yield from _calls(inner, awaited=within or isinstance(node, ast.Await), fenced=fenced or within)


def _is_fence(node: ast.AST, names: re.Pattern[str]) -> bool:
    """Return whether ``node`` calls one of ``names`` with a time other than None."""
    if not isinstance(node, ast.Call) or not names.search(ast.unparse(node.func)):
        return False
    return not any(_is(given, None) for given in [*node.args, *(k.value for k in node.keywords)])


def _endless_queues(tree: ast.AST) -> set[str]:
    """Return names of unbounded queues, whose `put` never waits."""
    made: dict[bool, set[str]] = {True: set(), False: set()}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        if _QUEUE.search(ast.unparse(node.value.func)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made[bool(node.value.args or node.value.keywords)] |= {ast.unparse(t) for t in targets}
    return made[False] - made[True]


def _may_wait(name: str, call: ast.Call) -> bool:
    never = name in _NEVER or _COLLECTIVE.match(name) is not None
    if never or any(_ends_it(keyword) for keyword in call.keywords):
        return never
    if name in _NAMED_TIMEOUT:
        return True
    method = name.rpartition(".")[2]
    if "." not in name or method not in _BLOCKING or name in _NO_QUEUE or _is_text(name):
        return False
    given = list(call.args)
    while given and _is(given[-1], None):  # no timeout
        given.pop()
    if len(given) >= _BLOCKING[method]:
        return False
    if method == "put":
        given = given[1:]
    # On mappings and caches the first argument is a key, on queues the blocking flag.
    return method not in ("get", "put") or all(_is(block, True) for block in given)


def _ends_it(keyword: ast.keyword) -> bool:
    """Return whether the keyword is a timeout or disables waiting; ** may be either."""
    if keyword.arg in ("block", "blocking"):
        return _is(keyword.value, False)
    return keyword.arg is None or (keyword.arg == "timeout" and not _is(keyword.value, None))


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_text(name: str) -> bool:
    """Return whether ``name`` is a text's or a path's `join`."""
    return name.startswith(("'", '"', "os.path")) or name.rpartition(".")[0].endswith(("'", '"'))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
