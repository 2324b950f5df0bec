"""Prompt pools: Thompson sampling by hand-worked posteriors, forgetting, exploration and state."""

import asyncio
import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from grpo_dist.config import DataConfig
from grpo_dist.data.order import OrderState
from grpo_dist.data.pools import PoolOrder, RewardScale, check_pools, pool_metrics, pool_of, pool_sizes
from grpo_dist.driver import run
from grpo_dist.types import Group
from tests.support import fakes
from tests.support.made_groups import group_of

BINARY = RewardScale().add_rewards(np.array([0.0, 1.0]))
RATES = {"easy": 1.0, "middle": 0.5, "hard": 0.0}


def make_prompts(count=60, names=tuple(RATES)):
    return [replace(p, source=names[i % len(names)]) for i, p in enumerate(fakes.prompts(count))]


def order(prompts, per_batch=6, *, half_life=10.0, seed=0, state=None, by="source"):
    return PoolOrder(prompts, per_batch, by, half_life, seed=seed, state=state or OrderState())


def outcome(prompt, right, scored=8):
    """Return a group of ``prompt`` with ``right`` right samples."""
    group = group_of([1.0] * right + [0.0] * (scored - right), [1] * scored)
    return replace(group, prompt=prompt, outcomes=("correct",) * right + ("wrong",) * (scored - right))


def play(pools, prompts, steps, rates, *, first=0, delay=0):
    """Take and train ``steps`` batches, outcomes ``delay`` batches late; return the pools of each batch."""
    random, waiting, pool_counts = np.random.default_rng(9), [], []
    for batch in range(first, first + steps):
        indices = pools.take(batch)
        batch_prompts = [prompts[i] for i in indices]
        pool_counts.append(Counter(p.source for p in batch_prompts))
        waiting.append((indices, [outcome(p, random.binomial(8, rates[p.source])) for p in batch_prompts]))
        if len(waiting) > delay:
            pools.trained(*waiting.pop(0))
    return pool_counts


def usefulness(right, scored=8):
    """Return the usefulness of ``right`` right answers of ``scored``."""
    return BINARY.usefulness(np.array([1.0] * right + [0.0] * (scored - right)))


def test_usefulness_is_the_unbiased_variance_as_a_share_of_the_largest():
    assert [round(usefulness(r), 3) for r in (0, 1, 2, 4, 8)] == [0, 0.5, 0.857, 1, 0]
    assert usefulness(1, 1) == 0.0
    shares = np.random.default_rng(3).random(8)  # partial credit
    assert BINARY.usefulness(shares) == pytest.approx(4 * shares.var(ddof=1))
    means = [  # E[p (1 - p)] n / (n - 1) = q (1 - q): exact where nothing is above 1
        np.mean([usefulness(r, 50) for r in np.random.default_rng(0).binomial(50, q, 20000)])
        for q in (0.02, 0.1, 0.2)
    ]
    assert means == pytest.approx([4 * q * (1 - q) for q in (0.02, 0.1, 0.2)], rel=0.02)


@pytest.mark.parametrize(("scale", "offset"), [(0.3, 0.0), (2.0, -1.0)])
def test_a_weight_or_an_offset_of_the_rewards_changes_nothing(scale, offset):
    """Rewards of weight 0.3 are never above 0.5, and yet they teach."""
    prompts, rewards = make_prompts(6), np.random.default_rng(0).integers(0, 2, (6, 8)).astype(np.float32)
    states = []
    for a, b in ((1.0, 0.0), (scale, offset)):
        groups = [replace(group_of([0.0] * 8, [1] * 8), prompt=p, rewards=np.float32(a) * r + np.float32(b))
                  for p, r in zip(prompts, rewards, strict=True)]  # fmt: skip
        pools = order(prompts)
        pools.trained(range(6), groups)
        states.append(pools.state)
    assert [scale[:2] for scale in states[0].reward_scales.values()] == [(0.0, 1.0)] * 3
    for name, counts in states[0].pools.items():
        assert sum(counts) == 2.0 and states[1].pools[name] == pytest.approx(counts) and counts[0] > 1.0
    for uid, counts in states[0].outcomes.items():
        assert states[1].outcomes[uid] == pytest.approx(counts)
    metrics = pool_metrics(groups, "source")
    assert metrics["pool/easy/usefulness"] == pytest.approx(states[0].pools["easy"][0] / 2)


def test_differences_count_relative_to_the_spread_of_all_groups_of_the_source():
    prompts = [replace(p, columns={"half": "ab"[i]}) for i, p in enumerate(fakes.prompts(2))]
    wide = replace(group_of([0.0, 1.0] * 4, [1] * 8), prompt=prompts[0])
    close = replace(group_of([0.75, 1.0] * 4, [1] * 8), prompt=prompts[1])
    pools = order(prompts, 2, by="half")
    pools.trained([0], [wide])
    pools.trained([1], [close])
    allowed = (8 * 0.25 + 4 * 0.25**2 + 4 * 0.25) / 16  # mean squared distance from 0.5
    assert pools.state.pools["b"][0] == pytest.approx(np.var([0.75, 1.0] * 4, ddof=1) / allowed)
    assert order(prompts, 2, by="half", state=pools.state).state == pools.state


def test_sources_of_other_scales_are_as_useful_where_their_groups_are_as_mixed():
    """Right or wrong answers next to logits of a reward model, whose range is 16 times as wide."""
    prompts, random = make_prompts(400, ("math", "logits")), np.random.default_rng(0)

    def group(prompt):
        right = random.binomial(8, 0.5)
        binary = outcome(prompt, right)
        if prompt.source == "math":
            return binary
        rewards = np.float32(np.where(np.arange(8) < right, 8.0, -8.0))
        return replace(binary, rewards=rewards, outcomes=("",) * 8)

    pools, counts = order(prompts, 16), Counter()
    for batch in range(40):
        indices = pools.take(batch)
        counts.update(prompts[i].source for i in indices)
        pools.trained(indices, [group(prompts[i]) for i in indices])
    assert min(counts.values()) > 0.3 * counts.total()
    assert {name: scale[:2] for name, scale in pools.state.reward_scales.items()} == {
        "math": (0.0, 1.0),
        "logits": (-8.0, 8.0),
    }
    metrics = pool_metrics([group(p) for p in prompts], "source")
    assert metrics["pool/logits/usefulness"] == pytest.approx(metrics["pool/math/usefulness"], abs=0.05)


def test_rewards_without_bounds_count_by_what_varies_within_their_groups():
    """Outliers of a normal distribution widen its range, and would make each of its groups useless."""
    scores = np.random.default_rng(0).normal(0.0, 4.0, (500, 8))
    scale = RewardScale().add_rewards(scores.ravel())
    assert np.mean([scale.usefulness(row) for row in scores]) > 0.75
    same = scores.mean(axis=1, keepdims=True) * np.sqrt(8) + 0.1 * scores  # alike within a group
    scale = RewardScale().add_rewards(same.ravel())
    assert np.mean([scale.usefulness(row) for row in same]) < 0.05


@pytest.mark.parametrize(
    ("train", "settings", "message"),
    [
        ([{"path": "reasoning_gym:chain_sum", "kwargs": {"max_terms": n}} for n in (2, 6)], None,
         "several sources have the name chain_sum"),
        ([{"path": "demo:add3"}], None, r"all 4 prompts are in the pool math, .*different `name`"),
    ],
)  # fmt: skip
def test_a_single_pool_is_refused_and_so_are_sources_that_would_share_one(train, settings, message):
    data = DataConfig(train=train, order="pools", pools=settings)
    prompts = [replace(p, source="math") for p in fakes.prompts(4)]
    with pytest.raises(ValueError, match=message):
        check_pools(data, prompts, [source.label for source in data.train])
    check_pools(data.model_copy(update={"order": "epochs"}), prompts, ["a", "b"])


def test_posteriors_by_hand_and_halved_every_half_life():
    prompts = make_prompts(3)
    pools = order(prompts, 3, half_life=1.0)
    pools.trained([0, 1, 2], [outcome(prompts[1], 4), outcome(prompts[0], 8), outcome(prompts[2], 1)])
    assert pools.state.pools == {"easy": (0.0, 1.0), "hard": (0.5, 0.5), "middle": (1.0, 0.0)}
    assert pools.state.outcomes == {"p0": (8.0, 0.0), "p1": (4.0, 4.0), "p2": (1.0, 7.0)}
    pools.trained([1], [outcome(prompts[1], 2)])
    assert pools.state.pools["middle"] == (0.5 + usefulness(2), 0.0 + 1 - usefulness(2))
    assert pools.state.outcomes["p1"] == (2.0 + 2.0, 2.0 + 6.0)
    for _ in range(20):
        pools.trained([], [])
    assert pools.state.outcomes == {}  # forgotten: a checkpoint holds recent outcomes only


def test_a_group_without_a_score_teaches_nothing():
    prompts = make_prompts(3)
    pools = order(prompts, 3)
    pools.trained([0], [replace(outcome(prompts[0], 4), outcomes=("error",) * 8)])
    assert pools.state == order(prompts, 3).state


@pytest.mark.parametrize("delay", [0, 2])
def test_most_samples_go_to_the_pool_with_mixed_groups_and_the_others_are_tried_again(delay):
    prompts = make_prompts(600)
    pools = order(prompts, 8)
    counts = play(pools, prompts, 60, RATES, delay=delay)
    late = sum(counts[20:], Counter())
    assert late["middle"] > 0.75 * late.total()
    assert late["easy"] > 0 and late["hard"] > 0
    # The policy learns the middle pool and begins to solve the hard one: the samples follow.
    counts = play(pools, prompts, 80, {"easy": 1.0, "middle": 1.0, "hard": 0.5}, first=60, delay=delay)
    assert sum(counts[50:], Counter())["hard"] > 0.6 * sum(counts[50:], Counter()).total()


def test_within_a_pool_prompts_that_are_always_right_or_wrong_are_admitted_rarely():
    prompts = [replace(p, source="one") for p in fakes.prompts(40)]
    rate = {p.uid: (0.0, 0.5, 1.0, 1.0)[i % 4] for i, p in enumerate(prompts)}
    pools, random, counts = order(prompts, 4), np.random.default_rng(1), Counter()
    for batch in range(80):
        indices = pools.take(batch)
        counts.update(rate[prompts[i].uid] for i in indices if batch >= 20)
        pools.trained(
            indices, [outcome(prompts[i], random.binomial(8, rate[prompts[i].uid])) for i in indices]
        )
    assert counts[0.5] > 2 * 0.25 * counts.total()  # a quarter of the prompts
    assert counts[0.0] > 0 and counts[1.0] > 0


def test_a_draw_repeats_has_no_prompt_twice_and_survives_the_files_of_a_checkpoint():
    prompts = make_prompts(30)
    first, second = order(prompts, 12), order(prompts, 12)
    play(first, prompts, 7, RATES), play(second, prompts, 7, RATES)
    indices = first.take(7)
    assert indices == second.take(7) and len(set(indices)) == 12
    state = TypeAdapter(OrderState).validate_python(json.loads(json.dumps(asdict(first.state))))
    assert order(prompts, 12, state=state).take(7) == indices
    assert order(prompts, 12, state=state, seed=1).take(7) != indices
    assert sorted(order(prompts, 30).take(0)) == list(range(30))  # small pools run out; others fill up
    with pytest.raises(ValueError, match="31 prompts a batch cannot be drawn from 30"):
        order(prompts, 31)


def test_pools_by_a_column():
    prompts = [replace(p, columns={"difficulty": i % 2}) for i, p in enumerate(fakes.prompts(5))]
    assert pool_sizes(prompts, "difficulty") == {"0": 3, "1": 2}
    with pytest.raises(ValueError, match=r"data.pools = level: .* it has: difficulty. Add the column"):
        pool_of(prompts[0], "level")


def test_metrics_of_each_pool():
    prompts = make_prompts(3)
    metrics = pool_metrics([outcome(prompts[0], 8), outcome(prompts[1], 4), outcome(prompts[1], 0)], "source")
    assert metrics["pool/middle/share"] == 2 / 3 and metrics["pool/middle/pass_rate"] == 0.25
    assert metrics["pool/middle/usefulness"] == 0.5 and metrics["pool/easy/usefulness"] == 0.0
    assert metrics["pool/easy/tokens"] == 8.0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_loop_draws_by_pools_alike_with_any_timing_and_across_a_resume(staleness, dynamic):
    prompts = make_prompts(48)
    config = fakes.config(
        steps=12, max_staleness=staleness, checkpoint={"every": 6},
        batch={"prompts_per_step": 4, "samples_per_prompt": 4},
        data={"train": [{"path": "demo:add3"}], "order": "pools"},
        **({"dynamic_sampling": {"enabled": True, "max_extra_prompts": 8}} if dynamic else {}),
    )  # fmt: skip
    worlds = []
    for jitter, start in ((True, 0), (False, 0), (True, 6)):
        world = fakes.World(jitter=jitter)
        world.version, world.score = start, graded
        progress = worlds[0].saved[6] if start else None
        workers = world.workers()
        asyncio.run(run(config, workers, prompts, [], world, world, progress))
        worlds.append(world)
    whole, other, resumed = (w.updates for w in worlds)
    pairs = [*zip(whole, other, strict=True), *zip(whole[6:], resumed, strict=True)]
    assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in pairs)
    assert worlds[0].saved[12].pipeline.order == worlds[2].saved[12].pipeline.order
    shares = [worlds[0].logged[step].get("pool/middle/share", 0.0) for step in range(1, 13)]
    assert np.mean(shares[6:]) > 1 / 3
    for entry in worlds[0].ledger_entries.values():
        uids = [uid for uids in entry.values() for uid in uids]
        assert len(set(uids)) == len(uids) == 4 + len(entry.get("put_aside", ()))


async def graded(prompt, rollouts):
    rates = RATES[prompt.source]
    rewards = np.array([float(r.completion_ids[0] / 100 < rates) for r in rollouts], np.float32)
    outcomes = tuple("correct" if r else "wrong" for r in rewards)
    return Group(prompt, rollouts, rewards, {"math": rewards}, outcomes)
