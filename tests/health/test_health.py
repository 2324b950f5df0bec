"""Steps without training, bounds on metrics, and the consequences of exceeding one."""

import asyncio
import dataclasses
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_dist import health as health_watch
from grpo_dist.cli import report_end
from grpo_dist.config import HealthConfig
from grpo_dist.driver import run
from grpo_dist.errors import Rollback, Unhealthy
from grpo_dist.health import HealthState, HealthWatch, passed
from grpo_dist.observe.tracker import Tracker
from grpo_dist.types import Group
from tests.support import fakes
from tests.support.made_groups import group


def train(world, config, **kwargs):
    asyncio.run(run(config, world.workers(), fakes.prompts(40), [], world, world, **kwargs))


def scored_by(group_rewards):
    """Return a world with the rewards ``rewards_of`` (batch number, index of the group in the batch)."""
    world, uids = fakes.World(jitter=False), []

    async def score(prompt, rollouts):
        step, index = divmod(len(uids), 4)
        uids.append(prompt.uid)
        rewards = np.array(group_rewards(step, index), np.float32)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))

    world.score = score
    return world


def set_update_metrics(world, **by_step):
    """Make updates of ``world`` return these metrics, a list with one value per step."""
    update, names = world.update, {name.replace("__", "/"): values for name, values in by_step.items()}

    async def update_with_metrics(batches, *, kl_coef, bounds):
        step = len(world.updates)
        return await update(batches, kl_coef=kl_coef, bounds=bounds) | {n: v[step] for n, v in names.items()}

    world.update = update_with_metrics


# --- steps that are not trained on


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_without_signal_is_not_trained_on_and_versions_still_advance(staleness):
    """Of steps 1 to 4, the second has only zero-variance groups, the third has one with a signal."""
    signals = [4, 0, 1, 4]
    world = scored_by(lambda step, index: [0.0, 1.0] if index < signals[step] else [1.0, 1.0])
    config = fakes.config(steps=4, max_staleness=staleness, health={"min_signal_groups": 1})
    train(world, config)
    assert len(world.updates) == 3
    assert [world.logged[s]["health/low_signal"] for s in (1, 2, 3, 4)] == [0, 1, 0, 0]
    assert [e.split(" with")[0] for e in world.events if e.startswith("sync")] == [
        "sync 1", "sync 2", "sync 3", "sync 4",
    ]  # fmt: skip
    assert world.warnings == [
        "step 2: not trained on, rewards differ within 0 of 4 groups (`health.min_signal_groups` = 1)"
    ]
    assert "train/rows" not in world.logged[2] and world.logged[2]["reward/mean"] == 1.0


def test_a_step_that_lacks_a_signal_because_samples_were_not_scored_says_so():
    world = scored_by(lambda step, index: [math.nan, 1.0])
    train(world, fakes.config(steps=1, health={"min_signal_groups": 1}))
    (warning,) = world.warnings
    assert "rewards differ within 0 of 4 groups" in warning
    assert warning.endswith("4 of 8 samples were not scored: the rewards gave no reason")


def test_the_minimum_number_of_groups_with_a_signal_can_be_set():
    for needed, trained in ((0, 2), (2, 1), (3, 0)):
        world = scored_by(lambda step, index: [0.0, float(index < 2 * step)])
        train(world, fakes.config(steps=2, health={"min_signal_groups": needed}))
        assert len(world.updates) == trained, needed


def test_every_step_is_trained_on_if_equal_rewards_give_advantages():
    world = scored_by(lambda step, index: [1.0, 1.0])
    algorithm = {"advantage": "reinforce_pp"}
    train(world, fakes.config(steps=2, health={"min_signal_groups": 1}, algorithm=algorithm))
    assert len(world.updates) == 2 and not world.warnings


def unscored_in(steps):
    """Return a world whose reward scores nothing in ``steps``, numbered from 0, and the reason."""
    reason = "reward mine:score: ZeroDivisionError: division by zero (/home/me/mine.py:2 in score)"

    def group_rewards(step, index):
        return [math.nan] * 2 if step in steps else [0.0, 1.0]

    world = scored_by(group_rewards)
    score = world.score

    async def with_reasons(prompt, rollouts):
        group = await score(prompt, rollouts)
        return dataclasses.replace(group, failures=[(reason,)] * 2 if np.isnan(group.rewards).all() else ())

    world.score = with_reasons
    return world, reason


def test_a_step_in_which_no_sample_is_scored_ends_the_run_with_the_reason():
    """With any action, and before 50 steps without a trained token."""
    for action in ("skip", "warn", "stop", "rollback"):
        world, reason = unscored_in({1})
        with pytest.raises(Unhealthy) as end:
            train(world, fakes.config(steps=9, health={"action": action}))
        assert end.value.exit_code == 3 and len(world.updates) == 1
        message = str(end.value)
        assert message.startswith(
            f"step 2: the first step in which no sample could be scored: {reason}. Stopped"
        )
        assert world.warnings == [f"step 2: no sample could be scored: {reason}"]
        assert world.logged[2]["reward/unscored"] == 8.0


def test_a_key_allows_more_steps_in_which_no_sample_is_scored():
    world, _ = unscored_in({1, 3, 4})
    train(world, fakes.config(steps=6, health={"unscored_steps_above": 2}))
    assert len(world.updates) == 3
    world, _ = unscored_in({1, 3, 4})
    with pytest.raises(Unhealthy, match="step 5: the last of 2 steps in a row in which no sample could be"):
        train(world, fakes.config(steps=6, health={"unscored_steps_above": 1}))
    world, _ = unscored_in(range(6))
    train(world, fakes.config(steps=6, health={"unscored_steps_above": None}))
    assert not world.updates


def test_the_kl_weight_stays_where_nothing_was_trained():
    world = scored_by(lambda step, index: [0.0, float(step != 1)])
    set_update_metrics(world, ref__kl=[5.0, math.nan, 5.0])
    kl = {"coef": 0.1, "target": 0.5, "gain": 1.0}
    config = fakes.config(steps=4, health={"min_signal_groups": 1}, algorithm={"kl": kl})
    workers = world.workers(reference=True)
    asyncio.run(run(config, workers, fakes.prompts(40), [], world, world))
    kl_coefs = [world.logged[s]["ref/kl_coef"] for s in (1, 2, 3, 4)]
    # Step 1 raises it by a fifth; step 2 is not trained on; the KL of step 3 is NaN.
    assert kl_coefs == pytest.approx([0.1, 0.12, 0.12, 0.12])


def test_the_batch_of_a_skipped_update_is_quarantined_and_the_run_continues():
    world = fakes.World(jitter=False)
    set_update_metrics(world, health__skipped_updates=[0.0, 1.0, 0.0], loss__total=[0.5, math.nan, 0.5])
    train(world, fakes.config(steps=3))
    assert list(world.quarantined) == [2] and len(world.quarantined[2]) == 4
    (warning,) = world.warnings
    assert "step 2: 1 update(s) skipped" in warning and "quarantine/step_000002.parquet" in warning
    assert [world.logged[s]["health/skipped_updates"] for s in (1, 2, 3)] == [0, 1, 0]
    assert [world.logged[s]["health/skipped_in_a_row"] for s in (1, 2, 3)] == [0, 1, 0]


def test_weights_that_are_not_finite_end_the_run_before_an_engine_gets_them():
    world = fakes.World(jitter=False)
    set_update_metrics(world, health__bad_weights=[0.0, 1.0])
    with pytest.raises(
        Unhealthy, match=r"step 2: the weights are not finite.*quarantine/step_000002\.parquet"
    ):
        train(world, fakes.config(steps=3, checkpoint={"every": 1}))
    assert world.version == 1 and list(world.saved) == [1]
    assert list(world.quarantined) == [2] and world.logged[2]["health/bad_weights"] == 1.0


def test_a_quarantined_batch_is_a_table_of_its_samples(tmp_path):
    config = fakes.config(tracking={"samples": False, "console": False, "tensorboard": False})
    with Tracker(config, tmp_path) as tracker:
        path = tracker.quarantine(12, [group(0, np.random.default_rng(0), rewards=[0, 1, 1, 0])])
    assert path == str(tmp_path / "quarantine" / "step_000012.parquet")
    assert pq.read_table(path)["reward"].to_pylist() == [0, 1, 1, 0]


# --- bounds


def watch(state=None, **settings):
    return HealthWatch(fakes.config(health=settings), fakes.World(), state or HealthState())


def alarms_for(metrics, state=None, **settings):
    alarms, counts = watch(state, **settings).examine(1, metrics)
    return [bound.describe(metrics | counts) for bound in alarms]


@pytest.mark.parametrize(
    ("settings", "metric", "okay", "beyond", "words"),
    [
        ({"entropy_below": 0.1}, "policy/entropy", 0.1, 0.09, "0.09 is below 0.1 (`health.entropy_below`)"),
        ({"truncated_above": 0.5}, "rollout/truncated_share", 0.5, 0.75, "0.75 is above 0.5"),
        ({}, "mismatch/logprob_diff_mean", 0.5, 1.5, "1.5 is above 1 (`health.mismatch_above`)"),
        ({}, "ref/kl", 9.0, 11.0, "11 is above 10 (`health.kl_above`)"),
        ({"kl_above": None}, "ref/kl", 1e9, None, None),
    ],
)
def test_a_metric_beyond_its_bound_is_named_with_value_bound_and_key(settings, metric, okay, beyond, words):
    for harmless in (okay, math.nan):
        assert alarms_for({metric: harmless}, **settings) == []
    assert alarms_for({}, **settings) == []
    if beyond is not None:
        (alarm,) = alarms_for({metric: beyond}, **settings)
        assert alarm.startswith(f"{metric} = ") and words in alarm


def test_a_reward_is_compared_with_the_highest_so_far():
    """The highest is 0.2, then 0.8, half of it 0.1, then 0.4; 0.39 is below that, 0.4 is not."""
    health = watch(reward_below_share=0.5)
    rewards = [0.2, 0.8, 0.4, math.nan, 0.39]
    alarms = [[a.key for a in health.examine(1, {"reward/mean": r})[0]] for r in rewards]
    assert alarms == [[], [], [], [], ["reward_below_share"]]
    assert health.state.best_reward == 0.8
    negative = watch(reward_below_share=0.5)  # a share of -1 would be above it
    assert [negative.examine(1, {"reward/mean": r})[0] for r in (-1.0, -3.0)] == [[], []]


def test_a_gradient_is_compared_with_the_median_of_earlier_ones():
    """The median of 1, 5, 2, 4, 3 is 3, four times that is 12. Fewer than five norms have no bound."""
    norms = [1.0, 5.0, 2.0, 4.0]
    assert alarms_for({"policy/grad_norm": 100.0}, HealthState(None, tuple(norms)), grad_norm_spike=4) == []
    before = HealthState(None, (*norms, 3.0))
    assert alarms_for({"policy/grad_norm": 12.0}, before, grad_norm_spike=4) == []
    assert alarms_for({"policy/grad_norm": 12.5}, before, grad_norm_spike=4) == [
        "policy/grad_norm = 12.5 is above 4 x 3, its median (`health.grad_norm_spike`)"
    ]
    health = watch(HealthState(None, tuple(map(float, range(1, 21)))))
    health.examine(1, {"policy/grad_norm": 21.0})
    assert health.state.grad_norms == tuple(map(float, range(2, 22)))


def test_steps_that_trained_on_nothing_do_not_make_a_gradient_a_spike():
    health = watch(grad_norm_spike=4, action="skip")
    for step in range(1, 13):
        health.examine(step, {"policy/grad_norm": 0.0})
    assert not passed(health.update_bounds(), {"policy/grad_norm": 0.5})


def test_too_many_skipped_updates_in_a_row_exceed_a_bound():
    health = watch(skipped_steps_above=2)
    skipped = [1.0, 0.0, 1.0, 2.0, 1.0]
    alarms = [[a.key for a in health.examine(1, {"health/skipped_updates": n})[0]] for n in skipped]
    assert alarms == [[], [], [], [], ["skipped_steps_above"]]


@pytest.mark.parametrize("action", ["skip", "warn", "stop", "rollback"])
def test_skipped_updates_end_the_run_whatever_the_action(action):
    health = watch(skipped_steps_above=2, action=action)
    for step in (1, 2, 3):
        alarms, counts = health.examine(step, {"health/skipped_updates": 1.0, "train/loss_tokens": 5.0})
        if step < 3:
            health.act(step, alarms, counts, [])
    with pytest.raises((Unhealthy, Rollback), match=r"health/skipped_in_a_row = 3 is above 2"):
        health.act(3, alarms, counts, [])


def test_a_step_is_rolled_back_from_only_once():
    health = watch(HealthState(avoid=(3,), skipped=1), skipped_steps_above=1, action="rollback")
    for step, error in ((2, Rollback), (3, Unhealthy)):
        with pytest.raises(error, match=f"^step {step}: health/skipped_in_a_row"):
            health.act(step, *health.examine(step, {"health/skipped_updates": 1.0}), [])


def test_stop_ends_the_run_after_the_step_is_recorded_and_before_it_is_saved(capsys):
    world = fakes.World(jitter=False)
    set_update_metrics(world, ref__kl=[0.1, 0.1, 12.0, 0.1])
    config = fakes.config(steps=4, checkpoint={"every": 1}, health={"action": "stop"})
    with pytest.raises(Unhealthy) as end:
        train(world, config)
    for part in ("step 3: ref/kl = 12 is above 10 (`health.kl_above`)", "quarantine/step_000003.parquet"):
        assert part in str(end.value)
    assert list(world.saved) == [1, 2] and world.logged[3]["health/alarms"] == 1.0
    assert list(world.quarantined) == [3]
    assert report_end(end.value) == 3
    assert capsys.readouterr().err == f"{end.value}\n"


# --- steps that are skipped for a bound


def looping(share):
    """Return a world where from the second batch on a ``share`` of the samples is degenerate."""
    world, uids = fakes.World(jitter=False), []
    score = world.score

    async def score_degenerate(prompt, rollouts):
        group = await score(prompt, rollouts)
        uids.append(prompt.uid)
        later = len(uids) > 4
        return dataclasses.replace(group, degenerate=round(share * len(rollouts)) if later else 0)

    world.score = score_degenerate
    return world


def test_a_batch_beyond_a_bound_is_reported_and_kept_and_not_trained_on():
    world = looping(share=1.0)
    train(world, fakes.config(steps=3, health={"degenerate_above": 0.9}, tracking={"samples": False}))
    assert len(world.updates) == 1 and world.version == 3
    assert list(world.quarantined) == [2, 3] and len(world.quarantined[2]) == 4
    assert world.warnings[0] == (
        "step 2: not trained on, rollout/degenerate_share = 1 is above 0.9 (`health.degenerate_above`); its "
        "batch is in quarantine/step_000002.parquet"
    )
    assert [world.logged[s]["health/skipped_in_a_row"] for s in (1, 2, 3)] == [0, 1, 2]
    assert "trained" in world.ledger_entries[1] and "skipped" in world.ledger_entries[2]
    half = looping(share=0.5)
    train(half, fakes.config(steps=3, health={"degenerate_above": 0.9}))
    assert len(half.updates) == 3 and half.logged[3]["rollout/degenerate_share"] == 0.5


def test_a_reward_that_has_collapsed_is_not_trained_on():
    world = scored_by(lambda step, index: [0.0, 1.0 if step != 1 else 0.4])
    train(world, fakes.config(steps=3, health={"reward_below_share": 0.5}))
    assert len(world.updates) == 2
    assert [step for step in world.ledger_entries if "skipped" in world.ledger_entries[step]] == [2]
    assert "reward/mean = 0.2 is below 0.5 x 0.5, its greatest" in world.warnings[0]


def test_a_run_that_skips_too_many_steps_in_a_row_is_stopped():
    world = looping(share=1.0)
    with pytest.raises(Unhealthy, match=r"step 4: health/skipped_in_a_row = 3 is above 2 \(`health\.skip"):
        train(world, fakes.config(steps=8, health={"skipped_steps_above": 2, "degenerate_above": 0.9}))
    assert len(world.updates) == 1 and sorted(world.logged) == [1, 2, 3, 4]


# --- runs that train on nothing


@pytest.mark.parametrize("action", ["skip", "warn", "stop", "rollback"])
@pytest.mark.parametrize("kind", ["equal rewards", "not scored"])
def test_a_run_that_trains_on_no_token_for_too_many_steps_ends_whatever_the_action(kind, action, monkeypatch):
    """Of the first four steps only the second is trained on, which resets the count."""
    assert health_watch._MOST_IDLE == 50
    monkeypatch.setattr(health_watch, "_MOST_IDLE", 2)
    equal = kind == "equal rewards"
    idle = [1.0, 1.0] if equal else [math.nan, math.nan]
    world = scored_by(lambda step, index: [0.0, 1.0] if step == 1 else idle)
    health = {"action": action, "min_signal_groups": int(equal), "unscored_steps_above": None}
    with pytest.raises(Unhealthy) as stop:
        train(world, fakes.config(steps=9, health=health))
    assert str(stop.value).startswith("step 5: 3 steps in a row trained on no token: reward/mean = ")
    assert stop.value.exit_code == 3
    assert [world.logged[s]["health/idle_in_a_row"] for s in sorted(world.logged)] == [1, 0, 1, 2, 3]
    assert [world.logged[s]["train/loss_tokens"] for s in sorted(world.logged)] == [0, 16, 0, 0, 0]


def test_a_run_whose_samples_are_all_cut_off_and_masked_trains_on_no_token(monkeypatch):
    monkeypatch.setattr(health_watch, "_MOST_IDLE", 3)
    world = fakes.World(jitter=False)
    sample = world.sample

    async def cut(prompt, **request):
        return tuple(dataclasses.replace(r, finish_reason="length") for r in await sample(prompt, **request))

    world.sample = cut
    config = fakes.config(steps=9, health={"min_signal_groups": 0}, algorithm={"mask_truncated": True})
    with pytest.raises(Unhealthy, match=r"step 4: 4 steps in a row.*rollout/truncated_share = 1\. Stopped"):
        train(world, config)


def test_idle_steps_are_counted_across_a_resume(monkeypatch):
    config = fakes.config(steps=4, checkpoint={"every": 2}, health={"min_signal_groups": 1})
    world = scored_by(lambda step, index: [1.0, 1.0])
    train(world, config)
    assert world.saved[2].health.idle == 2 and not world.updates
    resumed = scored_by(lambda step, index: [1.0, 1.0])
    resumed.version = 2
    monkeypatch.setattr(health_watch, "_MOST_IDLE", 2)
    with pytest.raises(Unhealthy, match=r"step 3: 3 steps in a row"):
        train(resumed, config, progress=world.saved[2])


def test_updates_get_bounds_only_if_the_action_is_skip():
    """The median of 1 to 5 is 3."""
    keys = {}
    for action in ("skip", "warn", "stop", "rollback"):
        state = HealthState(None, (1.0, 2.0, 3.0, 4.0, 5.0))
        bounds = watch(state, action=action, grad_norm_spike=4, entropy_below=0.1).update_bounds()
        keys[action] = {bound.key: (bound.metric, bound.value, bound.above) for bound in bounds}
    assert keys.pop("skip") == {
        "entropy_below": ("policy/entropy", 0.1, False),
        "mismatch_above": ("mismatch/logprob_diff_mean", 1.0, True),
        "kl_above": ("ref/kl", 10.0, True),
        "grad_norm_spike": ("policy/grad_norm", 12.0, True),
    }
    assert not any(keys.values())


def test_a_warning_of_skipped_updates_names_the_bound():
    world = fakes.World(jitter=False)
    set_update_metrics(
        world,
        health__skipped_updates=[0.0, 2.0, 0.0], health__refused_kl_above=[0.0, 2.0, 0.0],
        ref__kl=[0.1, 12.0, 0.1], policy__grad_norm=[1.0, 50.0, 1.0],
    )  # fmt: skip
    train(world, fakes.config(steps=3))
    assert world.warnings == [
        "step 2: 2 update(s) skipped, 2 beyond `health.kl_above` (ref/kl = 12, policy/grad_norm = 50). They "
        "left the weights unchanged; the batch is kept in quarantine/step_000002.parquet"
    ]
    assert list(world.quarantined) == [2] and "skipped" in world.ledger_entries[2]


def test_the_gradient_norm_of_a_skipped_update_is_not_remembered():
    health = watch()
    for norm, skipped in ((1.0, 0.0), (50.0, 1.0), (2.0, 0.0)):
        health.examine(1, {"policy/grad_norm": norm, "health/skipped_updates": skipped})
    assert health.state.grad_norms == (1.0, 2.0)


def test_a_resumed_run_remembers_what_its_metrics_are_compared_with():
    """Step 4 is a collapse only relative to the reward 1 of step 1."""
    rewards = [1.0, 0.9, 0.9, 0.1]
    health = {"action": "warn", "reward_below_share": 0.5, "min_signal_groups": 0}
    config = fakes.config(steps=4, checkpoint={"every": 2}, health=health)
    world = scored_by(lambda step, index: [rewards[step]] * 2)
    set_update_metrics(world, policy__grad_norm=[1.0, 2.0, 3.0, 4.0])
    train(world, config)
    assert len(world.warnings) == 1
    state = world.saved[2].health
    assert state == HealthState(1.0, (1.0, 2.0), 0)
    resumed = scored_by(lambda step, index: [rewards[2 + step]] * 2)
    resumed.version = 2
    train(resumed, config, progress=world.saved[2])
    assert resumed.warnings == world.warnings


def test_a_bound_that_no_step_can_meet_is_refused():
    with pytest.raises(ValueError, match=r"`health\.min_signal_groups` = 5, .*no step would be trained"):
        fakes.config(health={"min_signal_groups": 5})
    assert HealthConfig().min_signal_groups == 1 and HealthConfig().action.kind == "skip"


def test_samples_with_a_nan_log_prob_are_counted_and_reported():
    world = fakes.World(jitter=False)
    score = world.score

    async def score_with_nan(prompt, rollouts):
        rollouts[0].logprobs[1] = math.nan
        return await score(prompt, rollouts)

    world.score = score_with_nan
    config = fakes.config(steps=1, algorithm={"skip_idle_rows": False})
    train(world, config)
    groups = config.batch.prompts_per_step
    assert world.logged[1]["rollout/nan_logprobs"] == groups
    assert [w for w in world.warnings if f"{groups} samples are not trained on" in w]
    ((batch,),) = world.updates
    empty = ~batch.policy.mask.any(dim=1)
    assert int(empty.sum()) == groups and batch.policy.rollout_logprobs.isfinite().all()
