"""The real loop on fake workers: order, staleness, resuming, deadlines and failures."""

import asyncio
import dataclasses
import gc
from collections import Counter

import numpy as np
import pytest
import torch

from grpo_dist.data.order import OrderState
from grpo_dist.data.stream import PromptStream
from grpo_dist.driver import run
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.loop.pipeline import build_order
from grpo_dist.types import Group, TeacherLogprobs
from tests.support import fakes

DEMO = [{"path": "demo:add3"}]
EVERY_2 = {"before": False, "every": 2, "samples_per_prompt": 2}
EVALUATED = {"evaluation": EVERY_2, "data": {"train": DEMO, "eval": DEMO}}
SETS = [EvalSet("held", fakes.prompts(3))]


def train(world, config, prompts, eval_sets=(), **kwargs):
    workers = world.workers(reference=config.needs_reference)
    return asyncio.run(run(config, workers, prompts, list(eval_sets), world, world, **kwargs))


def test_synchronous_loop_samples_updates_and_syncs_in_turn():
    world, config = fakes.World(), fakes.config(steps=3)
    train(world, config, fakes.prompts(20))
    loop = [e for e in world.events if not e.startswith("samples")]
    assert loop == [
        "update at version 0", "sync 1 with 0 in flight",
        "update at version 1", "sync 2 with 0 in flight",
        "update at version 2", "sync 3 with 0 in flight", "settled", "end",
    ]  # fmt: skip
    assert [world.logged[s]["rollout/staleness_max"] for s in (1, 2, 3)] == [0, 0, 0]


def test_what_exists_before_the_loop_is_left_out_of_garbage_collections_while_it_runs(monkeypatch):
    world, frozen = fakes.World(), []
    update = type(world).update

    async def count_frozen(self, *arguments, **options):
        frozen.append(gc.get_freeze_count())
        return await update(self, *arguments, **options)

    monkeypatch.setattr(type(world), "update", count_frozen)
    gc.unfreeze()  # objects frozen at the start of the tests
    train(world, fakes.config(steps=2), fakes.prompts(20))
    assert len(frozen) == 2 and min(frozen) > 1000 and gc.get_freeze_count() == 0


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_token_is_staler_than_the_bound_and_the_bound_is_used(staleness):
    world, config = fakes.World(), fakes.config(steps=6, max_staleness=staleness)
    train(world, config, fakes.prompts(40))
    staleness_max = [world.logged[s]["rollout/staleness_max"] for s in range(1, 7)]
    assert max(staleness_max) == staleness
    assert staleness_max[-1] == staleness


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_prompt_of_an_epoch_is_trained_once(staleness):
    world, config = fakes.World(), fakes.config(steps=5, max_staleness=staleness)
    train(world, config, fakes.prompts(20))
    assert sorted(uid for uid, _, _ in world.sampled) == sorted(f"p{i}" for i in range(20))


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_ledger_has_every_prompt_of_every_step_once(staleness):
    world, config = fakes.World(), fakes.config(steps=5, max_staleness=staleness)
    train(world, config, fakes.prompts(20))
    lists = [uids for step in range(1, 6) for uids in world.ledger_entries[step].values()]
    assert sorted(uid for uids in lists for uid in uids) == sorted(f"p{i}" for i in range(20))
    for step, batch in enumerate(world.updates, start=1):
        with_advantage = {int(g) for u in batch for g in u.group_ids[u.policy.advantages.any(dim=1)]}
        assert len(world.ledger_entries[step].get("trained", ())) == len(with_advantage)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_batches_do_not_depend_on_the_order_in_which_groups_finish(staleness):
    batches = []
    for jitter in (True, False, True):
        world = fakes.World(jitter=jitter)
        train(world, fakes.config(max_staleness=staleness), fakes.prompts(40))
        batches.append(world.updates)
    for repeated in batches[1:]:
        for a, b in zip(batches[0], repeated, strict=True):
            assert torch.equal(a[0].tokens, b[0].tokens)
            assert torch.equal(a[0].policy.advantages, b[0].policy.advantages)


@pytest.mark.parametrize("staleness", [0, 2])
def test_resuming_from_a_checkpoint_repeats_the_uninterrupted_run(staleness):
    uninterrupted = fakes.World()
    train(uninterrupted, fakes.config(steps=6, max_staleness=staleness), fakes.prompts(40))

    config = fakes.config(steps=6, max_staleness=staleness, checkpoint={"every": 3})
    first = fakes.World()
    train(first, config, fakes.prompts(40))
    assert sorted(first.saved[3].pipeline.ahead) == list(range(3, 3 + staleness))

    second = fakes.World()
    second.version = 3
    train(second, config, fakes.prompts(40), progress=first.saved[3])
    for a, b in zip(uninterrupted.updates[3:], second.updates, strict=True):
        assert torch.equal(a[0].tokens, b[0].tokens)
    resampled = {uid for uid, _, _ in second.sampled}
    ahead = {g.prompt.uid for batch in first.saved[3].pipeline.ahead.values() for g in batch.groups}
    assert not resampled & ahead


@pytest.mark.parametrize("dynamic", [False, True])
def test_finished_groups_of_an_unfinished_batch_are_kept(dynamic):
    """One group of the next batch is slow: the checkpoint has the other three; a resumed run samples it."""
    config = fakes.config(
        steps=2, max_staleness=1, checkpoint={"every": 1}, weight_sync={"mode": "keep"},
        **({"dynamic_sampling": {"enabled": True, "max_extra_prompts": 1}} if dynamic else {}),
    )  # fmt: skip
    uninterrupted = fakes.World(jitter=False)
    train(uninterrupted, config, fakes.prompts(40))
    order = build_order(config, fakes.prompts(40), OrderState())
    _, second_batch = order.take(0), order.take(1)
    # One of the four is zero-variance: with dynamic sampling its replacement runs during the slow group.
    launched = [fakes.prompts(40)[order.prompt(place)].uid for place in second_batch[: 5 if dynamic else 4]]
    batch_uids = launched[:4]

    class Slow(fakes.World):
        async def sample(self, prompt, **request):
            samples = await super().sample(prompt, **request)
            if prompt.uid == batch_uids[2]:
                while 1 not in self.saved:
                    await asyncio.sleep(0)
            return samples

    first = Slow(jitter=False)
    train(first, config, fakes.prompts(40))
    assert 1 not in first.saved[1].pipeline.ahead
    assert {g.prompt.uid for g in first.saved[1].pipeline.partial[1]} == {*launched} - {batch_uids[2]}
    second = fakes.World(jitter=False)
    second.version = 1
    train(second, config, fakes.prompts(40), progress=first.saved[1])
    assert [uid for uid, _, _ in second.sampled if uid in launched] == [batch_uids[2]]
    assert torch.equal(uninterrupted.updates[1][0].tokens, second.updates[0][0].tokens)


def test_reference_logprobs_reach_the_batch_only_when_kl_is_on():
    world = fakes.World()
    train(world, fakes.config(steps=1), fakes.prompts(8))
    assert world.updates[0][0].policy.ref_logprobs is None
    world = fakes.World()
    train(world, fakes.config(steps=1, algorithm={"kl": {"coef": 0.1}}), fakes.prompts(8))
    batch = world.updates[0][0]
    assert torch.equal(batch.policy.ref_logprobs, torch.where(batch.policy.mask, -1.0, 0.0))


def test_updates_per_step_splits_whole_groups_with_their_own_denominators():
    world = fakes.World()
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 2}
    train(world, fakes.config(steps=1, batch=batch), fakes.prompts(8))
    first, second = world.updates[0]
    assert (len(first), len(second)) == (4, 4)
    assert (first.denominators.tokens, first.denominators.sequences) == (8.0, 4.0)


@pytest.mark.parametrize(("after", "evaluated_steps"), [(False, [0, 2, 4]), (True, [0, 2])])
def test_evaluation_comes_before_training_and_every_n_steps(after, evaluated_steps):
    """The last step is evaluated only if the exported model is not."""
    world = fakes.World()
    evaluation = {"before": True, "after": after, "every": 2, "samples_per_prompt": 2, "k": [1, 2]}
    train(world, fakes.config(steps=4, evaluation=evaluation), fakes.prompts(20), SETS)
    assert [s for s, m in sorted(world.logged.items()) if "eval/held/pass@1" in m] == evaluated_steps
    assert world.logged[0]["eval/held/pass@1"] == 1.0  # the fake grader calls everything correct
    assert {"eval/held/pass@1_stderr", "eval/held/pass@2"} <= set(world.logged[2])


class Peak(fakes.World):
    """Half of the answers are correct, and all of version 4."""

    async def score(self, prompt, rollouts):
        group = await super().score(prompt, rollouts)
        outcomes = ("correct", "correct" if self.version == 4 else "wrong")
        return dataclasses.replace(group, outcomes=outcomes[: len(rollouts)])


def test_the_best_checkpoint_is_made_when_it_is_measured_and_remembered_over_a_resume():
    config = fakes.config(**EVALUATED, steps=8, checkpoint={"every": 5, "keep_best": "eval/held/pass@1"})
    world, resumed = Peak(), Peak()
    train(world, config, fakes.prompts(20), SETS)
    assert {step: progress.best for step, progress in world.saved.items()} == {
        2: (2, 0.5), 4: (4, 1.0), 5: (4, 1.0), 8: (4, 1.0)
    }  # fmt: skip
    assert world.notes[1] == "the checkpoint of step 4 is the best: eval/held/pass@1 = 1"
    resumed.version = 5
    train(resumed, config, fakes.prompts(20), SETS, progress=world.saved[5])
    assert {step: progress.best for step, progress in resumed.saved.items()} == {8: (4, 1.0)}
    unknown = fakes.config(**EVALUATED, steps=3, checkpoint={"keep_best": "eval/other/pass@1"})
    train(world := Peak(), unknown, fakes.prompts(20), SETS)
    assert "the evaluation of step 2 has no such metric; it has eval/held/" in world.warnings[0]


@pytest.mark.parametrize(
    ("stop", "last_step", "words"),
    [
        ({"patience": 1}, 6, "1 of step 4 was not exceeded by 1 evaluations"),
        ({"patience": 2}, 8, "1 of step 4 was not exceeded by 2 evaluations"),
        ({"target": 0.9}, 4, "1 of step 4 has reached `checkpoint.target` = 0.9"),
        ({"target": 1.1, "patience": 9}, 12, ""),
    ],
)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_ends_early_by_its_best_evaluation_and_so_does_its_resume(stop, last_step, words, staleness):
    checkpoint = {"every": 5, "keep_best": "eval/held/pass@1", **stop}
    config = fakes.config(**EVALUATED, steps=12, checkpoint=checkpoint, max_staleness=staleness)
    world, resumed = Peak(), Peak()
    assert train(world, config, fakes.prompts(20), SETS) == last_step == max(world.saved)
    assert words in world.notes[-1]
    resumed.version = last_step
    assert train(resumed, config, fakes.prompts(20), SETS, progress=world.saved[last_step]) == last_step
    assert not resumed.saved and not resumed.updates


@pytest.mark.parametrize(("minutes", "saved_steps"), [(1e-9, [1, 2, 3]), (1e9, [3]), (None, [3])])
def test_a_checkpoint_is_due_by_time_too(minutes, saved_steps):
    world = fakes.World()
    checkpoint = {"every": 0, "every_minutes": minutes}
    train(world, fakes.config(steps=3, checkpoint=checkpoint), fakes.prompts(20))
    assert list(world.saved) == saved_steps


def test_failure_of_one_sample_ends_the_run_with_its_own_error():
    world = fakes.World(fail_on="p3")
    with pytest.raises(RuntimeError, match="engine died on p3"):
        train(world, fakes.config(steps=5), fakes.prompts(20))


def test_a_batch_that_is_not_sampled_before_the_deadline_is_named():
    world = fakes.World()

    async def stuck(prompt, *, seeds, sampling):
        await asyncio.sleep(60)

    world.sample = stuck
    config = fakes.config(cluster={"timeouts": {"sample_s": 0.05}})
    with pytest.raises(TimeoutError, match=r"sample: batch 0.*0\.05 s"):
        train(world, config, fakes.prompts(20))


def test_the_control_shuffles_rewards_among_samples():
    world, control = fakes.World(), fakes.World()
    settings = {"steps": 2, "batch": {"prompts_per_step": 8, "samples_per_prompt": 4}}
    settings["algorithm"] = {"advantage": {"std": "none"}, "skip_idle_rows": False}
    train(world, fakes.config(**settings), fakes.prompts(20))
    train(control, fakes.config(**settings, rewards={"shuffle": True}), fakes.prompts(20))
    for plain, mixed in zip(world.updates, control.updates, strict=True):
        assert torch.equal(plain[0].tokens, mixed[0].tokens)
        assert not torch.equal(plain[0].policy.advantages, mixed[0].policy.advantages)
    assert world.logged[1]["reward/mean"] == control.logged[1]["reward/mean"]


def test_a_run_of_one_sample_a_prompt_trains_on_all_of_them():
    """REINFORCE++ needs no group: its baseline is the mean over the tokens of the step."""
    world = fakes.World()
    batch = {"prompts_per_step": 6, "samples_per_prompt": 1}
    config = fakes.config(steps=2, batch=batch, algorithm={"advantage": "reinforce_pp"})
    train(world, config, fakes.prompts(20))
    assert [len(update) for updates in world.updates for update in updates] == [6, 6]
    for (update,) in world.updates:
        trained = update.policy.advantages[update.policy.mask]
        assert trained.any() and abs(float(trained.mean())) < 1e-5


# --- dynamic sampling


def only_some_differ(world, silent):
    """Make the groups of ``silent`` prompts zero-variance."""

    async def score(prompt, rollouts):
        rewards = np.arange(len(rollouts), dtype=np.float32) * (prompt.uid not in silent)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))

    world.score = score


def dynamic(**settings):
    return {"enabled": True} | settings


def test_groups_without_a_signal_are_replaced_by_further_prompts():
    silent = {f"p{i}" for i in range(20)}
    world = fakes.World()
    only_some_differ(world, silent)
    config = fakes.config(steps=3, dynamic_sampling=dynamic(max_extra_prompts=40))
    train(world, config, fakes.prompts(40))
    for step in (1, 2, 3):
        (batch,) = world.updates[step - 1]
        assert len(batch) == 8 and batch.policy.advantages[batch.policy.mask].all()
        # The metrics include discarded groups.
        extra = world.logged[step]["group/extra_prompts"]
        assert world.logged[step]["group/no_signal_share"] == pytest.approx(extra / (4 + extra))
        assert world.logged[step]["rollout/tokens"] == 2 * 2 * (4 + extra)
        assert world.logged[step]["group/samples_per_trained"] == (4 + extra) / 4
    sampled = len(world.sampled)
    assert sampled == 12 + sum(world.logged[s]["group/extra_prompts"] for s in (1, 2, 3)) > 12


def test_a_curriculum_also_learns_from_discarded_groups():
    world = fakes.World()
    only_some_differ(world, {f"p{i}" for i in range(20)})
    data = {"train": DEMO, "order": "pass_rate"}
    config = fakes.config(steps=8, data=data, dynamic_sampling=dynamic(), checkpoint={"every": 8})
    train(world, config, fakes.prompts(40))
    assert set(world.saved[8].pipeline.order.pass_rates) == {uid for uid, _, _ in world.sampled}


def test_the_bound_on_extra_prompts_is_kept_and_the_batch_stays_full():
    world = fakes.World()
    only_some_differ(world, {f"p{i}" for i in range(40)})
    train(world, fakes.config(steps=2, dynamic_sampling=dynamic(max_extra_prompts=5)), fakes.prompts(40))
    assert [world.logged[s]["group/extra_prompts"] for s in (1, 2)] == [5, 5]
    assert len(world.sampled) == 2 * (4 + 5)
    assert [len(batches[0]) for batches in world.updates] == [8, 8]


def test_dynamic_batches_do_not_depend_on_timing_and_resume_the_same():
    silent = {f"p{i}" for i in range(0, 40, 2)}
    config = fakes.config(
        steps=4, max_staleness=1, checkpoint={"every": 2}, dynamic_sampling=dynamic(oversample=1.5)
    )
    worlds = []
    for jitter, start, progress in ((True, 0, None), (False, 0, None), (True, 2, 1)):
        world = fakes.World(jitter=jitter)
        world.version = start
        only_some_differ(world, silent)
        restored = worlds[progress].saved[2] if progress is not None else None
        train(world, config, fakes.prompts(40), progress=restored)
        worlds.append(world)
    first, second, resumed = (w.updates for w in worlds)
    pairs = [*zip(first, second, strict=True), *zip(first[2:], resumed, strict=True)]
    assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in pairs)
    extra = [worlds[0].logged[s]["group/extra_prompts"] for s in (3, 4)]
    assert extra == [worlds[2].logged[s]["group/extra_prompts"] for s in (3, 4)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_dynamic_sampling_samples_every_prompt_of_an_epoch_once_also_across_a_resume(staleness):
    """26 prompts, of which every third is zero-variance; batches take the 4 to 10 that they need."""
    config = fakes.config(
        steps=15, max_staleness=staleness, checkpoint={"every": 5},
        dynamic_sampling=dynamic(oversample=1.5, max_extra_prompts=6),
    )  # fmt: skip
    worlds = []
    for start in (0, 5, 10):
        world = fakes.World()
        world.version = start
        only_some_differ(world, {f"p{i}" for i in range(0, 26, 3)})
        progress = worlds[-1].saved[start] if start else None
        train(world, config, fakes.prompts(26), progress=progress)
        worlds.append(world)
    entries = [worlds[min(step // 5, 2)].ledger_entries[step + 1] for step in range(15)]
    assert entries == [worlds[0].ledger_entries[step + 1] for step in range(15)]
    counted = Counter(uid for entry in entries for uids in entry.values() for uid in uids)
    order = worlds[0].saved[15].pipeline.order
    assert counted == PromptStream(fakes.prompts(26), 10, seed=0, state=order).sampled()
    assert sum(counted.values()) > 15 * 4 and len(counted) == 26
    assert max(counted.values()) - min(counted.values()) <= 1 + staleness


@pytest.mark.parametrize(("n", "staleness"), [(40, 0), (40, 1), (16, 1), (40, 4)])
def test_an_epoch_ends_before_the_next_begins_even_if_a_step_may_use_all_prompts(n, staleness):
    """No step needs extra prompts, but batches in flight reserve them."""
    world = fakes.World()
    only_some_differ(world, set())
    extra = dynamic(max_extra_prompts=n)
    config = fakes.config(steps=n // 4, max_staleness=staleness, dynamic_sampling=extra)
    train(world, config, fakes.prompts(n))
    entries = world.ledger_entries.values()
    counted = Counter(uid for entry in entries for uids in entry.values() for uid in uids)
    assert counted == {f"p{i}": 1 for i in range(n)}


def test_remax_samples_every_prompt_greedily_for_its_baseline():
    world = fakes.World()
    requests, sample = [], world.sample

    async def record(prompt, *, seeds, sampling):
        requests.append((prompt.uid, len(seeds), sampling.temperature))
        return await sample(prompt, seeds=seeds, sampling=sampling)

    async def score(prompt, rollouts):
        """Return i / 10 for the greedy answer to problem i, and i for sample i; one is unscored."""
        values = [int(prompt.uid[1:]) / 10] if len(rollouts) == 1 else range(len(rollouts))
        if prompt.uid == "p3" and len(rollouts) == 1:
            values = [np.nan]
        rewards = np.array(values, np.float32)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))

    world.sample, world.score = record, score
    config = fakes.config(
        steps=1, batch={"prompts_per_step": 8, "samples_per_prompt": 2}, algorithm={"advantage": "remax"}
    )
    train(world, config, fakes.prompts(8))
    assert sorted(requests) == sorted([(f"p{i}", n, t) for i in range(8) for n, t in ((1, 0.0), (2, 1.0))])
    (batch,) = world.updates[0]
    actual = sorted(
        batch.policy.advantages[i, 3].item() for i in range(len(batch)) if batch.policy.mask[i].any()
    )
    expected = [value - i / 10 for i in range(8) if i != 3 for value in (0, 1)]
    assert actual == pytest.approx(sorted(e for e in expected if e))


def test_the_kl_weight_follows_the_target_and_survives_a_resume():
    kl = {"coef": 0.1, "target": 0.5, "gain": 1.0}
    config = fakes.config(steps=4, algorithm={"kl": kl}, checkpoint={"every": 2})

    async def update(batches, *, kl_coef, bounds):
        world.kl_coefs.append(kl_coef)
        return {"ref/kl": 5.0}

    world = fakes.World()
    world.update = update
    train(world, config, fakes.prompts(40))
    expected = [0.1, 0.12, 0.144, 0.1728]
    assert world.kl_coefs == pytest.approx(expected)
    assert [world.logged[s]["ref/kl_coef"] for s in (1, 2, 3, 4)] == pytest.approx(expected)
    progress = world.saved[2]
    world = fakes.World()
    world.update = update
    train(world, config, fakes.prompts(40), progress=progress)
    assert world.kl_coefs == pytest.approx(expected[2:])


@pytest.mark.parametrize("staleness", [0, 1])
def test_batches_are_trained_with_the_refreshed_reference(staleness):
    """Batches sampled ahead with the old reference get the log-probs of the new one."""
    world = fakes.World()
    refreshes = []

    async def refresh():
        refreshes.append(world.version)

    async def logprobs(prompt, rollouts, top_k=0):
        values = [np.full(len(r.completion_ids), -1.0 - len(refreshes), np.float32) for r in rollouts]
        return list(map(TeacherLogprobs, values))

    world.refresh, world.logprobs = refresh, logprobs
    workers = dataclasses.replace(world.workers(reference=True), reference_sync=world)
    config = fakes.config(
        steps=5, max_staleness=staleness, algorithm={"kl": {"coef": 0.1}}, reference={"refresh_every": 2}
    )
    asyncio.run(run(config, workers, fakes.prompts(40), [], world, world))
    assert refreshes == [2, 4]
    ref_logprobs = [float(b[0].policy.ref_logprobs[b[0].policy.mask].unique()) for b in world.updates]
    assert ref_logprobs == [-1.0, -1.0, -2.0, -2.0, -3.0]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_curriculum_follows_what_was_observed_and_resumes_the_same(staleness):
    """The order of prompts depends on rewards, not on timing or a restart."""
    config = fakes.config(
        steps=12, max_staleness=staleness, checkpoint={"every": 6}, data={"train": DEMO, "order": "pass_rate"}
    )
    worlds = []
    for jitter, start in ((True, 0), (False, 0), (True, 6)):
        world = fakes.World(jitter=jitter)
        world.version = start

        async def score(prompt, rollouts):
            rewards = np.array([float(r.completion_ids[0] % 2) for r in rollouts], np.float32)
            rewards *= int(prompt.uid[1:]) % 2
            outcomes = tuple("correct" if r else "wrong" for r in rewards)
            return Group(prompt, rollouts, rewards, {"math": rewards}, outcomes)

        world.score = score
        progress = worlds[0].saved[6] if start else None
        train(world, config, fakes.prompts(12), progress=progress)
        worlds.append(world)
    first, second, resumed = (w.updates for w in worlds)
    pairs = [*zip(first, second, strict=True), *zip(first[6:], resumed, strict=True)]
    assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in pairs)
    rates = worlds[0].saved[12].pipeline.order.pass_rates
    assert set(rates) == {uid for uid, _, _ in worlds[0].sampled}
    assert all(correct == 0 < scored for uid, (correct, scored) in rates.items() if int(uid[1:]) % 2 == 0)
    assert any(correct > 0 for correct, _ in rates.values())


@pytest.mark.parametrize("staleness", [0, 1])
def test_running_reward_statistics_cover_every_step_once_and_survive_a_resume(staleness):
    """Advantages of a step normalise its rewards by all rewards so far, staged ahead or not."""
    algorithm = {"advantage": {"name": "reinforce_pp", "whiten": False}, "reward_norm": "running"}
    settings = {"steps": 6, "max_staleness": staleness, "algorithm": algorithm}
    uninterrupted = fakes.World()
    train(uninterrupted, fakes.config(**settings), fakes.prompts(40))
    first = fakes.World()
    config = fakes.config(**settings, checkpoint={"every": 3})
    train(first, config, fakes.prompts(40))
    all_rewards = []
    for step, (batch,) in enumerate(uninterrupted.updates):
        rewards = (batch.tokens[range(len(batch)), batch.prompt_lengths] % 2).double().numpy()
        all_rewards.extend(rewards)
        spread = np.std(all_rewards, ddof=1)
        expected = (rewards - np.mean(all_rewards)) / (spread + 1e-6)
        actual = batch.policy.advantages[range(len(batch)), batch.prompt_lengths].numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
        if step == 2:
            assert first.saved[3].rewards.count == len(all_rewards)
    second = fakes.World()
    second.version = 3
    train(second, config, fakes.prompts(40), progress=first.saved[3])
    for a, b in zip(uninterrupted.updates[3:], second.updates, strict=True):
        assert torch.equal(a[0].policy.advantages, b[0].policy.advantages)
