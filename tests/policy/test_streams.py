"""Rewards, a teacher and demonstrations in one batch: each stream has the numbers that it has alone."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.batch.rows import batch_of, make_batch, split_updates, with_demonstrations
from grpo_dist.policy.loss import batch_loss, finish_stats
from grpo_dist.types import TeacherLogprobs, TeacherStream, TrainBatch
from tests.support import made_groups
from tests.support.losses import change, nothing_trained, objective, train_batch
from tests.support.made_groups import shard
from tests.support.numbers_by_hand import Tiny
from tests.support.tiers import examples

ALL = objective(
    kl={"coef": 0.05}, entropy={"coef": 0.01}, correction="tis", distillation={"coef": 0.7},
    demonstration_coef=0.3,
)  # fmt: skip


@pytest.fixture(scope="module", params=[0, 5], ids=["sampled tokens", "likeliest tokens"])
def mixed(request):
    """Return a batch of all streams. ``request.param``: the teacher's top-k; 0: sampled tokens."""
    batch = made_groups.mixed_batch(top_k=request.param)
    with torch.no_grad():
        logprobs = Tiny(torch.float64)(batch)[0]
    noise = 0.4 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
    old = torch.where(batch.wanted, logprobs + noise, 0.0).float()
    engine = torch.where(batch.policy.mask, logprobs + noise / 2, 0.0).float()
    return change(batch, policy={"rollout_logprobs": engine, "old_logprobs": old})


def test_the_loss_of_three_streams_is_the_one_worked_by_hand():
    """A sample of two tokens with a teacher, one of one token without, and a demonstration of four."""
    no, yes = False, True
    logprobs = torch.tensor(
        [[0.0, -1.0, -2.0, 0, 0], [0.0, -3.0, 0, 0, 0], [0.0, -0.5, -1.5, -2.5, -3.5]], requires_grad=True
    )
    taught = torch.tensor([[no, yes, yes, no, no], [no] * 5, [no] * 5])
    batch = train_batch(
        torch.tensor([[no, yes, yes, no, no], [no, yes, no, no, no], [no] * 5]),
        advantages=torch.tensor([[0.0, 2, 2, 0, 0], [0.0, -1, 0, 0, 0], [0.0] * 5]),
        rollout_logprobs=torch.tensor([[0.0, -1, -2, 0, 0], [0.0, -3, 0, 0, 0], [0.0] * 5]),
        teacher=TeacherStream(taught, torch.tensor([[0.0, -1.5, -1, 0, 0], [0.0] * 5, [0.0] * 5])),
        demonstrated=torch.tensor([[no] * 5, [no] * 5, [no, yes, yes, yes, yes]]),
        sizes={"taught": 2.0, "demonstrated": 4.0},
    )  # fmt: skip
    how = objective(
        distillation={"coef": 0.5, "kl": {"name": "sampled", "estimator": "k2"}}, demonstration_coef=0.1
    )
    loss, stats = batch_loss(logprobs, batch, how)
    loss.backward()
    policy, kl, nll = -(2 + 2 - 1) / 3, (0.5**2 / 2 + 1 / 2) / 2, (0.5 + 1.5 + 2.5 + 3.5) / 4
    assert loss.item() == pytest.approx(policy + 0.5 * kl + 0.1 * nll, rel=1e-6)
    first = [0, -2 / 3 + 0.5 * 0.5 / 2, -2 / 3 + 0.5 * -1.0 / 2, 0, 0]
    expected = torch.tensor([first, [0, 1 / 3, 0, 0, 0], [0, *[-0.1 / 4] * 4]])
    torch.testing.assert_close(logprobs.grad, expected)
    metrics = finish_stats(stats)
    assert metrics["loss/policy"] == pytest.approx(policy)
    assert metrics["loss/teacher"] == pytest.approx(0.5 * kl)
    assert metrics["loss/demonstrations"] == pytest.approx(0.1 * nll)
    assert metrics["demonstrations/nll"] == pytest.approx(nll)


def test_every_stream_has_its_tokens_and_its_denominator(mixed):
    reward, taught, shown = mixed.policy.mask, mixed.teacher.mask, mixed.demonstrated
    assert mixed.denominators.tokens == reward.sum() and mixed.denominators.taught == taught.sum()
    tokens = sum(g.rollouts[0].sampled_ids.size for g in made_groups.demonstrations(5))
    assert mixed.denominators.demonstrated == shown.sum() == tokens
    assert not (shown & (reward | taught)).any()
    assert (taught & ~reward).any(), "a sample without a reward is taught"
    assert (reward & ~taught).any() and torch.equal(mixed.wanted, reward | taught | shown)


def test_a_sample_has_its_sampling_temperature_and_a_demonstration_temperature_1(mixed):
    """Compared with a softmax of each row alone."""
    shown, tiny = mixed.demonstrated.any(dim=1), Tiny(torch.float64)
    assert set(mixed.temperatures[shown].tolist()) == {1.0} and len(set(mixed.temperatures.tolist())) == 7
    with torch.no_grad():
        actual = tiny(mixed)[0]
        for i, group in enumerate(mixed.group_ids.tolist()):
            steps = torch.arange(1, mixed.tokens.shape[1] + 1)[:, None]
            hidden = torch.tanh(tiny.embedding[mixed.tokens[i]].cumsum(dim=0) / steps)
            temperature = 1.0 if shown[i] else 0.55 + 0.2 * group
            logprobs = torch.log_softmax(hidden @ tiny.head.T / temperature, dim=1)
            expected = logprobs[:-1].gather(1, mixed.tokens[i, 1:, None])[:, 0]
            wanted = mixed.wanted[i, 1:]
            torch.testing.assert_close(actual[i, 1:][wanted], expected[wanted])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=examples(3, 30))
@given(data=st.data())
def test_no_split_and_no_order_of_the_rows_changes_gradient_or_metrics(mixed, dtype, data):
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    rows = len(mixed)
    order = data.draw(st.permutations(range(rows)))
    cuts = data.draw(st.sets(st.integers(1, rows - 1)))
    parts = [mixed.select(list(order[a:b])) for a, b in pairwise([0, *sorted(cuts), rows])]
    expected, metrics = Tiny(dtype).gradient([mixed], ALL)
    actual, same = Tiny(dtype).gradient(parts, ALL)
    assert float((actual - expected).norm() / expected.norm()) < tolerance
    assert same == pytest.approx(metrics, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_get_every_row_once_with_the_denominators_of_the_whole(mixed, ranks):
    shards = shard(mixed, ranks)
    assert sorted(i for part in shards for i in part.row_ids.tolist()) == list(range(len(mixed)))
    assert all(part.denominators == mixed.denominators for part in shards)


def test_the_gradient_is_the_sum_of_the_gradients_of_the_streams(mixed):
    """The other streams are removed from the batch, not only weighted with 0."""
    tiny = Tiny(torch.float64)
    whole, _ = tiny.gradient([mixed], ALL)
    reward, _ = tiny.gradient([replace(mixed, teacher=None, demonstrated=None)], ALL)
    nothing = nothing_trained(mixed)
    taught, _ = tiny.gradient([replace(nothing, demonstrated=None)], ALL)
    shown, _ = tiny.gradient([replace(nothing, teacher=None)], ALL)
    assert min(float(part.norm()) for part in (reward, taught, shown)) > 1e-3
    assert float((reward + taught + shown - whole).norm() / whole.norm()) < 1e-12


def test_the_policy_loss_and_its_metrics_are_the_same_next_to_demonstrations():
    """The rows of the samples stay as they are."""
    rng = np.random.default_rng(3)
    groups = [made_groups.group(i, rng) for i in range(3)]
    advantages = [rng.standard_normal(4).astype(np.float32) for _ in groups]
    plain = make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=12)
    joined = with_demonstrations(plain, made_groups.demonstrations(4), first_row=12)

    def same_above(values):
        before, after = values
        width = before.shape[1] if before.ndim == 2 else None
        assert torch.equal(after[:12] if width is None else after[:12, :width], before)
        assert width is None or not after[:12, width:].any()
        return before

    TrainBatch.combine([plain, joined], same_above)
    results = []
    for batch in (plain, joined):
        logprobs, entropy = (torch.where(batch.wanted, value, 0.0) for value in (-1.0, 2.0))
        results.append(batch_loss(logprobs, batch, objective(demonstration_coef=0.0), entropy=entropy))
    (loss, stats), (joined_loss, joined_stats) = results
    metrics, expected = finish_stats(joined_stats), finish_stats(stats)
    assert joined_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_demonstrations_alone_have_the_loss_of_supervised_training_to_the_last_digit():
    """If no sample has an advantage, and the weight is 1."""
    shown = made_groups.demonstrations(6)
    rng = np.random.default_rng(0)
    idle = make_batch(
        [made_groups.group(0, rng)], [np.zeros(4, np.float32)], ref_logprobs=None, max_new_tokens=12
    )
    joined = with_demonstrations(idle, shown, first_row=4)
    alone = batch_of(shown, 12)
    tiny = Tiny(torch.float32)
    supervised, expected = tiny.gradient([alone], objective(supervised=True))
    mixed, metrics = tiny.gradient([joined.select(list(range(4, 10)))], objective(demonstration_coef=1.0))
    assert torch.equal(mixed, supervised)
    assert metrics["loss/total"] == expected["loss/total"]
    assert metrics["demonstrations/nll"] == pytest.approx(expected["loss/total"], rel=1e-6)


def test_a_stream_without_tokens_has_no_metrics():
    """A mean entropy of 0 would look like a collapse, and a KL of 0 would be below its target."""
    batch = made_groups.demonstrated_batch()
    names = {}
    for shown in (batch.demonstrated, torch.zeros_like(batch.demonstrated)):
        part = replace(batch, demonstrated=shown)
        entropy = torch.ones(batch.tokens.shape)
        _, stats = batch_loss(-torch.ones(batch.tokens.shape), part, ALL, entropy=entropy)
        names[bool(shown.any())] = set(finish_stats(stats))
    assert names[True] == {"loss/total", "loss/demonstrations", "demonstrations/nll"}
    assert names[False] == {"loss/total"} and len(names) == 2


def test_updates_of_a_step_have_their_number_of_taught_tokens():
    rng = np.random.default_rng(1)
    groups = [made_groups.group(i, rng) for i in range(4)]
    lengths = [[len(r.completion_ids) for r in g.rollouts] for g in groups]
    teachers = [
        TeacherLogprobs(np.full(n, -1.0, np.float32)) if i != 2 else None
        for i, group_lengths in enumerate(lengths)
        for n in group_lengths
    ]
    batch = make_batch(
        groups, [np.zeros(4, np.float32)] * 4, ref_logprobs=None, max_new_tokens=12, teachers=teachers
    )
    first, second = split_updates(batch, num_groups=4, num_updates=2)
    assert first.denominators.taught == sum(lengths[0] + lengths[1])
    assert second.denominators.taught == sum(lengths[3])


def test_a_teacher_that_agrees_gives_no_gradient_and_a_divergent_one_stays_finite():
    batch = replace(made_groups.mixed_batch(with_reference=False), demonstrated=None)
    batch = change(batch, policy={"advantages": torch.zeros_like(batch.policy.advantages)})
    logprobs = torch.full(batch.tokens.shape, -2.0, requires_grad=True)
    for teacher, norm in ((-2.0, 0.0), (-500.0, 498.0)):
        part = change(batch, teacher={"logprobs": torch.where(batch.teacher.mask, teacher, 0.0)})
        loss, _ = batch_loss(logprobs, part, objective(distillation={"coef": 1.0}))
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert float(gradient.sum()) == pytest.approx(norm, rel=1e-5) and math.isfinite(loss.item())
