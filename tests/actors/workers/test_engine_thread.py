"""The thread that steps an engine, with an engine of a few lines: which request gets which error."""

import asyncio
import contextlib
import ctypes
import inspect
import multiprocessing
import queue
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import (
    NCCL_UNIQUE_ID_BYTES,
    NCCLLibrary,
    ncclUniqueId,
)
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
from vllm.v1.core.sched.interface import PauseState

from actors.workers import engine_thread
from actors.workers.engine_thread import EngineThread
from tests.support.patience import HANG_S


@dataclass
class Output:
    request_id: str
    tokens: int
    finished: bool = True


@dataclass
class Scheduler:
    """Requests and how many tokens each still has to make."""

    waiting = ()  # to be computed again
    kv_cache_manager = SimpleNamespace(watermark_blocks=0)
    left: dict = field(default_factory=dict)
    running: set = field(default_factory=set)
    state: PauseState = PauseState.UNPAUSED

    def set_pause_state(self, state):
        self.state = state

    @property
    def pause_state(self):
        return self.state

    def has_requests(self):
        return bool(self.steppable())

    def steppable(self):
        if self.state == PauseState.PAUSED_ALL:
            return set()
        return self.running if self.state == PauseState.PAUSED_NEW else set(self.left)


class Engine:
    """One token per request and step. A prompt is [tokens to make]; 0 is refused, -1 breaks the step."""

    is_sleeping = False

    def __init__(self):
        self.scheduler, self.batch_queue = Scheduler(), []
        self.model_executor = self
        self.engine_core = SimpleNamespace(engine_core=self, shutdown=self._ended)
        self.log, self.cache_cleared, self.ended = [], 0, False
        self.step_s = 0.0  # duration of a step

    def add_request(self, request_id, prompt, params):
        (tokens,) = prompt["prompt_token_ids"]
        if tokens == 0:
            raise ValueError("nothing to make")
        self.scheduler.left[request_id] = tokens

    def step(self):
        if self.step_s:
            time.sleep(self.step_s)
        stepped = sorted(self.scheduler.steppable())
        self.scheduler.running = set(stepped)
        self.log.append(len(stepped))
        if -1 in self.scheduler.left.values():
            raise MemoryError("no more blocks")
        finished = []
        for request_id in stepped:
            self.scheduler.left[request_id] -= 1
            if not self.scheduler.left[request_id]:
                del self.scheduler.left[request_id]
                self.scheduler.running.discard(request_id)
                finished.append(Output(request_id, 0))
        return finished

    def pause_scheduler(self, mode, clear_cache):
        assert mode == "keep" and clear_cache
        self.scheduler.state, self.cache_cleared = PauseState.PAUSED_ALL, self.cache_cleared + 1

    def resume_scheduler(self):
        self.scheduler.state = PauseState.UNPAUSED

    def _ended(self):
        self.ended = True


class EngineAhead(Engine):
    """Returns the outputs of the previous step, as `async_scheduling` does on GPUs."""

    def step(self):
        self.batch_queue.append(super().step() if self.scheduler.has_requests() else None)
        if len(self.batch_queue) < 2 and self.batch_queue[-1] is not None:
            return []
        before = self.batch_queue.pop(0)
        self.batch_queue = [later for later in self.batch_queue if later is not None]
        return before or []


def with_engine(monkeypatch, use, engine_class=Engine):
    engine = engine_class()
    monkeypatch.setattr(engine_thread, "make_engine", lambda arguments: engine)

    async def run():
        thread = EngineThread({})
        await thread.start()
        try:
            return await asyncio.wait_for(use(thread, engine), HANG_S)
        finally:
            await thread.shutdown()

    result = asyncio.run(run())
    assert engine.ended
    return result


def test_a_burst_of_requests_is_decoded_together(monkeypatch):
    async def use(thread, engine):
        await asyncio.gather(*(thread.generate([3], None) for _ in range(50)))
        return engine.log

    assert with_engine(monkeypatch, use) == [50, 50, 50]


@pytest.mark.slow
def test_a_burst_that_ends_before_the_wait_delays_no_request():
    """As when the thread loses the processor meanwhile. `queue.SimpleQueue` then waits forever, about once in
    ten thousand tries.
    """

    async def commands():
        return type(EngineThread({})._commands)

    kind, tried = asyncio.run(commands()), []

    def wait():
        for _ in range(50_000):
            with contextlib.suppress(queue.Empty):
                kind().get(timeout=2e-7)
        tried.append(True)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert tried


def test_an_internal_error_of_the_engine_fails_all_pending_and_later_requests(monkeypatch):
    async def use(thread, engine):
        waiting = asyncio.create_task(thread.generate([10_000_000], None))
        while not engine.log:
            await asyncio.sleep(0.001)
        del engine.scheduler.left  # so that the check for work fails
        with pytest.raises(AttributeError, match="left"):
            await waiting
        with pytest.raises(RuntimeError, match="engine has failed"):
            thread.work()
        with pytest.raises(RuntimeError, match="engine has failed"):
            await thread.generate([1], None)

    with_engine(monkeypatch, use)


async def stands_still(thread):
    """Wait until it has pending work and makes no progress."""
    work = None
    while work is None or thread.work() != work:
        work = thread.work()
        await asyncio.sleep(0.05)


class Forgetful(Engine):
    def add_request(self, request_id, prompt, params):
        """Lose it."""


def test_an_engine_with_pending_work_and_no_step_counts_as_stalled(monkeypatch):
    async def use(thread, engine):
        assert thread.work() is None  # nobody waits for it
        waiting = asyncio.create_task(thread.generate([3], None))
        await stands_still(thread)
        begun, end = threading.Event(), threading.Event()
        busy = asyncio.create_task(thread.call(lambda: begun.set() or end.wait(HANG_S)))
        await asyncio.to_thread(begun.wait, HANG_S)
        assert thread.work() is None  # the call has its own deadline
        end.set()
        await busy
        await thread.pause(drain=False)
        assert thread.work() is None  # it must not continue
        await thread.resume()
        assert thread.work() is not None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    with_engine(monkeypatch, use, Forgetful)


def test_a_refused_request_fails_alone(monkeypatch):
    async def use(thread, engine):
        return await asyncio.gather(*(thread.generate([n], None) for n in (2, 0, 3)), return_exceptions=True)

    first, refused, last = with_engine(monkeypatch, use)
    assert first.finished and last.finished
    assert isinstance(refused, ValueError) and str(refused) == "nothing to make"


def test_a_failed_step_fails_all_pending_and_later_requests(monkeypatch):
    async def use(thread, engine):
        pending = await asyncio.gather(*(thread.generate([n], None) for n in (5, -1)), return_exceptions=True)
        with pytest.raises(RuntimeError, match=r"engine has failed.*no more blocks"):
            await thread.generate([1], None)
        with pytest.raises(RuntimeError, match=r"engine has failed.*no more blocks"):
            await thread.pause(drain=True)
        return pending

    assert all(isinstance(error, MemoryError) for error in with_engine(monkeypatch, use))


def test_after_a_failure_no_request_waits_for_another_of_its_prompt(monkeypatch):
    async def use(thread, engine):
        with pytest.raises(MemoryError):
            await thread.generate([-1], None)
        thread._tails = SimpleNamespace(add=lambda *held: None, release=None, abandon=list)  # it holds all
        with pytest.raises(RuntimeError, match="engine has failed"):
            await thread.generate([3], None)

    with_engine(monkeypatch, use)


def test_a_model_that_does_not_load_fails_the_start(monkeypatch):
    def broken(arguments):
        raise OSError("no such file")

    monkeypatch.setattr(engine_thread, "make_engine", broken)

    async def run():
        thread = EngineThread({})
        with pytest.raises(OSError, match="no such file"):  # itself: its type decides who must fix it
            await thread.start()
        await thread.shutdown()
        with pytest.raises(RuntimeError, match="not running"):
            await thread.resume()

    asyncio.run(run())


@pytest.mark.parametrize("drain", [True, False])
def test_a_pause_starts_no_request_and_finishes_those_in_flight_only_if_it_drains(monkeypatch, drain):
    """A request that is kept would take a quarter of an hour to finish."""

    async def use(thread, engine):
        engine.step_s = 0.01 if not drain else 0.0
        running = asyncio.create_task(thread.generate([2_000 if drain else 100_000], None))
        while not engine.log:
            await asyncio.sleep(0.001)
        await thread.pause(drain=drain)
        engine.step_s = 0.0
        steps, done = len(engine.log), running.done()
        later = asyncio.create_task(thread.generate([1], None))
        await asyncio.sleep(0.05)
        assert len(engine.log) == steps and not later.done() and engine.cache_cleared == 1
        await thread.resume()
        await asyncio.gather(running, later)
        return done

    assert with_engine(monkeypatch, use) == drain


def test_a_step_that_runs_ahead_is_delivered_before_the_pause(monkeypatch):
    async def use(thread, engine):
        engine.step_s = 0.01
        running = asyncio.create_task(thread.generate([100_000], None))
        while not engine.batch_queue:
            await asyncio.sleep(0)
        await thread.pause(drain=False)
        engine.step_s, left = 0.0, list(engine.batch_queue)
        await thread.resume()
        await running
        return left

    assert with_engine(monkeypatch, use, EngineAhead) == []


def test_a_partly_asleep_engine_is_not_resumed(monkeypatch):
    async def use(thread, engine):
        await thread.pause(drain=True)
        engine.is_sleeping = True
        await thread.resume()
        asleep = engine.scheduler.state
        engine.is_sleeping = False
        await thread.resume()
        return asleep, engine.scheduler.state

    assert with_engine(monkeypatch, use) == (PauseState.PAUSED_ALL, PauseState.UNPAUSED)


def test_pending_requests_fail_when_the_engine_is_shut_down(monkeypatch):
    async def use(thread, engine):
        waiting = asyncio.create_task(thread.generate([10_000_000], None))
        while not engine.log:
            await asyncio.sleep(0.001)
        await thread.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            await waiting

    with_engine(monkeypatch, use)


def test_a_cancelled_caller_disturbs_no_other(monkeypatch):
    async def use(thread, engine):
        gone = asyncio.create_task(thread.generate([500], None))
        await asyncio.sleep(0)
        gone.cancel()
        return await thread.generate([1000], None)

    assert with_engine(monkeypatch, use).finished


def test_this_vllm_has_the_nccl_functions_in_use(monkeypatch):
    """Its transport cannot be run without GPUs; see `test_transport` for the rest."""
    names = ["nccl_unique_id_bytes", "rank", "world_size", "device"]
    assert list(inspect.signature(uid_init_process_group).parameters) == names
    assert ctypes.sizeof(ncclUniqueId) == ncclUniqueId.internal.size == NCCL_UNIQUE_ID_BYTES
    assert callable(NCCLLibrary.ncclGetUniqueId)
    group = PyNcclCommunicator
    assert list(inspect.signature(group.broadcast).parameters) == ["self", "tensor", "src", "stream"]
    assert list(inspect.signature(group.destroy).parameters) == ["self"]
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    assert uid_init_process_group(bytes(NCCL_UNIQUE_ID_BYTES), 0, 2, 0).disabled


class Compiling(Engine):
    """Its first step keeps a core busy until ``done``, as a step that compiles or waits for a GPU."""

    def __init__(self):
        super().__init__()
        self.done = threading.Event()

    def step(self):
        while not self.done.is_set():
            sum(range(1000))
        return super().step()


async def during_a_step(thread, engine, use):
    waiting = asyncio.create_task(thread.generate([1], None))
    while thread.work() is None:
        await asyncio.sleep(0.001)
    try:
        await use()
    finally:
        engine.done.set()
        await waiting


def test_a_step_on_a_gpu_that_compiles_makes_progress(monkeypatch):
    monkeypatch.setattr(engine_thread, "device_type", lambda: "cuda")

    async def use(thread, engine):
        async def changes():
            first, end = thread.work(), time.monotonic() + HANG_S
            while thread.work() == first and time.monotonic() < end:
                await asyncio.sleep(0.01)
            assert thread.work() > first

        await during_a_step(thread, engine, changes)

    with_engine(monkeypatch, use, Compiling)


def test_a_step_on_a_gpu_that_only_spins_counts_as_hung_in_the_end(monkeypatch):
    monkeypatch.setattr(engine_thread, "device_type", lambda: "cuda")
    monkeypatch.setattr(engine_thread, "_COMPILE_S", 0.0)

    async def use(thread, engine):
        await during_a_step(thread, engine, lambda: stands_still(thread))

    with_engine(monkeypatch, use, Compiling)


def test_worker_processes_that_compile_make_progress(monkeypatch):
    """The workers of a tensor-parallel engine, while its thread waits for them and uses no processor."""
    spinning = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    spinning.start()
    try:
        first, end = engine_thread._cpu_seconds(spinning), time.monotonic() + HANG_S
        while engine_thread._cpu_seconds(spinning) == first and time.monotonic() < end:
            time.sleep(0.02)
        assert engine_thread._cpu_seconds(spinning) > first and spinning in multiprocessing.active_children()
    finally:
        spinning.kill()
        spinning.join()
    assert engine_thread._cpu_seconds(spinning) == 0.0


def _spin():
    while True:
        pass
