"""Roles colocated on the same GPUs: the order in which they release and reload memory."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import RayActorError

from actors import colocation
from actors.colocation import Colocation, colocated
from actors.workers.policy import PolicyGroup
from grpo_dist.config import TimeoutsConfig
from grpo_dist.errors import UserError
from grpo_dist.workers import Workers
from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

ENGINES_LEAVE = ["engines.abandon()", "engines.sleep(keep_weights=False)"]
TO_POLICY = [*ENGINES_LEAVE, "policy.hold(all)"]
PUSH = [
    "policy.hold(weights)", "engines.wake_up(weights)", "sync.push(1)", "policy.hold(nothing)",
    "engines.wake_up(kv_cache)",
]  # fmt: skip


class EventRecorder:
    """A fake role or sync that records every call as an event. ``takes_s``: seconds by method."""

    def __init__(self, name, events, **takes_s):
        self._name, self._events, self._takes_s = name, events, takes_s

    def __getattr__(self, method):
        async def call(*arguments, **options):
            texts = [*map(str, arguments), *(f"{k}={v}" for k, v in options.items())]
            self._events.append(f"{self._name}.{method}({', '.join(texts)})")
            await asyncio.sleep(self._takes_s.get(method, 0))
            return {}

        return call

    async def used(self, what, takes_s=0.0):
        """Make a call within a turn, as the pools do."""
        async with self.turn():
            self._events.append(f"{self._name}: {what}")
            await asyncio.sleep(takes_s)


class RecordedRanks(PolicyGroup):
    """The policy's handle; records every call to its ranks as an event."""

    def __init__(self, events):
        self._events, self._takes_s, self.updates = events, {}, 0
        self.ranks, self.team, self.update_s = (), SimpleNamespace(named=dict), HANG_S
        self._timeouts = TimeoutsConfig()

    def stage(self, batches, **_):
        return []

    async def ready(self):
        self._events.append("policy.ready()")

    async def _each(self, method, arguments, group=None):
        self._events.append(f"policy.{method}()")
        await asyncio.sleep(self._takes_s.get(method, 0))
        return [("float32", {})] if method == "logprobs" else [{}]

    async def hold(self, what):
        self._events.append(f"policy.hold({what})")
        await asyncio.sleep(self._takes_s.get("hold", 0))


class World:
    """A colocation of recorders, and the handles of the driver."""

    def __init__(self, timeout_s=HANG_S, has_reference=True):
        self.events = events = []
        self.policy, self.engines = RecordedRanks(events), EventRecorder("engines", events)
        self.reference, self.rewards = EventRecorder("reference", events), EventRecorder("rewards", events)
        others = {"reward_model a": self.rewards} | ({"reference": self.reference} if has_reference else {})
        self.colocation = Colocation(self.policy, self.engines, others, timeout_s=timeout_s)
        connected = Workers(
            self.engines, None, self.reference if has_reference else None, self.policy,
            EventRecorder("sync", events), EventRecorder("reference_sync", events),
        )  # fmt: skip
        self.workers = colocated(connected, self.colocation, has_reference=True)


def play(script, **how):
    """Run ``script`` in a world in which the engines have sampled; return the world and its events since."""

    async def session():
        world = World(**how)
        await world.colocation.start()
        await world.engines.used("sample")
        world.events.clear()
        await script(world)
        return world

    world = asyncio.run(session())
    return world, world.events


def test_roles_load_one_after_the_other_and_the_first_to_ask_gets_the_gpus():
    async def session():
        world = World()
        await world.colocation.start()
        await world.engines.used("sample")
        return world.events

    assert asyncio.run(session()) == [
        "engines.ready()", "engines.sleep(keep_weights=True)", "policy.ready()", "policy.hold(nothing)",
        "rewards.ready()", "rewards.sleep()", "reference.ready()", "reference.sleep()", "engines.wake_up()",
        "engines: sample",
    ]  # fmt: skip


def test_the_policys_memory_is_given_back_before_the_engines_map_their_weights():
    async def step(world):
        await world.workers.policy.update([])
        await world.workers.sync.push(1)
        await world.engines.used("sample")

    _, events = play(step)
    assert events == [*TO_POLICY, "policy.update()", *PUSH, "engines: sample"]


def test_each_role_has_one_turn_for_all_groups_of_a_batch_whatever_the_order_of_its_calls(monkeypatch):
    monkeypatch.setattr(colocation, "_GRACE_S", 0.2)  # enough for immediate calls on a busy machine

    async def step(world):
        async def group(number):
            await world.engines.used(f"sample {number}", takes_s=0.01 * number)
            await asyncio.gather(
                world.rewards.used(f"score {number}"), world.reference.used(f"log-probs {number}")
            )

        await asyncio.gather(*map(group, range(3)))
        await world.workers.policy.update([])

    _, events = play(step)
    scored = ["rewards.wake_up()", *(f"rewards: score {i}" for i in range(3)), "rewards.sleep()"]
    referenced = [
        "reference.wake_up()", *(f"reference: log-probs {i}" for i in range(3)), "reference.sleep()",
    ]  # fmt: skip
    turns = [events[5:10], events[10:15]]  # either waiting role may come first
    assert events[:5] == [*(f"engines: sample {i}" for i in range(3)), *ENGINES_LEAVE]
    assert sorted(map(sorted, turns)) == sorted([sorted(scored), sorted(referenced)])
    assert all(turn[0].endswith("wake_up()") and turn[-1].endswith("sleep()") for turn in turns)
    assert events[15:] == ["policy.hold(all)", "policy.update()"]


def test_engines_that_dropped_their_weights_get_the_same_version_again():
    """After a checkpoint, or where reward models alternate with sampling."""

    async def step(world):
        await world.workers.policy.update([])
        await world.workers.sync.push(1)
        await world.workers.policy.save(Path("step"))
        world.events.clear()
        await world.engines.used("sample")
        await world.rewards.used("score")
        await world.engines.used("sample again")

    _, events = play(step)
    again = ["rewards.sleep()", "policy.hold(weights)", *PUSH[1:], "engines: sample again"]
    turn = [*ENGINES_LEAVE, "rewards.wake_up()", "rewards: score"]
    assert events == [*PUSH, "engines: sample", *turn, *again]


def test_engines_never_sample_from_weights_that_were_not_sent():
    """Their caller is told to push; the others go on."""

    async def step(world):
        await world.workers.policy.update([])
        with pytest.raises(UserError, match=r"call sync\(\) after update\(\)"):
            await world.engines.used("sample")
        await world.rewards.used("score")
        await world.workers.sync.push(1)
        await world.engines.used("sample")

    _, events = play(step)
    scored = ["policy.hold(nothing)", "rewards.wake_up()", "rewards: score", "rewards.sleep()"]
    assert events == [*TO_POLICY, "policy.update()", *scored, *PUSH, "engines: sample"]


@pytest.mark.parametrize("values", ["logprobs", "score_norms"])  # for the sync probe; for the token baseline
def test_values_of_rows_are_computed_in_the_turn_of_the_update_that_follows(values):
    async def step(world):
        await getattr(world.workers.policy, values)("batch")
        await world.workers.policy.update([])

    _, events = play(step)
    assert events == [*TO_POLICY, f"policy.{values}()", "policy.update()"]


def test_a_refresh_has_the_policys_weights_and_the_reference_on_the_gpus_and_nothing_else():
    async def step(world):
        await world.workers.reference_sync.refresh()
        await world.reference.used("log-probs")

    _, events = play(step)
    assert events == [
        *ENGINES_LEAVE, "policy.hold(weights)", "reference.wake_up()", "reference_sync.refresh()",
        "policy.hold(nothing)", "reference: log-probs",
    ]  # fmt: skip


def test_a_resumed_run_loads_and_pushes():
    async def resume(world):
        await world.workers.policy.load(Path("step"))
        world.events.clear()
        await world.workers.sync.push(1)
        await world.engines.used("sample")

    _, events = play(resume)
    assert events == [*PUSH, "engines: sample"]


class Team:
    """A fake team of engines; ``catch_up``, which a sync sets, records events."""

    def __init__(self, events, failure=None):
        async def catch_up(worker):
            events.append(f"sync.catch_up({worker})")
            if failure is not None:
                raise failure

        self.catch_up = catch_up


def joining(world, failure=None):
    """Have an engine join; return the task of its first weights."""
    team = Team(world.events, failure)
    world.colocation.admit(team)
    return asyncio.create_task(team.catch_up("guest"))


JOIN = ["policy.hold(weights)", "sync.catch_up(guest)", "policy.hold(nothing)"]


def test_an_engine_that_joins_gets_the_weights_once_the_samples_in_flight_are_done():
    async def step(world):
        sampling = asyncio.create_task(world.engines.used("sample", takes_s=0.05))
        await asyncio.sleep(0)
        await joining(world)
        assert sampling.done()
        await world.workers.policy.update([])
        await world.workers.sync.push(1)

    _, events = play(step)
    update = ["policy.hold(all)", "policy.update()"]
    assert events == ["engines: sample", *ENGINES_LEAVE, *JOIN, *update, *PUSH]


def test_engines_that_left_for_one_that_joins_get_their_weights_again():
    async def step(world):
        await world.workers.sync.push(1)
        await joining(world)
        await world.engines.used("sample")

    _, events = play(step)
    assert events == [*ENGINES_LEAVE, *PUSH, *ENGINES_LEAVE, *JOIN, *PUSH, "engines: sample"]


@pytest.mark.parametrize("failure", [TimeoutError("it hangs"), RayActorError(), UserError("too far")])
def test_an_engine_that_cannot_join_costs_the_others_nothing(monkeypatch, failure):
    """The sending rank is free once the engine is killed, at the latest when its wait times out."""
    killed = []
    monkeypatch.setattr(colocation, "kill", killed.extend)

    async def step(world):
        world.colocation._timeout_s, world.policy._takes_s["hold"] = 0.5, 0.7
        hold = world.policy.hold

        async def until_killed(what):
            if what != "nothing":
                world.policy._takes_s["hold"] = 0
            await hold(what)
            world.policy._takes_s["hold"] = 0.7 if what == "weights" else 0
            assert what != "nothing" or killed == ["guest"]

        world.policy.hold = until_killed
        with pytest.raises(type(failure)):
            await joining(world, failure)
        await world.workers.policy.update([])

    _, events = play(step)
    assert events == [*ENGINES_LEAVE, *JOIN, "policy.hold(all)", "policy.update()"]


def test_an_update_that_waits_for_a_join_whose_caller_is_gone_follows_it():
    async def step(world):
        world.policy._takes_s["hold"] = 0.02
        join = joining(world)
        while "policy.hold(weights)" not in world.events:
            await asyncio.sleep(0)
        join.cancel()
        await world.workers.policy.update([])

    _, events = play(step)
    assert events == [*ENGINES_LEAVE, *JOIN, "policy.hold(all)", "policy.update()"]


async def caller_of_a_change(world):
    """Start a save; return its task while the engines go to sleep, which takes a while."""
    world.engines._takes_s["sleep"] = 0.05
    caller = asyncio.create_task(world.workers.policy.save(Path("step")))
    while "engines.sleep(keep_weights=False)" not in world.events:
        await asyncio.sleep(0)
    return caller


def test_a_cancelled_caller_does_not_leave_the_gpus_half_moved():
    async def step(world):
        caller = await caller_of_a_change(world)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        await world.workers.policy.update([])

    _, events = play(step)
    assert events == [*TO_POLICY, "policy.update()"]


def test_engines_drop_what_a_cancelled_caller_asked_for():
    """A preempted evaluation: its samples may take longer than the grace."""

    async def step(world):
        caller = asyncio.create_task(world.engines.used("long sample", takes_s=HANG_S))
        while not world.events:
            await asyncio.sleep(0)
        caller.cancel()
        await world.workers.policy.save(Path("step"))

    _, events = play(step)
    assert events == ["engines: long sample", *TO_POLICY, "policy.save()"]


def test_a_cancelled_change_is_no_error_for_waiting_roles():
    """Two roles wait for a change to a third, whose caller is cancelled. They run after it."""

    async def step(world):
        caller = await caller_of_a_change(world)
        others = asyncio.gather(world.rewards.used("score"), world.reference.used("log-probs"))
        await asyncio.sleep(0)
        caller.cancel()
        await others

    _, events = play(step)
    assert events == [
        *TO_POLICY, "policy.hold(nothing)", "rewards.wake_up()", "rewards: score", "rewards.sleep()",
        "reference.wake_up()", "reference: log-probs",
    ]  # fmt: skip


def test_the_seconds_of_all_changes_since_the_last_push_are_metrics_of_the_push():
    async def step(world):
        await world.rewards.used("score")
        await world.workers.policy.update([])
        world.metrics = await world.workers.sync.push(1), await world.workers.sync.push(2)

    world, _ = play(step)
    first, second = world.metrics
    moves = [
        "engines_sleep", "engines_wake", "policy_offload", "policy_reload", "reward_model_sleep",
        "reward_model_wake",
    ]  # fmt: skip
    assert sorted(first) == [f"time/turn_{move}_s" for move in moves]
    assert "time/turn_reward_model_wake_s" not in second


def test_a_change_of_turns_has_a_deadline_and_all_waiting_callers_get_its_error():
    async def stuck(world):
        world.engines._takes_s["sleep"], world.colocation._timeout_s = HANG_S, 0.05
        world.errors = await asyncio.gather(
            world.workers.policy.update([]), world.rewards.used("score"), return_exceptions=True
        )

    world, _ = play(stuck)
    assert [str(error) for error in world.errors] == [
        "stage placement: engines sleep on the shared GPUs: not finished within 0.05 s"
    ] * 2


def test_the_base_of_adapters_answers_all_groups_in_one_call_in_the_policys_turn():
    async def step(world):
        async def base_logprobs(groups, top_k):
            world.events.append(f"policy.base_logprobs of {[prompt for prompt, _ in groups]}")
            return [[np.full(1, samples)] for _, samples in groups]

        world.policy.base_logprobs = base_logprobs

        async def group(number):
            await world.engines.used(f"sample {number}", takes_s=0.01 * number)
            return await world.workers.reference.logprobs(f"prompt {number}", number)

        world.answers = await asyncio.gather(*map(group, range(3)))
        await world.workers.policy.update([])

    world, events = play(step, has_reference=False)
    assert [answer[0].item() for answer in world.answers] == [0, 1, 2]
    assert events[3:] == [
        *TO_POLICY, "policy.base_logprobs of ['prompt 0', 'prompt 1', 'prompt 2']", "policy.update()",
    ]  # fmt: skip


def test_a_cancelled_group_leaves_the_base_to_the_others_and_is_not_sent_again():
    """As after a failed score. One is cancelled before the policy's turn, one while the ranks compute."""

    async def step(world):
        computing = asyncio.Event()

        async def base_logprobs(groups, top_k):
            world.events.append([prompt for prompt, _ in groups])
            computing.set()
            await asyncio.sleep(0.05)
            return [[np.full(1, samples)] for _, samples in groups]

        world.policy.base_logprobs = base_logprobs
        calls = [asyncio.create_task(world.workers.reference.logprobs(f"prompt {i}", i)) for i in range(4)]
        await asyncio.sleep(0)
        calls[0].cancel()
        await computing.wait()
        calls[1].cancel()
        world.answers = await asyncio.gather(*calls, return_exceptions=True)

    world, events = play(step, has_reference=False)
    assert events == [*TO_POLICY, ["prompt 1", "prompt 2", "prompt 3"]]
    assert [type(answer) for answer in world.answers[:2]] == [asyncio.CancelledError] * 2
    assert [answer[0].item() for answer in world.answers[2:]] == [2, 3]


def test_an_error_of_the_base_reaches_every_group():
    async def step(world):
        async def base_logprobs(groups, top_k):
            raise ValueError("out of memory")

        world.policy.base_logprobs = base_logprobs
        calls = (world.workers.reference.logprobs("prompt", number) for number in range(2))
        world.errors = await asyncio.gather(*calls, return_exceptions=True)

    world, _ = play(step, has_reference=False)
    assert list(map(str, world.errors)) == ["out of memory"] * 2
