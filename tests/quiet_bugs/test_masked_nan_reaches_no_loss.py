"""verl#6349, "mask invalid sequence loss values" (and verl#6361): a mask was applied by multiplication, and
NaN times 0 is NaN.

The thread injects one NaN with mask 0: `actor/pg_loss: nan` in the sequence modes; only token-mean
selected its tokens. Its worked example: values [1, NaN, 3] with mask [1, 0, 1] must sum to 4.
"""

import math

import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.policy.loss import batch_loss
from tests.support import made_groups
from tests.support.losses import change, objective

VALUES, MASK = torch.tensor([[1.0, math.nan, 3.0]]), torch.tensor([[True, False, True]])


def test_the_bug_makes_nan_of_a_masked_token():
    assert torch.isnan((VALUES * MASK).sum())
    assert torch.where(MASK, VALUES, 0.0).sum() == 4


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 2), ("seq-mean-token-mean", 2), ("seq-mean-token-sum", 4), ("seq-mean-token-sum-norm", 1),
     ("prompt-mean-token-mean", 2)],
)  # fmt: skip
def test_a_masked_nan_is_in_no_mode_of_aggregation(mode, expected):
    assert aggregate(VALUES, MASK, mode, num_tokens=2, num_sequences=1, max_tokens=4) == expected


EVERY = [
    *({"loss": loss} for loss in POLICY_LOSSES),
    *({"kl": {"coef": 0.1, "estimator": kl}} for kl in KL_ESTIMATORS),
    *({"aggregation": mode} for mode in MODES),
    {"correction": {"kind": "tis", "level": "sequence"}},
]


@pytest.mark.parametrize("section", EVERY, ids=lambda section: str(next(iter(section.values()))))
def test_the_whole_loss_and_its_gradient_are_those_without_it(section):
    """NaN at every untrained token, in the log-probs of trainer, engine and reference."""
    batch = made_groups.batch(groups=2, samples=2)
    settings = objective(**{"kl": {"coef": 0.1}, "aggregation": "seq-mean-token-mean"} | section)
    clean = torch.full(batch.tokens.shape, -1.0)

    def loss_and_gradient(garbage):
        where = batch.policy.mask
        logprobs = torch.where(where, clean, garbage).requires_grad_()
        stream = {
            name: torch.where(where, getattr(batch.policy, name), garbage)
            for name in ("rollout_logprobs", "ref_logprobs", "advantages")
        }
        loss, _ = batch_loss(logprobs, change(batch, policy=stream), settings)
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]

    (value, slope), (clean_value, clean_slope) = map(loss_and_gradient, (math.nan, 0.0))
    assert math.isfinite(value) and value == clean_value
    assert torch.equal(slope, clean_slope) and not slope[~batch.policy.mask].any()
