"""Teachers and demonstrations in the driver's loop: which requests are made, and what reaches the batch."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist import driver
from grpo_dist.data.demonstrations import Demonstration
from grpo_dist.loop.ledger import audit, summary
from grpo_dist.types import TeacherLogprobs
from tests.support import fakes


class Teacher:
    """Return log-prob ``value`` for every token; record the prompts that are read."""

    def __init__(self, value):
        self.value, self.read = value, []

    async def logprobs(self, prompt, rollouts, top_k=0):
        self.read.append(prompt)
        return [TeacherLogprobs(np.full(len(r.completion_ids), self.value, np.float32)) for r in rollouts]


class Distributed(Teacher):
    """Also return top-k tokens: 40, 41 ... at every position, the first with log-prob ``value``."""

    async def logprobs(self, prompt, rollouts, top_k=0):
        def distribution(sampled):
            ids = np.tile(np.arange(40, 40 + top_k, dtype=np.int32), (len(sampled), 1))
            return TeacherLogprobs(sampled, ids, np.float32(self.value) - (ids - 40).astype(np.float32))

        return [distribution(logprobs.sampled) for logprobs in await super().logprobs(prompt, rollouts)]


class EqualRewards(fakes.World):
    """All groups are zero-variance. ``unscored``: prompts whose samples have no reward."""

    unscored = ()

    async def score(self, prompt, rollouts):
        group = await super().score(prompt, rollouts)
        reward = np.nan if prompt.uid in self.unscored else 1.0
        return replace(group, rewards=np.full_like(group.rewards, reward))


def two_sources(count=8):
    prompts = fakes.prompts(count)
    return [replace(p, source="even" if i % 2 == 0 else "odd") for i, p in enumerate(prompts)]


def train(world, config, prompts, teachers=None, *, reference=False, demonstrations=(), progress=None):
    workers = replace(world.workers(reference=reference), teachers=teachers or {})
    asyncio.run(
        driver.run(config, workers, prompts, [], world, world, progress, demonstrations=demonstrations)
    )
    return [update for updates in world.updates for update in updates]


def teacher(name, **how):
    return {"name": name, "model": "/elsewhere"} | how


def test_each_sample_learns_from_exactly_the_teachers_of_its_source():
    world, teachers = EqualRewards(), {"of_even": Teacher(-3.0), "of_all": Teacher(-2.0)}
    config = fakes.config(
        steps=2,
        distillation={"teachers": [teacher("of_even", sources=["even"]), teacher("of_all")], "coef": 0.5},
    )
    batches = train(world, config, two_sources(), teachers)
    assert {p.source for p in teachers["of_even"].read} == {"even"}
    assert {p.source for p in teachers["of_all"].read} == {"even", "odd"}
    prompts = {p.uid: p for p in two_sources()}
    for step, batch in enumerate(batches):
        sources = [prompts[g.prompt.uid].source for g in world.sampled_groups[f"step_{step + 1:06d}"]]
        for row, group in enumerate(batch.group_ids.tolist()):
            # -(log p - mean of its teachers' log p) at half weight; engines gave -1.
            expected = 0.5 * (-2.5 + 1 if sources[group] == "even" else -2 + 1)
            assert batch.policy.advantages[row][batch.policy.mask[row]].tolist() == [expected] * 2
        assert batch.teacher is None, "it is part of the advantages"
    assert world.logged[1]["teacher/kl/of_even"] == 2.0 and world.logged[1]["teacher/kl/of_all"] == 1.0
    first = [prompts[g.prompt.uid].source for g in world.sampled_groups["step_000001"]]
    even = first.count("even")
    assert 0 < even < 4 and world.logged[1]["teacher/kl"] == pytest.approx((2.0 * even + 4) / (even + 4))


@pytest.mark.parametrize("kl", ["advantage", "sampled"])
@pytest.mark.parametrize("reward_coef", [0.0, 1.0])
def test_groups_without_reward_signal_are_trained_on_where_they_have_a_teacher(kl, reward_coef, monkeypatch):
    """Also samples without a reward. Health checks, idle rows and the ledger agree."""
    monkeypatch.setattr("grpo_dist.health._MOST_IDLE", 1)
    world = EqualRewards()
    world.unscored = ("p1",)
    config = fakes.config(
        steps=2,
        health={"min_signal_groups": 1},
        distillation={"teachers": [teacher("t")], "kl": kl, "reward_coef": reward_coef},
    )
    batches = train(world, config, fakes.prompts(8), {"t": Teacher(-3.0)})
    assert len(batches) == 2 and not world.warnings
    assert sorted(uid for e in world.ledger_entries.values() for uid in e["trained"]) == [
        f"p{i}" for i in range(8)
    ]
    assert all(metrics["group/no_signal_share"] == 0.0 for metrics in world.logged.values())
    for batch in batches:
        mask = batch.policy.mask if kl == "advantage" else batch.teacher.mask
        assert mask.sum() == 16 and len(batch) == 8
        if kl == "sampled":
            assert batch.denominators.taught == 16.0 and not batch.policy.advantages.any()
            assert torch.equal(batch.teacher.logprobs, torch.where(batch.teacher.mask, -3.0, 0.0))


@pytest.mark.parametrize("unscored", [("p0", "p1", "p2", "p3"), ("p1",), ()])
@pytest.mark.parametrize("kl", ["advantage", "sampled"])
def test_a_token_that_only_a_teacher_trains_is_a_trained_token(kl, unscored, monkeypatch):
    """Tokens of two streams count once, and the run does not stop for a lack of trained tokens."""
    monkeypatch.setattr("grpo_dist.health._MOST_IDLE", 1)
    world = EqualRewards()
    world.unscored = unscored
    config = fakes.config(steps=2, distillation={"teachers": [teacher("t")], "kl": kl})
    train(world, config, fakes.prompts(4), {"t": Teacher(-3.0)})
    assert [metrics["train/loss_tokens"] for metrics in world.logged.values()] == [16.0, 16.0]


def test_rewards_and_teacher_are_weighed_in_the_advantage():
    """Two groups of the same samples: with reward weight 0 only the teacher's part is left."""
    parts = {}
    for reward_coef in (0.0, 1.0, 3.0):
        config = fakes.config(
            steps=1, distillation={"teachers": [teacher("t")], "coef": 2.0, "reward_coef": reward_coef}
        )
        (batch,) = train(fakes.World(jitter=False), config, fakes.prompts(8), {"t": Teacher(-1.25)})
        parts[reward_coef] = torch.where(batch.policy.mask, batch.policy.advantages, 0.0)
    (plain,) = train(fakes.World(jitter=False), fakes.config(steps=1), fakes.prompts(8))
    rows = plain.row_ids
    assert set(parts[0.0][batch.policy.mask].tolist()) == {-0.5}
    for weight in (1.0, 3.0):
        torch.testing.assert_close((parts[weight] - parts[0.0])[rows], weight * plain.policy.advantages)


def test_a_teacher_reads_its_own_prompt_and_the_policy_does_not():
    prompts = [replace(p, teacher_ids={"t": np.array([9, 9, 9, 9], np.int32)}) for p in fakes.prompts(4)]
    reader = Teacher(-2.0)
    config = fakes.config(steps=1, distillation={"teachers": [teacher("t")]})
    (batch,) = train(EqualRewards(), config, prompts, {"t": reader})
    assert [p.token_ids.tolist() for p in reader.read] == [[9] * 4] * 4
    assert all(not p.teacher_ids for p in reader.read)
    assert batch.tokens[:, :3].tolist() == [[1, 2, 3]] * 8


def test_a_teacher_that_is_the_reference_is_asked_without_a_kl_term():
    config = fakes.config(steps=1, distillation={"teachers": [teacher("own", model="reference")]})
    assert config.needs_reference and not config.has_kl_term
    (batch,) = train(EqualRewards(), config, fakes.prompts(4), reference=True)
    assert batch.policy.ref_logprobs is None
    assert not batch.policy.advantages.any(), "the reference gives -1, as the engine does"


def test_likeliest_tokens_reach_the_rows_of_the_teachers_source_and_no_others():
    """Two sources have their own teacher, one has none; the reported KL is unchanged."""
    config = fakes.config(
        steps=1,
        distillation={
            "teachers": [teacher("of_even", sources=["even"]), teacher("of_third", sources=["third"])],
            "kl": {"name": "top_k", "k": 3},
        },
    )
    prompts = [replace(p, source=("even", "odd", "third")[i % 3]) for i, p in enumerate(fakes.prompts(4))]
    world, teachers = fakes.World(jitter=False), {"of_even": Distributed(-3.0), "of_third": Distributed(-2.0)}
    (batch,) = train(world, config, prompts, teachers)
    groups = [g.prompt.uid for g in world.sampled_groups["step_000001"]]
    sources = {p.uid: p.source for p in prompts}
    for row, group in enumerate(batch.group_ids.tolist()):
        value = {"even": -3.0, "third": -2.0}.get(sources[groups[group]])
        taught = batch.teacher.mask[row]
        assert taught.any() == (value is not None)
        assert (
            not batch.teacher.top_ids[row][~taught].any()
            and not batch.teacher.top_logprobs[row][~taught].any()
        )
        if value is not None:
            assert torch.equal(taught, batch.policy.mask[row])
            assert batch.teacher.top_ids[row][taught].tolist() == [[40, 41, 42]] * int(taught.sum())
            expected = [[value, value - 1, value - 2]] * int(taught.sum())
            assert batch.teacher.top_logprobs[row][taught].tolist() == expected
    assert world.logged[1]["teacher/kl/of_even"] == 2.0 and world.logged[1]["teacher/kl/of_third"] == 1.0


class CountingReference(EqualRewards):
    """Counts the requests to the reference by prompt and number of prompt tokens."""

    def __init__(self):
        super().__init__(jitter=False)
        self.requests = Counter()

    async def logprobs(self, prompt, rollouts, top_k=0):
        self.requests[prompt.uid, len(prompt.token_ids)] += 1
        return await super().logprobs(prompt, rollouts)

    async def refresh(self):
        self.events.append("refresh")


def test_the_reference_that_teaches_with_likeliest_tokens_is_still_asked_once_for_the_kl_term():
    class Reference(CountingReference):
        async def logprobs(self, prompt, rollouts, top_k=0):
            plain, size = await super().logprobs(prompt, rollouts), (2, top_k)
            ids, top = np.zeros(size, np.int32), np.zeros(size, np.float32)
            return [TeacherLogprobs(teacher_logprobs.sampled, ids, top) for teacher_logprobs in plain]

    config = fakes.config(
        steps=1,
        algorithm={"kl": {"coef": 0.1}},
        distillation={"teachers": [teacher("own", model="reference")], "kl": {"name": "top_k", "k": 2}},
    )
    world = Reference()
    (batch,) = train(world, config, fakes.prompts(4), reference=True)
    assert set(world.requests.values()) == {1} and batch.teacher.top_ids.shape[2] == 2
    assert torch.equal(batch.policy.ref_logprobs, -1.0 * batch.policy.mask)


def test_the_reference_is_asked_once_for_the_kl_term_and_all_teachers_that_read_the_same():
    """Also if a teacher with its own model has the name `reference`."""
    same = [teacher(name, model="reference") for name in ("own", "again", "shown")]
    config = fakes.config(
        steps=1, algorithm={"kl": {"coef": 0.1}}, distillation={"teachers": [*same, teacher("reference")]}
    )
    prompts = [replace(p, teacher_ids={"shown": np.array([9] * 4, np.int32)}) for p in fakes.prompts(4)]
    world, large = CountingReference(), Teacher(-3.0)
    (batch,) = train(world, config, prompts, {"reference": large}, reference=True)
    assert world.requests == {(f"p{i}", tokens): 1 for i in range(4) for tokens in (3, 4)}
    assert len(large.read) == 4 and torch.equal(batch.policy.ref_logprobs, -1.0 * batch.policy.mask)
    # The mean of -1, -1, -1 and -3, less the engine's -1.
    assert batch.policy.advantages[batch.policy.mask].tolist() == [-0.5] * 16


def test_a_refresh_of_the_reference_asks_no_teacher_with_a_model_of_its_own_again():
    teachers = [teacher("large"), teacher("own", model="reference")]
    config = fakes.config(
        steps=4, max_staleness=1, reference={"refresh_every": 1}, distillation={"teachers": teachers}
    )
    world, large = CountingReference(), Teacher(-3.0)
    workers = replace(world.workers(reference=True), teachers={"large": large}, reference_sync=world)
    asyncio.run(driver.run(config, workers, fakes.prompts(16), [], world, world))
    assert world.events.count("refresh") >= 3 and max(world.requests.values()) == 2
    assert sorted(p.uid for p in large.read) == sorted(f"p{i}" for i in range(16))
    for (batch,) in world.updates:
        assert batch.policy.advantages[batch.policy.mask].tolist() == [-1.0] * 16


def demonstrations(count):
    completion = np.array([7, 8, 2], np.int32)
    return [
        Demonstration(f"d{i}", np.array([5, i], np.int32), "", "shown", completion_ids=completion)
        for i in range(count)
    ]


@pytest.mark.parametrize("updates", [1, 2])
def test_demonstrations_of_a_step_are_a_function_of_seed_and_step(updates):
    """Every demonstration occurs once per epoch, and a resume repeats the rows."""
    config = fakes.config(
        steps=4,
        batch={"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": updates},
        demonstrations={"data": "shown.jsonl", "rows_per_step": 4, "coef": 0.1},
        checkpoint={"every": 2},
    )
    data, world = demonstrations(8), fakes.World(jitter=False)
    batches = train(world, config, fakes.prompts(40), demonstrations=data)
    assert len(batches) == 4 * updates
    for batch in batches:
        added = batch.demonstrated.any(dim=1)
        assert added.sum() == 4 // updates and batch.denominators.demonstrated == 3 * added.sum()
        assert not batch.policy.mask[added].any() and not batch.policy.advantages[added].any()
        assert len(set(batch.row_ids.tolist())) == len(batch)
    uids = [world.ledger_entries[step]["demonstrations"] for step in range(1, 5)]
    for epoch in (uids[:2], uids[2:]):
        assert sorted(epoch[0] + epoch[1]) == [f"d{i}" for i in range(8)]
    resumed_world = fakes.World(jitter=False)
    resumed_world.version = 2
    resumed = train(resumed_world, config, fakes.prompts(40), demonstrations=data, progress=world.saved[2])
    assert [resumed_world.ledger_entries[step]["demonstrations"] for step in (3, 4)] == uids[2:]
    for one, other in zip(batches[2 * updates :], resumed, strict=True):
        assert torch.equal(one.demonstrated, other.demonstrated) and torch.equal(one.tokens, other.tokens)


def test_demonstrations_change_no_metric_of_the_samples_and_no_row_of_theirs():
    plain, joined = fakes.World(jitter=False), fakes.World(jitter=False)
    train(plain, fakes.config(steps=2), fakes.prompts(16))
    config = fakes.config(steps=2, demonstrations={"data": "shown.jsonl", "rows_per_step": 3})
    train(joined, config, fakes.prompts(16), demonstrations=demonstrations(5))
    for step in (1, 2):
        before, after = plain.logged[step], joined.logged[step]
        names = [name for name in before if name.startswith(("reward/", "rollout/", "group/", "outcome/"))]
        assert len(names) > 10 and {n: after[n] for n in names} == {n: before[n] for n in names}
        assert after["train/rows"] == before["train/rows"] + 3
        assert after["train/loss_tokens"] == before["train/loss_tokens"] + 9
        ledger = dict(joined.ledger_entries[step])
        assert len(ledger.pop("demonstrations")) == 3 and ledger == plain.ledger_entries[step]


def test_a_ledger_with_demonstrations_balances_and_counts_them(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text(
        '{"step": 1, "trained": ["a", "b"], "demonstrations": ["d1", "d1", "d2"]}\n'
        '{"step": 2, "trained": ["c"], "no_signal": ["a"], "demonstrations": ["d1", "d2", "d3"]}\n'
    )
    assert audit(path, steps=2, prompts_per_step=2) is None
    assert summary(path) == (
        "ledger: 4 prompts sampled = 3 trained + 1 zero-variance (all advantages 0); in addition 6 "
        "demonstrations"
    )
