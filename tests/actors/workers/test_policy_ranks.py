"""Real DeepSpeed ranks: a step's gradient matches the whole batch, however it is split. Most are forked: each
of Ray's actors would import for seconds.
"""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.config import AdaptiveEntropyConfig, AlgorithmConfig, KLConfig, OffloadConfig
from grpo_dist.health import Bound
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from tests.support import made_groups
from tests.support.losses import change, choose, objective
from tests.support.made_groups import shard
from tests.support.models import architecture
from tests.support.real_ranks import (
    ALGORITHM,
    STREAMS,
    TEMPERATURE,
    comparable,
    flat,
    gradients_of,
    loss_of_the_whole,
    on_all,
    relative,
    running,
)
from tests.support.tiers import one_each, slow_after

pytestmark = pytest.mark.machine

BF16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def batch():
    return made_groups.batch()


@pytest.fixture(scope="module")
def episodes():
    """Rows with given tokens between sampled ones, several of some samples."""
    return made_groups.episode_batch(rewritten=0.4)


@pytest.fixture(scope="module")
def reference(tiny_model, batch):
    return gradient_of_the_whole(tiny_model, batch)


def same_weights(ours, theirs):
    """Return whether both have the same weights on each rank, to the last bit."""
    return all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


def gradient_of_the_whole(tiny_model, batch, loss_of=None):
    """Compute the loss and gradient at once, in float64, in this process, without DeepSpeed."""
    how = {"dtype": torch.float64, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, **how)
    module = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)
    loss = loss_of_the_whole(module, batch, loss_of or Objective(ALGORITHM))
    loss.backward()
    return float(loss.detach()), flat({name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("ranks", "stage", "micro_batch_tokens", "how"),
    [
        *slow_after([(1, 2, 40, {"packing": False}), (1, 0, 10_000, {})], 1),
        *slow_after([(2, 2, 40, {}), (2, 1, 10_000, {}), (2, 0, 40, {})], 1),
        (2, 3, 40, {}),
        *slow_after(
            [
                (2, 2, 40, {"shared": 2}), (2, 3, 10_000, {"shared": 2}), (4, 2, 40, {"shared": 2}),
                (4, 0, 10_000, {"shared": 4}),
            ],
            1,
        ),
    ],
)  # fmt: skip
def test_gradient_is_that_of_the_whole_batch(
    forked_ranks, tiny_model, batch, reference, ranks, stage, micro_batch_tokens, how
):
    """Over ranks, ZeRO stages, micro-batches, padded and packed rows, and ranks that share sequences (with as
    many key heads as ranks, and with fewer).
    """
    how = how | {"ranks": ranks, "stage": stage, "micro_batch_tokens": micro_batch_tokens}
    (gradients, metrics), _ = asyncio.run(gradients_of(tiny_model, batch, **how))
    loss, expected = reference
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert relative(flat(gradients), expected) < 1e-5
    assert metrics["policy/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-3)
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0


@pytest.mark.parametrize(
    ("name", "how"),
    slow_after(
        [("gemma2, capped logits", {"stage": 3}), ("granite, scaled logits", {"stage": 2, "shared": 2})], 1
    ),
)
def test_gradients_of_capped_or_scaled_logits_match_the_whole_batch(forked_ranks, batch, tmp_path, name, how):
    """Gathered weights of ZeRO-3, and ranks that share sequences."""
    model_dir = architecture(tmp_path, name)
    (gradients, metrics), _ = asyncio.run(
        gradients_of(model_dir, batch, ranks=2, micro_batch_tokens=40, **how)
    )
    loss, expected = gradient_of_the_whole(model_dir, batch)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert relative(flat(gradients), expected) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "stage", "micro_batch_tokens", "how"),
    [(2, 2, 40, {"shared": 2}), *slow_after([(2, 3, 40, {}), (1, 0, 10_000, {"packing": False})], 0)],
)
def test_the_gradient_of_truncated_samples_is_that_of_the_softmax_over_their_masks(
    forked_ranks, tiny_model, ranks, stage, micro_batch_tokens, how
):
    """With entropies; each row of logits has its own mask, and some have none."""
    vocabulary = AutoConfig.from_pretrained(tiny_model).vocab_size
    batch = made_groups.truncated_batch(vocabulary)
    how = how | {"ranks": ranks, "stage": stage, "micro_batch_tokens": micro_batch_tokens}
    settings = objective(kl={"coef": 0.05}, entropy={"coef": 0.01}, correction="tis")
    (gradients, metrics), _ = asyncio.run(gradients_of(tiny_model, batch, objective=settings, **how))
    loss, expected = gradient_of_the_whole(tiny_model, batch, settings)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert relative(flat(gradients), expected) < 1e-5
    unmasked, _ = gradient_of_the_whole(tiny_model, replace(batch, kept=None), settings)
    assert abs(unmasked - loss) > 1e-3 * abs(loss)


@pytest.mark.parametrize(
    ("ranks", "stage", "micro_batch_tokens", "how"),
    [
        (2, 2, 60, {}),
        *slow_after(
            [(2, 2, 60, {"shared": 2}), (1, 0, 10_000, {}), (2, 3, 40, {}), (2, 2, 40, {"packing": False})], 1
        ),
    ],
)
def test_the_gradient_of_episodes_is_that_of_the_whole_batch(
    forked_ranks, tiny_model, episodes, ranks, stage, micro_batch_tokens, how
):
    """Also where the rows of one episode are on several ranks; an episode is one sequence of the mean."""
    how = how | {"ranks": ranks, "stage": stage, "micro_batch_tokens": micro_batch_tokens}
    (gradients, metrics), _ = asyncio.run(gradients_of(tiny_model, episodes, **how))
    loss, expected = gradient_of_the_whole(tiny_model, episodes)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert relative(flat(gradients), expected) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "stage", "micro_batch_tokens", "how"),
    [
        (2, 2, 60, {"top_k": 4}),
        *slow_after(
            [
                (1, 0, 10_000, {"packing": False, "top_k": 4}), (2, 3, 40, {"top_k": 4}),
                (2, 1, 60, {"shared": 2, "top_k": 4}), (2, 1, 60, {"shared": 2}), (3, 2, 60, {}),
            ],
            1,
        ),
    ],
)  # fmt: skip
def test_the_gradient_of_rewards_teacher_and_demonstrations_is_that_of_the_whole_batch(
    forked_ranks, tiny_model, ranks, stage, micro_batch_tokens, how
):
    """Completions, episodes and demonstrations in one batch, each token in its streams; with a teacher of
    sampled tokens, and of ``top_k`` likeliest ones.
    """
    how = how | {"ranks": ranks, "stage": stage, "micro_batch_tokens": micro_batch_tokens}
    batch, shared = made_groups.mixed_batch(top_k=how.pop("top_k", 0)), how.get("shared", 1)

    async def on_ranks():
        async with running(tiny_model, **how) as group:
            shards = [s for s in shard(batch, ranks // shared) for _ in range(shared)]
            calls = [r.gradients_with.remote(s, STREAMS) for r, s in zip(group.ranks, shards, strict=True)]
            return (await asyncio.gather(*calls))[0]

    gradients, metrics = asyncio.run(on_ranks())
    loss, expected = gradient_of_the_whole(tiny_model, batch, STREAMS)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss/teacher"] > 0 and metrics["loss/demonstrations"] > 0
    assert relative(flat(gradients), expected) < 1e-5


CORRECTED = [("none", "token"), ("tis", "token"), ("mis", "sequence"), ("icepop", "geometric")]
REJECT = [{"rule": "seq_mean_k3", "high": 0.03}, {"rule": "token_tv", "high": 0.1}]
LOSSES = [
    objective(
        loss=choose("loss", policy_loss, clip_low=0.1, clip_high=0.15), aggregation=mode,
        entropy={"coef": 0.01}, kl={"coef": 0.05, "bias_correction": i % 2 == 0},
        correction=choose(
            "correction", CORRECTED[i % 4][0], level=CORRECTED[i % 4][1], low=0.5, high=2.0,
            reject=REJECT if i % 3 == 0 else (),
        ),
        off_policy_mask_threshold=0.03 if i % 3 == 1 else None,
    )
    for i, (policy_loss, mode) in enumerate(one_each(POLICY_LOSSES, MODES))
]  # fmt: skip


@pytest.mark.parametrize("shared", slow_after([(1,), (2,)], 1))
def test_no_loss_and_no_aggregation_of_episodes_depends_on_ranks(forked_ranks, tiny_model, episodes, shared):
    """Two ranks with separate rows, and two that share sequences; old log-probs differ from the new."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    with torch.no_grad():
        new = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)(
            padded(episodes.tokens, episodes.policy.mask)
        )[0]
    generator = torch.Generator().manual_seed(0)
    old, engine = (
        torch.where(
            episodes.policy.mask, new + 0.2 * torch.randn(new.shape, generator=generator), 0.0
        ).float()
        for _ in range(2)
    )
    chosen = torch.rand(new.shape, generator=generator) < 0.2
    stream = {"rollout_logprobs": engine, "old_logprobs": old}
    batch = change(episodes, policy=stream, choice={"mean_weight": 0.9, "selected": chosen})

    async def all_of_them():
        shards, results = [part for part in shard(batch, 2 // shared) for _ in range(shared)], []
        async with running(tiny_model, ranks=2, stage=2, micro_batch_tokens=60, shared=shared) as group:
            for loss in LOSSES:
                calls = [r.gradients_with.remote(s, loss) for r, s in zip(group.ranks, shards, strict=True)]
                results.append((await asyncio.gather(*calls))[0])
        return results

    for loss_of, (gradients, metrics) in zip(LOSSES, asyncio.run(all_of_them()), strict=True):
        loss, expected = gradient_of_the_whole(tiny_model, batch, loss_of)
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-4, abs=1e-6), loss_of
        assert relative(flat(gradients), expected) < 2e-5, loss_of


@pytest.mark.parametrize(
    ("ranks", "stage", "how"), slow_after([(2, 3, {}), (2, 2, {"shared": 2, "packing": True})], 1)
)
def test_the_logprobs_and_score_norms_of_every_row_are_given_and_change_nothing(
    forked_ranks, tiny_model, tmp_path, ranks, stage, how
):
    """For the sync probe and the token baseline, also with fewer rows than ranks. update == probe, update, to
    the last bit.
    """
    batch = made_groups.batch(groups=2, samples=2)
    one = batch.select([2])

    async def steps():
        async with running(tiny_model, ranks=ranks, stage=stage, **how) as group:
            await group.save(tmp_path)
            expected = await group.update(group.stage([batch]))
            await group.load(tmp_path)
            values = await group.logprobs(batch), await group.logprobs(one), await group.score_norms(batch)
            return values, expected, await group.update(group.stage([batch]))

    ((dtype, rows), (_, alone), norms), expected, again = asyncio.run(steps())
    assert dtype == "float32" and sorted(rows) == sorted(norms) == [0, 1, 2, 3] and list(alone) == [2]
    assert again == expected
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    module = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)
    layout = padded(batch.tokens, batch.policy.mask)
    with torch.no_grad():
        values, exact = module(layout)[0], module(layout, score_norms=True)[0]
    for row, ours in norms.items():
        assert torch.allclose(torch.from_numpy(ours), exact[row][batch.policy.mask[row]].float(), atol=1e-5)
    for row, ours in (*rows.items(), (2, alone[2])):
        theirs = values[row][batch.policy.mask[row]].double()
        assert torch.allclose(torch.from_numpy(ours).double(), theirs, atol=1e-5)


def test_weights_are_gathered_after_passes_that_no_backward_pass_follows(forked_ranks, tiny_model):
    """ZeRO-3 keeps no weight for later here, as with models above 10^9 parameters by default: the last
    module of a forward pass fetches the first weights of a backward pass ahead.
    """
    small = {
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1,  # one weight ahead
    }
    batch = made_groups.batch(groups=2, samples=2)

    async def steps():
        how = {"micro_batch_tokens": 40, "deepspeed": {"zero_optimization": small}}
        async with running(tiny_model, ranks=2, stage=3, **how) as group:
            await group.update(group.stage([batch]))  # the order of modules is known from now on
            before = await on_all(group, "weights")
            await group.logprobs(batch)
            between = await on_all(group, "weights")
            await group.score_norms(batch)
            after = await on_all(group, "weights")
            await group.update(group.stage([batch]))
        return before, between, after

    before, *others = asyncio.run(steps())
    assert all(same_weights(before, other) for other in others)


@pytest.mark.parametrize("how", slow_after([({},), ({"offload": OffloadConfig(optimizer="cpu")},)], 1))
def test_bfloat16_gradients_of_zero1_are_added_up_and_reduced_in_float32(
    forked_ranks, tiny_model, batch, reference, how
):
    how = how | {"ranks": 2, "stage": 1, "micro_batch_tokens": 40} | BF16
    (gradients, metrics), _ = asyncio.run(gradients_of(tiny_model, batch, **how))
    gradient, (_, expected) = flat(gradients), reference
    assert (gradient != gradient.bfloat16().double()).double().mean() > 0.5
    assert relative(gradient, expected) < 0.1  # the passes themselves are in bfloat16
    assert metrics["policy/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-3)


def test_more_ranks_than_rows_still_give_the_gradient(forked_ranks, tiny_model):
    small = made_groups.batch(groups=1, samples=1)

    async def both():
        (one, _), _ = await gradients_of(tiny_model, small, ranks=1, stage=0)
        (two, _), _ = await gradients_of(tiny_model, small, ranks=2, stage=3)
        return one, two

    one, two = asyncio.run(both())
    assert relative(flat(two), flat(one)) < 1e-5


@pytest.mark.parametrize("stage", slow_after([(3,), (2,), (0,)], 1))
def test_checkpoint_restores_weights_optimiser_and_schedule(forked_ranks, tiny_model, tmp_path, stage):
    """update, save, update  ==  update, save, (another process) load, update; the entropy bonus continues."""
    first, second = made_groups.batch(seed=1), made_groups.batch(seed=2)
    steered = ALGORITHM.model_copy(update={"entropy": AdaptiveEntropyConfig(target=100.0)})
    how = {"ranks": 2, "stage": stage, "schedule": "linear", "warmup_steps": 2, "algorithm": steered}

    async def uninterrupted():
        async with running(tiny_model, **how) as group:
            await group.update(group.stage([first]))
            await group.save(tmp_path / "policy")
            metrics = await group.update(group.stage([second]))
            weights = (await on_all(group, "weights"))[0]
            await group.export(tmp_path / "model", tokenizer_dir=tiny_model)
        return metrics, weights

    async def resumed():
        async with running(tiny_model, **how) as group:
            await group.load(tmp_path / "policy")
            return await group.update(group.stage([second])), (await on_all(group, "weights"))[0]

    metrics, weights = asyncio.run(uninterrupted())
    again, same_weights = asyncio.run(resumed())
    assert again == metrics and metrics["policy/entropy_coef"] == pytest.approx(0.005)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert exported.config.tie_word_embeddings
    assert {n: p.shape for n, p in exported.named_parameters()} == {n: w.shape for n, w in weights.items()}
    assert all(torch.equal(p.data, weights[name]) for name, p in exported.named_parameters())


WARMUP = {"schedule": "linear", "warmup_steps": 2}


def check_refused(refuse, second, model_dir, path, **how):
    """Check that update, update  ==  update, ``refuse``, update: metrics, weights, optimiser and schedule.
    ``refuse`` gets the ranks and the metrics of the update on ``second``; it returns the metrics of refused
    updates, and bounds for the last one. Returns both metrics.
    """

    async def steps():
        async with running(model_dir, **how) as group:
            await group.update(group.stage([made_groups.batch(seed=1)]))
            await group.save(path)
            expected = await group.update(group.stage([second])), await on_all(group, "weights")
            await group.load(path)
            before = await on_all(group, "weights")
            metrics, bounds = await refuse(group, expected[0])
            between = await on_all(group, "weights")
            again = await group.update(group.stage([second]), bounds=bounds), await on_all(group, "weights")
        return expected, before, metrics, between, again

    expected, before, metrics, between, again = asyncio.run(steps())
    assert again[0] == expected[0]
    assert same_weights(between, before) and same_weights(again[1], expected[1])
    return expected[0], metrics


@pytest.mark.parametrize(
    ("ranks", "stage", "how"),
    [*slow_after([(2, 3, {}), (2, 2, {}), (2, 0, {}), (1, 1, BF16)], 1), (2, 2, BF16)],
)
def test_an_update_that_is_not_finite_changes_nothing_on_any_rank(
    forked_ranks, tiny_model, tmp_path, ranks, stage, how
):
    """update, update  ==  update, one with an infinite loss on one rank, one with a gradient that is NaN on
    one, update: weights, optimiser and schedule.
    """
    second = made_groups.batch(seed=2)
    # Row 0 is on one rank. The gradient of its k3 is finite: 1 - exp(-inf).
    reference = second.policy.ref_logprobs.clone()
    reference[0] = -torch.inf
    lost = change(second, policy={"ref_logprobs": reference})

    async def refuse(group, _):
        metrics = [await group.update(group.stage([lost]))]
        await on_all(group, "spoil", ranks - 1)
        metrics.append(await group.update(group.stage([second])))
        await on_all(group, "spoil", None)
        return metrics, ()

    how = how | WARMUP | {"ranks": ranks, "stage": stage}
    expected, metrics = check_refused(refuse, second, tiny_model, tmp_path, **how)
    assert [m["health/skipped_updates"] for m in metrics] == [1, 1]
    assert [m["health/bad_weights"] for m in metrics] == [0, 0]
    assert metrics[0]["loss/total"] == math.inf  # not hidden
    assert all(math.isnan(m["policy/grad_norm"]) for m in metrics)
    assert metrics[1]["loss/total"] == expected["loss/total"] and expected["health/skipped_updates"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_finite_gradient_whose_norm_is_beyond_float32_is_skipped_at_every_stage(
    forked_ranks, tiny_model, tmp_path, stage
):
    """DeepSpeed 0.19.8 itself clips it at stages 0 and 3 and skips it at 1 and 2, with a norm of inf, and
    counts the step in all of them (observed).
    """
    second = made_groups.batch(seed=2)

    async def refuse(group, _):
        await on_all(group, "spoil", 0, 1e30)
        metrics = await group.update(group.stage([second]))
        await on_all(group, "spoil", None)
        return metrics, ()

    _, metrics = check_refused(refuse, second, tiny_model, tmp_path, ranks=1, stage=stage)
    assert metrics["health/skipped_updates"] == 1 and math.isnan(metrics["policy/grad_norm"])


@pytest.mark.parametrize(
    ("ranks", "stage", "how"), slow_after([(2, 3, {}), (2, 2, {}), (2, 0, {}), (1, 1, BF16)], 1)
)
def test_an_update_beyond_a_bound_changes_nothing_on_any_rank(
    forked_ranks, tiny_model, tmp_path, ranks, stage, how
):
    """update, update  ==  update, one beyond a bound of its KL, one beyond one of its gradient, update."""
    second = made_groups.batch(seed=2)

    async def refuse(group, expected):
        limits = {"kl_above": "ref/kl", "grad_norm_spike": "policy/grad_norm"}
        beyond = [Bound(key, metric, expected[metric] / 2, above=True) for key, metric in limits.items()]
        metrics = [await group.update(group.stage([second]), bounds=[bound]) for bound in beyond]
        return metrics, [replace(bound, value=3 * bound.value) for bound in beyond]

    how = how | WARMUP | {"ranks": ranks, "stage": stage}
    expected, metrics = check_refused(refuse, second, tiny_model, tmp_path, **how)
    for refused, key in zip(metrics, ("kl_above", "grad_norm_spike"), strict=True):
        assert refused.pop("health/skipped_updates") == refused.pop(f"health/refused_{key}") == 1
        assert refused | {"health/skipped_updates": 0} == expected


def test_an_update_of_demonstrations_alone_is_made_and_counts_in_their_mean(forked_ranks, tiny_model):
    """It has no entropy that could have collapsed; the step has the metrics of both of its updates."""
    both, demonstrated = made_groups.mixed_batch(seed=1), made_groups.demonstrated_batch(seed=2)
    bound = Bound("entropy_below", "policy/entropy", 0.01, above=False)

    async def steps():
        async with running(tiny_model, ranks=1, stage=0, objective=STREAMS, lr=1e-9) as group:
            alone = [await group.update(group.stage([one]), bounds=[bound]) for one in (both, demonstrated)]
            return alone, await group.update(group.stage([both, demonstrated]), bounds=[bound])

    (first, second), together = asyncio.run(steps())
    assert second["health/skipped_updates"] == together["health/skipped_updates"] == 0
    assert not {"policy/entropy", "ref/kl", "mismatch/logprob_diff_mean"} & set(second)
    for name in ("demonstrations/nll", "loss/demonstrations", "loss/total", "policy/grad_norm"):
        assert together[name] == pytest.approx((first[name] + second[name]) / 2, rel=1e-4)
    for name in ("policy/entropy", "loss/policy", "loss/teacher"):
        assert together[name] == pytest.approx(first[name], rel=1e-4)


def test_weights_that_are_not_finite_are_reported(forked_ranks, tiny_model):
    """A step so long that weights leave the range of float32."""

    async def step():
        async with running(tiny_model, ranks=1, stage=3, lr=1e30, weight_decay=1e30) as group:
            return await group.update(group.stage([made_groups.batch()]))

    metrics = asyncio.run(step())
    assert metrics["health/bad_weights"] == 1 and metrics["health/skipped_updates"] == 0


FAMILY = {
    "epochs with old log-probs": ({"loss": "ppo_clip"}, 2),
    "sequence ratios and an entropy bonus": (
        {"loss": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}, "entropy": {"coef": 0.05}}, 2,
    ),
    "the tokens of highest entropy": ({"top_entropy_share": 0.3, "kl": KLConfig()}, 1),
    "ratios to the engine": ({"correction": "bypass", "loss": "cispo", "kl": KLConfig()}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after([(name,) for name in FAMILY], 1))
def test_two_ranks_and_small_micro_batches_update_as_one_does(forked_ranks, tiny_model, name):
    """Whole steps of two updates: ranks, ZeRO stages and micro-batches move the weights alike."""
    changes, epochs = FAMILY[name]
    algorithm = AlgorithmConfig(**changes)
    batches = [made_groups.batch(seed=s, reference=algorithm.kl.coef > 0) for s in (3, 4)]
    batches = [change(b, policy={"rollout_logprobs": near_the_models(tiny_model, b)}) for b in batches]

    async def step(**how):
        async with running(tiny_model, algorithm=algorithm, epochs=epochs, **how) as group:
            return await group.update(group.stage(batches)), (await on_all(group, "weights"))[0]

    one, weights = asyncio.run(step(ranks=1, stage=0))
    two, same = asyncio.run(step(ranks=2, stage=3, micro_batch_tokens=40))
    first = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = flat({n: p.detach() for n, p in first.named_parameters()})
    moved, moved_too = flat(weights) - before, flat(same) - before
    assert float(moved.norm()) > 0
    # Adam divides by the size of the gradient, so rounding shows where a gradient is nearly 0.
    assert relative(moved_too, moved) < 1e-2
    assert comparable(two) == pytest.approx(comparable(one), rel=1e-3, abs=1e-5)
    if not algorithm.correction.bypasses:
        assert one["first_update/policy/ratio_max"] == 1.0


@torch.no_grad()
def near_the_models(model_dir, batch):
    """Return log-probs as from an engine with a small mismatch."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logprobs = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)(
        padded(batch.tokens, batch.policy.mask)
    )[0]
    noise = 0.1 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(8))
    return torch.where(batch.policy.mask, logprobs + noise, 0.0)


@pytest.mark.parametrize(
    "how", slow_after([({"ranks": 2, "stage": 3, "micro_batch_tokens": 40},), ({"ranks": 1, "stage": 0},)], 1)
)
def test_ranks_keep_the_logprobs_of_each_row_from_before_the_update_on_request(
    forked_ranks, tiny_model, batch, how
):
    async def step():
        async with running(tiny_model, epochs=2, **how) as group:
            await group.update(group.stage([batch], keep_logprobs=True))
            kept = await group.token_logprobs()
            await group.update(group.stage([batch]))
            return kept, await group.token_logprobs()

    kept, nothing = asyncio.run(step())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    module = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)
    with torch.no_grad():
        expected = module(padded(batch.tokens, batch.policy.mask))[0]
    assert sorted(kept) == list(range(len(batch))) and nothing == {}
    for row, values in kept.items():
        torch.testing.assert_close(
            torch.from_numpy(values), expected[row][batch.policy.mask[row]].float(), atol=1e-5, rtol=1e-5
        )


def test_a_rank_without_rows_takes_part_in_every_collective(forked_ranks, tiny_model):
    """One sample on two ranks: old log-probs, the entropy threshold and two epochs all need both."""
    algorithm = AlgorithmConfig(top_entropy_share=0.5, kl=KLConfig())
    small = made_groups.batch(groups=1, samples=1, reference=False)

    async def step(**how):
        async with running(tiny_model, algorithm=algorithm, epochs=2, **how) as group:
            return await group.update(group.stage([small, small]))

    one, two = asyncio.run(step(ranks=1, stage=0)), asyncio.run(step(ranks=2, stage=3))
    assert comparable(two) == pytest.approx(comparable(one), rel=1e-3, abs=1e-5)
    computed = int(small.lengths[0])
    assert one[COMPUTED_TOKENS] == computed
    assert two[COMPUTED_TOKENS] == computed + 2  # tokens of a row that adds nothing
