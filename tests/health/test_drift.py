"""A drifting run causes a warning with any configuration; a healthy one does not."""

import asyncio
import dataclasses
import json
import math
import random

import numpy as np
import pytest

from grpo_dist.driver import run
from grpo_dist.health.bounds import HealthState
from grpo_dist.health.drift import DRIFTING, count_drifting, new_drifts, track
from grpo_dist.runs.checkpoint import CheckpointState
from grpo_dist.runs.resume import load_progress
from tests.support import fakes
from tests.support.tiers import slow_after

REWARD, ENTROPY = "reward/mean", "policy/entropy"
CUT, GARBAGE = "rollout/truncated_share", "rollout/degenerate_share"


def tracked(values_of):
    """Track metrics with these values of each step. Return the state at the end, the warnings by step, and
    how many metrics drifted at each step.
    """
    known, said, counts = {}, {}, []
    for step, values in enumerate(zip(*values_of.values(), strict=True), 1):
        known = track(known, step, dict(zip(values_of, values, strict=True)))
        counts.append(count_drifting(known))
        if messages := list(new_drifts(known, step)):
            said[step] = messages
    return known, said, counts


def warned_at(metric, values):
    return list(tracked({metric: values})[1])


def flat(value, steps=20):
    return [value] * steps


# --- when it warns, and when it does not


@pytest.mark.parametrize(
    ("metric", "before", "near", "beyond"),
    [
        (REWARD, 0.75, 0.375, 0.359375),  # half of it is 0.375
        (ENTROPY, 2.0, 0.2, 0.1875),  # a tenth is 0.2
        (CUT, 0.0, 0.484375, 0.515625),  # a half
        (CUT, 0.3125, 0.609375, 0.640625),  # twice is 0.625
        (GARBAGE, 0.0, 0.484375, 0.515625),
        (GARBAGE, 0.3125, 0.609375, 0.640625),
    ],
)
def test_each_metric_warns_at_its_threshold_and_not_before(metric, before, near, beyond):
    assert warned_at(metric, flat(before) + flat(near, 80)) == []
    assert len(warned_at(metric, flat(before) + flat(beyond, 80))) == 1


def test_a_moving_average_decides():
    """From 2 to 0 it is 2 * 0.9^k after k steps: below 0.2 with k = 22."""
    assert warned_at(ENTROPY, flat(2.0) + flat(0.0, 40)) == [42]
    # From 0 to 1 it is 1 - 0.9^k: at least 0.5 with k = 7.
    assert warned_at(CUT, flat(0.0) + flat(1.0)) == [27]
    assert warned_at(CUT, flat(0.0) + flat(1.0, 6) + flat(0.0)) == []


def test_a_reward_is_compared_with_its_best_average_wherever_it_is():
    """After 20 steps at 0.1 and 20 at 0.8 the average is 0.8 - 0.7 * 0.9^20 = 0.7149, then at 0.2 after k
    steps 0.2 + 0.5149 * 0.9^k: below 0.3574 with k = 12.
    """
    known, said, _ = tracked({REWARD: flat(0.1) + flat(0.8) + flat(0.2)})
    assert (known[REWARD].reference, known[REWARD].reference_step) == (pytest.approx(0.8 - 0.7 * 0.9**20), 40)
    (message,) = said[52]
    assert list(said) == [52]
    assert message == (
        "reward/mean drifts: its moving average is 0.3454, lower by more than half of the best, 0.7149 at "
        "step 40. This is only a warning; to act on it, set `health.reward_below_share`"
    )


def test_a_reward_that_is_never_above_0_also_warns_after_a_fall():
    """From -1 that is a fall to less than -1.5; from 0, any that is more than chance. Of -1 and 1, 40 % of
    them right, the mean is -0.2, with all wrong -1.
    """
    assert warned_at(REWARD, flat(-1.0) + flat(-1.5, 40)) == []
    assert len(warned_at(REWARD, flat(-1.0) + flat(-1.5625, 40))) == 1
    assert len(warned_at(REWARD, flat(0.0) + flat(-5.0))) == 1
    draw = random.Random(0)
    wrong = [sum(draw.choice((-1, -1, -1, 1, 1)) for _ in range(32)) / 32 for _ in range(300)]
    assert warned_at(REWARD, wrong) == []
    (step,) = warned_at(REWARD, wrong + flat(-1.0))
    assert step <= 310


def test_a_fall_within_chance_does_not_warn():
    """Steps of 0.75 and -0.25 in turn differ by 1: the variance is 0.5, and the error of the difference of
    two averages sqrt(0.5 * 0.2 / 1.9) = 0.229. The best average is that of the first 5 steps, 0.35. A fall
    to -1.25 is by 1.6, less than 7 errors, 1.606; one to -2.5 is more.
    """
    known, said, _ = tracked({REWARD: [0.75, -0.25] * 10})
    one = known[REWARD]
    assert (one.reference, one.reference_step, one.steps) == (pytest.approx(0.35), 5, 20) and not said
    assert one.scatter == pytest.approx(0.5)
    for mean, times in ((0.0, 0), (-1.25, 0), (-2.5, 1)):
        assert len(warned_at(REWARD, [0.75, -0.25] * 10 + [mean + 0.5, mean - 0.5] * 10)) == times


@pytest.mark.parametrize("since", [5, 6, 8, 9, 12, 20])
def test_a_collapse_within_the_first_steps_warns(since):
    """32 samples per step; from step ``since`` on those of a policy ruined by a high learning rate."""
    draw = np.random.default_rng(since)

    def share(before, after):
        return list(draw.binomial(32, flat(before, since - 1) + flat(after, 101 - since)) / 32)

    right, wrong = share(0.5, 0.03), share(0.4, 0.0)
    for metric, values in {REWARD: right, CUT: share(0.05, 0.98), GARBAGE: share(0.02, 0.9)}.items():
        (step,) = warned_at(metric, values)
        assert step <= max(20, since + 12)
    (step,) = warned_at(REWARD, [2 * value - 1 for value in wrong])
    assert step <= max(20, since + 12)
    assert len(warned_at(ENTROPY, flat(1.0, since - 1) + flat(0.02, 101 - since))) == 1


@pytest.mark.parametrize(
    ("metric", "before", "after", "scatter"),
    [(REWARD, 0.6, 0.3, 0.08), (ENTROPY, 2.0, 0.2, 0.02), (CUT, 0.05, 0.5, 0.08), (GARBAGE, 0.3, 0.6, 0.08)],
)
def test_a_metric_that_stays_at_its_threshold_warns_once_or_twice(metric, before, after, scatter):
    """1000 noisy steps cross the threshold many times in both directions."""
    draw = random.Random(0)
    values = [draw.gauss(level, scatter) for level in flat(before, 50) + flat(after, 1000)]
    assert 1 <= len(warned_at(metric, values)) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_noisy_or_rare_rewards_do_not_warn_until_they_collapse(seed):
    """32 samples per step: -1 or 1 with equal odds; 0 or 1, right in 1 of 200 or 3 of 10."""
    draw = random.Random(seed)
    even = [sum(draw.choice((-1, 1)) for _ in range(32)) / 32 for _ in range(500)]
    rare = [sum(draw.random() < 0.005 for _ in range(32)) / 32 for _ in range(500)]
    third = [sum(draw.random() < 0.3 for _ in range(32)) / 32 for _ in range(500)]
    assert warned_at(REWARD, even) == warned_at(REWARD, rare) == warned_at(REWARD, third) == []
    assert len(warned_at(REWARD, even + flat(-1.0))) == 1
    assert len(warned_at(REWARD, third + flat(0.0))) == 1


def test_a_healthy_run_causes_no_warning():
    """It learns, its entropy halves, and its completions grow tenfold without truncation."""
    steps = [k / 200 for k in range(200)]
    _, said, counts = tracked({
        REWARD: [0.1 + 0.7 * k for k in steps],
        ENTROPY: [1.0 - 0.5 * k for k in steps],
        CUT: [0.05 * k for k in steps],
        GARBAGE: flat(0.0, 200),
        "rollout/length_tokens": [200 + 1800 * k for k in steps],
    })  # fmt: skip
    assert not said and counts == [0] * 200


@pytest.mark.parametrize("lacking", [math.nan, math.inf, None])
def test_a_step_that_lacks_a_metric_is_left_out(lacking):
    """Every third step lacks the entropy: the 42nd value is that of step 62."""
    known, said = {}, {}
    values = iter(flat(2.0) + flat(0.0, 25))
    for step in range(1, 66):
        value = lacking if step % 3 == 0 else next(values, None)
        known = track(known, step, {} if value is None else {ENTROPY: value})
        if messages := list(new_drifts(known, step)):
            said[step] = messages
    assert (known[ENTROPY].reference, known[ENTROPY].reference_step) == (2.0, 7)
    assert list(said) == [62]
    assert said[62][0].startswith(
        "policy/entropy drifts: its moving average is 0.197, less than a tenth of 2 at step 7. "
    )
    assert known[ENTROPY].since == 62 and count_drifting(track(known, 66, {})) == 1


def test_a_drift_warns_when_it_begins_and_again_only_after_it_ended():
    """The average is at least 0.5 from step 27 on, below 0.4 from step 48 on, and 0.5 again at step 66."""
    cut = flat(0.0) + flat(1.0) + flat(0.0, 20) + flat(1.0, 20)
    _, said, counts = tracked({CUT: cut})
    assert list(said) == [27, 66]
    assert [step for step, count in enumerate(counts, 1) if count] == [*range(27, 48), *range(66, 81)]


# --- in the loop


class Drifting(fakes.World):
    """From step ``since`` on nothing is right, all text is degenerate, and the entropy is near 0."""

    def __init__(self, since, sampled=0):
        super().__init__(jitter=False)
        self._since, self._scored, self._first = since, sampled * 4, sampled

    async def score(self, prompt, rollouts):
        group = await super().score(prompt, rollouts)
        step, self._scored = self._scored // 4 + 1, self._scored + 1
        lost = step >= self._since
        rewards = np.zeros(2, np.float32) if lost else np.array([0.0, 1.0 - step / 100], np.float32)
        return dataclasses.replace(group, rewards=rewards, degenerate=2 if lost else 0)

    async def update(self, batches, *, kl_coef, bounds):
        step = self._first + len(self.updates) + 1
        metrics = await super().update(batches, kl_coef=kl_coef, bounds=bounds)
        return metrics | {ENTROPY: 0.01 if step >= self._since else 1.0 - step / 100}


def train(world, **kwargs):
    config = fakes.config(steps=48, checkpoint={"every": 1})
    asyncio.run(run(config, world.workers(), fakes.prompts(40), [], world, world, **kwargs))
    clocked = ("time/", "throughput/")
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(clocked)}
        for step, metrics in world.logged.items()
    }


def test_with_defaults_a_run_that_drifts_warns_and_continues():
    """It drifts from step 25 on. The best average of the reward, 0.5 - k / 200 at step k, is that of steps 1
    to 5, 0.485; at step 30 it is 0.2231. The degenerate share averages 1 - 0.9^7 = 0.5217 at step 31. The
    entropy, 1 - k / 100, has the average 0.97 at step 5 and 0.0917 at step 46.
    """
    world = Drifting(since=25)
    logged = train(world)
    assert len(world.updates) == 48 and not world.quarantined
    assert [text.split(" drifts")[0] for text in world.warnings] == [
        f"step 30: {REWARD}", f"step 31: {GARBAGE}", f"step 46: {ENTROPY}",
    ]  # fmt: skip
    assert world.warnings[1] == (
        "step 31: rollout/degenerate_share drifts: its moving average is 0.5217, at least twice the least, 0 "
        "at step 5. This is only a warning; to act on it, set `health.degenerate_above`"
    )
    assert [logged[step][DRIFTING] for step in (1, 24, 29, 30, 31, 48)] == [0, 0, 0, 1, 2, 3]


def through_a_checkpoint(progress, tmp_path):
    """Return ``progress`` with its health state as a checkpoint stores it."""
    state = CheckpointState(
        progress.step, "", "", health=json.loads(json.dumps(dataclasses.asdict(progress.health)))
    )
    return dataclasses.replace(progress, health=load_progress(tmp_path, state, []).health)


@pytest.fixture(scope="module")
def uninterrupted():
    whole = Drifting(since=25)
    return whole, train(whole)


@pytest.mark.parametrize("step", slow_after([(step,) for step in range(1, 48)], 8))
def test_a_run_resumed_from_any_step_warns_and_counts_as_an_uninterrupted_one(uninterrupted, tmp_path, step):
    whole, logged = uninterrupted
    resumed = Drifting(since=25, sampled=step)
    resumed.version = step
    again = train(resumed, progress=through_a_checkpoint(whole.saved[step], tmp_path))
    assert again == {later: logged[later] for later in range(step + 1, 49)}
    due = [w for w in whole.warnings if int(w.split(":")[0].removeprefix("step ")) > step]
    assert resumed.warnings == due
    assert resumed.saved[48].health == whole.saved[48].health


def test_a_checkpoint_of_an_older_version_restarts_tracking():
    """It had windows of single steps, under another name."""
    older = {
        "recent": [[1, 0.5]],
        "reference": {"first": 1, "last": 5, "mean": 0.5, "steps": 5},
        "since": None,
    }
    state = HealthState.from_json({"best_reward": 0.5, "followed": {REWARD: older}})
    assert (state.best_reward, state.tracked) == (0.5, {})
