"""Advantages of steps, turns and tokens: numbers worked by hand, and definitions in loops."""

import math
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.advantages import grpo
from grpo_dist.algorithms.token_advantages import optimal_token_baseline, process, sum_so_far, turn_level
from tests.support.numbers_by_hand import NAN, close, mask_of, tensor


def test_process_advantages_sum_the_normalised_rewards_of_steps_that_end_at_or_after_a_token():
    """Two samples of one prompt, three steps and one; statistics over all four steps."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    rewards, rows, ends = tensor(1, 0, 1, 0), torch.tensor([0, 0, 0, 1]), torch.tensor([3, 4, 6, 3])
    unit = 0.5 / math.sqrt(1 / 3)
    got = process(rewards, rows, ends, torch.tensor([5, 5]), mask, eps=0.0)
    close(got[0] / unit, tensor(0, 0, 1, 1, 0, 1, 1, 0), 1e-6)
    close(got[1] / unit, tensor(0, 0, -1, -1, 0, 0, 0, 0), 1e-6)


def test_process_ignores_the_order_of_steps_and_leaves_out_unscored_ones():
    mask = torch.ones(2, 4, dtype=torch.bool)
    ids = torch.tensor([0, 0])
    rewards, rows, ends = tensor(1, 0, 0.5), torch.tensor([0, 0, 1]), torch.tensor([1, 3, 2])
    whole = process(rewards, rows, ends, ids, mask)
    turned = torch.tensor([2, 0, 1])
    assert torch.equal(process(rewards[turned], rows[turned], ends[turned], ids, mask), whole)
    more = torch.cat([rewards, tensor(NAN)]), torch.cat([rows, ids[:1]]), torch.cat([ends, ids[:1]])
    assert torch.equal(process(*more, ids, mask), whole)


def turns(episodes, rewards, groups=None, **how):
    """Return the advantages, sample by sample. ``episodes``: rewards of the turns of each sample."""
    flat = torch.tensor([reward for episode in episodes for reward in episode], dtype=torch.float64)
    samples = torch.tensor([i for i, episode in enumerate(episodes) for _ in episode], dtype=torch.long)
    ids = torch.tensor(groups or [0] * len(episodes))
    got = turn_level(flat, samples, torch.tensor(rewards, dtype=torch.float64), ids, **how)
    return [part.tolist() for part in got.split([len(episode) for episode in episodes])]


def test_turns_are_compared_with_the_same_turn_of_the_group():
    a, b, c = turns([[0, 0], [0, 0], [0]], [1, 0, 1], eps=0)
    assert a == pytest.approx([(1 / 3) / math.sqrt(1 / 3), 0.5 / math.sqrt(0.5)])
    assert b == pytest.approx([(-2 / 3) / math.sqrt(1 / 3), -0.5 / math.sqrt(0.5)])
    assert c == pytest.approx([(1 / 3) / math.sqrt(1 / 3)])


def test_rewards_of_turns_count_for_the_turn_and_all_before_it():
    """Returns [1 + 0.5 (0 + 0.5 (2 + 1)), 0.5 * 3, 3] = [1.75, 1.5, 3] against [0, 0, 0]."""
    one, other = turns([[1, 0, 2], [0, 0, 0]], [1, 0], discount=0.5, std="none")
    assert one == pytest.approx([1.75 / 2, 0.75, 1.5])
    assert other == pytest.approx([-1.75 / 2, -0.75, -1.5])


def test_without_rewards_of_turns_and_one_turn_each_it_is_grpo():
    rewards, groups = [1.0, 0, 0, 1, 0.3, 0.3], [0, 0, 0, 0, 1, 1]
    got = turns([[0]] * 6, rewards, groups)
    expected = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert [turn for (turn,) in got] == expected.tolist()


def test_a_turn_that_no_other_sample_has_gets_0_and_equal_returns_are_exactly_0():
    long, short, other = turns([[0, 0, 0], [0], [0, 0]], [0.7, 0.7, 0.7])
    assert long == [0, 0, 0] and short == [0] and other == [0, 0]
    long, short = turns([[0, 5], [0]], [1, 0])
    assert long[1] == 0 and long[0] == -short[0] != 0


def test_an_unscored_reward_leaves_the_statistics_of_the_turns_it_reaches():
    """A NaN in turn 1 reaches turns 0 and 1, a NaN of the episode all turns."""
    clean = turns([[0, 1, 3], [0, 0, 0], [0, 2, 1]], [1, 0, 0])
    lost, *others = turns([[0, math.nan, 3], [0, 0, 0], [0, 2, 1]], [1, 0, 0])
    pair = turns([[0, 0, 0], [0, 2, 1]], [0, 0])
    assert lost[:2] == [0, 0] and lost[2] == pytest.approx(clean[0][2])
    assert [values[:2] for values in others] == [pytest.approx(values[:2]) for values in pair]
    whole, *others = turns([[0, 1, 3], [0, 0, 0], [0, 2, 1]], [math.nan, 0, 0])
    assert whole == [0, 0, 0] and others == [pytest.approx(values) for values in pair]


def by_definition(episodes, rewards, groups, discount, std, eps):
    returns = [
        [
            sum(discount ** (k - t) * r for k, r in enumerate(episode) if k >= t)
            + discount ** (len(episode) - 1 - t) * reward
            for t in range(len(episode))
        ]
        for episode, reward in zip(episodes, rewards, strict=True)
    ]
    peers = {}
    for values, group in zip(returns, groups, strict=True):
        for t, value in enumerate(values):
            peers.setdefault((group, t), []).append(value)
    centred = [v - mean(same) for same in peers.values() for v in same]
    over_all = math.sqrt(sum(v * v for v in centred) / max(len(centred) - 1, 1))
    out = []
    for values, group in zip(returns, groups, strict=True):
        line = []
        for t, value in enumerate(values):
            same = peers[group, t]
            if len(set(same)) == 1:
                line.append(0.0)
                continue
            scale = {"none": 1.0, "group": stdev(same) + eps, "batch": over_all + eps}[std]
            line.append((value - mean(same)) / scale)
        out.append(line)
    return out


@settings(max_examples=100)
@given(
    samples=st.lists(
        st.tuples(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=5),
                  st.sampled_from([0.0, 1.0, 0.25]), st.integers(0, 2)),
        min_size=1, max_size=12,
    ),
    discount=st.sampled_from([1.0, 0.5, 0.0]),
    std=st.sampled_from(["none", "group", "batch"]),
)  # fmt: skip
def test_advantages_of_turns_are_those_of_the_definition(samples, discount, std):
    episodes, rewards, groups = map(list, zip(*samples, strict=True))
    got = turns(episodes, rewards, groups, discount=discount, std=std, eps=1e-6)
    expected = by_definition(episodes, rewards, groups, discount, std, 1e-6)
    for actual, theirs in zip(got, expected, strict=True):
        assert actual == pytest.approx(theirs, rel=1e-9, abs=1e-9)


NORMS = torch.tensor([[0.2, 0.4, 0.0], [0.6, 0.0, 0.5]], dtype=torch.float64)
ONE = torch.tensor([0, 0])


def test_each_token_has_the_mean_weighted_by_the_energy_so_far():
    """W: 0.2, 0.6 and 0.6, 0.6, 1.1; baselines 2 / 0.8 and 2.4 / 1.2; the third token is alone."""
    got = optimal_token_baseline(tensor(1, 3), ONE, NORMS, mask_of([2, 3], 3))
    close(got, [[-1.5, -1, 0], [0.5, 1, 3]], 1e-12)


def test_an_observed_token_is_no_step_of_time():
    """The same samples, with two observed tokens behind the first token of one sample."""
    mask = torch.tensor([[True, False, False, True, False], [True, True, True, False, False]])
    norms = torch.tensor([[0.2, 9, NAN, 0.4, 9], [0.6, 0.0, 0.5, 9, 9]], dtype=torch.float64)
    got = optimal_token_baseline(tensor(1, 3), ONE, norms, mask)
    close(got, [[-1.5, 0, 0, -1, 0], [0.5, 1, 3, 0, 0]], 1e-12)


def test_the_rows_of_a_sample_are_one_sequence():
    mask, samples = torch.tensor([[True, False], [False, True], [True, True], [True, False]]), [0, 0, 1, 1]
    norms = torch.tensor([[0.2, 9], [9, 0.4], [0.6, 0.0], [0.5, 9]], dtype=torch.float64)
    got = optimal_token_baseline(tensor(1, 3), ONE, norms, mask, sequence_ids=torch.tensor(samples))
    close(got, [[-1.5, 0], [0, -1], [0.5, 1], [3, 0]], 1e-12)
    assert sum_so_far(torch.tensor([[1, 2], [4, 0], [8, 1]]), torch.tensor([5, 5, 7])).tolist() == [
        [1, 3], [7, 7], [8, 9],
    ]  # fmt: skip


def test_equal_rewards_teach_only_the_end_of_the_longest():
    rewards, groups = torch.full((3,), 0.7), torch.zeros(3, dtype=torch.long)
    got = optimal_token_baseline(rewards, groups, torch.rand(3, 4), mask_of([2, 3, 4], 4))
    assert got.count_nonzero() == 1 and float(got[2, 3]) == float(rewards[2])


def test_a_sample_without_scored_siblings_has_no_advantage_and_tokens_without_energy_the_mean():
    norms, groups = torch.zeros(5, 2), torch.tensor([0, 1, 1, 2, 2])
    got = optimal_token_baseline(tensor(4, 2, NAN, 1, 0), groups, norms, mask_of([2, 1, 2, 2, 2], 2))
    close(got, [[0, 0]] * 3 + [[0.5, 0.5], [-0.5, -0.5]])


@pytest.mark.parametrize("seed", range(4))
def test_token_baselines_are_those_of_the_definition_in_any_order_of_samples(seed):
    rng = np.random.default_rng(seed)
    groups = np.repeat([7, 3, 5], [4, 5, 1])
    rewards = rng.normal(1, 2, len(groups))
    rewards[rng.random(len(groups)) < 0.15] = math.nan
    norms, mask = rng.uniform(0, 2, (len(groups), 8)), rng.random((len(groups), 8)) < 0.7
    order = rng.permutation(len(groups))
    inputs = [torch.from_numpy(array[order]) for array in (rewards, groups, norms, mask)]
    got = optimal_token_baseline(*inputs).numpy()[np.argsort(order)]

    energy = [np.cumsum(values[kept]) for values, kept in zip(norms, mask, strict=True)]
    for i, places in enumerate(np.flatnonzero(row) for row in mask):
        siblings = [j for j in range(len(groups)) if groups[j] == groups[i] and math.isfinite(rewards[j])]
        for t, place in enumerate(places):
            there = [j for j in siblings if len(energy[j]) > t]
            expected = 0.0
            if i in siblings and len(siblings) > 1:
                weights = [energy[j][t] for j in there]
                mean = math.fsum(w * rewards[j] for w, j in zip(weights, there, strict=True))
                expected = rewards[i] - (mean / math.fsum(weights) if len(there) > 1 else 0.0)
            assert got[i, place] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not got[~mask].any()
