"""Credit assignment: from a group's rewards to the advantages of a batch's tokens."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.token_advantages import discounted_to_go, sum_to_go
from grpo_dist.batch.credit_assignment import AdvantageSettings, sample_advantages, token_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.config.files import read_tree
from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.loop.updates import reward_moments
from grpo_dist.types import Denominators
from tests.support import fakes
from tests.support.losses import algorithm, credit
from tests.support.made_groups import group_of


def credited(groups, settings, ref_logprobs=None):
    advantages = sample_advantages(groups, settings)
    batch = make_batch(groups, advantages, ref_logprobs=ref_logprobs, max_new_tokens=8)
    return token_advantages(batch, groups, settings).policy.advantages


def test_rewards_are_clipped_before_and_advantages_after():
    settings = credit(std="none", reward_clip=1.0, advantage_clip=0.75)
    got = credited([group_of([5, -1, -9, 0.2], [1, 1, 1, 1])], settings)[:, 2]
    mean = (1 - 1 - 1 + 0.2) / 4
    expected = [0.75, -1 - mean, -1 - mean, 0.2 - mean]
    expected = [max(-0.75, min(0.75, v)) for v in expected]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_a_sample_that_is_not_trained_stays_in_the_token_baseline_of_its_siblings():
    """One right and three truncated samples: the right one is better whether these are trained or not."""
    groups = [group_of([1, 0, 0, 0], [3, 4, 4, 4], reasons=["stop", "length", "length", "length"])]
    settings = credit("otb")
    trained, masked = (
        make_batch(groups, sample_advantages(groups, settings), ref_logprobs=None, max_new_tokens=4,
                   mask_truncated=mask)
        for mask in (False, True)
    )  # fmt: skip
    norms = torch.where(trained.policy.mask, 0.5, 0.0)
    whole, part = (
        token_advantages(batch, groups, settings, norms).policy.advantages for batch in (trained, masked)
    )
    assert whole[0].tolist() == part[0].tolist() == [0, 0, 0.75, 0.75, 0.75, 0]
    assert whole[1:].any() and not part[1:].any()


def test_samples_are_weighted_by_their_length_after_all_other_steps():
    """Over the whole step: lengths 1, 3, 2, 2 weigh 1.5, 0.5, 1, 1. The clip applies before the weights."""
    groups = [group_of([5, -5], [1, 3]), group_of([0.1, 0], [2, 2])]
    settings = credit(std="none", advantage_clip=0.75)
    got = credited(groups, credit(std="none", advantage_clip=0.75, length_weights=True))
    weights = torch.tensor([1.5, 0.5, 1.0, 1.0])[:, None]
    torch.testing.assert_close(got, credited(groups, settings) * weights)
    assert float(got.max()) == 1.125


REFERENCE = [np.array([-1.5, -1.0, -3.0], np.float32), np.array([-1.0], np.float32)]  # k1: .5, 0, 2; 0


def test_kl_in_the_reward_subtracts_from_each_token_its_kl_and_all_later_kl():
    settings = credit(std="none", kl_coef=0.1, kl={"estimator": "k1"})
    got = credited([group_of([1, 0], [3, 1])], settings, REFERENCE)
    torch.testing.assert_close(got[0], torch.tensor([0, 0, 0.5 - 0.25, 0.5 - 0.2, 0.5 - 0.2]))
    torch.testing.assert_close(got[1], torch.tensor([0, 0, -0.5, 0, 0]))


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_the_weight_of_rewards_leaves_the_kl_in_the_reward_as_it_is(weight):
    settings = credit(std="none", kl_coef=0.1, kl={"estimator": "k1"}, reward_coef=weight)
    got = credited([group_of([1, 0], [3, 1])], settings, REFERENCE)
    half = 0.5 * weight
    torch.testing.assert_close(got[0], torch.tensor([0, 0, half - 0.25, half - 0.2, half - 0.2]))
    torch.testing.assert_close(got[1], torch.tensor([0, 0, -half, 0, 0]))


def test_whitened_advantages_are_weighted_after_whitening():
    groups = [group_of([1, 0], [2, 2]), group_of([3, 0], [1, 3], prompt_tokens=1)]
    plain = credit("reinforce_pp", whiten=True)
    expected = 0.5 * credited(groups, plain)
    torch.testing.assert_close(credited(groups, replace(plain, reward_coef=0.5)), expected)


def test_whitening_comes_after_the_kl_and_covers_the_whole_step():
    groups = [group_of([1, 0], [2, 2]), group_of([3, 0], [1, 3], prompt_tokens=1)]
    got = credited(groups, credit("reinforce_pp", whiten=True))
    tokens = [1, 1, 0, 0, 3, 0, 0, 0]
    mean = sum(tokens) / 8
    deviation = math.sqrt(sum((t - mean) ** 2 for t in tokens) / 7)
    flat = [*got[0, 2:4], *got[1, 2:4], *got[2, 1:2], *got[3, 1:4]]
    torch.testing.assert_close(torch.stack(flat), torch.tensor([(t - mean) / deviation for t in tokens]))


def test_step_rewards_become_token_advantages_at_their_positions():
    got = credited([with_steps()], credit("process", eps=1e-12))
    unit = math.sqrt(1 / 3)
    a, b = (1 / 3) / unit, (-2 / 3) / unit
    torch.testing.assert_close(got[0], torch.tensor([0, 0, a + b, b, b]))
    torch.testing.assert_close(got[1], torch.tensor([0, 0, a, a, 0]))
    with pytest.raises(ValueError, match="no step rewards; add a process reward model"):
        credited([group_of([1, 0], [1, 1])], credit("process"))


def with_steps(rewards=(1, 0)):
    steps = (np.array([1.0, 0.0], np.float32), np.array([1.0], np.float32))
    ends = (np.array([0, 2], np.int32), np.array([1], np.int32))
    return group_of(list(rewards), [3, 2], step_rewards=steps, step_ends=ends)


def test_advantages_of_outcomes_and_steps_add_up_with_their_weights():
    """Outcomes 1, 0 centred: .5, -.5. Steps 1, 0, 1 centred: 1/3, -2/3, 1/3, as reward-to-go."""
    how = credit(std="none", process={"coef": 3.0, "outcome_coef": 2.0})
    got = credited([with_steps()], how)
    torch.testing.assert_close(got[0], torch.tensor([0, 0, 1 - 1.0, 1 - 2.0, 1 - 2.0]))
    torch.testing.assert_close(got[1], torch.tensor([0, 0, -1 + 1.0, -1 + 1.0, 0]))
    halved = credited([with_steps()], replace(how, reward_coef=0.5))
    torch.testing.assert_close(halved, 0.5 * got)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce_pp_baseline", "opo"])
def test_steps_next_to_an_estimator_are_the_sum_of_both_alone(estimator):
    groups = [with_steps(), with_steps((0, 3))]
    outcome = credited(groups, credit(estimator, whiten=False))
    steps = credited(groups, credit("process"))
    weights = {"coef": 2.0, "outcome_coef": 0.5}
    both = credited(groups, credit(estimator, whiten=False, process=weights))
    torch.testing.assert_close(both, 0.5 * outcome + 2.0 * steps)


def test_equal_outcomes_leave_the_signal_of_steps():
    got = credited([with_steps((1, 1))], credit(process={"coef": 1.0}))
    torch.testing.assert_close(got, credited([with_steps()], credit("process")))
    with pytest.raises(ValueError, match=r"algorithm\.process.coef = 1, but .* has no step rewards"):
        credited([group_of([1, 0], [1, 1])], credit(process={"coef": 1.0}))


def test_a_group_that_was_not_scored_at_all_needs_no_steps():
    """For example after the loss of the workers that score steps: only the other groups are trained."""
    lost = group_of([np.nan, np.nan], [2, 2])
    how = credit("process")
    got = credited([with_steps(), lost], how)
    torch.testing.assert_close(got[:2], credited([with_steps()], how))
    assert not got[2:].any()


def test_steps_of_a_sample_without_a_reward_do_not_move_the_others():
    """The third sample has step scores, but no reward: the others must be as without it."""
    steps = [np.array(r, np.float32) for r in ([1.0, 0.0], [1.0], [9.0, -7.0])]
    ends = [np.array(e, np.int32) for e in ([0, 2], [1], [0, 1])]
    how = credit("process", eps=1e-12)
    two = group_of([1, 0], [3, 2], step_rewards=tuple(steps[:2]), step_ends=tuple(ends[:2]))
    three = group_of([1, 0, np.nan], [3, 2, 2], step_rewards=tuple(steps), step_ends=tuple(ends))
    got = credited([three], how)
    torch.testing.assert_close(got[:2], credited([two], how))
    assert got[:2].any() and not got[2].any()


def test_gdpo_normalises_each_reward_separately():
    parts = {"math": np.array([1, 1, 0, 0], np.float32), "format": np.array([0, 0, 0, 1], np.float32)}
    group = group_of([1, 1, 0, 1], [1] * 4, parts=parts)
    got = credited([group], credit("gdpo", weights={"math": 1.0, "format": 1.0}))[:, 2]
    assert got[0] == got[1] and got[0] != got[3]
    alone = credited([group], credit("gdpo", weights={"math": 1.0, "format": 0.0}))[:, 2]
    torch.testing.assert_close(alone, torch.tensor([1.0, 1, -1, -1]) * math.sqrt(3 / 4), rtol=1e-5, atol=0)


def scored(*groups):
    return [ScoredGroup(g, []) for g in groups]


@pytest.mark.parametrize("std", ["group", "batch", "batch_raw"])
def test_groups_without_a_reward_do_not_change_its_statistics(std):
    """One group with both rewards, and three of a source without math."""
    math, form = np.array([1, 1, 0, 0], np.float32), np.array([1, 0, 1, 0], np.float32)
    settings = credit("gdpo", std=std, weights={"math": 1.0, "form": 1.0})
    both = group_of(math + form, [1] * 4, parts={"math": math, "form": form})
    others = [group_of(form, [1] * 4, parts={"form": form}) for _ in range(3)]
    alone, beside = sample_advantages([both], settings)[0], sample_advantages([both, *others], settings)[0]
    assert alone[1] == alone[2] == 0  # math alone and form alone are worth the same
    assert np.abs(beside[1:3]).max() < 0.2 * beside[0]


def test_idle_rows_are_left_out_and_the_denominators_stay():
    batch = {"prompts_per_step": 2, "samples_per_prompt": 2}
    silent, useful = group_of([1, 1], [4, 4]), group_of([1, 0], [2, 3])
    (short,) = fakes.make_batches(fakes.config(batch=batch), scored(silent, useful), 0, kl_coef=0.0)
    assert (len(short), short.denominators.tokens, short.denominators.sequences) == (2, 13.0, 4.0)
    reference = [np.full(n, -1.5, np.float32) for n in (4, 4)], [np.full(n, -1.5, np.float32) for n in (2, 3)]
    with_reference = [ScoredGroup(g, ref) for g, ref in zip((silent, useful), reference, strict=True)]
    for settings in (
        {"skip_idle_rows": False}, {"entropy": {"coef": 0.1}}, {"top_entropy_share": 0.2},
        {"entropy": {"kind": "adaptive", "target": 1.0}}, {"loss": "dro", "correction": "bypass"},
        {"loss": "clip_cov"}, {"correction": {"normalize": True}}, {"kl": {"coef": 0.1}},
        {"kl": {"coef": 0.1, "in_reward": True}},
    ):  # fmt: skip
        config = fakes.config(batch=batch, algorithm=settings)
        (whole,) = fakes.make_batches(config, with_reference, 0, kl_coef=config.algorithm.kl.coef)
        assert len(whole) == 4, settings
    (nothing,) = fakes.make_batches(fakes.config(batch=batch), scored(silent, silent), 0, kl_coef=0.0)
    assert len(nothing) == 4


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"advantage": {"std": "batch"}}, {"advantage": {"std": "none", "whiten": True}},
     {"reward_norm": "batch"}],
    ids=str,
)  # fmt: skip
def test_filtered_zero_variance_groups_count_as_if_they_had_not_been_sampled(algorithm):
    """Compared with a step of the useful group alone, also within each update."""
    batch = {"prompts_per_step": 2, "samples_per_prompt": 2}
    silent, useful = group_of([1, 1], [4, 4]), group_of([1, 0], [2, 3])
    config = fakes.config(batch=batch, algorithm=algorithm | {"zero_variance_filter": True})
    (filtered,) = fakes.make_batches(config, scored(silent, useful), 0, kl_coef=0.0)
    (alone,) = fakes.make_batches(config, scored(useful), 0, kl_coef=0.0)
    assert filtered.denominators == alone.denominators == Denominators(5.0, 2.0, 1.0)
    np.testing.assert_array_equal(filtered.policy.advantages.numpy(), alone.policy.advantages.numpy())
    with_kl = {"zero_variance_filter": True, "kl": {"coef": 0.1}}
    several = fakes.config(batch=batch | {"updates_per_step": 2}, algorithm=with_kl)
    reference = [ScoredGroup(g, [np.full(n, -1.5, np.float32) for n in lengths])
                 for g, lengths in ((silent, (4, 4)), (useful, (2, 3)))]  # fmt: skip
    nothing, whole = fakes.make_batches(several, reference, 0, kl_coef=0.1)
    assert not nothing.policy.mask.any() and nothing.denominators.tokens == 0 == nothing.denominators.prompts
    assert (whole.denominators.tokens, whole.denominators.prompts) == (5.0, 1.0)


def test_reward_clip_also_applies_to_the_baseline_of_remax():
    group = group_of([5, 0], [1, 1], baseline_reward=5.0)
    got = sample_advantages([group], credit("remax", reward_clip=1.0))
    assert got[0].tolist() == [0.0, -1.0]


def test_truncated_samples_count_in_their_group_and_are_not_trained():
    algorithm = {"mask_truncated": True, "advantage": {"std": "none"}, "skip_idle_rows": False}
    config = fakes.config(algorithm=algorithm)
    cut = group_of([0, 0, 1], [4, 2, 2], reasons=["length", "stop", "stop"])
    (batch,) = fakes.make_batches(config, scored(cut), 0, kl_coef=0.0)
    assert not batch.policy.mask[0].any()
    assert (batch.denominators.tokens, batch.denominators.sequences) == (4.0, 2.0)
    torch.testing.assert_close(batch.policy.advantages[1, 2], torch.tensor(-1 / 3))


def test_reinforce_pp_is_whitened_unless_the_configuration_sets_otherwise():
    def whitened(name, **settings):
        return algorithm(name, **settings).advantage.whiten

    assert whitened("reinforce_pp") and whitened("reinforce_pp_baseline") and not whitened("grpo")
    assert not whitened("reinforce_pp", whiten=False) and whitened("grpo", whiten=True)


def test_the_order_of_groups_changes_no_advantage():
    groups = [group_of([1, 0, 0], [3, 1, 2]), group_of([2, 5, 1], [1, 4, 1]), group_of([0, 0, 1], [2, 2, 2])]
    for estimator in ("grpo", "opo", "pass_at_k", "reinforce_pp"):
        settings = credit(estimator, std="batch", whiten=True, k=2)
        forth = credited(groups, settings)
        back = credited(groups[::-1], settings)
        back = torch.cat([back[6:], back[3:6], back[:3]])
        torch.testing.assert_close(back, forth, rtol=1e-6, atol=1e-7)


def in_float64(rewards):
    """Centre the exact values of float32 rewards and divide by their sample deviation."""
    values = np.array(rewards, np.float32).astype(np.float64)
    return (values - values.mean()) / values.std(ddof=1)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize(("shift", "scale"), [(False, True), (True, True), (True, False)])
def test_small_differences_of_large_rewards_survive_normalisation_and_whitening(estimator, shift, scale):
    rewards = [100, 100.001, 100, 100.002]
    settings = credit(
        estimator, std="none", whiten=estimator.startswith("reinforce"), eps=1e-12,
        reward_norm={"name": "batch", "shift": shift, "scale": scale, "eps": 1e-12},
    )  # fmt: skip
    got = credited([group_of(rewards, [1] * 4)], settings)[:, 2]
    assert got.dtype == torch.float32
    expected = in_float64(rewards)
    expected *= got.double().std().item()  # another test covers the divisor
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4)
    unit = {"grpo": 1.0, "dr_grpo": 1.0, "rloo": 4 / 3}.get(estimator)
    if unit and scale:
        np.testing.assert_allclose(got.numpy(), unit * in_float64(rewards), rtol=1e-4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp", "remax", "rloo", "opo", "pass_at_k"])
def test_a_reward_that_is_not_finite_is_not_clipped_into_one(estimator, bad):
    settings = credit(estimator, reward_clip=10.0, k=1, whiten=estimator == "reinforce_pp")
    with_it = credited([group_of([bad, 1, 0, 0], [2, 1, 1, 1], baseline_reward=0.5)], settings)
    without = credited([group_of([1, 0, 0], [1, 1, 1], baseline_reward=0.5)], settings)
    assert not with_it[0].any() and torch.equal(with_it[1:, 2], without[:, 2])


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_sample_with_a_nan_log_prob_is_left_out_of_training(kl):
    """Its reward still counts in its group; whitening over all tokens leaves it out."""
    broken = group_of([1, 0, 0], [2, 2, 1])
    broken.rollouts[0].logprobs[1] = math.nan
    advantage, term = {"std": "none", "whiten": kl > 0}, {"coef": kl, "in_reward": kl > 0}
    config = fakes.config(algorithm={"advantage": advantage, "skip_idle_rows": False, "kl": term})
    reference = [np.full(n, -1.0, np.float32) for n in (2, 2, 1)]
    (batch,) = fakes.make_batches(config, [ScoredGroup(broken, reference)], 0, kl_coef=kl)
    assert not batch.policy.mask[0].any()
    assert (batch.denominators.tokens, batch.denominators.sequences) == (3.0, 2.0)
    assert batch.policy.advantages.isfinite().all() and batch.policy.rollout_logprobs.isfinite().all()
    if not kl:
        torch.testing.assert_close(batch.policy.advantages[1, 2], torch.tensor(-1 / 3))


def test_running_normalisation_continues_from_earlier_steps():
    config = fakes.config(algorithm={"advantage": "reinforce_pp", "reward_norm": "running"})
    first, second = scored(group_of([1, 0, 1, 1], [1] * 4)), scored(group_of([0, 4, 0, 2], [1] * 4))
    after_one = reward_moments(config.algorithm, first, Moments())
    after_two = reward_moments(config.algorithm, second, after_one)
    everything = np.array([1, 0, 1, 1, 0, 4, 0, 2])
    assert after_two.mean == pytest.approx(everything.mean())
    assert after_two.deviation == pytest.approx(everything.std(ddof=1))
    settings = credit("reinforce_pp", whiten=False, reward_norm="running", moments=after_two)
    (got,) = sample_advantages([s.group for s in second], settings)
    expected = (everything[4:] - everything.mean()) / (after_two.deviation + 1e-6)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert reward_moments(fakes.config().algorithm, first, Moments()) == Moments()


def roll_advantages(rewards, lengths, *, clip):
    """Repeat ROLL's steps for adv_estimator grpo in float64: group norm, spread over tokens, whiten, clip."""
    rewards = np.array(rewards, np.float64)
    normalised = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    tokens = np.repeat(normalised.ravel(), np.ravel(lengths))
    whitened = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    return np.clip(whitened, -clip, clip)


def test_the_preset_of_rolls_study_gives_rolls_advantages():
    rewards, lengths = [[1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]], [[5, 3, 1, 4, 2, 5, 2, 3]] * 2
    preset = read_tree(Path(__file__).parents[2] / "configs" / "algorithms" / "roll.yaml").algorithm
    config = fakes.config(algorithm=OmegaConf.to_container(preset))
    groups = [group_of(r, n) for r, n in zip(rewards, lengths, strict=True)]
    got = credited(groups, AdvantageSettings(config.algorithm))
    flat = [got[i, 2 : 2 + n].tolist() for i, n in enumerate(np.ravel(lengths))]
    np.testing.assert_allclose(np.concatenate(flat), roll_advantages(rewards, lengths, clip=2.0), rtol=1e-5)
    assert max(map(max, flat)) == 2.0, "the clip acts on these numbers"


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ({"name": "group", "scale": False}, [0.75, -0.25]),  # reward_shift: true, reward_scale: false
        ({"name": "group"}, [1.6201816, -0.5400605]),  # both false
        ("none", [1.0, 0.0]),
    ],
)
def test_normalised_rewards_follow_rolls_settings(norm, expected):
    """One group [1, 0, 0, 1, 0, 0, 0, 0]; ROLL's adv_estimator reinforce uses the normalised reward."""
    settings = credit("reinforce_pp", whiten=False, reward_norm=norm)
    (got,) = sample_advantages([group_of([1, 0, 0, 1, 0, 0, 0, 0], [1] * 8)], settings)
    np.testing.assert_allclose(got[:2], expected, rtol=1e-6)


@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_is_neither_whitened_nor_clipped_away(broken, whiten, clip):
    """The loss stays non-finite, so the update is refused."""
    reference = [np.array([-1.0, broken], np.float32), np.array([-1.0], np.float32)]
    settings = credit(std="none", kl_coef=0.1, kl={"estimator": "k1"}, whiten=whiten, advantage_clip=clip)
    got = credited([group_of([1, 0], [2, 1])], settings, reference)
    assert not got[0, 2:4].isfinite().any() and got[1, 2].isfinite()


def test_gamma_discounts_the_reward_and_the_kl_for_each_later_token():
    """By hand, gamma 0.5, KL k1 of 0.1 a token: token 0 of three has 0.25 R - 0.1 (1 + 0.5 + 0.25) * 2."""
    group = group_of([1.0, -2.0], [3, 1])
    how, whole, near = (
        credit("reinforce_pp", whiten=False, gamma=gamma, kl_coef=2.0, kl={"estimator": "k1"})
        for gamma in (0.5, 1.0, 1 - 1e-9)
    )
    reference = [np.full(n, -1.1, np.float32) for n in (3, 1)]
    batch = make_batch([group], sample_advantages([group], how), ref_logprobs=reference, max_new_tokens=4)
    got = token_advantages(batch, [group], how).policy.advantages
    expected = [[0.25 - 0.35, 0.5 - 0.3, 1 - 0.2], [-2 - 0.2]]
    for row, values in zip(got, expected, strict=True):
        assert row[2 : 2 + len(values)].tolist() == pytest.approx(values, rel=1e-5)
    one, other = (token_advantages(batch, [group], each).policy.advantages for each in (whole, near))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_observed_tokens_take_no_time_in_discounted_returns_and_rows_of_a_sample_continue():
    values = torch.tensor([[1.0, 9.0, 2.0], [4.0, 9.0, 9.0], [3.0, 5.0, 9.0]])
    mask = torch.tensor([[True, False, True], [True, False, False], [True, True, False]])
    got = discounted_to_go(values, mask, 0.5, torch.tensor([0, 0, 1]))
    assert torch.equal(got[mask], torch.tensor([3.0, 4, 4, 5.5, 5], dtype=torch.float64))
    alone = discounted_to_go(values, mask, 0.5)
    assert torch.equal(alone[mask], torch.tensor([2.0, 2, 4, 5.5, 5], dtype=torch.float64))
    assert torch.equal(discounted_to_go(values, mask, 1.0)[mask], sum_to_go(values * mask)[mask].double())
