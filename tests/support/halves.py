"""``python -m tests.support.halves [--all] [ARGUMENTS OF PYTEST]``: both halves of the suite at once.

Tests that start engines, ranks or clusters wait for processes; the other tests compute meanwhile, so that no
core is idle. Each half has its own processes: a test that checks its process for leftovers finds no cluster.
``--all`` also runs the slow tests.

    clusters, 2 at once  |---------------------------------|  printed at once
    the others, 2 at once |----------------------------|......  printed afterwards

Exit code 0: both passed. pytest returns 5 if ARGUMENTS select no test; one of the halves may have none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import BinaryIO

from tests.support.tiers import ALL

HALVES = ("machine and not evidence", "not machine and not evidence")
_ALL = "--all"
_PYTEST = ["-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m"]
_NONE = 5  # pytest selected no test
_POLL_S = 0.2
_INTERRUPTED = 130


def main(arguments: Sequence[str], python: str = sys.executable) -> int:
    """Run both halves; return 0 if none failed, 1 if one did, 130 after an interrupt."""
    tier, arguments = ("", arguments[1:]) if arguments[:1] == [_ALL] else (" and not slow", arguments)
    environment = os.environ | ({} if tier else {ALL: "1"})
    interrupts = _Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a background job ignores the first
        signal.signal(number, interrupts)
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as output:
        try:
            for marks, out, err in zip(HALVES, (None, output), (None, subprocess.STDOUT), strict=True):
                command = [python, *_PYTEST, marks + tier, *arguments]
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=err, process_group=0, env=environment)
                )
            interrupts.release()
            first, second = started
            while first.poll() is None:
                time.sleep(_POLL_S)
            print("the other half:", flush=True)
            _follow(output, second)
        except KeyboardInterrupt:
            _interrupt(*started)
            return _INTERRUPTED
    codes = first.returncode, second.returncode
    if codes in ((0, 0), (0, _NONE), (_NONE, 0)):
        return 0
    print(f"failed: exit codes {codes[0]} and {codes[1]}", flush=True)
    return 1


class _Interrupts:
    """A signal handler that raises KeyboardInterrupt, but not before `release`: a half that was just started
    and is not listed would be left running.
    """

    def __init__(self) -> None:
        self._deferred, self._interrupted = True, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if not self._deferred:
            raise KeyboardInterrupt

    def release(self) -> None:
        self._deferred = False
        if self._interrupted:
            raise KeyboardInterrupt


def _follow(output: BinaryIO, process: subprocess.Popen[bytes]) -> None:
    """Print ``output`` until its writer ``process`` has ended."""
    at, running = 0, True
    while running:
        running = process.poll() is None  # before reading, so that nothing is missed
        while chunk := os.pread(output.fileno(), 1 << 16, at):  # no seek: it shares the writer's position
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            at += len(chunk)
        time.sleep(_POLL_S if running else 0)


def _interrupt(*halves: subprocess.Popen[bytes]) -> None:
    """Interrupt each half once, as a terminal would. pytest then ends its workers and their clusters."""
    for half in halves:
        with suppress(ProcessLookupError):
            os.killpg(half.pid, signal.SIGINT)
    for half in halves:
        half.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
