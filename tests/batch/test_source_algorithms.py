"""Advantage, loss and KL weight per source: each source has the numbers that it has alone, over the
denominators of the whole update.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist.batch.rows import split_updates
from grpo_dist.batch.sharding import micro_batches
from grpo_dist.batch.signal import SignalRule
from grpo_dist.loop.groups import GroupDraw, ScoredGroup
from grpo_dist.loop.updates import make_updates
from grpo_dist.policy.loss import Objective, add_stats, batch_loss, finish_stats
from tests.support import fakes, made_groups
from tests.support.made_groups import group_of, shard

WIDE = {"loss": {"clip_low": 0.5, "clip_high": 0.5, "dual_clip": 3}}


def with_source(group, source, uid=""):
    return replace(group, prompt=replace(group.prompt, source=source, uid=f"{source}{uid}"))


def configured(sources, *, prompts=2, samples=4, environment="none", **settings):
    """Return a configuration with ``sources``, which maps names to `algorithm` overrides or None."""
    train = [
        {"path": f"{name}.jsonl"} | ({} if overrides is None else {"algorithm": overrides})
        for name, overrides in sources.items()
    ]
    algorithm = {"correction": "none", "skip_idle_rows": False} | settings.pop("algorithm", {})
    batch = {"prompts_per_step": prompts, "samples_per_prompt": samples}
    data = {"train": train, "environment": environment}
    return fakes.config(data=data, batch=batch, algorithm=algorithm, **settings)


def make(config, groups, reference=None):
    """Return the one update of ``groups``; ``reference``: log-prob of every token."""

    def logprobs(group):
        rows = [row for rollout in group.rollouts for row in rollout.rows] if reference else []
        return [np.full(len(row.completion_ids), reference, np.float32) for row in rows]

    scored = [ScoredGroup(group, logprobs(group)) for group in groups]
    return make_updates(config, scored, 1, kl_coef=config.algorithm.kl.coef)[0][0]


def whole_loss(config, batch, logprobs):
    """Return loss, gradient and metrics of ``batch`` at these log-probs of its tokens."""
    logprobs = logprobs.clone().requires_grad_()
    objective = Objective(config.algorithm, of_sources=tuple(config.source_algorithms.values()))
    loss, stats = batch_loss(logprobs, batch, objective)
    loss.backward()
    return loss.item(), logprobs.grad, finish_stats(stats)


def first_token(batch):
    """Return the advantage of each row's first trained token."""
    rows = torch.arange(len(batch))
    return batch.policy.advantages[rows, batch.policy.mask.int().argmax(dim=1)].tolist()


def test_advantages_of_two_sources_by_hand():
    """math: (r - mean) / deviation. code: r - mean of the others. chat: r - mean of all samples of chat."""
    config = configured(
        {"math": None, "code": {"advantage": "rloo"}, "chat": {"advantage": "flash_reinforce"}},
        prompts=4, samples=2, algorithm={"advantage": {"eps": 1e-12}},
    )  # fmt: skip
    groups = [
        with_source(group_of([1, 0], [2, 3]), "math"), with_source(group_of([1, 0], [1, 2]), "chat", 1),
        with_source(group_of([3, 1], [1, 4]), "code"), with_source(group_of([0, 0], [2, 2]), "chat", 2),
    ]  # fmt: skip
    batch = make(config, groups)
    half = 0.5**0.5
    assert first_token(batch) == pytest.approx([half, -half, 0.75, -0.25, 2, -2, -0.25, -0.25])
    sizes = batch.denominators
    assert (sizes.tokens, sizes.sequences, sizes.prompts) == (17, 8, 4)


@pytest.mark.parametrize("estimator", [
    {"name": "grpo", "std": "batch"}, "reinforce_pp", {"name": "reinforce_pp", "gamma": 0.5}, "gpg", "opo",
    {"whiten": True}, "process", "turn", "remax", "gdpo",
])  # fmt: skip
def test_a_source_has_the_advantages_that_it_has_alone(estimator):
    rng = np.random.default_rng(3)
    groups = [made_groups.episode_group(i, rng) for i in range(4)]
    groups = [replace(g, reward_parts={"math": g.rewards}, baseline_reward=0.3) for g in groups]
    groups[1].rewards[2] = np.nan
    mixed = [with_source(g, ("a", "b")[i % 2], i) for i, g in enumerate(groups)]
    episodes = {"environment": "calculator"}
    two = configured({"a": None, "b": {"advantage": estimator}}, prompts=4, **episodes)
    alone = configured({"b": None}, algorithm={"advantage": estimator}, **episodes)
    batch, part = make(two, mixed), make(alone, mixed[1::2])
    rows = [i for i, group in enumerate(batch.group_ids.tolist()) if group in (1, 3)]
    width = part.tokens.shape[1]
    assert torch.equal(batch.policy.advantages[rows, :width], part.policy.advantages)
    assert part.policy.advantages.any()
    others = make(configured({"a": None}, **episodes), mixed[::2])
    rows = [i for i in range(len(batch)) if i not in rows]
    assert torch.equal(batch.policy.advantages[rows, : others.tokens.shape[1]], others.policy.advantages)


def test_each_source_has_its_loss_over_the_denominators_of_all():
    """One token each, ratio 1.4 and advantage 1 or -1: clipped at 1.2 for math, unclipped for code."""
    config = configured({"math": None, "code": WIDE}, samples=2, algorithm={"advantage": {"std": "none"}})
    groups = [with_source(group_of([2, 0], [1, 1]), name) for name in ("math", "code")]
    batch = make(config, groups)
    moved = torch.where(batch.policy.mask, batch.policy.rollout_logprobs.double() + np.log(1.4), 0.0)
    unmoved = replace(batch.policy, old_logprobs=batch.policy.rollout_logprobs)
    loss, gradient, metrics = whole_loss(config, replace(batch, policy=unmoved), moved)
    assert loss == pytest.approx((-1.2 + 1.4 - 1.4 + 1.4) / 4)
    assert gradient[batch.policy.mask].tolist() == pytest.approx([0, 1.4 / 4, -1.4 / 4, 1.4 / 4])
    assert metrics["policy/clip_high_share"] == 0.25


def test_each_source_has_its_weight_of_the_kl_term():
    """k2 of a gap of 2 nats is 2, its gradient 2: times 0.1 for math, 0.3 for code and 0 for chat."""
    config = configured(
        {"math": None, "code": {"kl": {"coef": 0.3}}, "chat": {"kl": {"coef": 0.0}}}, prompts=3, samples=2,
        algorithm={"kl": {"coef": 0.1, "estimator": "k2"}},
    )  # fmt: skip
    groups = [with_source(group_of([1, 1], [1, 1]), name) for name in ("math", "code", "chat")]
    batch = make(config, groups, reference=-3.0)
    loss, gradient, metrics = whole_loss(config, batch, batch.policy.rollout_logprobs.double())
    assert loss == pytest.approx(2 * (0.1 + 0.3) * 2 / 6) and metrics["loss/kl"] == pytest.approx(loss)
    assert gradient[batch.policy.mask].tolist() == pytest.approx([0.2 / 6] * 2 + [0.6 / 6] * 2 + [0] * 2)
    assert metrics["ref/kl"] == 2


@pytest.mark.parametrize("in_reward", [False, True])
def test_a_source_without_a_kl_term_may_be_far_from_the_reference(in_reward):
    """k3 overflows at a gap of -99 nats: 0 times infinity would be NaN. `ref/kl`, which `health.kl_above`
    bounds and `algorithm.kl.target` steers, only covers sources with a KL term.
    """
    config = configured(
        {"math": None, "chat": {"kl": {"coef": 0.0}}}, samples=2,
        algorithm={"kl": {"coef": 0.1, "in_reward": in_reward}},
    )  # fmt: skip
    far = group_of([1, 1], [2, 2])
    far = replace(far, rollouts=tuple(replace(r, logprobs=r.logprobs - 99) for r in far.rollouts))
    groups = [with_source(group_of([1, 1], [1, 1]), "math"), with_source(far, "chat")]
    batch = make(config, groups, reference=-1.0)
    loss, gradient, metrics = whole_loss(config, batch, batch.policy.rollout_logprobs)
    assert loss == 0 and not gradient.any()
    assert metrics["ref/kl"] == 0
    assert batch.policy.advantages.isfinite().all()


def test_a_source_with_only_an_estimator_leaves_the_loss_that_chooses_tokens():
    config = configured({"a": None, "b": {"advantage": "rloo"}}, samples=2, algorithm={"loss": "clip_cov"})
    groups = [with_source(group_of([1, 0], [1, 2]), name) for name in ("a", "b")]
    assert make(config, groups).policy.loss_ids is None


def test_each_source_has_its_weight_of_a_kl_in_the_rewards():
    config = configured(
        {"math": None, "code": {"kl": {"coef": 0.3}}}, samples=2,
        algorithm={"kl": {"coef": 0.1, "estimator": "k1", "in_reward": True}},
    )  # fmt: skip
    groups = [with_source(group_of([1, 1], [1, 2]), name) for name in ("math", "code")]
    batch = make(config, groups, reference=-3.0)
    assert first_token(batch) == pytest.approx([-0.2, -0.4, -0.6, -1.2])


LOSSES = [
    "ppo_clip", "gspo", "gmpo", "sapo", "dppo_tv", "gspo_segment", {"name": "cispo", "clip_high": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"])
def test_the_gradient_of_a_row_is_that_of_a_run_with_its_loss_for_all(loss, aggregation):
    """Bit for bit."""
    rng = np.random.default_rng(5)
    groups = [with_source(made_groups.episode_group(i, rng), ("a", "b")[i % 2], i) for i in range(4)]
    rest = {"aggregation": aggregation, "kl": {"coef": 0.1}, "correction": {"kind": "tis", "high": 1.1}}
    two = configured({"a": None, "b": {"loss": loss}}, prompts=4, algorithm=rest)
    first, second = (
        configured({"a": None, "b": None}, prompts=4, algorithm=rest | ({"loss": used} if used else {}))
        for used in (None, loss)
    )
    batch = make(two, groups, reference=-2.0)
    stream = replace(batch.policy, old_logprobs=batch.policy.rollout_logprobs.nan_to_num() + 0.1)
    batch = replace(batch, policy=stream)
    now = stream.old_logprobs + 0.3 * torch.from_numpy(rng.standard_normal(batch.tokens.shape))
    plain = replace(batch, policy=replace(stream, loss_ids=None))
    _, gradient, _ = whole_loss(two, batch, now)
    of_b = torch.isin(batch.group_ids, torch.tensor([1, 3]))[:, None]
    expected = torch.where(of_b, whole_loss(second, plain, now)[1], whole_loss(first, plain, now)[1])
    assert torch.equal(gradient, expected) and gradient.any()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_split_of_the_rows_changes_loss_and_statistics(ranks):
    rng = np.random.default_rng(8)
    names = ("a", "b", "c", "a")
    groups = [with_source(made_groups.episode_group(i, rng), name, i) for i, name in enumerate(names)]
    by_source = {"b": {"loss": "gspo", "kl": {"coef": 0.2}}, "c": {"loss": "sapo", "advantage": "rloo"}}
    rest = {"kl": {"coef": 0.1}, "aggregation": "seq-mean-token-mean"}
    config = configured({"a": None} | by_source, prompts=4, algorithm=rest)
    batch = make(config, groups, reference=-2.0)
    noise = torch.from_numpy(rng.standard_normal(batch.tokens.shape)) * 0.2
    objective = Objective(config.algorithm, of_sources=tuple(config.source_algorithms.values()))

    def parts(count):
        for share in shard(batch, count):
            for rows in micro_batches(share.lengths.tolist(), 60):
                yield share.select(rows)

    def total(split):
        loss, stats = 0.0, {}
        for part in split:
            now = (part.policy.rollout_logprobs + noise[part.row_ids, : part.tokens.shape[1]]).double()
            value, more = batch_loss(now.nan_to_num(), part, objective)
            loss, stats = loss + value.item(), add_stats(stats, more) if stats else more
        return loss, finish_stats(stats)

    whole, metrics = total([batch])
    assert total(parts(ranks)) == (pytest.approx(whole, rel=1e-6), pytest.approx(metrics, rel=1e-5, abs=1e-9))
    halves = split_updates(batch, num_groups=4, num_updates=2)
    assert [set(half.policy.loss_ids.tolist()) for half in halves] == [{0, 1}, {0, 2}]


def test_a_source_without_overrides_changes_nothing():
    groups = [with_source(group_of([1, 0], [2, 3]), "math"), with_source(group_of([1, 0], [2, 3]), "code")]
    batch = make(configured({"math": None, "code": None}, samples=2), groups)
    assert batch.policy.loss_ids is None and batch.policy.kl_weights is None


def test_signals_greedy_answers_and_the_least_samples_follow_the_source():
    config = configured(
        {"math": None, "code": {"advantage": "remax"}, "chat": {"advantage": {"name": "pass_at_k", "k": 2}}}
    )
    rule = SignalRule(config.algorithm, by_source=config.source_algorithms)
    one = group_of([1, 1, 1, 1], [1] * 4, baseline_reward=0.0)
    two_right = group_of([1, 1, 1, 0], [1] * 4)
    assert [rule(with_source(one, name)) for name in ("math", "code")] == [False, True]
    assert [rule(with_source(two_right, name)) for name in ("math", "chat")] == [True, False]
    draw = GroupDraw.from_config(config)
    assert (draw.with_baseline, draw.baselines, draw.least) == (False, {"code": True, "chat": False}, 3)
