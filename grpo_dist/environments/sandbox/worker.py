"""The process that runs a program: creates its object and answers one request at a time.

Policy code may run here and read and write everything in this process, so it can forge its replies. It cannot
reply for another request, or to anybody but its keeper.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from grpo_dist.environments.sandbox.frames import INNER, read, write
from grpo_dist.errors import raised


def serve(make: Callable[[], Any], requests: int, replies: int) -> NoReturn:
    """Serve requests until the keeper is gone. ``make`` returns the program's object; it is called at the
    first request, and again after a failure.
    """
    os.register_at_fork(after_in_child=partial(_close, requests, replies))
    program: Any = None
    runner: asyncio.Runner | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            if runner is not None:
                _run_until_readable(runner, requests)
            token, size = INNER.unpack(read(requests, INNER.size))
            payload = read(requests, size)
            body: list[Any]
            try:
                if program is None:
                    program = make()
                kind, value = json.loads(payload)
                result = program.handle(kind, value)
                if inspect.isawaitable(result):
                    # One event loop that also runs between requests, so that an environment's clients can
                    # answer their servers' pings.
                    runner = runner or asyncio.Runner()
                    result = runner.run(_await_result(result))
                reply = json.dumps(["ok", result]).encode()
            except BaseException as error:  # includes SystemExit: a program must not end its process
                body = ["memory" if isinstance(error, MemoryError) else "error", raised(error)]
                reply = json.dumps(body).encode()
            _flush()
            write(replies, INNER.pack(token, len(reply)) + reply)
    os._exit(0)


def redirect(output: int) -> None:
    """Redirect prints to ``output``, make stdin empty, and reset signal handlers."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for descriptor in {nothing, output} - {0, 1, 2}:
        os.close(descriptor)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a too large file raises OSError


def _flush() -> None:
    """Flush output before the reply."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have closed or replaced it
            stream.flush()


def _run_until_readable(runner: asyncio.Runner, descriptor: int) -> None:
    """Run the event loop until ``descriptor`` has a request or its other end closes."""
    while True:
        with suppress(SystemExit):  # a leftover task of the program must not end its process
            return runner.run(_readable(descriptor))


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()  # bounded: by the end of the keeper
    finally:
        loop.remove_reader(descriptor)


async def _await_result(result: Any) -> Any:
    return await result


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
