"""`make lint` refuses calls that may block a thread forever."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("check_waits", ROOT / "launch" / "check_waits.py")
check_waits = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_waits)


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(ref)", "ray.get(ref, timeout=5)", "commands = queue.SimpleQueue()", "queue.get()",
        "thread.join()", "future.result()", "process.wait()", "process.communicate()",
        "subprocess.run(['ls'])", "dist.barrier()", "torch.distributed.all_gather_object(found, own)",
        "dist.all_to_all_single(out, x, timeout=5)", "dist.reduce_scatter_tensor(out, x)", "queue.get(True)",
        "queue.get(block=True)", "socket.accept()", "x = [future.result() for future in futures]",
        "queue.put(item)", "queue.put(item, True)", "queue.put(item, True, None)",
        "queue.put(item, block=True)", "queue.get(timeout=None)", "thread.join(None)",
        "condition.wait_for(ready)", "concurrent.futures.wait(futures)", "async def f(): await queue.get()",
        "async def f(): await queue.put(item)", "async def f(): await queue.join()",
        "async def f(): await event.wait()", "async def f(): await condition.wait_for(ready)",
        "async def f(): await asyncio.wait(tasks)", "async def f(): await asyncio.wait(tasks, timeout=None)",
    ],
)  # fmt: skip
def test_an_unbounded_wait_is_found_with_its_line(line):
    assert [number for number, _ in check_waits.unbounded(f"import x\n{line}\n")] == [2]
    assert not list(check_waits.unbounded(f"import x\n{line}  # bounded: it is done\n"))


@pytest.mark.parametrize(
    "body",
    [
        "async with asyncio.timeout(None):\n        await queue.get()",
        "await asyncio.wait_for(ready, None)",
        "async with self.lock:\n        await queue.get()",
        "async with deadline(5, 'stage'):\n        process.wait()",
        "async with deadline(5, 'stage'):\n        async def g():\n            await queue.get()",
        "async with deadline(5, 'stage'):\n        pass\n    await queue.get()",
    ],
)
def test_a_deadline_bounds_only_what_is_awaited_under_it(body):
    assert len(list(check_waits.unbounded(f"async def f():\n    {body}\n"))) == 1


def test_putting_is_unbounded_only_into_a_queue_with_a_size():
    def lines(*assignments):
        return [line for line, _ in check_waits.unbounded("\n".join([*assignments, "self.q.put(item)"]))]

    assert lines("self.q = queue.Queue()") == lines("self.q: Queue[int] = queue.Queue()") == []
    assert lines("self.q = queue.Queue(3)") == lines("other.q = queue.Queue()") == [2]
    assert lines("self.q = queue.Queue()", "self.q = asyncio.Queue(maxsize=2)") == [3]


@pytest.mark.parametrize(
    "line",
    [
        "queue.get(timeout=1)", "mapping.get('key')", "mapping.get('key', True)", "dist.get_rank()",
        "thread.join(5)", "', '.join(names)", "os.path.join(a, b)", "future.result(timeout=2)",
        "subprocess.run(['ls'], timeout=3)", "queue.put(item, timeout=1)", "queue.put(item, True, 1)",
        "queue.put(item, block=False)", "lock.acquire(blocking=False)", "cache.put(key, value)",
        "ray.put(value)", "condition.wait_for(ready, 3)", "async def f():\n    await client.get(address)",
        "async def f():\n    await asyncio.wait(tasks, timeout=1)",
        "async def f():\n    await asyncio.wait_for(queue.get(), 5)",
        "async def f():\n    async with asyncio.timeout(5):\n        await queue.get()",
        "async def f():\n    async with deadline_of(ranks, 5, 'stage'):\n        await event.wait()",
        "async def f():\n    async with self._deadline(1):\n        if late:\n            await queue.join()",
    ],
)  # fmt: skip
def test_calls_that_end_by_themselves_are_allowed(line):
    assert not list(check_waits.unbounded(line))


def test_refused_functions_may_not_be_imported_by_name():
    assert list(check_waits.unbounded("import ray\nfrom ray import get, kill")) == [(2, "ray.get")]
    waits = check_waits.unbounded("from queue import Empty, SimpleQueue")
    assert list(waits) == [(1, "queue.SimpleQueue")]
