"""Advantages against numbers worked by hand and plain loops."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.advantages import (
    ADVANTAGE_INPUTS,
    ADVANTAGES,
    dr_grpo,
    gdpo,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from grpo_dist.algorithms.normalise import Moments, length_weights, normalise_rewards, whiten
from grpo_dist.algorithms.token_advantages import process
from tests.support.numbers_by_hand import NAN, close, mask_of, tensor

OF_ANY_REWARD = sorted(set(ADVANTAGES) - {"maxrl"})  # that one is of 0 and 1: test_best_of_group
GROUP_RELATIVE = sorted(set(OF_ANY_REWARD) - {"reinforce_pp", "remax"})


def advantages(name, rewards, groups, std="group"):
    """Call any estimator; its other inputs are equal lengths, k = 2 and the reward as the only part."""
    known = {
        "std": std, "eps": 1e-6, "k": 2, "lengths": torch.full_like(groups, 3), "parts": rewards[None],
        "weights": torch.ones(1), "baselines": torch.zeros_like(rewards),
    }  # fmt: skip
    return ADVANTAGES[name](rewards, groups, **{n: known[n] for n in ADVANTAGE_INPUTS.get(name, ())})


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [(grpo, 1.6201816, -0.5400605), (rloo, 0.8571429, -0.2857143), (dr_grpo, 0.75, -0.25)],
)
def test_advantages_have_their_golden_values(estimator, right, wrong):
    rewards = tensor(1, 0, 0, 1, 0, 0, 0, 0)
    expected = torch.where(rewards == 1, right, wrong)
    close(estimator(rewards, torch.zeros(8, dtype=torch.long)), expected, 2e-7)


@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, 1e-8, 12345.678, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(reward, size, std):
    groups = torch.arange(3).repeat_interleave(size)
    rewards = torch.full((3 * size,), reward)
    for name in GROUP_RELATIVE:
        assert torch.equal(advantages(name, rewards, groups, std), torch.zeros(3 * size)), name
    # Also next to a group whose rewards differ.
    rewards[0] += 1
    assert torch.equal(grpo(rewards, groups, std=std)[size:], torch.zeros(2 * size))


def test_a_nan_reward_is_left_out_of_the_statistics_and_gets_no_advantage():
    rewards, groups = tensor(1, NAN, 0, 0, NAN, NAN), torch.tensor([0, 0, 0, 1, 1, 1])
    third = 1 / math.sqrt(0.5)
    close(grpo(rewards, groups, eps=0.0), tensor(0.5 * third, 0, -0.5 * third, 0, 0, 0))
    close(dr_grpo(rewards, groups), tensor(0.5, 0, -0.5, 0, 0, 0))
    close(rloo(rewards, groups), tensor(1, 0, -1, 0, 0, 0))


def test_a_lone_sample_and_an_empty_batch_have_no_advantage():
    for name in GROUP_RELATIVE:
        assert advantages(name, tensor(5.0), torch.tensor([3])).tolist() == [0.0]
    for name in ADVANTAGES:
        assert advantages(name, tensor(), torch.tensor([], dtype=torch.long)).tolist() == []


@pytest.mark.parametrize("name", OF_ANY_REWARD)
def test_unscored_samples_change_no_other_advantage(name):
    rewards, groups = tensor(1, 0, 2, 0.5, 4, 4), torch.tensor([0, 0, 0, 0, 1, 1])
    with_nan = torch.cat([rewards, tensor(NAN, NAN)]), torch.cat([groups, torch.tensor([0, 1])])
    got = advantages(name, *with_nan)
    assert torch.equal(got[:6], advantages(name, rewards, groups)) and got[6:].tolist() == [0.0, 0.0]


def test_the_batch_deviation_is_that_of_all_centred_rewards():
    rewards, groups = tensor(1, 0, NAN, 6, 2, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    centred = [0.5, -0.5, 2.0, -2.0, 0.0]
    a, b, c, d, e = (v / (statistics.stdev(centred) + 1e-6) for v in centred)
    close(grpo(rewards, groups, std="batch"), tensor(a, b, 0, c, d, e))


def test_an_unknown_deviation_is_refused():
    with pytest.raises(ValueError, match="std = 'population': expected group, batch or none"):
        grpo(tensor(0, 1), torch.zeros(2, dtype=torch.long), std="population")


RIGHT = tensor(1, 0, 0, 1, 0, 0, 0, 0)
ONE = torch.zeros(8, dtype=torch.long)
LENGTHS = torch.tensor([5, 3, 1, 4, 2, 5, 2, 3])


def test_opo_weighs_the_baseline_by_length():
    close(opo(RIGHT, ONE, lengths=LENGTHS), torch.where(RIGHT == 1, 0.64, -0.36))
    close(opo(RIGHT, ONE, lengths=torch.full((8,), 7)), dr_grpo(RIGHT, ONE))


def test_remax_subtracts_the_greedy_answers_reward():
    rewards, baselines = tensor(1, 0, NAN, 1), tensor(0.25, 0.25, 1, NAN)
    close(remax(rewards, torch.tensor([0, 0, 1, 1]), baselines=baselines), tensor(0.75, -0.25, 0, 0))


def test_reinforce_pp_and_its_baseline_form_are_whitened_over_tokens():
    mask = torch.arange(5) < LENGTHS[:, None]
    spread = reinforce_pp_baseline(RIGHT, ONE)[:, None].expand(8, 5)
    white = whiten(spread, mask)
    close(white[0], tensor(*[1.3063945] * 5), 2e-7)
    close(white[1], tensor(*[-0.7348470] * 3, 0, 0), 2e-7)
    # Without the group's mean: whitening subtracts a mean anyway, here the same one.
    close(whiten(reinforce_pp(RIGHT, ONE)[:, None].expand(8, 5), mask), white, 1e-6)


def test_whitened_tokens_have_mean_0_and_deviation_1_and_equal_ones_are_0():
    mask = torch.rand(4, 6) < 0.7
    white = whiten(torch.randn(4, 6, dtype=torch.float64), mask)
    assert abs(float(white[mask].mean())) < 1e-12 and float(white[mask].std()) == pytest.approx(1, abs=1e-6)
    assert not white[~mask].any()
    assert not whiten(torch.full((4, 6), 0.7), mask).any()
    assert not whiten(torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bool)).any()


def subsets(values, k):
    """Compute pass@k advantages by enumerating all subsets."""
    tries = list(itertools.combinations(range(len(values)), k))
    best = [max(values[i] for i in chosen) for chosen in tries]
    mean, deviation = statistics.fmean(best), statistics.pstdev(best)
    return [
        (statistics.fmean(b for b, chosen in zip(best, tries, strict=True) if i in chosen) - mean)
        / (deviation + 1e-6)
        for i in range(len(values))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("values", [[1, 0, 0, 0, 0, 1], [0.5, 2, -1, 0.5, 3, 0], [1, 1, 1, 0, 0]])
def test_pass_at_k_equals_enumeration_of_all_subsets(k, values):
    groups = torch.zeros(len(values), dtype=torch.long)
    expected = subsets([float(v) for v in values], k)
    if max(values) in sorted(values)[:-1] and len({max(c) for c in itertools.combinations(values, k)}) == 1:
        expected = [0.0] * len(values)
    close(pass_at_k(tensor(*values), groups, k=k), tensor(*expected), 2e-6)


def test_pass_at_k_has_the_papers_values_for_right_and_wrong():
    close(pass_at_k(tensor(1, 0, 0, 0), ONE[:4], k=2, eps=0.0), tensor(1, -1 / 3, -1 / 3, -1 / 3), 1e-7)
    with pytest.raises(ValueError, match="k = 0: expected at least 1"):
        pass_at_k(RIGHT, ONE, k=0)


def test_gdpo_distinguishes_samples_whose_rewards_have_the_same_sum():
    """Right answers in a bad format and wrong ones in a good format: the sum is 1 for both."""
    parts = tensor(1, 1, 0, 0), tensor(0, 0, 0, 1)
    weights = tensor(1, 1)
    total = parts[0] + parts[1]
    assert total[0] == total[3]
    got = gdpo(total, ONE[:4], parts=torch.stack(parts), weights=weights)
    assert got[0] != got[3] and got[0] == got[1]
    silent = torch.cat([torch.stack(parts), tensor(1, 1, 1, 0, 0, 0).view(2, 3)], dim=1)
    with_silent = gdpo(silent.sum(0), torch.tensor([0, 0, 0, 0, 1, 1, 1]), parts=silent, weights=weights)
    assert with_silent[4:].tolist() == [0.0, 0.0, 0.0]
    own = [(v - 0.5) / (1 / math.sqrt(3)) for v in (1, 1, 0, 0)], [(v - 0.25) / 0.5 for v in (0, 0, 0, 1)]
    summed = [a + b for a, b in zip(*own, strict=True)]
    deviation = statistics.stdev(summed)
    close(got, tensor(*(s / deviation for s in summed)), 1e-5)


def test_rewards_are_shifted_and_scaled_over_group_or_batch():
    rewards, groups = tensor(1, 3, NAN, 10, 14), torch.tensor([0, 0, 0, 1, 1])

    def norm(**how):
        return normalise_rewards(rewards, groups, eps=0.0, **how)

    half = math.sqrt(0.5)
    close(norm(over="group")[[0, 1, 3, 4]], tensor(-half, half, -half, half))
    close(norm(over="group", scale=False)[[0, 1, 3, 4]], tensor(-1, 1, -2, 2))
    close(norm(over="group", shift=False)[[0, 1, 3, 4]], tensor(1, 3, 10 / 2, 14 / 2) / math.sqrt(2))
    centred = [v - 7 for v in (1, 3, 10, 14)]
    deviation = statistics.stdev(centred)
    close(norm(over="batch")[[0, 1, 3, 4]], tensor(*(c / deviation for c in centred)))
    equal = normalise_rewards(tensor(1, 1, 1, 0), torch.tensor([0, 0, 1, 1]), over="group", shift=False)
    close(equal, tensor(1, 1, math.sqrt(2), 0), 1e-5)
    assert all(math.isnan(norm(over=over)[2]) for over in ("none", "group", "batch"))
    assert norm(over="none") is rewards
    with pytest.raises(ValueError, match="reward_norm = 'step': expected none, group, batch"):
        norm(over="step")


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


def by_hand(rewards, groups, name):
    out = []
    for reward, own in zip(rewards, groups, strict=True):
        known = [r for r, g in zip(rewards, groups, strict=True) if g == own and not math.isnan(r)]
        if math.isnan(reward) or len(known) < 2 or len(set(known)) == 1:
            out.append(0.0)
        elif name == "grpo":
            out.append((reward - statistics.fmean(known)) / (statistics.stdev(known) + 1e-6))
        elif name == "dr_grpo":
            out.append(reward - statistics.fmean(known))
        else:
            others = (sum(known) - reward) / (len(known) - 1)
            out.append(reward - others)
    return out


REWARD = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, NAN])


@settings(max_examples=60)
@given(st.lists(st.tuples(REWARD, st.integers(0, 3)), min_size=1, max_size=24), st.randoms())
def test_advantages_equal_the_definition_in_any_order_of_samples(samples, rng):
    rng.shuffle(samples)
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    for name in ("grpo", "dr_grpo", "rloo"):
        actual = ADVANTAGES[name](tensor(*rewards, dtype=torch.float64), torch.tensor(groups))
        close(actual, by_hand(rewards, groups, name), 1e-12)


def test_advantages_keep_the_dtype_of_rewards_and_do_not_modify_them():
    rewards = tensor(1, 0, NAN)
    before = rewards.clone()
    groups = torch.zeros(3, dtype=torch.int32)
    for name in ADVANTAGES:
        assert advantages(name, rewards, groups).dtype == torch.float32
        assert advantages(name, rewards.double(), groups).dtype == torch.float64
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize("name", OF_ANY_REWARD)
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_non_finite_reward_gets_no_advantage_and_is_left_out_of_the_statistics(name, bad):
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 0])
    whole = tensor(1, 0, 0, 2, 1, 0, bad)
    got = advantages(name, whole, groups)
    assert got[-1] == 0.0 and got.isfinite().all()
    assert torch.equal(got[:-1], advantages(name, whole[:-1], groups[:-1]))


@pytest.mark.parametrize("name", OF_ANY_REWARD)
def test_integer_rewards_are_not_truncated(name):
    groups, values = torch.tensor([0, 0, 0, 1, 1, 1]), (3, 0, 1, 2, 0, 0)
    got = advantages(name, torch.tensor(values), groups)
    assert got.dtype == torch.float32
    close(got, advantages(name, tensor(*values), groups), 1e-7)
    whole = normalise_rewards(torch.tensor(values), groups, over="group")
    close(whole, normalise_rewards(tensor(*values), groups, over="group"), 1e-12)


def test_the_deviation_of_the_batch_is_that_of_centred_or_of_raw_rewards():
    """TRL's scale_rewards = batch and ROLL's norm_std_type = batch use raw rewards."""
    rewards, groups = tensor(1, 0, 5, 4), torch.tensor([0, 0, 1, 1])
    unit = [0.5, -0.5, 0.5, -0.5]
    centred, raw = statistics.stdev(unit), statistics.stdev([1, 0, 5, 4])
    close(grpo(rewards, groups, std="batch", eps=0.0), tensor(*(u / centred for u in unit)), 1e-6)
    close(grpo(rewards, groups, std="batch_raw", eps=0.0), tensor(*(u / raw for u in unit)), 1e-6)


def test_length_weights_fall_linearly_from_the_shortest_sequence_to_the_longest():
    close(length_weights(mask_of([2, 4, 6], 6))[:, 0], [1.5, 1.0, 0.5])
    close(length_weights(mask_of([2, 2, 6], 6))[:, 0], [9 / 7, 9 / 7, 3 / 7])
    close(length_weights(mask_of([3, 3], 4))[:, 0], [1, 1])
    close(length_weights(mask_of([2, 0, 6], 6))[:, 0], [1.5, 1.0, 0.5])  # one without tokens
    close(length_weights(mask_of([0, 0], 6))[:, 0], [1, 1])
    close(length_weights(mask_of([1, 3, 2, 1], 4), torch.tensor([0, 1, 1, 0]))[:, 0], [1.5, 0.5, 0.5, 1.5])


def test_whitening_leaves_out_non_finite_values():
    values, mask = torch.tensor([[1.0, NAN, 3.0], [math.inf, 5.0, 9.0]]), mask_of([3, 2], 3)
    got = whiten(values, mask)
    kept = [1.0, 3.0, 5.0]
    expected = [(v - 3) / statistics.stdev(kept) for v in kept]
    close(got, torch.tensor([[expected[0], 0, expected[1]], [0, expected[2], 0]]), 1e-6)


def test_running_moments_are_those_of_all_rewards_so_far():
    steps = [(1.0, 0.0, NAN, 1.0), (0.25,), (math.inf,), (7.0, -2.0, 3.0)]
    moments = Moments()
    for step in steps:
        moments = moments.updated(tensor(*step))
    known = [v for step in steps for v in step if math.isfinite(v)]
    assert (moments.count, moments.mean) == (len(known), pytest.approx(statistics.fmean(known), rel=1e-12))
    assert moments.deviation == pytest.approx(statistics.stdev(known), rel=1e-12)
    assert Moments().updated(tensor(0.1, 0.1, 0.1)).deviation == 0.0
    groups, rewards = torch.tensor([0, 0, 0]), tensor(7, NAN, 3)
    how = {"over": "running", "eps": 0.0, "moments": moments}
    shifted = [(v - moments.mean) / moments.deviation for v in (7, 3)]
    close(normalise_rewards(rewards, groups, **how)[[0, 2]], tensor(*shifted))
    scaled = [v / moments.deviation for v in (7, 3)]
    close(normalise_rewards(rewards, groups, shift=False, **how)[[0, 2]], tensor(*scaled))


@pytest.mark.parametrize(
    ("eps", "right", "wrong"),
    [
        (1e-6, 1.6201816, -0.5400605),  # verl and ROLL
        (1e-9, 1.6201851, -0.5400617),  # OpenRLHF
        (1e-4, 1.6198353, -0.5399451),  # TRL and ms-swift
    ],
)
def test_advantages_equal_those_recorded_from_other_trainers(eps, right, wrong):
    """Recorded by calling their functions on one group of rewards [1, 0, 0, 1, 0, 0, 0, 0]."""
    for std in ("group", "batch", "batch_raw"):  # all the same for one group
        got = grpo(RIGHT, ONE, std=std, eps=eps)
        close(got[:2], tensor(right, wrong), 1e-7)
