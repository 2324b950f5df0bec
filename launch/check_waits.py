"""Refuse waits without a bound: ``python launch/check_waits.py DIRECTORY ...``; part of `make lint`.

A run must not wait for ever for what may have died. Waits of the event loop are bounded by
`grpo_dist.concurrency.deadline` around them; what blocks a thread has no such fence, so each blocking call
needs a timeout of its own, or a comment ``# bounded: WHY`` on its line that says what ends it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Calls that block a thread until something else happens, and how many positional arguments they have when
# one of them is a timeout. `ray.get` and collectives are refused whatever they are given.
_BLOCKING = {
    "get": 2, "join": 1, "wait": 1, "result": 1, "acquire": 2, "communicate": 2, "recv": 9, "accept": 9,
}  # fmt: skip
_NEVER = {"ray.get", "ray.wait"}
_COLLECTIVE = re.compile(
    r"(torch\.distributed|dist)\.(barrier|monitored_barrier|(all_)?(reduce|gather|to_all)|broadcast|scatter|send|recv)"
)
_PROCESSES = {"subprocess.run", "subprocess.check_call", "subprocess.check_output"}
_REASON = "# bounded: "


def main(directories: list[str]) -> int:
    """Exit code: 1 with a line for each wait without a bound, else 0."""
    found = [
        f"{path}:{line}: {what} may wait for ever; give it a timeout, or say what ends it ({_REASON}WHY)"
        for directory in directories
        for path in sorted(Path(directory).rglob("*.py"))
        for line, what in unbounded(path.read_text())
    ]
    print("\n".join(found) or "every wait is bounded")
    return 1 if found else 0


def unbounded(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each blocking call of ``source`` without a timeout or a reason."""
    lines, tree = source.splitlines(), ast.parse(source)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            yield from ((node.lineno, f"ray.{a.name}") for a in node.names if f"ray.{a.name}" in _NEVER)
        if not isinstance(node, ast.Call) or id(node) in awaited:
            continue
        name = ast.unparse(node.func)
        said = any(_REASON in line for line in lines[node.lineno - 1 : node.end_lineno])
        if not said and _may_block(name, node):
            yield node.lineno, name


def _may_block(name: str, call: ast.Call) -> bool:
    never = name in _NEVER or _COLLECTIVE.match(name) is not None
    if never or any(keyword.arg in ("timeout", None) for keyword in call.keywords):
        return never
    if name in _PROCESSES:
        return True
    method = name.rpartition(".")[2]
    if "." not in name or method not in _BLOCKING or _is_text(name):
        return False
    if method == "get" and len(call.args) < _BLOCKING[method]:  # of a mapping it has a key
        return all(isinstance(block, ast.Constant) and block.value is True for block in call.args)
    return len(call.args) < _BLOCKING[method]


def _is_text(name: str) -> bool:
    """``", ".join`` and paths; what they join is an argument."""
    return name.startswith(("'", '"', "os.path")) or name.rpartition(".")[0].endswith(("'", '"'))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
