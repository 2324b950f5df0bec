"""Advantages of turns, by hand and against the definition in plain float64."""

import math
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.advantages import grpo
from grpo_dist.algorithms.token_advantages import turn_level


def of(episodes, rewards, groups=None, **how):
    """``episodes``: rewards of the turns of each sample. Returns the advantages, sample by sample."""
    flat = torch.tensor([r for own in episodes for r in own], dtype=torch.float64)
    samples = torch.tensor([i for i, own in enumerate(episodes) for _ in own], dtype=torch.long)
    ids = torch.tensor(groups or [0] * len(episodes))
    got = turn_level(flat, samples, torch.tensor(rewards, dtype=torch.float64), ids, **how)
    return [part.tolist() for part in got.split([len(own) for own in episodes])]


def test_the_worked_example():
    a, b, c = of([[0, 0], [0, 0], [0]], [1, 0, 1], eps=0)
    assert a == pytest.approx([(1 / 3) / math.sqrt(1 / 3), 0.5 / math.sqrt(0.5)])
    assert b == pytest.approx([(-2 / 3) / math.sqrt(1 / 3), -0.5 / math.sqrt(0.5)])
    assert c == pytest.approx([(1 / 3) / math.sqrt(1 / 3)])


def test_rewards_of_turns_count_for_the_turn_and_all_before_it():
    """Returns [1 + 0.5 (0 + 0.5 (2 + 1)), 0.5 * 3, 3] = [1.75, 1.5, 3] against [0, 0, 0]."""
    one, other = of([[1, 0, 2], [0, 0, 0]], [1, 0], discount=0.5, std="none")
    assert one == pytest.approx([1.75 / 2, 0.75, 1.5])
    assert other == pytest.approx([-1.75 / 2, -0.75, -1.5])


def test_without_rewards_of_turns_and_one_turn_each_it_is_grpo():
    rewards, groups = [1.0, 0, 0, 1, 0.3, 0.3], [0, 0, 0, 0, 1, 1]
    got = of([[0]] * 6, rewards, groups)
    expected = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert [own[0] for own in got] == expected.tolist()


def test_a_turn_that_nobody_else_has_gets_0_and_equal_returns_are_exactly_0():
    long, short, other = of([[0, 0, 0], [0], [0, 0]], [0.7, 0.7, 0.7])
    assert long == [0, 0, 0] and short == [0] and other == [0, 0]
    long, short = of([[0, 5], [0]], [1, 0])
    assert long[1] == 0 and long[0] == -short[0] != 0


def test_what_is_not_scored_leaves_the_statistics_of_the_turns_it_reaches():
    """A NaN in turn 1 reaches turns 0 and 1, a NaN of the episode all of them."""
    clean = of([[0, 1, 3], [0, 0, 0], [0, 2, 1]], [1, 0, 0])
    lost, *others = of([[0, math.nan, 3], [0, 0, 0], [0, 2, 1]], [1, 0, 0])
    pair = of([[0, 0, 0], [0, 2, 1]], [0, 0])
    assert lost[:2] == [0, 0] and lost[2] == pytest.approx(clean[0][2])
    assert [own[:2] for own in others] == [pytest.approx(own[:2]) for own in pair]
    whole, *others = of([[0, 1, 3], [0, 0, 0], [0, 2, 1]], [math.nan, 0, 0])
    assert whole == [0, 0, 0] and others == [pytest.approx(own) for own in pair]


def by_definition(episodes, rewards, groups, discount, std, eps):
    returns = [
        [
            sum(discount ** (k - t) * r for k, r in enumerate(own) if k >= t)
            + discount ** (len(own) - 1 - t) * reward
            for t in range(len(own))
        ]
        for own, reward in zip(episodes, rewards, strict=True)
    ]
    peers = {}
    for own, group in zip(returns, groups, strict=True):
        for t, value in enumerate(own):
            peers.setdefault((group, t), []).append(value)
    centred = [v - mean(own) for own in peers.values() for v in own]
    over_all = math.sqrt(sum(v * v for v in centred) / max(len(centred) - 1, 1))
    out = []
    for own, group in zip(returns, groups, strict=True):
        line = []
        for t, value in enumerate(own):
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
    made=st.lists(
        st.tuples(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=5),
                  st.sampled_from([0.0, 1.0, 0.25]), st.integers(0, 2)),
        min_size=1, max_size=12,
    ),
    discount=st.sampled_from([1.0, 0.5, 0.0]),
    std=st.sampled_from(["none", "group", "batch"]),
)  # fmt: skip
def test_advantages_of_turns_are_those_of_the_definition(made, discount, std):
    episodes, rewards, groups = map(list, zip(*made, strict=True))
    got = of(episodes, rewards, groups, discount=discount, std=std, eps=1e-6)
    expected = by_definition(episodes, rewards, groups, discount, std, 1e-6)
    for own, theirs in zip(got, expected, strict=True):
        assert own == pytest.approx(theirs, rel=1e-9, abs=1e-9)
