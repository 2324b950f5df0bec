"""Properties of all formulas: masked positions never matter, and the registries are complete."""

import inspect

import pytest
import torch

from grpo_dist.algorithms.advantages import ADVANTAGE_INPUTS, ADVANTAGES
from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.offpolicy import correction
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES, ppo_clip
from grpo_dist.batch.credit_assignment import OTB, PROCESS, TURN
from grpo_dist.config import AlgorithmConfig, KLConfig
from grpo_dist.config.base import choices
from tests.support.numbers_by_hand import INF, NAN, mask_of


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, -1e30])
def test_garbage_at_masked_positions_changes_nothing(garbage):
    generator = torch.Generator().manual_seed(3)
    clean = [torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
    mask = mask_of([5, 2, 0], 5)
    results = []
    for fill in (0.0, garbage):
        logprobs, old, rollout, advantages = (torch.where(mask, t, fill) for t in clean)
        logprobs.requires_grad_()
        losses, stats = ppo_clip(logprobs, old, advantages, mask, dual_clip=2.0)
        weights, more = correction(old, rollout, mask, kind="tis", level="sequence", low=0.0, high=2.0)
        total = aggregate(
            losses * weights, mask, "token-mean", num_tokens=7.0, num_sequences=2.0, max_tokens=5
        )
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert torch.equal(gradient[~mask], torch.zeros(8, dtype=torch.float64))
        assert torch.equal(losses[~mask], torch.zeros(8, dtype=torch.float64))
        results.append([total.detach(), gradient, losses.detach(), weights, *stats.values(), *more.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_registries_hold_what_the_configuration_offers():
    assert set(choices(AlgorithmConfig, "advantage")) == set(ADVANTAGES) | {PROCESS, TURN, OTB}
    assert set(choices(AlgorithmConfig, "loss")) == set(POLICY_LOSSES)
    assert set(choices(AlgorithmConfig, "aggregation")) == set(MODES)
    assert set(choices(KLConfig, "estimator")) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_configuration_of_a_loss_has_its_settings_and_their_defaults(name):
    parameters = inspect.signature(POLICY_LOSSES[name]).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert AlgorithmConfig(loss=name).loss.token_arguments == keywords


def test_the_declared_inputs_are_the_keywords_of_every_estimator():
    for name, function in ADVANTAGES.items():
        parameters = inspect.signature(function).parameters.values()
        assert ADVANTAGE_INPUTS[name] == tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY), name
