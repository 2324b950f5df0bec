"""Runs Python cells that share variables, like a notebook. Uses the standard library only, because this
file's text is also sent to a sandbox service.
"""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import os
import random
import sys
import traceback
import types
from typing import TextIO

OK, ERROR, MEMORY = "ok", "error", "memory"
_NAME = "<call"  # prefix of the code's name in tracebacks


class Cells:
    """One interpreter. Its output goes to descriptors 1 and 2, which are the same file."""

    def __init__(self) -> None:
        self._count = 0
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        self._globals = module.__dict__
        random.seed(0)  # the same code gives the same numbers in every episode and run
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)

    def run(self, code: str) -> str:
        """Run ``code``; print the value of its last expression, or the traceback. Returns the outcome."""
        self._count += 1
        name = f"{_NAME} {self._count}>"
        lines = code.splitlines(keepends=True)
        linecache.cache[name] = (len(code), None, lines, name)
        # One buffer for both keeps their output in order.
        sys.stdout = sys.stderr = stream = _stream()
        outcome = OK
        try:
            self._execute(code, name)
        except BaseException as error:
            outcome = MEMORY if isinstance(error, MemoryError) else ERROR
            if isinstance(error, SystemExit) and error.code in (None, 0):
                outcome = OK
            else:
                self._explain(error, stream)
        for output in (sys.stdout, stream):
            try:
                output.flush()
            except Exception:  # the code closed or replaced it
                continue
        return outcome

    def _execute(self, code: str, name: str) -> None:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), self._globals)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self._globals)
            if value is not None:
                self._globals["_"] = value
                builtins.print(repr(value))

    @staticmethod
    def _explain(error: BaseException, stream: TextIO) -> None:
        """Print a traceback that begins in the code."""
        try:
            report = traceback.TracebackException.from_exception(error, compact=True)
            _trim(report)
            text = "".join(report.format())
        except BaseException:  # the code's exception class failed, or no memory is left
            text = f"{type(error).__name__}\n"
        try:
            stream.write(text)
        except Exception:  # the code closed it
            os.write(2, text.encode(errors="replace"))


def _trim(report: traceback.TracebackException, depth: int = 20) -> None:
    """Drop the frames of this file and the parser, before the code's frames."""
    frames = list(report.stack)
    while frames and not frames[0].filename.startswith(_NAME):
        del frames[0]
    report.stack = traceback.StackSummary.from_list(frames)
    further = [report.__cause__, report.__context__, *(getattr(report, "exceptions", None) or ())]
    for other in further:
        if other is not None and depth:
            _trim(other, depth - 1)


def _stream() -> TextIO:
    raw = io.FileIO(1, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def replay(earlier: list[str], code: str) -> None:
    """Run ``code`` after ``earlier``, whose output is discarded; exit with 0, 1 (error) or 3 (memory)."""
    cells = Cells()
    stdout, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    for cell in earlier:
        cells.run(cell)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    outcome = cells.run(code)
    os._exit({OK: 0, ERROR: 1, MEMORY: 3}.get(outcome, 1))
