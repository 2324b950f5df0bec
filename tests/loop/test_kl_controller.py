"""Only steps with a KL change the weight of the KL term."""

import math

import pytest
import torch

from grpo_dist.config import KLConfig
from grpo_dist.loop.sampling_schedule import KLController
from grpo_dist.policy.loss import batch_loss, finish_stats
from tests.support import made_groups
from tests.support.losses import objective

STEERED = KLConfig(coef=0.1, target=0.05)


def test_a_kl_below_its_target_lowers_the_weight_for_the_next_update():
    kl = KLController(STEERED)
    assert kl.observe({"ref/kl": 0.0}) == {"ref/kl_coef": 0.1}
    assert kl.coef == pytest.approx(0.1 * (1 - 0.2 * STEERED.gain))


def test_a_step_without_a_token_of_the_policy_loss_moves_nothing():
    """A KL of 0 would be below every target: steps of demonstrations alone would take the weight to 0."""
    batch = made_groups.demonstrated_batch()
    _, stats = batch_loss(-torch.rand(batch.tokens.shape), batch, objective(kl={"coef": 0.1}))
    kl = KLController(STEERED)
    assert kl.observe(finish_stats(stats)) == {"ref/kl_coef": 0.1} and kl.coef == 0.1


@pytest.mark.parametrize("metrics", [{}, {"ref/kl": math.nan}, {"ref/kl": math.inf}])
def test_a_step_without_a_finite_kl_moves_nothing(metrics):
    kl = KLController(STEERED)
    kl.observe(metrics)
    assert kl.coef == 0.1
