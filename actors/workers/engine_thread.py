"""Run a vLLM engine in this process: a thread steps it, an actor's event loop uses it.

event loop            engine thread
  generate() ------->   add request | step, step, step ...
  future     <-------   finished requests of a step, all at once
  call(f)    ------->   f() between two steps

vLLM's asynchronous engine runs in another process and sends the tokens of every step. On few cores, unpacking
them takes CPU time from the model. Here the thread only sends finished completions.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from operator import methodcaller
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from actors.lifecycle.calls import portable
from actors.workers.shared_tails import SharedTails
from grpo_dist.errors import TransferLost
from grpo_dist.runtime.hardware import device_type
from grpo_dist.runtime.processes import pause_garbage_collection

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


def make_engine(arguments: dict[str, Any]) -> Any:
    """Make an engine. ``arguments``: passed to `vllm.EngineArgs`."""
    with pause_garbage_collection():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

    # The usage context selects vLLM's defaults for batch use: larger prefills.
    config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    if device_type() == "cuda":
        _serve_with_one_thread()
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    if "worker_cls" in arguments:  # `engine_settings.RECORDING_WORKER`
        from actors.workers.recorders import attach  # imports vLLM

        attach(engine)
    return engine


def _serve_with_one_thread() -> None:
    """Make vLLM serve with one torch thread: others would busy-wait on the cores that prepare a step.

    vLLM does so unless the user set OMP_NUM_THREADS. This project sets it, for loading; otherwise Ray sets it
    to 1. VLLM_OMP_NUM_THREADS_SET_BY_VLLM tells vLLM that the user did not set it. Set this only after
    vLLM's configuration is made, which warns of variables that it does not list, such as this one.
    """
    os.environ.setdefault("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "1")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Reply:
    """A process's return value or error. ``trace``: its traceback, which pickling drops."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""


def call_workers(engine: Any, function: Callable[[Any], T]) -> list[T]:
    """Call ``function`` with vLLM's worker in each process of ``engine``; return the results by rank.

    vLLM's multi-process executor raises at the first failed reply, with its text alone; replies of later
    ranks stay queued, and the next call reads them as its replies. So here the reply carries the error, which
    is raised once all replies are read.

    Raises the error of a process, with its type if it can be pickled. Of several errors, raises the first
    that is not TransferLost: a failing process breaks the connections of the others.
    """
    replies: list[_Reply] = engine.collective_rpc(partial(_reply, function))
    errors = [(reply.error, reply.trace) for reply in replies if reply.error is not None]
    if errors:
        error, trace = next((e for e in errors if not isinstance(e[0], TransferLost)), errors[0])
        if error.__traceback__ is None:
            error.add_note(trace)
        raise error
    return [reply.value for reply in replies]


def _start_weight_update(worker: Any) -> None:
    """Start an update. vLLM refuses while one is active, and a failed transfer ends it only in the processes
    in which it failed.
    """
    worker.worker._weight_update_active = False  # ``worker`` wraps it, and delegates only what is read
    worker.start_weight_update()


def _reply(function: Callable[[Any], Any], worker: Any) -> _Reply:
    try:
        return _Reply(function(worker))
    except Exception as error:
        return _Reply(error=portable(error), trace=traceback.format_exc())


# A batch arrives in many calls. An idle engine waits for a gap of this length before it starts, instead of
# decoding the first few requests alone.
_BURST_S = 0.002

# Seconds of a GPU step in which CPU time counts as progress: later, it may be busy waiting, not compiling.
_COMPILE_S = 120.0


class EngineThread:
    """Runs an engine for one event loop. The request that causes a vLLM error raises it; an error in a step
    is raised by all pending and later requests.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        shares_tails: bool = False,
        records_masks: bool = False,
    ) -> None:
        """``arguments``: passed to `vllm.EngineArgs`. ``shares_tails``: use `SharedTails` if the engine can.
        ``records_masks``: requests return their sampling masks.
        """
        self._loop = asyncio.get_running_loop()
        self._commands: Queue[Callable[[], None] | None] = Queue()
        self._numbers = itertools.count()
        self._futures: dict[str, asyncio.Future[RequestOutput]] = {}
        self._failed: BaseException | None = None
        self._steps, self._step_began = 0, 0.0
        self._stepping = self._in_command = False
        self._engine: Any = None
        self._tails: SharedTails | None = None
        thread_arguments = (dict(arguments), shares_tails, records_masks)
        self._thread = Thread(target=self._run, args=thread_arguments, name="engine", daemon=True)

    async def start(self) -> None:
        """Load the model. Raises vLLM's error if that fails."""
        self._thread.start()
        try:
            await self.call(lambda: None)
        except RuntimeError as error:
            raise error.__cause__ or error from None

    async def generate(self, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        """Sample one finished completion. ``params``: for one sample, final output only."""
        request_id = f"r{next(self._numbers)}"
        future: asyncio.Future[RequestOutput] = self._loop.create_future()
        self._futures[request_id] = future
        self._put(lambda: self._add(request_id, token_ids, params))
        return await future

    async def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the engine's thread between two steps; return its result."""
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            try:
                result = self._run_command(function)
            except BaseException as error:
                self._call_on_loop(_fail, future, error)
            else:
                self._call_on_loop(_finish, future, result)

        self._put(command)
        return await future

    async def abandon(self) -> None:
        """Abort all pending requests; their callers get an error."""
        await self.call(self._abandon)

    async def pause(self, *, drain: bool) -> None:
        """Stop stepping and drop the key-value cache. Requests may be added meanwhile.

        ``drain``: first finish the requests in the cache, but not requests waiting for space in it. Otherwise
        stop now; requests continue after `resume` and recompute their keys and values.
        """
        await self.call(lambda: self._pause(drain))

    async def resume(self) -> None:
        """Continue stepping; if part of the engine's memory sleeps, its last `wake_up` does this instead."""
        await self.call(lambda: self._core.model_executor.is_sleeping or self._core.resume_scheduler())

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self.in_workers(methodcaller("init_weight_transfer_engine", init_info=info))

    async def start_weight_update(self) -> None:
        """Start an update, or restart one that is active; it may be active in some processes only."""
        await self.in_workers(_start_weight_update)

    async def update_weights(self, info: dict[str, Any]) -> None:
        await self.in_workers(methodcaller("update_weights", update_info=info))

    async def finish_weight_update(self) -> None:
        await self.in_workers(methodcaller("finish_weight_update"))

    async def in_workers(self, function: Callable[[Any], T]) -> list[T]:
        """Run `call_workers` between two steps."""
        return await self.call(lambda: call_workers(self._engine, function))

    async def set_weight_version(self, version: int) -> int:
        """Label tokens of later steps with ``version``; return the engine's reported version."""

        def label() -> int:
            self._engine.set_weight_version(str(version))
            return int(self._engine.get_weight_version())

        return await self.call(label)

    async def sleep(self, level: int) -> None:
        """Drain, then free the GPU memory. ``level``: 1 keeps the weights in host memory, 2 drops them."""
        await self.pause(drain=True)
        await self.call(lambda: self._engine.sleep(level, mode="keep"))

    async def wake_up(self, tags: list[str] | None) -> None:
        """Allocate memory again: for "weights", for "kv_cache", or for all that sleeps (None)."""
        await self.call(lambda: self._engine.wake_up(tags))

    def work(self) -> float | None:
        """Return a number that changes as the engine makes progress; None: it has no work.

        A large prefill on CPUs or compiling a kernel may take minutes; CPU time tells them from a hung step.
        Raises RuntimeError if a step has failed.
        """
        self._check()
        if self._thread.ident is None or not self._thread.is_alive():
            return None
        if not self._stepping and not self._has_pending_work():
            return None
        if device_type() == "cuda" and time.monotonic() - self._step_began > _COMPILE_S:
            return float(self._steps)
        thread_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return self._steps + thread_s + sum(map(_cpu_seconds, active_children()))

    async def shutdown(self) -> None:
        """End the engine and its worker processes after the current step; pending requests fail."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _has_pending_work(self) -> bool:
        """Return whether requests are pending and the thread can step them. Commands have other deadlines."""
        if not self._futures or self._in_command:
            return False
        # Not before the first request: while the engine starts, its thread imports vLLM.
        from vllm.v1.core.sched.interface import PauseState

        return bool(self._core.scheduler.pause_state == PauseState.UNPAUSED)

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def _put(self, command: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("rollout: the engine is not running")
        self._commands.put(command)

    def _run(
        self,
        arguments: dict[str, Any],
        shares_tails: bool,
        records_masks: bool,
    ) -> None:
        try:
            self._engine = make_engine(arguments)
            if records_masks:
                from actors.workers.recorders import record_masks  # imports vLLM

                record_masks(self._core)
            self._tails = SharedTails.attach(self._core.scheduler) if shares_tails else None
        except BaseException as error:
            self._failed = error
        while self._loop_once():
            pass
        self._end()

    def _end(self) -> None:
        self._failed = self._failed or RuntimeError("it was shut down")
        while not self._commands.empty():
            if command := self._commands.get_nowait():
                command()
        self._call_on_loop(self._fail_all, self._failed)
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _loop_once(self) -> bool:
        """Run commands and one step; return False if the thread must end."""
        try:
            if not self._run_commands():
                return False
            if self._failed is None and self._core_has_work():
                self._step()
        except BaseException as error:  # internal vLLM error: fail pending futures so that no caller hangs
            self._fail_engine(error)
        return True

    def _run_commands(self) -> bool:
        """Run pending commands, waiting for one if idle; return False if the thread must end."""
        command: Callable[[], None] | None
        idle = self._failed is not None or not self._core_has_work()
        try:
            command = self._commands.get() if idle else self._commands.get_nowait()  # bounded: `shutdown`
            while command is not None:
                command()
                command = self._commands.get(timeout=_BURST_S) if idle else self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _run_command(self, function: Callable[[], T]) -> T:
        self._check()
        self._in_command = True
        try:
            return function()
        finally:
            self._in_command = False

    def _core_has_work(self) -> bool:
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _step(self) -> None:
        self._steps += 1
        self._step_began = time.monotonic()
        self._stepping = True
        try:
            outputs = self._engine.step()
        except BaseException as error:
            self._fail_engine(error)
            return
        finally:
            self._stepping = False
        finished = [output for output in outputs if output.finished]
        if self._tails:
            self._tails.release({output.request_id for output in finished})
        if finished:
            self._call_on_loop(self._deliver, finished)

    def _add(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        def add() -> bool:
            try:
                self._check()
                self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
            except BaseException as error:
                self._call_on_loop(self._refuse, request_id, error)
                return False
            return True

        # A failed engine computes no prompt that others could wait for.
        hold = self._tails if self._failed is None else None
        hold.add(request_id, token_ids, add) if hold else add()

    def _abandon(self) -> None:
        states = dict(self._engine.output_processor.request_states)
        self._engine.abort_request(list(states), internal=True)
        aborted_ids = [state.external_req_id for state in states.values()]
        for request_id in [*aborted_ids, *(self._tails.abandon() if self._tails else ())]:
            self._call_on_loop(self._refuse, request_id, RuntimeError("rollout: the request was abandoned"))

    def _pause(self, drain: bool) -> None:
        from vllm.v1.core.sched.interface import PauseState

        # `pause_scheduler` neither drains nor waits for asynchronous steps, so do both first.
        self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW if drain else PauseState.PAUSED_ALL)
        while self._failed is None and self._core_has_work():
            self._step()
        self._check()
        self._core.pause_scheduler(mode="keep", clear_cache=True)

    def _check(self) -> None:
        if self._failed is not None:
            raise RuntimeError(f"rollout: the engine has failed: {self._failed!r}") from self._failed

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, finished: list[RequestOutput]) -> None:
        for output in finished:
            _finish(self._futures.pop(output.request_id), output)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        if future := self._futures.pop(request_id, None):
            _fail(future, error)

    def _fail_engine(self, error: BaseException) -> None:
        """Mark the engine as failed and fail all pending requests."""
        self._failed = error
        self._call_on_loop(self._fail_all, error)

    def _fail_all(self, error: BaseException) -> None:
        for future in self._futures.values():
            _fail(future, error)
        self._futures.clear()


def _cpu_seconds(worker: BaseProcess) -> float:
    """Return the CPU time of a worker process; 0 if it has ended."""
    try:
        times = psutil.Process(worker.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _finish(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # the caller may have been cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
