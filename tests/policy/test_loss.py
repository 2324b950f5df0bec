"""The loss of an update: how its terms combine, and that no split of the rows changes it."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.batch.rows import make_batch, split_updates
from grpo_dist.batch.sharding import micro_batches
from grpo_dist.config import AlgorithmConfig
from grpo_dist.config.files import read_tree
from grpo_dist.config.presets import PRESETS
from grpo_dist.policy.loss import Objective, add_stats, batch_loss, finish_stats
from tests.support import made_groups
from tests.support.losses import change, choose, nothing_trained, objective, train_batch
from tests.support.made_groups import shard
from tests.support.numbers_by_hand import Tiny
from tests.support.tiers import examples, one_each

LOGPROBS = torch.tensor([[0.0, -1, -2, -3]])
REFERENCE = LOGPROBS - torch.tensor([[0.0, 0.5, -1, 0]])
KL = (0.1065307 + 0.7182818) / 3  # k3 of both


def batch_of_one_row(**changes):
    """Return a batch of one row: prompt of one token, completion of three."""
    fields = {
        "mask": torch.tensor([[False, True, True, True]]),
        "advantages": torch.tensor([[0.0, 2, 2, 2]]),
        "rollout_logprobs": LOGPROBS,
        "max_tokens": 10,
    }
    return train_batch(**(fields | changes))


def loss_and_gradient(batch, settings, logprobs, entropy=None, **weights):
    logprobs = logprobs.clone().requires_grad_()
    loss, stats = batch_loss(logprobs, batch, settings, entropy=entropy, **weights)
    loss.backward()
    return loss.item(), logprobs.grad, finish_stats(stats)


def test_first_update_has_ratio_one_and_the_plain_policy_gradient():
    batch = batch_of_one_row()
    loss, gradient, metrics = loss_and_gradient(batch, objective(), LOGPROBS)
    assert loss == -2.0
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -2, -2, -2]]) / 3)
    assert metrics == {
        "loss/total": -2.0, "loss/policy": -2.0,
        "policy/ratio_mean": 1.0, "policy/ratio_max": 1.0, "policy/approx_kl": 0.0,
        "policy/clip_low_share": 0.0, "policy/clip_high_share": 0.0, "policy/dual_clip_share": 0.0,
        "mismatch/logprob_diff_mean": 0.0, "mismatch/logprob_diff_max": 0.0, "mismatch/kl": 0.0,
        "mismatch/ess_share": 1.0,
    }  # fmt: skip


def test_later_updates_take_the_ratio_to_the_old_logprobs():
    batch = batch_of_one_row(old_logprobs=LOGPROBS)
    ratios = torch.tensor([[1.0, 1.1, 1.5, 0.5]])
    loss, gradient, metrics = loss_and_gradient(
        batch, objective(loss={"clip_high": 0.2}), batch.policy.old_logprobs + ratios.log()
    )
    assert loss == pytest.approx(-2 * (1.1 + 1.2 + 0.5) / 3)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -2 * 1.1, 0, -2 * 0.5]]) / 3)
    assert metrics["policy/clip_high_share"] == pytest.approx(1 / 3)
    assert metrics["policy/ratio_mean"] == pytest.approx((1.1 + 1.5 + 0.5) / 3)


def test_scalerl_weights_tokens_by_their_ratio_to_the_engine_up_to_five():
    """With the trainer's old log-probs every ratio of its one update would be 1."""
    tree = read_tree(PRESETS / "scalerl.yaml")
    algorithm = AlgorithmConfig.model_validate(OmegaConf.to_container(tree.algorithm))
    prompts = {"prompt_tokens": torch.tensor([3]), "sizes": {"prompts": 1.0}}
    batch = batch_of_one_row(old_logprobs=LOGPROBS, **prompts)
    ratios = torch.tensor([[1.0, 2, 4, 8]])
    _, gradient, _ = loss_and_gradient(batch, Objective(algorithm), LOGPROBS + ratios.log())
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -2 * 2, -2 * 4, -2 * 5]]) / 3)


def test_flash_reinforce_is_its_papers_objective():
    """-1/B sum_i m_i A_i / T_i sum_t (pi / mu) log pi, with unbounded ratios, over all B and T_i. The third
    sequence has left the trust region: a mean binary KL above 0.003.
    """
    tree = read_tree(PRESETS / "flash_reinforce.yaml")
    algorithm = AlgorithmConfig.model_validate(OmegaConf.to_container(tree.algorithm))
    policy = [[0.5, 0.3, 0.002], [0.9], [0.4, 0.5]]
    engine = [[0.52, 0.29, 0.0002], [0.88], [0.6, 0.5]]
    advantages, width = [0.5, -0.25, -0.25], 4
    mask = torch.tensor([[0 < t <= len(row) for t in range(width)] for row in policy])

    def padded(rows):
        full = [[0.0, *map(math.log, row), *[0.0] * (width - 1 - len(row))] for row in rows]
        return torch.tensor(full, dtype=torch.float64)

    batch = train_batch(
        mask, advantages=torch.tensor(advantages).double()[:, None] * mask, rollout_logprobs=padded(engine),
    )  # fmt: skip
    loss, gradient, metrics = loss_and_gradient(batch, Objective(algorithm), padded(policy))
    expected, total, left = torch.zeros(3, width).double(), 0.0, []
    for i, (now, then) in enumerate(zip(policy, engine, strict=True)):
        pairs = list(zip(then, now, strict=True))
        kls = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in pairs]
        left.append(sum(kls) / len(kls) > 0.003)
        for t, (p, q) in enumerate(pairs, start=1):
            expected[i, t] = 0 if left[-1] else -q / p * advantages[i] / len(now) / 3
            total += float(expected[i, t])
    assert left == [False, False, True]
    torch.testing.assert_close(gradient, expected)  # the third token of the first row has a ratio of 10
    assert loss == pytest.approx(total) and metrics["correction/rejected_share"] == pytest.approx(2 / 6)


def test_importance_weights_multiply_the_policy_loss_and_never_the_kl_term():
    rollout = LOGPROBS - torch.tensor([[0.0, math.log(1.5), math.log(4), math.log(0.5)]])
    batch = batch_of_one_row(rollout_logprobs=rollout, ref_logprobs=REFERENCE)
    settings = objective(kl={"coef": 0.1}, correction={"kind": "tis", "high": 2.0})
    loss, gradient, metrics = loss_and_gradient(batch, settings, LOGPROBS)
    policy = -2 * (1.5 + 2.0 + 0.5) / 3
    assert loss == pytest.approx(policy + 0.1 * KL, rel=1e-6)
    slopes = [1 - math.exp(-d) for d in (0.5, -1, 0)]
    expected = [-2 * w + 0.1 * s for w, s in zip((1.5, 2.0, 0.5), slopes, strict=True)]
    torch.testing.assert_close(gradient, torch.tensor([[0.0, *expected]]) / 3)
    assert metrics["ref/kl"] == pytest.approx(KL, rel=1e-6)
    assert metrics["loss/kl"] == pytest.approx(0.1 * KL, rel=1e-6)
    assert metrics["loss/policy"] == pytest.approx(policy, rel=1e-6)
    assert metrics["correction/weight_mean"] == pytest.approx((1.5 + 4 + 0.5) / 3, rel=1e-6)
    assert metrics["correction/weight_max"] == pytest.approx(4, rel=1e-6)
    assert metrics["correction/outside_share"] == pytest.approx(1 / 3)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(math.log(4), rel=1e-6)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(math.log(1.5 * 4 * 2) / 3, rel=1e-6)


def test_the_mismatch_is_measured_without_a_correction_and_entropy_is_a_mean_over_trained_tokens():
    batch = batch_of_one_row(rollout_logprobs=torch.tensor([[9.0, -1, -2, -2.5]]))
    entropy = torch.tensor([[9.0, 1, 2, 6]])
    _, _, metrics = loss_and_gradient(batch, objective(), LOGPROBS, entropy)
    assert metrics["mismatch/logprob_diff_max"] == 0.5
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(0.5 / 3)
    assert metrics["mismatch/kl"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 3)
    assert metrics["policy/entropy"] == 3.0


@pytest.mark.parametrize("mode", MODES)
def test_the_kl_term_is_aggregated_like_the_policy_loss(mode):
    """With advantages -1 on policy every token loss is 1; with k1 and d = 1 every KL is 1: equal terms."""
    batch = made_groups.batch()
    logprobs = torch.randn(batch.tokens.shape)
    stream = {"advantages": torch.full_like(logprobs, -1.0), "ref_logprobs": logprobs - 1}
    batch = change(batch, policy=stream)
    settings = objective(kl={"coef": 0.25, "estimator": "k1"}, aggregation=mode)
    _, _, metrics = loss_and_gradient(batch, settings, logprobs)
    assert metrics["loss/kl"] == pytest.approx(0.25 * metrics["loss/policy"], rel=1e-5)
    assert metrics["ref/kl"] == pytest.approx(1.0, rel=1e-5)


def test_the_kl_weight_of_the_update_applies_if_there_is_a_kl_term():
    for how, expected in ((objective(kl={"coef": 0.1}), 0.3), (objective(kl={"coef": 0.0}), 0.0)):
        batch = batch_of_one_row(ref_logprobs=REFERENCE)
        loss, _, metrics = loss_and_gradient(batch, how, LOGPROBS, kl_coef=0.3)
        assert loss == pytest.approx(-2 + expected * KL, rel=1e-6)
        assert metrics["ref/kl"] == pytest.approx(KL, rel=1e-6)


def test_the_entropy_bonus_is_subtracted_with_its_gradient():
    entropy = torch.tensor([[9.0, 1, 2, 6]], requires_grad=True)
    loss, stats = batch_loss(LOGPROBS, batch_of_one_row(), objective(entropy={"coef": 0.1}), entropy=entropy)
    loss.backward()
    assert loss.item() == pytest.approx(-2 - 0.1 * 3)
    torch.testing.assert_close(entropy.grad, torch.tensor([[0.0, -0.1, -0.1, -0.1]]) / 3)
    assert finish_stats(stats)["loss/entropy"] == pytest.approx(-0.3)


def test_tokens_outside_the_policy_mask_lose_only_their_policy_loss():
    kept = torch.tensor([[False, False, True, True]])
    batch = change(batch_of_one_row(ref_logprobs=LOGPROBS - 1), choice={"kept": kept})
    settings = objective(kl={"coef": 0.5, "estimator": "k1"})
    loss, gradient, _ = loss_and_gradient(batch, settings, LOGPROBS)
    assert loss == pytest.approx(-4 / 3 + 0.5)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.5, -1.5, -1.5]]) / 3)


def test_with_ratios_to_the_engine_the_mismatch_still_compares_with_the_trainer():
    rollout = torch.tensor([[0.0, -1, -2, -2.5]])
    batch = batch_of_one_row(rollout_logprobs=rollout, old_logprobs=rollout)
    settings = objective(correction="bypass")
    _, _, metrics = loss_and_gradient(batch, settings, LOGPROBS)
    assert metrics["mismatch/logprob_diff_max"] == 0.5
    assert metrics["policy/ratio_mean"] == pytest.approx((2 + math.exp(-0.5)) / 3)
    weights = [1.0, 1.0, math.exp(-0.5)]
    share = sum(weights) ** 2 / (3 * sum(w * w for w in weights))
    assert metrics["mismatch/ess_share"] == pytest.approx(share)


# --- the same gradient for every split


@pytest.fixture(scope="module")
def whole():
    """Return 16 rows, one of them unscored."""
    rng = np.random.default_rng(5)
    groups = [made_groups.group(i, rng) for i in range(4)]
    rewards = groups[1].rewards.copy()
    rewards[2] = np.nan
    groups[1] = replace(groups[1], rewards=rewards)
    advantages = [rng.standard_normal(4).astype(np.float32) for _ in groups]
    reference = [
        -5 * rng.random(len(r.completion_ids)).astype(np.float32) for g in groups for r in g.rollouts
    ]
    return with_old(make_batch(groups, advantages, ref_logprobs=reference, max_new_tokens=12), rng)


@pytest.fixture(scope="module")
def episodes():
    """Return rows with observed tokens between sampled ones; some samples have several rows."""
    batch = made_groups.episode_batch(groups=4, rewritten=0.4)
    assert len(batch) > 16 == batch.denominators.sequences
    return with_old(batch, np.random.default_rng(6))


@pytest.fixture(scope="module")
def batches(whole, episodes):
    return {"completions": whole, "episodes": episodes}


def with_old(batch, rng):
    """Add old log-probs near the model's, so that both clip bounds bite."""
    with torch.no_grad():
        logprobs = Tiny(torch.float64)(batch)[0]

    def near(spread):
        noise = torch.from_numpy(rng.standard_normal(batch.tokens.shape)) * spread
        return torch.where(batch.policy.mask, logprobs + noise, 0.0).float()

    old = near(0.3)
    engine = near(0.5)
    selected = torch.from_numpy(rng.random(tuple(batch.tokens.shape)) < 0.2)
    stream = {"rollout_logprobs": engine, "old_logprobs": old}
    return change(batch, policy=stream, choice={"mean_weight": 0.8, "selected": selected})


KL_AND_CORRECTION = [
    ("k3", "none", "token"), ("k2", "tis", "token"),
    ("k1", "mis", "sequence"), ("k3+", "icepop", "geometric"), ("abs", "tis", "segment"),
]  # fmt: skip
REJECT = {
    "none": [{"rule": "token_tv", "high": 0.1}, {"rule": "seq_max_k2", "high": 2.0}],
    "mis": [{"rule": "segment_mean_k3", "high": 0.5}, {"rule": "seq_mean_k1", "high": 1.3, "low": 0.7}],
}
COMBINATIONS = [
    objective(
        loss=choose(
            "loss", policy_loss, clip_low=0.1, clip_high=0.15, dual_clip=3.0 if kind == "mis" else None
        ),
        aggregation=mode, entropy={"coef": 0.01},
        kl={"coef": 0.05, "estimator": estimator, "bias_correction": estimator in ("k1", "k3")},
        correction=choose(
            "correction", kind, level=level, low=0.5, high=2.0,
            veto=0.2 if kind in ("tis", "none") else 0.0, reject=REJECT.get(kind, ()),
        ),
        off_policy_mask_threshold=0.02 if kind == "icepop" else None,
    )
    for policy_loss, mode, (estimator, kind, level) in product(POLICY_LOSSES, MODES, KL_AND_CORRECTION)
]  # fmt: skip


DTYPES = [torch.float64, torch.float32]


def by_segment(how):
    """Return whether ``how`` depends on segments, which observed tokens end."""
    correction = how.algorithm.correction
    by_level = getattr(correction, "level", None) == "segment" or how.algorithm.loss.name == "gspo_segment"
    return by_level or any(r.rule.startswith("segment") for r in correction.reject)


def named(how):
    algorithm = how.algorithm
    parts = (algorithm.loss, algorithm.aggregation, algorithm.kl.estimator)
    return *(part.name for part in parts), algorithm.correction.kind


@st.composite
def splits(draw, rows):
    """Draw the rows of each part, in any order, with any cuts."""
    order = draw(st.permutations(range(rows)))
    cuts = draw(st.sets(st.integers(1, rows - 1)))
    return [list(order[a:b]) for a, b in pairwise([0, *sorted(cuts), rows])]


def check_split(whole, dtype, how, split):
    """Compare the parts with the whole. The data are float32 even if the model is float64."""
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    model = Tiny(dtype)
    expected, metrics = model.gradient([whole], how)
    actual, same = model.gradient([whole.select(rows) for rows in split], how)
    assert float((actual - expected).norm() / expected.norm()) < tolerance, how
    assert same == pytest.approx(metrics, rel=tolerance, abs=tolerance), how


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@settings(max_examples=examples(2, 30))
@given(data=st.data(), of=st.sampled_from(["completions", "episodes"]), dtype=st.sampled_from(DTYPES))
def test_no_split_of_the_rows_changes_gradient_or_metrics(batches, of, dtype, policy_loss, data):
    """For every loss, with any aggregation, KL estimator and correction: relative error 1e-6 in float64, 1e-5
    in float32. Two fixed combinations per loss, with rows and dtype; `make test-all` has 30.
    """
    how = data.draw(st.sampled_from([c for c in COMBINATIONS if c.algorithm.loss.name == policy_loss]))
    check_split(batches[of], dtype, how, data.draw(splits(len(batches[of]))))


@pytest.mark.parametrize(
    "how", [c for c in COMBINATIONS if not by_segment(c)], ids=lambda how: "-".join(named(how))
)
def test_observed_tokens_count_for_nothing(episodes, how):
    """Without them loss, gradient and metrics agree to the last digits, for every combination."""
    noise, entropy = torch.rand(2, *episodes.tokens.shape, dtype=torch.float64)
    logprobs = torch.where(episodes.policy.mask, episodes.policy.old_logprobs + noise - 0.5, math.nan)
    order = (~episodes.policy.mask).to(torch.uint8).argsort(dim=1, stable=True)  # sampled tokens first
    width = int(episodes.policy.mask.sum(dim=1).max())

    def compact(values):
        return values.gather(1, order)[:, :width]

    short = episodes.map_tensors(lambda values: compact(values) if values.ndim > 1 else values)
    loss, gradient, metrics = loss_and_gradient(episodes, how, logprobs, entropy)
    total, same, metrics_of_short = loss_and_gradient(short, how, compact(logprobs), compact(entropy))
    assert total == pytest.approx(loss, rel=1e-12)
    assert gradient[episodes.policy.mask].any() and not gradient[~episodes.policy.mask].any()
    expected = gradient[episodes.policy.mask]
    torch.testing.assert_close(same[short.policy.mask], expected, rtol=1e-12, atol=1e-15)
    assert metrics_of_short == pytest.approx(metrics, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("of", ["completions", "episodes"])
def test_padding_after_the_end_of_a_row_changes_nothing(batches, of):
    batch, how = batches[of], COMBINATIONS[0]
    behind = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
    other = replace(batch, tokens=torch.where(behind, 77, batch.tokens))
    expected, metrics = Tiny(torch.float64).gradient([batch], how)
    actual, same = Tiny(torch.float64).gradient([other], how)
    assert behind.any() and torch.equal(actual, expected) and same == metrics


@st.composite
def made_up_batches(draw):
    """Draw a batch of any shape: rows of any length, some with nothing to train, log-ratios up to 20 nats."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(2, 9))
    lengths = torch.tensor(draw(st.lists(st.integers(0, width - 1), min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 0.1, 2.0, 20.0]))
    mask = (torch.arange(width) >= 1) & (torch.arange(width) <= lengths[:, None])
    mask &= torch.rand(rows, width, generator=generator) < draw(st.sampled_from([1.0, 0.5]))
    sample = torch.arange(rows) // draw(st.integers(1, 2))  # rows of each sample
    tokens_of = torch.zeros(rows, dtype=torch.long).index_add(0, sample, mask.sum(dim=1))

    def noise(scale):
        return scale * (2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 1)

    logprobs = noise(2.0) - 3.0
    batch = train_batch(
        mask, advantages=torch.where(mask, noise(2.0), math.nan), rollout_logprobs=logprobs + noise(spread),
        ref_logprobs=logprobs + noise(min(spread, 2.0)), old_logprobs=logprobs + noise(spread),
        sequence_tokens=tokens_of[sample], sizes={"sequences": float((tokens_of > 0).sum())},
    )  # fmt: skip
    return batch, logprobs


@settings(max_examples=examples(40, 200))
@given(drawn=made_up_batches(), how=st.sampled_from(COMBINATIONS), data=st.data())
def test_for_any_shape_the_parts_of_a_batch_add_up_to_it(drawn, how, data):
    batch, logprobs = drawn
    entropy = torch.full_like(logprobs, 0.5)
    loss, gradient, metrics = loss_and_gradient(batch, how, logprobs, entropy)
    assert math.isfinite(loss) and gradient.isfinite().all() and not gradient[~batch.policy.mask].any()
    assert all(math.isfinite(value) for value in metrics.values())
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    total, parts = 0.0, torch.zeros_like(gradient)
    for rows in (list(order[:cut]), list(order[cut:])):
        if rows:
            value, part, _ = loss_and_gradient(batch.select(rows), how, logprobs[rows], entropy[rows])
            total += value
            parts[rows] = part
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(parts, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("mode", "split"), one_each(MODES, [(1, 1), (2, 40), (3, 100), (20, 40)]))
@pytest.mark.parametrize("of", ["completions", "episodes"])
def test_ranks_and_micro_batches_give_the_gradient_of_the_whole(batches, of, mode, split):
    """Split as policy workers do: rows assigned to ranks, micro-batches by token budget; some ranks idle."""
    ranks, budget = split
    whole = batches[of]
    how = objective(kl={"coef": 0.05}, correction="tis", aggregation=mode)
    model = Tiny(torch.float64)
    expected, _ = model.gradient([whole], how)
    parts = [
        part.select(rows)
        for part in shard(whole, ranks)
        for rows in micro_batches(part.lengths.tolist(), budget)
    ]
    actual, _ = model.gradient(parts, how)
    assert float((actual - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_an_unscored_row_contributes_nothing(whole, mode):
    unscored = 4 + 2
    assert not whole.policy.mask[unscored].any() and whole.denominators.sequences == 15
    how = objective(kl={"coef": 0.05}, correction="tis", aggregation=mode)
    model = Tiny(torch.float64)
    expected, metrics = model.gradient([whole], how)
    actual, same = model.gradient([whole.select([r for r in range(16) if r != unscored])], how)
    assert torch.equal(actual, expected) and same == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["none", "tis", "mis", "icepop"])
def test_a_step_with_nothing_to_train_has_loss_and_gradient_zero(mode, kind):
    batch = nothing_trained(made_groups.batch())
    correction = choose("correction", kind, level="sequence")
    settings = objective(kl={"coef": 0.1}, correction=correction, aggregation=mode)
    loss, gradient, metrics = loss_and_gradient(batch, settings, torch.randn(batch.tokens.shape))
    assert loss == 0.0 and not gradient.any()
    assert metrics == {"loss/total": 0.0}  # no token for any mean


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("of", ["completions", "episodes"])
def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient_nor_metrics(batches, of, garbage):
    whole = batches[of]
    correction = {"kind": "tis", "level": "sequence"}
    settings = objective(loss={"dual_clip": 3.0}, kl={"coef": 0.1}, correction=correction)
    mask = whole.policy.mask
    logprobs, entropy = torch.randn(mask.shape), torch.rand(mask.shape)
    clean = loss_and_gradient(whole, settings, logprobs, entropy)
    names = ("advantages", "rollout_logprobs", "ref_logprobs", "old_logprobs")
    stream = {name: torch.where(mask, getattr(whole.policy, name), garbage) for name in names}
    spoilt = change(whole, policy=stream)
    logprobs, entropy = (torch.where(mask, values, garbage) for values in (logprobs, entropy))
    dirty = loss_and_gradient(spoilt, settings, logprobs, entropy)
    assert dirty[0] == clean[0] and dirty[2] == clean[2]
    assert torch.equal(dirty[1], clean[1]) and not dirty[1][~mask].any()


def test_each_update_of_a_step_is_divided_by_its_size(whole):
    """Two updates of whole groups: the loss of each equals a step of only its groups."""
    parts = split_updates(whole, num_groups=4, num_updates=2)
    model = Tiny(torch.float64)
    for part, rows in zip(parts, (range(8), range(8, 16)), strict=True):
        alone = whole.select(list(rows))
        mask = alone.policy.mask
        sizes = {"tokens": float(mask.sum()), "sequences": float(mask.any(1).sum())}
        alone = change(alone, denominators=sizes)
        expected, metrics = model.gradient([alone], objective())
        actual, same = model.gradient([part], objective())
        assert torch.equal(actual, expected) and same == metrics
    assert [p.denominators.sequences for p in parts] == [7.0, 8.0]


def test_statistics_of_disjoint_rows_add_up_except_maxima():
    a = {"ratio": torch.tensor(2.0), "ratio_max": torch.tensor(5.0)}
    b = {"ratio": torch.tensor(3.0), "ratio_max": torch.tensor(4.0)}
    assert {k: float(v) for k, v in add_stats(a, b).items()} == {"ratio": 5.0, "ratio_max": 5.0}


CROSS_ENTROPY = objective(supervised=True)


def test_cross_entropy_is_the_mean_of_minus_log_p_and_ignores_advantages_and_engine():
    batch = batch_of_one_row(advantages=torch.full((1, 4), 7.0), rollout_logprobs=torch.full((1, 4), -9.0))
    entropy = torch.tensor([[5.0, 1, 2, 3]])
    loss, gradient, metrics = loss_and_gradient(
        batch, CROSS_ENTROPY, torch.tensor([[torch.nan, -1, -2, -4.5]]), entropy
    )
    assert loss == 2.5
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1, -1, -1]]) / 3)
    assert metrics == {"loss/total": 2.5, "policy/entropy": 2.0}


def test_cross_entropy_of_parts_adds_up_to_the_whole_and_is_0_without_tokens():
    batch = made_groups.batch(reference=False)
    logprobs = -torch.rand(batch.tokens.shape, dtype=torch.float64)
    whole, _, metrics = loss_and_gradient(batch, CROSS_ENTROPY, logprobs)
    total, stats = 0.0, None
    for rows in (list(range(5)), list(range(5, len(batch)))):
        part = batch.select(rows)
        value, more = batch_loss(logprobs[rows, : part.tokens.shape[1]], part, CROSS_ENTROPY)
        total, stats = total + value.item(), more if stats is None else add_stats(stats, more)
    assert total == pytest.approx(whole, rel=1e-12)
    assert finish_stats(stats)["loss/total"] == pytest.approx(metrics["loss/total"], rel=1e-12)
    nothing = nothing_trained(batch)
    loss, gradient, _ = loss_and_gradient(nothing, CROSS_ENTROPY, logprobs)
    assert loss == 0.0 and not gradient.any()
