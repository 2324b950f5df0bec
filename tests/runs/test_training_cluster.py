"""The verbs of a user-written loop give the numbers of `train()`, and clear errors. Fake workers."""

import asyncio
import dataclasses
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import grpo_dist
from grpo_dist.driver import run
from grpo_dist.errors import SamplesFailed, SamplesLost, Unhealthy, UserError
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.runs import training_cluster
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.training_cluster import Verbs
from grpo_dist.runtime.seeds import request_seeds
from tests.support import fakes
from tests.support.fakes import Probed
from tests.support.patience import HANG_S

PROMPTS = fakes.prompts(40)


class FakeActors:
    def __init__(self, world, reference=False):
        self.world, self.reference, self.ended = world, reference, False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        self.ended = True

    async def where_stuck(self):
        return ""

    async def start_training(self, model_dir):
        return self.world.workers(self.reference)


@pytest.fixture
def started(monkeypatch):
    """Return a function that opens a cluster on ``world``."""

    def start(world, config, reference=False):
        eval_sets = [EvalSet("held", [dataclasses.replace(p, uid=f"held {p.uid}") for p in PROMPTS[:2]])]
        actors = FakeActors(world, reference)
        inputs = RunInputs(Path(), PROMPTS, eval_sets), actors
        monkeypatch.setattr(training_cluster.TrainingCluster, "_load_inputs", lambda _: inputs)
        world.actors = actors
        return grpo_dist.cluster(config)

    return start


def default_loop(cluster):
    logged = []
    for prompts in cluster.batches():
        groups = cluster.score(cluster.sample(prompts))
        metrics = cluster.update(groups)
        logged.append(metrics | cluster.sync())
    return logged


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm": {"kl": {"coef": 0.1, "target": 0.02}}}, {"data": "pass_rate"}]
)
def test_the_default_loop_has_the_numbers_of_train(started, changes):
    if "data" in changes:
        changes = {"data": {"train": [{"path": "demo:add3"}], "order": changes["data"]}}
    config, reference = fakes.config(**changes), "algorithm" in changes
    train, looped = fakes.World(jitter=False), fakes.World(jitter=False)
    asyncio.run(run(config, train.workers(reference), PROMPTS, [], train, train))
    with started(looped, config, reference) as cluster:
        logged = default_loop(cluster)
    assert looped.sampled == train.sampled and looped.kl_coefs == train.kl_coefs
    assert [e for e in looped.events if "update" in e] == [e for e in train.events if "update" in e]
    for updates, batches in zip(looped.updates, train.updates, strict=True):
        for one, other in zip(updates, batches, strict=True):
            assert one.policy.advantages.equal(other.policy.advantages) and one.tokens.equal(other.tokens)
    assert len(logged) == 6
    for step, metrics in enumerate(logged, start=1):
        expected = {k: v for k, v in train.logged[step].items() if not k.startswith(("time/", "throughput/"))}
        del expected["group/extra_prompts"]  # dynamic sampling, in `train` only
        assert expected == pytest.approx({k: metrics[k] for k in expected}, abs=0, rel=0, nan_ok=True)
    assert looped.actors.ended


@pytest.mark.parametrize(("every", "expected"), [(0, [0]), (2, [0, 2, 4])])
def test_engines_are_probed_after_the_first_sync_and_then_every_n_steps(started, every, expected):
    world = Probed(("rollout-0", "rollout-1"))
    with started(world, fakes.config(steps=5, weight_sync={"probe_every": every})) as cluster:
        logged = default_loop(cluster)
    assert world.probed == {version: ["rollout-0", "rollout-1"] for version in expected}
    assert [version for version, m in enumerate(logged) if "probe/logprob_diff_mean" in m] == expected


@pytest.mark.parametrize("first", [0, 2])
def test_an_engine_that_differs_stops_the_loop_with_the_message_of_train(started, first):
    """From the first sync or from a later one. The update is not made."""

    class Wrong(Probed):
        async def push(self, version):
            self.error["rollout-0"] = 0.25 if version >= first else 0.0
            return await super().push(version)

    config = fakes.config(steps=5, weight_sync={"probe_every": 2})
    trained, looped = Wrong(), Wrong()
    if first == 0:
        trained.error["rollout-0"] = 0.25  # the first push comes before `run`
    with pytest.raises(Unhealthy) as expected:
        asyncio.run(run(config, trained.workers(), PROMPTS, [], trained, trained))
    with pytest.raises(Unhealthy) as stop, started(looped, config) as cluster:
        default_loop(cluster)
    assert str(stop.value) == str(expected.value)
    assert f"not the same model at version {first}" in str(stop.value)
    assert len(looped.updates) == first and looped.actors.ended


def test_samples_of_another_call_in_the_same_step_are_others(started):
    with started(world := fakes.World(jitter=False), fakes.config()) as cluster:
        prompts = next(cluster.batches())
        assert next(cluster.batches()) == prompts  # until the update
        first, second = cluster.sample(prompts), cluster.sample(prompts, samples=3)
        assert [len(group.rollouts) for group in (*first, *second)] == [2] * 4 + [3] * 4
        seeds = [seed for uid, call_seeds, _ in world.sampled if uid == prompts[0].uid for seed in call_seeds]
        assert len(set(seeds)) == 5


@pytest.mark.parametrize("unscored", [0, 1, 2])
def test_advantages_of_the_caller_are_used_as_they_are(started, unscored):
    """Also of samples that the configured rewards could not score."""

    class Partly(fakes.World):
        async def score(self, prompt, rollouts):
            group = await super().score(prompt, rollouts)
            rewards = group.rewards.copy()
            rewards[:unscored] = np.nan
            return dataclasses.replace(group, rewards=rewards)

    config = fakes.config(algorithm={"skip_idle_rows": False}, max_staleness=1)
    with started(world := Partly(jitter=False), config) as cluster:
        groups = cluster.score(cluster.sample(next(cluster.batches())))
        cluster.update(groups, advantages=[[0.25 + i, -2.0] for i in range(4)])
        (batch,) = world.updates[0]
        advantages = batch.policy.advantages.numpy()[batch.policy.mask.numpy()]
        advantages = advantages.reshape(4, 2, 2)  # two tokens per sample
        assert advantages.tolist() == [[[0.25 + i] * 2, [-2.0] * 2] for i in range(4)]
        with pytest.raises(UserError, match=r"shapes \[\(3,\)\]; expected .* \[\(2,\)\]"):
            cluster.update(groups[:1], advantages=[np.zeros(3)])
        with pytest.raises(UserError, match="NaN"):
            cluster.update(groups[:1], advantages=[np.array([0.0, np.nan])])


TEACHERS, KL = [{"name": "t", "model": "reference"}], {"coef": 0.5}


@pytest.mark.parametrize(("settings", "message"), [
    ({"distillation": {"teachers": TEACHERS, "kl": "advantage"}}, r"`distillation\.kl` to sampled"),
    ({"distillation": {"teachers": TEACHERS, "kl": "sampled"}}, None),
    ({"algorithm": {"kl": KL | {"in_reward": True}}}, r"`algorithm\.kl\.in_reward` = true.*set it to false"),
    ({"algorithm": {"kl": KL | {"in_reward": False}}}, None),
])  # fmt: skip
def test_advantages_of_the_caller_are_refused_where_teacher_or_kl_is_part_of_them(started, settings, message):
    with started(world := fakes.World(jitter=False), fakes.config(**settings), reference=True) as cluster:
        groups = cluster.score(cluster.sample(next(cluster.batches())))
        advantages = [np.array([1.0, -1.0])] * 4
        if message:
            with pytest.raises(UserError, match=message):
                cluster.update(groups, advantages=advantages)
        cluster.update(groups, advantages=None if message else advantages)
        (batch,) = world.updates[0]
        if "algorithm" in settings:
            assert batch.policy.ref_logprobs is not None
        elif not message:
            assert batch.teacher.mask.any()


def test_advantages_of_the_caller_do_not_pass_a_bound_of_health(started):
    """They replace the reward signal, not the health checks of the batch."""

    class Cut(fakes.World):
        async def sample(self, prompt, **settings):
            rollouts = await super().sample(prompt, **settings)
            return tuple(dataclasses.replace(rollout, finish_reason="length") for rollout in rollouts)

    world = Cut(jitter=False)
    with started(world, fakes.config(health={"action": "skip", "truncated_above": 0.5})) as cluster:
        groups = cluster.score(cluster.sample(next(cluster.batches())))
        metrics = cluster.update(groups, advantages=[[1.0, -1.0]] * 4)
    assert metrics["health/skipped_updates"] == 1 and not world.updates


def test_prompts_of_the_callers_own_leave_the_pools_as_they_are(started):
    config = fakes.config(data={"train": [{"path": "demo:add3"}], "order": "pools"})
    with started(fakes.World(jitter=False), config) as cluster:
        prompts = [dataclasses.replace(p, uid=f"own {p.uid}") for p in PROMPTS[:4]]
        cluster.update(cluster.score(cluster.sample(prompts)))
        assert cluster.step == 1


def test_an_open_cluster_is_not_opened_again(started):
    """The workers of the first would be unreachable, and keep their GPUs."""
    with started(world := fakes.World(jitter=False), fakes.config()) as cluster:
        with pytest.raises(UserError, match="the cluster is open already"):
            cluster.open()
        assert cluster.step == 0
    assert world.actors.ended


def test_verbs_in_the_wrong_order_are_refused_with_what_to_do(started):
    world = fakes.World(jitter=False)
    with started(world, fakes.config(batch={"prompts_per_step": 4, "samples_per_prompt": 2})) as cluster:
        sampled = cluster.sample(next(cluster.batches()))
        with pytest.raises(UserError, match=r"has a SampledGroup; expected .* call score\(\) on them first"):
            cluster.update(sampled)
        with pytest.raises(UserError, match=r"score.*has a Prompt; expected a sequence of SampledGroup"):
            cluster.score([group.prompt for group in sampled])
        with pytest.raises(UserError, match=r"sample.*has a str"):
            cluster.sample(["2 + 2 ="])
        groups = cluster.score(sampled)
        with pytest.raises(UserError, match="0 groups cannot be split"):
            cluster.update([])
        cluster.update(groups)
        stale = cluster.score(cluster.sample(next(cluster.batches())))
        with pytest.raises(UserError, match=r"1 update\(s\) older .* sync\(\) was not called since the last"):
            cluster.update(stale)
        cluster.sync()
        with pytest.raises(UserError, match=r"`max_staleness` = 0; call sync\(\) after update\(\)"):
            cluster.update(stale)
        assert world.version == cluster.step == 1
    with pytest.raises(UserError, match="not open"):
        cluster.sync()


def test_older_samples_are_trained_within_max_staleness(started):
    with started(fakes.World(jitter=False), fakes.config(max_staleness=1)) as cluster:
        groups = cluster.score(cluster.sample(next(cluster.batches())))
        cluster.update(groups)
        assert cluster.update(groups)["rollout/staleness_max"] == 1.0
        with pytest.raises(UserError, match="2 update"):
            cluster.update(groups)


def test_the_verbs_work_inside_a_running_event_loop_and_from_several_threads(started):
    async def notebook():
        with started(fakes.World(), fakes.config(max_staleness=1)) as cluster:
            prompts = next(cluster.batches())
            groups, sampled = cluster.score(cluster.sample(prompts)), []
            ahead = threading.Thread(target=lambda: sampled.append(cluster.sample(cluster.prompts[:4])))
            ahead.start()
            cluster.update(groups)
            ahead.join()
            assert len(sampled[0]) == 4
            return cluster.evaluate()

    assert "eval/held/pass@1" in asyncio.run(notebook())


def test_samples_of_a_call_that_an_update_overtakes_have_the_seeds_of_the_step_it_began_in(
    started, monkeypatch
):
    """Another thread of the caller may end an update after `sample` counts and before its tasks begin."""
    world, original = fakes.World(jitter=False), Verbs._within
    overtaken = []

    async def slow(verbs, done, work):
        if overtaken:
            overtaken.clear()
            verbs.step, verbs._samples_drawn = verbs.step + 1, Counter()  # as `update` does at its end
        return await original(verbs, done, work)

    monkeypatch.setattr(Verbs, "_within", slow)
    with started(world, fakes.config(max_staleness=1)) as cluster:
        prompt = cluster.prompts[:1]
        overtaken.append(True)
        for _ in range(2):
            cluster.sample(prompt, samples=3)
        assert cluster.step == 1
    (uid, first, _), (_, second, _) = world.sampled
    assert first == tuple(request_seeds(0, 0, uid, range(3)))
    assert second == tuple(request_seeds(0, 1, uid, range(3)))


def test_a_call_that_is_open_when_the_block_ends_raises(started):
    """A call of another thread, which would wait forever."""
    waits = threading.Event()

    class Slow(fakes.World):
        async def sample(self, prompt, **settings):
            waits.set()
            try:
                await asyncio.sleep(HANG_S)
            finally:
                self.events.append("given up")

    def sample():
        try:
            cluster.sample(cluster.prompts[:1])
        except UserError as error:
            raised.append(str(error))

    raised, world = [], Slow(jitter=False)
    with pytest.raises(ValueError, match="of the caller"), started(world, fakes.config()) as cluster:
        ahead = threading.Thread(target=sample, daemon=True)
        ahead.start()
        assert waits.wait(HANG_S)
        loop = cluster._loop
        raise ValueError("of the caller")
    ahead.join(5)
    assert not ahead.is_alive() and "the cluster was closed during this call" in raised[0]
    assert world.events[-1] == "given up" and world.actors.ended
    with pytest.raises(UserError, match="the cluster was closed"):
        loop.run(asyncio.sleep(0))


def interrupted_update(cluster, groups, update_begun, monkeypatch, advantages=None):
    """Call `update`, and press Ctrl-C after ``update_begun``."""

    def interrupt(future):
        assert update_begun.wait(HANG_S)
        future.cancel()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training_cluster, "_result", interrupt)
        cluster.update(groups, advantages=advantages)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("first", [0.5, None])
def test_an_interrupted_update_is_made_once_and_synced_whole(started, monkeypatch, repeats, first):
    """Ctrl-C in a notebook, then the same cell with advantages edited in place, or the next cell."""
    update_begun, may_end, calls = threading.Event(), threading.Event(), []

    class Slow(fakes.World):
        async def update(self, *arguments, **settings):
            calls.append(self.version)
            update_begun.set()
            while not may_end.is_set():
                await asyncio.sleep(0.01)
            return await super().update(*arguments, **settings)

    with started(world := Slow(jitter=False), fakes.config(max_staleness=1)) as cluster:
        groups = cluster.score(cluster.sample(next(cluster.batches())))
        advantages = first and [np.full(len(scored.group.rollouts), first, np.float32) for scored in groups]
        interrupted_update(cluster, groups, update_begun, monkeypatch, advantages)
        assert cluster.step == 0
        for values in advantages or ():
            values[:] = 0.25
        threading.Timer(0.1, may_end.set).start()
        if repeats:
            with pytest.raises(UserError, match=r"an earlier call has trained on these groups.*sample again"):
                cluster.update(groups, advantages=advantages)
        cluster.sync()
        assert world.version == cluster.step == len(world.updates) == 1
        trained = {float(x) for batch in world.updates[0] for x in batch.policy.advantages[batch.policy.mask]}
        assert (trained == {first}) == (first is not None)
        assert cluster.update(groups)["rollout/staleness_max"] == 1.0  # another update
    assert len(world.updates) == 2 and calls == [0, 1]


class Held(fakes.World):
    """Each update waits for its permission. ``fails``: the first one raises."""

    def __init__(self, fails=False):
        super().__init__(jitter=False)
        self.begun, self.allowed, self.fails = threading.Semaphore(0), threading.Semaphore(0), fails

    async def update(self, *arguments, **settings):
        self.begun.release()
        while not self.allowed.acquire(blocking=False):
            await asyncio.sleep(0.01)
        if self.fails:
            self.fails = False
            raise ValueError("the update failed")
        return await super().update(*arguments, **settings)


@pytest.mark.parametrize("order", ["epochs", "pass_rate"])
def test_a_thread_that_samples_during_an_update_gets_the_prompts_of_the_next_step(started, order):
    config = fakes.config(steps=10, max_staleness=1, data={"train": [{"path": "demo:add3"}], "order": order})
    trained = fakes.World(jitter=False)
    asyncio.run(run(config, trained.workers(), PROMPTS, [], trained, trained))
    sampled = []
    with started(looped := Held(), config) as cluster:
        batches = cluster.batches()
        sampled.append(cluster.sample(next(batches)))
        while cluster.step < config.steps:
            groups = cluster.score(sampled[-1])
            updates = threading.Thread(target=cluster.update, args=(groups,))
            updates.start()
            assert looped.begun.acquire(timeout=HANG_S)
            if (prompts := next(batches, None)) is not None:
                assert next(cluster.batches()) == prompts  # until its own update
                sampled.append(cluster.sample(prompts))
            looped.allowed.release()
            updates.join()
            cluster.sync()
        assert next(cluster.batches(), None) is None
    uid_batches = [sorted(group.prompt.uid for group in groups) for groups in sampled]
    uids = [uid for uid, _, _ in trained.sampled]
    assert uid_batches == [sorted(uids[i : i + 4]) for i in range(0, 40, 4)]
    if order == "epochs":
        assert sorted(uid for uids in uid_batches for uid in uids) == sorted(p.uid for p in PROMPTS)


def test_the_prompts_of_an_update_that_failed_are_those_of_the_next(started):
    with started(world := Held(fails=True), fakes.config()) as cluster:
        prompts = next(cluster.batches())
        groups = cluster.score(cluster.sample(prompts))
        world.allowed.release()
        with pytest.raises(ValueError, match="the update failed"):
            cluster.update(groups)
        assert cluster.step == 0 and next(cluster.batches()) == prompts


def test_an_update_that_runs_when_the_block_ends_ends_with_it(started, monkeypatch):
    update_begun, update_ended = threading.Event(), []

    class Stuck(fakes.World):
        async def update(self, *_, **__):
            update_begun.set()
            try:
                await asyncio.sleep(HANG_S)
            finally:
                update_ended.append(True)

    with started(world := Stuck(jitter=False), fakes.config()) as cluster:
        groups = cluster.score(cluster.sample(next(cluster.batches())))
        interrupted_update(cluster, groups, update_begun, monkeypatch)
    assert update_ended and world.actors.ended


class Flaky(fakes.World):
    """Loses a sample of p3, and all but one of p5 in its first draw."""

    async def sample(self, prompt, *, seeds, sampling):
        samples = await super().sample(prompt, seeds=seeds, sampling=sampling)
        first = [uid for uid, _, _ in self.sampled].count(prompt.uid) == 1
        if prompt.uid == "p3" or (prompt.uid == "p5" and first):
            samples = samples[:-1] if prompt.uid == "p3" else samples[:1]
        if len(samples) < sampling.least:
            raise SamplesFailed(f"{len(samples)} of {len(seeds)} samples of {prompt.uid}")
        return samples


def test_groups_that_lack_samples_are_those_of_train(started):
    config = fakes.config(steps=10, batch={"samples_per_prompt": 4, "prompts_per_step": 4})
    trained, looped = Flaky(jitter=False), Flaky(jitter=False)
    asyncio.run(run(config, trained.workers(), PROMPTS, [], trained, trained))
    with started(looped, config) as cluster:
        default_loop(cluster)
    assert looped.sampled == trained.sampled and len(looped.sampled) == 41
    assert len(looped.updates) == len(trained.updates) == 10


def test_a_group_that_is_drawn_again_shares_no_sample_with_another_call(started):
    config = fakes.config(batch={"samples_per_prompt": 4, "prompts_per_step": 4})
    with started(world := Flaky(jitter=False), config) as cluster:
        prompt = [p for p in cluster.prompts if p.uid == "p5"]
        for samples in (None, 1):
            cluster.sample(prompt, samples=samples)
    assert [seeds for _, seeds, _ in world.sampled] == [
        tuple(request_seeds(0, 0, "p5", indices)) for indices in (range(4), range(4, 8), range(8, 9))
    ]


def test_samples_that_are_lost_before_the_caller_has_them_are_drawn_again(started):
    class Lost(fakes.World):
        async def sample(self, prompt, **settings):
            rollouts = await super().sample(prompt, **settings)

            async def reference():
                if len(self.sampled) == 1:
                    raise SamplesLost("a node is lost")
                return rollouts

            return reference()

    with started(world := Lost(jitter=False), fakes.config()) as cluster:
        (group,) = cluster.sample(cluster.prompts[:1])
    assert len(group.rollouts) == 2 and len(world.sampled) == 2 and len(set(world.sampled)) == 1


@pytest.mark.parametrize(("every", "refreshed"), [(1, [3, 6, 9, 12]), (2, [4, 6, 10, 12]), (5, [5, 10])])
def test_a_sync_after_several_updates_refreshes_the_reference_where_that_was_due(started, every, refreshed):
    class Refreshed(fakes.World):
        at = ()

        def workers(self, reference=False):
            return dataclasses.replace(super().workers(reference), reference_sync=self)

        async def refresh(self):
            self.at = (*self.at, self.version)

    config = fakes.config(
        steps=12, max_staleness=5, reference={"refresh_every": 3}, algorithm={"kl": {"coef": 0.1}}
    )
    with started(world := Refreshed(jitter=False), config, reference=True) as cluster:
        for prompts in cluster.batches():
            cluster.update(cluster.score(cluster.sample(prompts)))
            if cluster.step % every == 0:
                cluster.sync()
    assert list(world.at) == refreshed


def test_an_export_replaces_an_earlier_one_and_nothing_else(started, tmp_path):
    class Exporting(fakes.World):
        async def export(self, directory, *, tokenizer_dir):
            self.events.append(f"export {directory.name}")

    def make_directory(name, **files):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file.replace("_json", ".json")).write_text(text)
        return tmp_path / name

    model_config = '{"model_type": "qwen2"}'
    model = make_directory("model", config_json=model_config, tokenizer_json="{}")
    empty, link = make_directory("empty"), tmp_path / "link"
    link.symlink_to(model)
    (model / ".export.json").write_text('{"files": ["config.json", "tokenizer.json"]}')
    (model / "adapter").mkdir()
    (file := tmp_path / "file").write_text("kept")
    refused = {
        make_directory("results", notes="kept"): "no export wrote its notes",
        make_directory("thesis", config_json=model_config): "no export wrote its config.json",
        file: "it is a file",
        link: "it is a link",
    }
    (linked := make_directory("linked")).joinpath("model.safetensors").symlink_to(file)
    refused[linked] = "its model.safetensors"
    with started(world := Exporting(jitter=False), fakes.config()) as cluster:
        for directory, reason in refused.items():
            with pytest.raises(UserError, match=rf"{directory.name} is no earlier export \(.*{reason}"):
                cluster.export(directory)
        for directory in (model, empty, tmp_path / "new" / "model"):
            cluster.export(directory)
    assert [e for e in world.events if "export" in e] == ["export model", "export empty", "export model"]


def test_workers_end_when_the_loop_fails_or_its_start_does(started):
    world = fakes.World(jitter=False, fail_on="p1")
    with pytest.raises(RuntimeError, match="engine died on p1"), started(world, fakes.config()) as cluster:
        cluster.sample(cluster.prompts)
    assert world.actors.ended

    async def unready(_):
        raise UserError("no room")

    cluster = started(world, fakes.config())
    world.actors.start_training = unready
    with pytest.raises(UserError, match="no room"):
        cluster.open()
    assert world.actors.ended and not [t for t in threading.enumerate() if t.name == "grpo-dist cluster"]


def test_settings_that_only_train_follows_are_refused():
    with pytest.raises(UserError, match=r"`dynamic_sampling\.enabled` is supported by train\(\) alone"):
        grpo_dist.cluster(fakes.config(dynamic_sampling={"enabled": True}))
    with pytest.raises(UserError, match=r"`health\.action: rollback` is supported by train\(\) alone"):
        grpo_dist.cluster(fakes.config(health={"action": "rollback"}))
