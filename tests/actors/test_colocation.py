"""Engines and policy on the same GPUs: the order in which they give and take memory."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.colocation import ColocatedPolicy, ColocatedReferenceSync, ColocatedSync, Colocation
from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

TO_TRAINING = ["engines.sleep(keep_weights=False)", "policy.reload_states()"]


class EventRecorder:
    """Stands for the policy, the engines or a sync; every call is an event."""

    def __init__(self, name, events):
        self._name, self._events = name, events

    def __getattr__(self, method):
        async def call(*arguments, **options):
            said = [*map(str, arguments), *(f"{k}={v}" for k, v in options.items())]
            self._events.append(f"{self._name}.{method}({', '.join(said)})")
            return {}

        return call


def world(timeout_s=1.0):
    events = []
    policy, rollouts = EventRecorder("policy", events), EventRecorder("engines", events)
    colocation = Colocation(policy, rollouts, timeout_s=timeout_s)
    sync, reference = EventRecorder("sync", events), EventRecorder("reference", events)
    return (
        events,
        colocation,
        ColocatedPolicy(policy, colocation),
        ColocatedSync(sync, colocation),
        ColocatedReferenceSync(reference, colocation),
    )


async def started(colocation, events):
    await colocation.start()
    await colocation.to_sampling()
    events.clear()


def test_engines_load_before_the_policy_and_have_the_first_turn():
    events, colocation, *_ = world()

    async def start():
        await colocation.start()
        await colocation.to_sampling()

    asyncio.run(start())
    assert events == [
        "engines.ready()",
        "engines.sleep(keep_weights=True)",
        "policy.ready()",
        "policy.offload_states()",
        "engines.wake_up()",
    ]


def test_a_step_drops_the_engines_weights_and_pushes_new_ones():
    events, colocation, policy, sync, _ = world()

    async def step():
        await started(colocation, events)
        await policy.update([])
        await sync.push(1)

    asyncio.run(step())
    assert events == [
        *TO_TRAINING,
        "policy.update([], kl_coef=None, bounds=())",
        "engines.wake_up(weights)",
        "sync.push(1)",
        "policy.offload_states()",
        "engines.wake_up(kv_cache)",
    ]


def test_a_sync_probe_is_compared_in_the_turn_of_the_update_that_follows():
    events, colocation, policy, *_ = world()

    async def step():
        await started(colocation, events)
        await policy.logprobs("batch")
        await policy.update([])

    asyncio.run(step())
    assert events == [*TO_TRAINING, "policy.logprobs(batch)", "policy.update([], kl_coef=None, bounds=())"]


def test_a_checkpoint_or_a_new_reference_between_steps_keeps_the_engines_weights():
    events, colocation, policy, _, reference = world()

    async def between():
        await started(colocation, events)
        await policy.save(Path("step"))
        await reference.refresh()

    asyncio.run(between())
    turn = ["engines.sleep(keep_weights=True)", "policy.reload_states()"]
    back = ["policy.offload_states()", "engines.wake_up()"]
    assert events == [*turn, "policy.save(step, blocking=True)", *back, *turn, "reference.refresh()", *back]


def test_a_resumed_run_loads_and_pushes():
    events, colocation, policy, sync, _ = world()

    async def resume():
        await started(colocation, events)
        await policy.load(Path("step"))
        events.clear()
        await sync.push(5)

    asyncio.run(resume())
    assert events[:2] == TO_TRAINING
    assert events[3:] == ["sync.push(5)", "policy.offload_states()", "engines.wake_up(kv_cache)"]


def test_a_change_of_turns_has_a_deadline():
    events, colocation, policy, *_ = world(timeout_s=0.05)

    async def stuck():
        await started(colocation, events)
        colocation._rollouts.sleep = lambda **_: asyncio.sleep(60)
        await policy.update([])

    with pytest.raises(TimeoutError, match="the engines leave their GPUs to the policy: not finished within"):
        asyncio.run(stuck())


_ON_TWO_GPUS = """
import json, os, ray
from actors.factory import on_devices
from actors.placement.demands import share_out
from actors.workers.policy import PolicyWorker

class Engine:
    def sees(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_accelerator_ids()["GPU"]

ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
ranks = [ray.remote(PolicyWorker).options(num_gpus=1, **options).remote() for _ in range(2)]
held = ray.get([rank.devices.remote() for rank in ranks])
seen = []
for size in (1, 2):
    for devices in share_out(held, size):
        own = options | {"num_gpus": 0} | on_devices(options, devices)
        engine = ray.remote(Engine).options(**own).remote()
        seen.append(ray.get(engine.sees.remote()))
print(json.dumps(seen))
"""


@pytest.mark.evidence
def test_engines_see_the_gpus_that_ray_gave_the_ranks():
    """On a Ray with two GPUs that do not exist."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_TWO_GPUS], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    seen = [(tuple(sorted(visible.split(","))), counted) for visible, counted in json.loads(done.stdout)]
    assert sorted(seen) == [(("0",), []), (("0", "1"), []), (("1",), [])]
