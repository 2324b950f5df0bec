"""`sampling` that changes during a run, by step or steered: the real loop on fake workers."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.schedules import interpolated, latest, steer
from grpo_dist.config import Config
from grpo_dist.config.files import ConfigError, dump_config, load_config
from grpo_dist.driver import run
from grpo_dist.loop.progress import Progress
from grpo_dist.loop.sampling_schedule import SamplingSchedule, sampling_used
from grpo_dist.runs.checkpoint import Checkpoints, load_progress, load_state
from grpo_dist.runs.identity import changes, fingerprint
from grpo_dist.types import KeptTokens, Sampling
from tests.support import fakes
from tests.support.made_groups import group_of
from tests.support.tiers import slow_after

LENGTHS = {"schedule": [[0, 4], [2, 8], [4, 16]]}
COOLED = {"schedule": [[0, 1.0], [4, 0.6]]}
LONGER = {"kind": "adaptive", "start": 4, "largest": 16, "factor": 2.0, "truncated_above": 0.2, "patience": 2}
STEERED = {"kind": "adaptive", "start": 1.0, "entropy": 0.5, "gain": 1.0, "lowest": 0.7, "highest": 1.2}


class Drawing(fakes.World):
    """Its samples record their settings, which determine the truncated share and the entropy."""

    def __init__(self, **how) -> None:
        super().__init__(**how)
        self.asked: dict[str, Sampling] = {}

    async def sample(self, prompt, *, seeds, sampling):
        self.asked[prompt.uid] = sampling
        rollouts = await super().sample(prompt, seeds=seeds, sampling=sampling)
        return tuple(
            r.__class__(
                **{name: getattr(r, name) for name in r.__slots__}
                | {
                    "finish_reason": "length" if seed % 20 > sampling.max_new_tokens else "stop",
                    "logprobs": np.full(2, -(sampling.temperature**2) * (1 + seed % 7 / 10), np.float32),
                }
            )
            for r, seed in zip(rollouts, seeds, strict=True)
        )


def train(world, config, **kwargs):
    workers = world.workers(reference=config.needs_reference)
    asyncio.run(run(config, workers, fakes.prompts(80), [], world, world, **kwargs))
    return world


def logged_settings(world, steps):
    """Return the logged temperature and length of each step."""
    names = "sampling/temperature", "sampling/max_new_tokens"
    return [tuple(world.logged[step][name] for name in names) for step in range(1, steps + 1)]


def test_values_of_a_schedule_by_hand():
    assert [latest([(0, 8), (5, 16)], step) for step in (0, 4, 5, 99)] == [8, 8, 16, 16]
    assert [interpolated([(0, 1.0), (10, 0.5)], step) for step in (0, 5, 10, 99)] == [1.0, 0.75, 0.5, 0.5]
    # entropy 10 % too low: up by half of 10 %; far too high: down by half of the largest error, 20 %
    assert steer(0.8, 0.45, target=0.5, gain=-0.5) == pytest.approx(0.8 * 1.05)
    assert steer(0.8, 5.0, target=0.5, gain=-0.5) == pytest.approx(0.8 * 0.9)


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_step_is_sampled_by_its_number_however_early_it_is_launched(staleness):
    sampling = {"max_new_tokens": LENGTHS, "temperature": COOLED}
    config = fakes.config(max_staleness=staleness, sampling=sampling)
    world = train(Drawing(), config)
    expected = [(1.0, 4), (0.9, 4), (0.8, 8), (0.7, 8), (0.6, 16), (0.6, 16)]
    assert np.allclose(logged_settings(world, 6), expected)
    for step, updates in enumerate(world.updates):
        assert torch.allclose(updates[0].temperatures, torch.tensor(expected[step][0]).double())
        assert updates[0].policy.max_tokens == expected[step][1]  # the constant of seq-mean-token-sum-norm


@pytest.mark.parametrize("staleness", slow_after([0, 1, 2], 1))
@pytest.mark.parametrize("saved_at", [2, 3, 5])
def test_steered_sampling_resumes_as_if_it_had_not_been_interrupted(staleness, saved_at, tmp_path):
    """Through the files of a checkpoint, with batches in flight."""
    steered = {"max_new_tokens": LONGER, "temperature": STEERED | {"entropy": 0.9}}
    config = fakes.config(steps=9, max_staleness=staleness, checkpoint={"every": 1}, sampling=steered)
    uninterrupted = train(Drawing(), config)
    logged = logged_settings(uninterrupted, 9)
    # A correction waits for the first batch sampled with the previous one: every third step at staleness 2.
    least = {0: 4, 1: 4, 2: 3}[staleness]
    assert len({length for _, length in logged}) == 3 and len({heat for heat, _ in logged}) >= least, logged
    progress = through_files(tmp_path, config, uninterrupted.saved[saved_at])
    second = Drawing()
    second.version = saved_at
    train(second, config, progress=progress)
    for step in range(saved_at + 1, 10):
        assert second.logged[step]["sampling/temperature"] == logged[step - 1][0]
        assert second.logged[step]["sampling/max_new_tokens"] == logged[step - 1][1]
    for a, b in zip(uninterrupted.updates[saved_at:], second.updates, strict=True):
        assert torch.equal(a[0].tokens, b[0].tokens) and torch.equal(a[0].temperatures, b[0].temperatures)


def through_files(directory, config, progress) -> Progress:
    """Return ``progress`` after a round trip through the files of a checkpoint."""
    prompts = fakes.prompts(80)
    writer = Checkpoints(directory, config, prompts)

    class Policy:
        async def save(self, path, *, blocking):
            path.mkdir()
            (path / "weights").write_text("")

        async def saved(self):
            """Nothing is written in the background."""

    async def save():
        await writer.save(progress.step, fakes.Workers(None, None, None, Policy(), None), progress)
        await writer.settle()

    asyncio.run(save())
    (checkpoint,) = directory.iterdir()
    return load_progress(checkpoint, load_state(checkpoint, config), prompts)


def observe_all(settings, observations):
    """Return the sampling settings after each observation: (truncated samples of 10, entropy, length of the
    samples[, their temperature; default: the current one]).
    """
    schedule = SamplingSchedule(fakes.config(sampling=settings).sampling, Progress().pipeline.schedule)
    sampling = []
    for truncated, entropy, length, *temperatures in observations:
        group = group_of([1.0] * 10, [2] * 10, reasons=["length"] * truncated + ["stop"] * (10 - truncated))
        for rollout in group.rollouts:
            rollout.logprobs[:] = -entropy
        temperature = temperatures[0] if temperatures else schedule.of(99).temperature
        schedule.observe([group], Sampling(temperature, max_new_tokens=length))
        sampling.append(schedule.of(99))
    return sampling


def test_the_length_is_raised_after_enough_steps_in_a_row_that_were_drawn_with_it():
    rows = [(n, 1, 4) for n in (3, 2, 3, 3, 9, 9)] + [(9, 1, 8), (9, 1, 8), (9, 1, 16)]
    sampling = observe_all({"max_new_tokens": LONGER}, rows)
    # One above, one at the bound, two above: raised. Two of the old length, then two of the new: raised.
    assert [s.max_new_tokens for s in sampling] == [4, 4, 4, 8, 8, 8, 8, 16, 16]


def test_the_temperature_follows_the_entropy_within_its_bounds():
    rows = [(0, 0.45, 4), (0, 0.1, 4), (0, float("nan"), 4), (0, 9.0, 4)]
    sampling = observe_all({"temperature": STEERED}, rows)
    assert [s.temperature for s in sampling] == pytest.approx([1.1, 1.2, 1.2, 0.96])


def test_samples_drawn_before_the_last_correction_do_not_repeat_it():
    """With staleness 2 the batches in flight would raise 1.0 three times for one error."""
    rows = [(0, 0.45, 4), (0, 0.45, 4, 1.0), (0, 0.45, 4, 1.0), (0, 0.5, 4)]
    sampling = observe_all({"temperature": STEERED}, rows)
    assert [s.temperature for s in sampling] == pytest.approx([1.1, 1.1, 1.1, 1.1])


def test_a_factor_that_rounds_to_no_change_raises_the_length_by_one():
    small = LONGER | {"factor": 1.1, "patience": 1}
    sampling = observe_all({"max_new_tokens": small}, [(9, 1, 4), (9, 1, 5), (9, 1, 6)])
    assert [s.max_new_tokens for s in sampling] == [5, 6, 7]


def test_what_samples_were_drawn_with_is_read_from_them():
    """A user-written loop may train on samples of an earlier step."""
    current, group = Sampling(1.1, max_new_tokens=8, stop=("x",)), group_of([0.0, 1.0], [2, 2])
    recorded = [replace(r, temperature=1.1, max_new_tokens=8) for r in group.rollouts]
    old = replace(recorded[1], temperature=1.0, max_new_tokens=4)
    for rollouts, expected in (
        (group.rollouts, current),  # without settings
        (recorded, current),
        ((recorded[0], old), replace(current, temperature=1.0, max_new_tokens=4)),
    ):
        assert sampling_used([replace(group, rollouts=tuple(rollouts))], current) == expected


def test_numbers_stay_numbers_and_schedules_are_part_of_the_identity():
    plain, varied = fakes.config(), fakes.config(sampling={"max_new_tokens": LENGTHS, "temperature": STEERED})
    numbers = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 4, "stop": [],
    }  # fmt: skip
    assert plain.model_dump(mode="json")["sampling"] == numbers
    assert fingerprint(plain) != fingerprint(varied)
    assert any(change.decides(varied) for change in changes(dump_config(plain), varied))
    assert Config.model_validate(json.loads(varied.model_dump_json())) == varied
    assert (varied.sampling.shortest, varied.sampling.longest, varied.max_length) == (4, 16, 512 + 16)
    assert varied.sampling.at_its_longest.model_dump(mode="json") == numbers | {"max_new_tokens": 16}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_new_tokens", {"schedule": [[1, 8]]}, "expected rising ones, the first of them 0"),
        ("max_new_tokens", {"schedule": [[0, 8], [0, 9]]}, "expected rising ones"),
        ("max_new_tokens", {"schedule": [[0, 0]]}, "sampling.max_new_tokens.schedule.0.1"),
        ("max_new_tokens", {"start": 8}, "write `sampling.max_new_tokens: {kind: adaptive, start: ...}`"),
        ("max_new_tokens", {"kind": "adaptive", "start": 8}, "`sampling.max_new_tokens.largest` is missing"),
        ("max_new_tokens", {"kind": "adaptive", "start": 8, "largest": 8}, "largest = 8 must be above"),
        ("max_new_tokens", {"schedule": [[0, 8]], "patience": 2}, "it takes schedule; adaptive"),
        ("max_new_tokens", {"0": 8}, "sampling.max_new_tokens.0"),
        ("temperature", STEERED | {"start": 2.0, "highest": 1.5}, "start = 2 must be between lowest = 0.7"),
        ("temperature", {"schedule": [[0, 0.001]]}, "sampling.temperature.schedule.0.1"),
        ("temperature", "hot", "sampling.temperature"),
    ],
)
def test_an_impossible_schedule_is_refused_with_its_key(tmp_path, key, value, words):
    path = tmp_path / "run.yaml"
    base = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}
    path.write_text(json.dumps(base | {"sampling": {key: value}}))
    with pytest.raises(ConfigError) as error:
        load_config(str(path), [])
    assert words in str(error.value) and "changing" not in str(error.value), error.value


def test_a_step_is_divided_by_the_length_it_was_drawn_with_and_by_the_configured_one_without():
    from grpo_dist.loop.groups import ScoredGroup

    group = group_of([0.0, 1.0], [2, 2])
    long = replace(group, rollouts=tuple(replace(r, max_new_tokens=32) for r in group.rollouts))
    for scored, expected in ((group, 4), (long, 32)):
        (update,) = fakes.make_batches(fakes.config(), [ScoredGroup(scored, [])], 0, kl_coef=0.0)
        assert update.policy.max_tokens == expected


class Truncating(fakes.World):
    """Engines that return the masks of truncated samples."""

    async def sample(self, prompt, *, seeds, sampling):
        rollouts = await super().sample(prompt, seeds=seeds, sampling=sampling)
        if not sampling.is_truncated:
            return rollouts
        kept_by_sample = [KeptTokens.from_lists([[int(t), 90 + sampling.top_k] for t in r.completion_ids], 99)
               for r in rollouts]  # fmt: skip
        return tuple(replace(r, kept=kept) for r, kept in zip(rollouts, kept_by_sample, strict=True))


def test_updates_of_truncated_samples_have_their_masks():
    """Settings as in verl and TRL: top_p = 1, top_k = -1 and min_p = 0 give no mask."""
    plain, truncated = {"top_p": 1, "top_k": -1, "min_p": 0}, {"top_p": 0.95, "top_k": 5}
    for sampling in (plain, truncated):
        config = fakes.config(steps=2, sampling={"max_new_tokens": 4} | sampling)
        assert config.sampling.is_truncated is (sampling is truncated)
        world = fakes.train(Truncating(), config, fakes.prompts(8))
        batches = [batch for update in world.updates for batch in update]
        if sampling is plain:
            assert all(batch.kept is None for batch in batches)
            assert not any("kept" in name for name in world.logged[1])
        else:
            ids = [int(batch.kept[row].ids[1]) for batch in batches for row in range(len(batch))]
            assert ids == [95] * len(ids)
            assert world.logged[1]["sampling/kept_tokens_mean"] == 2.0


@pytest.mark.parametrize(
    ("key", "value"), [("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.0), ("min_p", -0.1)]
)
def test_an_impossible_truncation_is_refused_with_its_key(key, value):
    with pytest.raises(ValueError, match=rf"sampling\.{key}"):
        fakes.config(sampling={"max_new_tokens": 4, key: value})
