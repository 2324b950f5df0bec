"""Ranks forked from a process with everything imported, for tests of their computations: under Ray, each rank
takes ten seconds for these imports.

    test                         parent                      rank
      one socket per rank ----->   fork --------------------->  the worker object
      (method, arguments) ------------------------------------> its method
      result or exception <------------------------------------

A rank is a separate process, as under Ray, and handles calls one by one.
"""

import asyncio
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener

import pytest
import ray

_PR_SET_PDEATHSIG = 1
_PRELOADED = """
import sys; sys.modules["mlflow"] = None  # as `PolicyWorker.start`
import deepspeed, deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2, deepspeed.ops.adam
import transformers.models.qwen2.modeling_qwen2, transformers.integrations, peft
from transformers import AutoModelForCausalLM, AutoTokenizer
import actors.workers.policy, grpo_dist.policy.trainer
"""


class Parent:
    """Starts the process that ranks are forked from."""

    def __init__(self, directory, environment):
        self.address = str(directory / "ranks")
        code = f"from tests.support import forked_ranks; forked_ranks.serve_forks({self.address!r})"
        variables = os.environ | environment | {"DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"ready\n"

    def close(self):
        self._process.kill()
        self._process.wait()

    def _remote_class(self, worker):
        return Remote(lambda *arguments: Forked(self.address, worker, arguments))

    @contextmanager
    def in_the_place_of_ray(self):
        """Fork the ranks of every `PolicyGroup` made in the block."""
        from actors.workers import policy

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "one_at_a_time", self._remote_class)
            patch.setattr(policy, "kill", lambda ranks: [rank.end() for rank in ranks])
            yield


class Remote:
    """Replaces an actor's class or method: ``remote`` calls ``function``."""

    def __init__(self, function):
        self.remote = function

    def options(self, **_):
        return self


class Forked:
    """Replaces an actor's handle."""

    def __init__(self, address, worker, arguments):
        self._connection = Client(address, "AF_UNIX")
        self._thread = ThreadPoolExecutor(1)
        self._send(worker, arguments)

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return Remote(lambda *arguments: _Answer(self._thread.submit(self.call, method, arguments)))

    def end(self):
        """End the rank; replaces `ray.kill`."""
        self._send(None)
        self._thread.shutdown(cancel_futures=True)

    def call(self, method, arguments):
        self._send(method, [ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in arguments])
        value, error = pickle.loads(self._connection.recv_bytes())
        if error is not None:
            raise error
        return value

    def _send(self, *message):
        self._connection.send_bytes(pickle.dumps(message))


class _Answer:
    """Like an object reference: created without an event loop, and awaited in one."""

    def __init__(self, future):
        self._future = future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()


def serve_forks(address):
    """Run the parent. It computes nothing itself: a fork of a process with threads would hang."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    exec(_PRELOADED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Listener(address, "AF_UNIX", backlog=16) as listener:
        print("ready", flush=True)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # needed to wait for compilers
                _serve(connection)
            connection.close()


def _serve(connection):
    """Serve calls until the other side closes the connection."""
    try:
        worker, arguments = pickle.loads(connection.recv_bytes())
        rank = worker(*arguments)
        while (message := pickle.loads(connection.recv_bytes())) != (None,):
            method, arguments = message
            connection.send_bytes(pickle.dumps(_answer(getattr(rank, method), arguments)))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(method, arguments):
    try:
        return method(*arguments), None
    except Exception as error:
        return None, error
