"""Errors of an engine's worker processes, through vLLM's own executor of several processes."""

import asyncio
import pickle
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.worker.worker_base import WorkerWrapperBase

from actors.workers.engine_thread import call_workers
from grpo_dist.errors import TransferLost
from tests.actors.workers.test_engine_thread import Engine, with_engine


class Replies:
    """Replies that a process has sent and nobody has read, pickled as between processes."""

    def __init__(self):
        self._sent = deque()

    def enqueue(self, reply):
        self._sent.append(pickle.dumps(reply))

    def dequeue(self, timeout=None):
        return pickle.loads(self._sent.popleft())


class Worker:
    """vLLM's worker. ``fails``: what its weight update raises, once."""

    def __init__(self, rank, fails):
        self.rank, self.fails, self._weight_update_active = rank, fails, False

    def start_weight_update(self):
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._fail_once()
        self._weight_update_active = True
        return self.rank

    def update_weights(self, update_info):
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self._fail_once()
        except BaseException:
            self._weight_update_active = False
            raise

    def _fail_once(self):
        error, self.fails = self.fails, None
        if error is not None:
            raise error


class TwoProcesses(Engine):
    """An engine over the processes of ``workers``, which all run in this one."""

    def __init__(self, *fails):
        super().__init__()
        self.processes = []
        for rank, error in enumerate(fails):
            process = object.__new__(WorkerProc)
            process.worker, process.rank = WorkerWrapperBase(rank), rank
            process.worker.worker = Worker(rank, error)
            process.use_async_scheduling, process.worker_response_mq = False, Replies()
            self.processes.append(process)
        self.executor = SimpleNamespace(
            rpc_broadcast_mq=self, is_failed=False,
            response_mqs=[process.worker_response_mq for process in self.processes], futures_queue=deque(),
        )  # fmt: skip

    def enqueue(self, request):
        for process in self.processes:
            process._execute_worker_rpc(request)

    def collective_rpc(self, method, **arguments):
        return MultiprocExecutor.collective_rpc(self.executor, method, **arguments)


def start(worker):
    return worker.start_weight_update()


def rank(worker):
    return worker.rank


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_vllm_itself_takes_a_late_reply_for_the_reply_of_the_next_call():
    engine = TwoProcesses(TransferLost("first"), TransferLost("second"))
    with pytest.raises(RuntimeError, match="Worker failed with error 'first'") as raised:
        engine.collective_rpc(start)
    assert type(raised.value) is RuntimeError
    with pytest.raises(RuntimeError, match="Worker failed with error 'second'"):
        engine.collective_rpc(rank)


def test_an_error_in_every_process_keeps_its_type_and_disturbs_no_later_call():
    engine = TwoProcesses(TransferLost("first"), TransferLost("second"))
    with pytest.raises(TransferLost, match="first") as raised:
        call_workers(engine, start)
    assert "start_weight_update" in "".join(raised.value.__notes__)  # where it was raised
    assert call_workers(engine, rank) == call_workers(engine, start) == [0, 1]


@pytest.mark.parametrize(
    ("fails", "kind", "message"),
    [
        ((None, TransferLost("gone")), TransferLost, "gone"),
        ((MemoryError("full"), None), MemoryError, "full"),
        ((TransferLost("gone"), MemoryError("full")), MemoryError, "full"),
        ((Unpicklable(1, 2), None), RuntimeError, "Unpicklable: 1 and 2"),
    ],
)
def test_the_error_that_is_raised_is_the_cause(fails, kind, message):
    engine = TwoProcesses(*fails)
    with pytest.raises(kind, match=message) as raised:
        call_workers(engine, start)
    assert type(raised.value) is kind
    assert call_workers(engine, rank) == [0, 1]


def test_calls_of_the_engines_thread_keep_the_type(monkeypatch):
    async def use(thread, engine):
        with pytest.raises(TransferLost, match="first"):
            await thread.start_weight_update()
        return await asyncio.gather(thread.in_workers(rank), thread.in_workers(lambda w: w.rank + 1))

    make = partial(TwoProcesses, TransferLost("first"), TransferLost("second"))
    assert with_engine(monkeypatch, use, make) == [[0, 1], [1, 2]]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_transfer_that_fails_in_one_process_is_restarted_in_both(monkeypatch, lost):
    async def use(thread, engine):
        await thread.start_weight_update()
        engine.processes[lost].worker.worker.fails = TransferLost("gone")
        with pytest.raises(TransferLost, match="gone"):
            await thread.update_weights({})
        await thread.start_weight_update()
        await thread.update_weights({})

    with_engine(monkeypatch, use, partial(TwoProcesses, None, None))
