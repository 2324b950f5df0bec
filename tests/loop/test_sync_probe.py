"""The sync probe: when engines are probed, what is compared, and what ends the run."""

import asyncio
import dataclasses
import json
import math

import numpy as np
import pytest

from grpo_dist.cli import report_end
from grpo_dist.config import Config
from grpo_dist.driver import run
from grpo_dist.errors import Unhealthy
from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.observe.tracker import EVENTS, Tracker
from grpo_dist.runs.identity import fingerprint
from grpo_dist.types import HeldRoutes
from tests.support import fakes
from tests.support.fakes import LOGPROB, Probed, Probes


def config(every=20, above=None, **changes) -> Config:
    return fakes.config(**({"weight_sync": {"probe_every": every, "probe_above": above}} | changes))


def train(world, settings, **kwargs):
    asyncio.run(run(settings, world.workers(), fakes.prompts(40), [], world, world, **kwargs))


# --- when engines are probed


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (0, [0])])
def test_engines_are_probed_after_the_first_sync_and_then_every_n_steps(every, expected, staleness):
    world = Probed(("rollout-0", "rollout-1"))
    train(world, config(every, steps=5, max_staleness=staleness))
    assert world.probed == {version: ["rollout-0", "rollout-1"] for version in expected}
    with_metric = [step for step in sorted(world.logged) if "probe/logprob_diff_mean" in world.logged[step]]
    assert with_metric == [version + 1 for version in expected]
    assert all("time/probe_s" in world.logged[step] for step in with_metric)


def test_a_probe_is_on_by_default():
    world = Probed()
    train(world, fakes.config(steps=1))
    assert world.probed == {0: ["rollout-0"]}


def test_a_resumed_run_probes_at_once_and_logs_the_numbers_of_the_uninterrupted_one():
    uninterrupted = Probed()
    train(uninterrupted, config(4, steps=6, checkpoint={"every": 3}))
    resumed = Probed()
    resumed.version = 3
    train(resumed, config(4, steps=6), progress=uninterrupted.saved[3])
    assert list(uninterrupted.probed) == [0, 4] and list(resumed.probed) == [3, 4]
    assert len(resumed.notes) == 2

    def numbers(world, step):
        return {k: v for k, v in world.logged[step].items() if not k.startswith(("time/", "throughput/"))}

    for step in (4, 5, 6):
        assert numbers(resumed, step) == numbers(uninterrupted, step)


def test_an_engine_that_was_replaced_is_probed_before_the_next_update():
    """It joins while the batch of step 3 is sampled."""
    world = Probed(("rollout-0", "rollout-1"))
    score, replacement = world.score, object()

    async def replace_engine(prompt, rollouts):
        if world.version == 2:
            world.serving["rollout-1"] = replacement
        return await score(prompt, rollouts)

    world.score = replace_engine
    train(world, config(0, steps=5))
    assert world.probed[0] == ["rollout-0", "rollout-1"]
    assert world.probed[2] == ["rollout-1"] and len(world.probed) == 2
    assert "probe/logprob_diff_mean" not in world.logged[3] and "rollout-1 at version 2" in world.notes[-1]


def test_a_wrong_engine_that_joins_later_ends_the_run_before_its_samples_move_the_weights():
    world = Probed(("rollout-0", "rollout-1"))
    push = world.push

    async def push_and_join(version):
        if version == 2:
            world.serving["rollout-1"], world.error["rollout-1"] = object(), 0.5
        return await push(version)

    world.push = push_and_join
    with pytest.raises(Unhealthy, match=r"step 3: .*rollout-1 and the policy differ by 0\.5 nats") as stop:
        train(world, config(0, steps=5))
    assert "rollout-0" not in str(stop.value) and len(world.updates) == 2


def test_an_engine_lost_during_its_probe_is_left_out_and_its_replacement_is_probed():
    """It is lost during the probe of version 0 and returns at version 2."""
    world = Probed(("rollout-0", "rollout-1"))
    sample, push = Probes.sample, world.push

    class Losing(Probes):
        async def sample(self, engine, *request):
            if world.version == 0:
                world.serving.pop("rollout-1", None)
            return await sample(self, engine, *request)

    async def push_and_return(version):
        if version == 2:
            world.serving["rollout-1"] = object()
        return await push(version)

    world.push = push_and_return
    workers = dataclasses.replace(world.workers(), probe=Losing(world))
    asyncio.run(run(config(1, steps=3), workers, fakes.prompts(40), [], world, world))
    assert world.probed == {0: ["rollout-0"], 1: ["rollout-0"], 2: ["rollout-0", "rollout-1"]}
    assert not world.warnings


def test_a_run_whose_engines_are_all_being_replaced_waits_for_one_to_probe():
    world = Probed()
    engine = world.serving.pop("rollout-0")

    async def session():
        settings = config(0, steps=1)
        running = asyncio.create_task(run(settings, world.workers(), fakes.prompts(40), [], world, world))
        await asyncio.sleep(0.3)
        assert not running.done() and not world.updates
        world.serving["rollout-0"] = engine
        await running

    asyncio.run(session())
    assert world.probed == {0: ["rollout-0"]} and len(world.updates) == 1


def test_an_engine_that_never_serves_ends_the_probe_at_the_deadline_of_sampling():
    world = Probed()
    world.serving.clear()
    with pytest.raises(TimeoutError, match=r"sync probe: samples of version 0: not finished within 0\.2 s"):
        train(world, config(0, steps=1, cluster={"timeouts": {"sample_s": 0.2}}))


# --- what is compared


def test_identical_probe_samples_of_several_engines_cost_one_forward_pass():
    world = Probed(tuple(f"rollout-{i}" for i in range(8)))
    train(world, config(0, steps=1))
    assert world.rows == [4]
    (uids, seeds, sampling), *other_requests = world.requests
    assert len(set(uids)) == 2 and len(set(seeds)) == 2 and sampling.max_new_tokens == 4
    assert all(request == (uids, seeds, sampling) for request in other_requests)


def test_a_probe_is_sampled_at_the_temperature_of_training():
    world = Probed()
    train(world, config(0, steps=1, sampling={"temperature": 0.6, "max_new_tokens": 100}))
    assert (world.requests[0][2].temperature, world.requests[0][2].max_new_tokens) == (0.6, 32)


def test_a_probe_without_tokens_of_its_version_does_not_pass_and_ends_the_run_after_repeats():
    world = Probed()
    world.claimed = 99
    with pytest.raises(Unhealthy, match=r"step 3: .*rollout-0 has no token of version 2.*3 times in a row"):
        train(world, config(0, steps=9))
    assert list(world.probed) == [0, 1, 2] and len(world.updates) == 2 and not world.notes
    assert [w.split(",")[0] for w in world.warnings] == [
        "step 1: the sync probe of rollout-0 has no token of version 0",
        "step 2: the sync probe of rollout-0 has no token of version 1",
    ]


def test_a_probe_with_no_token_is_repeated_at_the_next_step():
    world = Probed()
    world.claimed = 99
    push = world.push

    async def push_and_repair(version):
        world.claimed = None
        return await push(version)

    world.push = push_and_repair
    train(world, config(0, steps=4))
    assert list(world.probed) == [0, 1] and len(world.warnings) == len(world.notes) == 1


def test_each_engine_is_compared_on_the_experts_that_it_took():
    """Both sample the same tokens by different routes, which determine the log-probs."""
    world = Probed(("rollout-0", "rollout-1"))
    world.error |= {"rollout-1": 0.5}
    workers = world.workers()
    sample = workers.probe.sample

    async def sample_with_routes(engine, *request):
        expert = 1 if world.name_of(engine) == "rollout-1" else 0
        routes = HeldRoutes(np.full((2, 1, 1), expert, np.uint8))
        groups = await sample(engine, *request)
        return [tuple(dataclasses.replace(rollout, routes=routes) for rollout in group) for group in groups]

    async def logprobs_by_expert(batch):
        experts = [int(routes.fetch()[0, 0, 0]) for routes in batch.routes]
        values = [np.full(2, LOGPROB + 0.5 * expert, np.float32) for expert in experts]
        return "float32", dict(zip(batch.row_ids.tolist(), values, strict=True))

    workers.probe.sample, workers.probe.logprobs = sample_with_routes, logprobs_by_expert
    asyncio.run(run(config(steps=1), workers, fakes.prompts(40), [], world, world))
    assert len(world.updates) == 1 and len(world.notes) == 2


# --- failing probes


@pytest.mark.parametrize("action", ["skip", "warn", "stop", "rollback"])
def test_an_engine_that_differs_ends_the_run_before_the_first_update_whatever_the_action(action):
    world = Probed(("rollout-0", "rollout-1"))
    world.error["rollout-1"] = 0.25
    settings = config(steps=3, health={"min_signal_groups": 0, "action": action})
    with pytest.raises(Unhealthy) as stop:
        train(world, settings)
    message = str(stop.value)
    assert message.startswith(
        "step 1: engine and trainer are not the same model at version 0: rollout-1 and the policy differ by "
        "0.25 nats on average, 0.25 at most, over 8 tokens (bound 0.001 in float32, "
        "`weight_sync.probe_above`). Stopped before the update. "
    )
    assert "rollout-0" not in message and "model.dtype=float32" in message
    assert not world.updates and stop.value.exit_code == 3
    assert world.logged[1]["probe/logprob_diff_mean"] == pytest.approx(0.25)
    assert world.notes[-1] == message


@pytest.mark.parametrize(
    ("dtype", "above", "error", "passes"),
    [
        ("float32", None, 0.9e-3, True), ("float32", None, 1.1e-3, False),
        ("bfloat16", None, 0.14, True), ("bfloat16", None, 0.16, False),
        ("float32", 0.5, 0.4, True), ("bfloat16", 0.01, 0.02, False),
        ("float32", None, math.nan, False), ("float32", None, -1.1e-3, False),
    ],
)  # fmt: skip
def test_the_bound_is_that_of_the_policys_dtype_unless_it_is_set(dtype, above, error, passes):
    world = Probed(dtype=dtype)
    world.error["rollout-0"] = error
    if passes:
        train(world, config(above=above, steps=1))
        assert "(bound " in world.notes[0] and dtype in world.notes[0]
    else:
        with pytest.raises(Unhealthy, match=f"in {dtype}"):
            train(world, config(above=above, steps=1))
    assert len(world.updates) == passes


def test_one_token_whose_log_prob_is_nan_ends_the_run_with_a_message():
    """A training batch excludes such a sample; the probe must not."""
    world = Probed()
    workers = world.workers()
    sample = workers.probe.sample

    async def sample_nan(*request):
        groups = await sample(*request)
        groups[0][0].logprobs[1] = math.nan
        return groups

    workers.probe.sample = sample_nan
    with pytest.raises(Unhealthy, match="the policy differ by nan nats on average, nan at most, over 8"):
        asyncio.run(run(config(steps=1), workers, fakes.prompts(40), [], world, world))
    assert not world.updates


def updates_differ_by(world, *means):
    """Make the update of each step report this mean difference for its samples."""
    update = world.update

    async def update_with_mismatch(batches, *, kl_coef, bounds):
        mean = means[len(world.updates)]
        mismatch = {"mismatch/logprob_diff_mean": mean, "mismatch/logprob_diff_max": 2 * mean}
        return await update(batches, kl_coef=kl_coef, bounds=bounds) | mismatch

    world.update = update_with_mismatch


def test_the_samples_of_an_on_policy_step_are_held_to_the_bound_at_every_step():
    """Two steps after the only probe, the sync of the update's weights is lost."""
    world = Probed()
    updates_differ_by(world, 1e-6, 1e-6, 0.3)
    with pytest.raises(Unhealthy) as stop:
        train(world, config(0, steps=5, checkpoint={"every": 1}))
    assert str(stop.value).startswith(
        "step 3: engine and trainer are not the same model at version 2: log-probs of its own samples differ "
        "by 0.3 nats on average, 0.6 at most (bound 0.001 in float32, `weight_sync.probe_above`). Stopped; "
        "no checkpoint has this update. "
    )
    assert world.version == 2 and list(world.saved) == [1, 2] and world.notes[-1] == str(stop.value)
    assert world.logged[3]["mismatch/logprob_diff_mean"] == 0.3


def test_samples_of_older_weights_are_not_held_to_the_bound():
    world = Probed()
    updates_differ_by(world, 1e-6, 0.3, 0.3)
    train(world, config(1, steps=3, max_staleness=1))
    assert len(world.updates) == 3 and world.logged[2]["rollout/staleness_max"] == 1


def test_every_dtype_of_a_policy_has_a_bound():
    names = Config.model_fields["model"].annotation.model_fields["dtype"].annotation.__args__
    quantised = Config.model_fields["rollout"].annotation.model_fields["quantization"].annotation.__args__
    assert (set(names) - {"auto"}) | (set(quantised) - {"none"}) == set(BOUNDS)


@pytest.mark.parametrize(
    ("quantization", "share", "passes"), [("fp8", 0.9, True), ("fp8", 1.1, False), ("none", 0.9, False)]
)
def test_engines_in_fp8_are_held_to_a_bound_of_their_own(quantization, share, passes):
    world = Probed(dtype="bfloat16")
    world.error["rollout-0"] = share * BOUNDS["fp8"]
    settings = config(steps=1, rollout={"quantization": quantization})
    precision = "fp8" if quantization == "fp8" else "bfloat16"
    if passes:
        train(world, settings)
        assert f"bound {BOUNDS['fp8']:g} in fp8" in world.notes[0]
        return
    with pytest.raises(Unhealthy, match=rf"not the same model.*bound {BOUNDS[precision]:g} in {precision}"):
        train(world, settings)


def test_a_run_that_fails_its_probe_ends_with_exit_code_3_and_one_message(capsys):
    world = Probed()
    world.error["rollout-0"] = 1.0
    with pytest.raises(Unhealthy) as end:
        train(world, config(steps=1))
    code = report_end(end.value)
    message = capsys.readouterr().err
    assert code == 3 and message.count("\n") == 1 and "not the same model" in message


def test_a_run_that_ends_for_another_reason_leaves_no_probe_behind():
    world = Probed(fail_on="p3")
    sample = Probes.sample

    class Slow(Probes):
        async def sample(self, engine, *request):
            await asyncio.sleep(60)
            return await sample(self, engine, *request)

    async def session():
        slow = dataclasses.replace(world.workers(), probe=Slow(world))
        with pytest.raises(RuntimeError, match="engine died on p3"):
            await run(config(steps=40), slow, fakes.prompts(4), [], world, world)
        assert [task for task in asyncio.all_tasks() if "probe" in task.get_name()] == []

    asyncio.run(session())


def test_settings_of_the_probe_may_change_on_resume():
    assert fingerprint(config(3, 0.5)) == fingerprint(config())


# --- records and report


def test_a_probe_that_passes_is_an_event_and_no_warning(tmp_path, capsys):
    with Tracker(fakes.config(tracking={"console": False, "tensorboard": False}), tmp_path) as tracker:
        tracker.note("sync probe of rollout-0 at version 0: 1e-07 nats")
    (event,) = map(json.loads, (tmp_path / EVENTS).read_text().splitlines())
    assert event["message"].startswith("sync probe of rollout-0") and event["step"] == 0
    assert capsys.readouterr() == ("", "")
