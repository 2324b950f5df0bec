"""Groups that share calls between driver and actor, which is in this process: no Ray is started."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from actors.workers.exchange import Line, SamplingActor, ScoringActor, StoredGroups, StoredSamples, submit
from grpo_dist.errors import SamplesFailed, SamplesLost
from grpo_dist.runtime.load_balancer import Load
from grpo_dist.types import Sampling
from tests.support.made_records import made_group, made_prompts, made_rollouts
from tests.support.patience import HANG_S

SAMPLES = made_rollouts("made", 2, np.random.default_rng(0))


class Engine(SamplingActor):
    """Samples "slow" prompts after a while, and fails "failed" ones. Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.lost, self.go = [], False, asyncio.Event()

    async def sample(self, prompt, seeds, sampling):
        if prompt == "slow":
            await self.go.wait()
        self._count_finished(Load(len(seeds), 10))
        if prompt == "failed":
            raise SamplesFailed("0 of 2 samples")
        return SAMPLES

    async def submit(self, requests):
        self.calls.append([prompt for _, (prompt, *_) in requests])
        if self.lost:
            raise ActorDiedError()
        for number, (prompt, *how) in requests:
            self._start(number, self.sample(prompt, *how), SimpleNamespace(uid=prompt))

    def line(self):
        async def collect():
            (finished, numbers, failed), packed = await self.collect(100)
            self.calls.append((finished.sequences, len(numbers), len(failed)))
            groups = StoredGroups(Reference(packed, self.calls))
            return [*((number, StoredSamples(groups, i)) for i, number in enumerate(numbers)), *failed]

        return Line(self.submit, collect)


class Reference:
    """A fake reference to an object of the store."""

    def __init__(self, packed, calls):
        self._packed, self._calls = packed, calls

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        self._calls.append("fetched")
        return self._packed


def ask(line, *prompts):
    return [asyncio.create_task(line.ask((prompt, [1, 2], Sampling()))) for prompt in prompts]


def run(session):
    async def on_the_loop():
        engine = Engine()
        return await session(engine, engine.line())

    return asyncio.run(asyncio.wait_for(on_the_loop(), HANG_S))


def test_groups_of_one_moment_travel_in_one_call_and_their_samples_are_fetched_once():
    async def session(engine, line):
        groups = await asyncio.gather(*ask(line, "a", "b", "c"))
        fetched = await asyncio.gather(*groups)
        return engine.calls, [[r.text for r in group] for group in fetched]

    calls, texts = run(session)
    assert calls == [["a", "b", "c"], (6, 3, 0), "fetched"]
    assert texts == [[r.text for r in SAMPLES]] * 3


def test_a_slow_group_keeps_no_other_waiting():
    async def session(engine, line):
        slow, quick = ask(line, "slow", "a")
        await quick
        assert not slow.done()
        (later,) = ask(line, "b")
        await later
        assert not slow.done()
        engine.go.set()
        await slow
        return [call for call in engine.calls if isinstance(call, list)]

    assert run(session) == [["slow", "a"], ["b"]]


def test_a_group_that_fails_is_raised_by_its_own_caller_alone_as_ray_raises_it():
    async def session(_, line):
        return await asyncio.gather(*ask(line, "a", "failed", "b"), return_exceptions=True)

    first, failed, last = run(session)
    assert isinstance(failed, SamplesFailed) and isinstance(failed, RayTaskError)
    assert isinstance(failed.cause, SamplesFailed) and "in sample" in str(failed)
    assert isinstance(first, StoredSamples) and isinstance(last, StoredSamples)


def test_the_loss_of_the_actor_is_raised_by_all_that_have_no_answer():
    async def session(engine, line):
        engine.collect = lose
        (slow,) = ask(line, "slow")
        await asyncio.sleep(0)
        engine.lost = True
        return await asyncio.gather(slow, *ask(line, "a", "b"), return_exceptions=True)

    async def lose(at_least):
        await asyncio.sleep(0.01)
        raise ActorDiedError()

    assert [type(error) for error in run(session)] == [ActorDiedError] * 3


def test_samples_that_are_lost_cost_no_other_group_of_their_call_its_own():
    async def session(engine, line):
        async def submit(requests):
            if any(prompt == "on a lost node" for _, (prompt, *_) in requests):
                raise ObjectLostError("00" * 28, b"", "")
            await engine.submit(requests)

        line._submit = submit
        return await asyncio.gather(*ask(line, "a", "on a lost node", "b"), return_exceptions=True)

    first, lost, last = run(session)
    assert isinstance(lost, ObjectLostError)
    assert isinstance(first, StoredSamples) and isinstance(last, StoredSamples)


def test_a_caller_that_is_gone_disturbs_no_other_and_its_load_is_reported():
    async def session(engine, line):
        gone, other = ask(line, "slow", "a")
        await other
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        engine.go.set()
        while line._answers:
            await asyncio.sleep(0.001)
        return [call for call in engine.calls if isinstance(call, tuple)]

    assert run(session) == [(2, 1, 0), (4, 1, 0)]


def test_a_closed_line_leaves_no_caller_waiting_forever():
    async def session(engine, line):
        tasks = ask(line, "slow", "slow")
        await asyncio.sleep(0.01)
        line.close()
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks]

    assert run(session) == [True, True]


def test_an_engine_reports_finished_sequences_before_a_group_is_done():
    async def session(engine, _):
        waiting = asyncio.create_task(engine.collect(3))
        await asyncio.sleep(0.01)
        engine._count_finished(Load(2, 20))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        engine._count_finished(Load(1, 10))
        return await waiting

    (finished, numbers, failed), packed = run(session)
    assert (finished, numbers, failed) == (Load(3, 30), [], []) and packed.groups == []


def test_samples_whose_node_is_lost_are_lost_for_each_of_their_groups():
    async def lost():
        raise ObjectLostError("00" * 28, b"", "")

    async def session(*_):
        groups = StoredGroups(lost())
        tasks = [asyncio.create_task(groups.group(i)) for i in range(2)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in run(session)] == [SamplesLost] * 2


def test_a_reward_worker_scores_many_groups_a_call_and_each_answers_for_itself():
    class Scorer(ScoringActor):
        def score(self, prompt, rollouts, modelled):
            if prompt.answer == "1":
                raise OSError("no disk")
            return made_group(prompt, tuple(rollouts)), (f"{modelled}",)

    async def session(*_):
        worker, prompts = Scorer(threads=2), made_prompts(3)
        handle = SimpleNamespace(submit=SimpleNamespace(remote=worker.submit))
        line = Line(lambda requests: submit(handle, requests), worker.collect)
        tasks = [asyncio.create_task(line.ask((prompt, SAMPLES, {"m": 1}))) for prompt in prompts]
        return made_group(prompts[0], SAMPLES), await asyncio.gather(*tasks, return_exceptions=True)

    expected, (first, failed, last) = run(session)
    assert first == last == (expected.scores(), ("{'m': 1}",))
    with pytest.raises(OSError, match="no disk"):
        raise failed
