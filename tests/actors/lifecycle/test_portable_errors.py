"""Guarantees: an exception of a worker reaches the driver with its type or at least its text."""

import asyncio
import inspect

import httpx
import pytest
from ray.exceptions import RayError, RayTaskError, UnserializableException
from vllm.exceptions import VLLMValidationError

from actors.lifecycle.calls import Probeable, reason
from actors.workers.environment import EnvironmentWorker
from actors.workers.reward import RewardWorker
from grpo_dist.errors import Rollback, UserError, find_cause


class Quota(Exception):
    """As HTTP clients define them: with other arguments than the base class gets."""

    def __init__(self, message, *, status):
        super().__init__(f"{message} ({status})")
        self.status = status


class Base:
    def inherited(self, error):
        raise error


class Worker(Probeable, Base):
    def fail(self, error):
        raise error

    async def fail_later(self, error):
        await asyncio.sleep(0)
        raise error


def delivered(error):
    """Return what Ray delivers to the driver for ``error``."""
    return RayError.from_bytes(RayTaskError("call", "Traceback ...", error).to_bytes())


REQUEST, RESPONSE = httpx.Request("GET", "http://x"), httpx.Response(503)
ERRORS = [
    Quota("too many", status=429),
    Rollback("rolled back", 3),
    UserError("no such key"),
    httpx.HTTPStatusError("503 for url", request=REQUEST, response=RESPONSE),
    VLLMValidationError("too long", parameter="n", value=3),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_every_exception_arrives_with_its_message(error):
    worker = Worker()
    calls = [
        lambda: worker.fail(error),
        lambda: worker.inherited(error),
        lambda: asyncio.run(worker.fail_later(error)),
    ]
    for call in calls:
        with pytest.raises(Exception) as caught:
            call()
        arrived = delivered(caught.value)
        assert not isinstance(arrived, UnserializableException)
        assert str(error).splitlines()[0] in reason(arrived)
        if type(find_cause(arrived)) is RuntimeError:
            assert reason(arrived).startswith(f"{type(error).__name__}: ")
    assert inspect.iscoroutinefunction(Worker.fail_later) and not inspect.iscoroutinefunction(Worker.fail)


def test_without_portable_errors_ray_delivers_neither_type_nor_cause():
    arrived = delivered(Quota("too many", status=429))
    assert isinstance(arrived, UnserializableException) and find_cause(arrived) is arrived


def test_all_methods_of_workers_are_covered():
    for worker in (RewardWorker, EnvironmentWorker):
        names = [n for n, f in inspect.getmembers(worker, inspect.isfunction) if not n.startswith("_")]
        assert names and all(hasattr(getattr(worker, name), "_raises_portable_errors") for name in names)
