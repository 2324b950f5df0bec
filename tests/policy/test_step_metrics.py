"""The metrics of a step are means over the updates with trained tokens."""

import math

import pytest
import torch

from grpo_dist.config import AlgorithmConfig, PolicyConfig
from grpo_dist.health import GRAD_NORM, SKIPPED, Bound
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.preparation import EntropyBonus
from grpo_dist.policy.trainer import Trainer, step_metrics
from tests.support import made_groups

ONE = {"policy/entropy": 2.0, "policy/ratio_max": 1.5, "mismatch/kl": 0.4, GRAD_NORM: 1.0, SKIPPED: 1.0}
TWO = {"policy/entropy": 4.0, "policy/ratio_max": 1.2, "mismatch/kl": 0.8, GRAD_NORM: 2.0, SKIPPED: 0.0}
NONE = {GRAD_NORM: 0.0, SKIPPED: 0.0}
DEMONSTRATED = {"demonstrations/nll": 5.0, GRAD_NORM: 3.0, SKIPPED: 0.0}


def test_an_update_without_tokens_is_in_no_mean():
    metrics = step_metrics([NONE, ONE, TWO], [False, True, True])
    assert (metrics["policy/entropy"], metrics["policy/ratio_max"], metrics[SKIPPED]) == (3.0, 1.5, 1.0)
    assert metrics["mismatch/kl"] == pytest.approx(0.6) and metrics[GRAD_NORM] == 1.5


class MovedRank(Trainer):
    """A rank without a model. Its weights are further from the engine's after each update."""

    def __init__(self, correction):
        self._policy, self._objective = PolicyConfig(), Objective(AlgorithmConfig(correction=correction))
        self._bonus = EntropyBonus(self._objective.algorithm.entropy)
        self._epochs, self._updates, self._sharing, self.device = 1, 0, None, torch.device("cpu")

    def logprobs(self, batch):
        return torch.zeros(batch.tokens.shape), torch.zeros(batch.tokens.shape)

    def accumulate(self, batch, kl_coef=None, **_):
        return {"mismatch/logprob_diff_mean": 0.02 + 0.5 * self._updates}

    def step(self, *, limit=math.inf):
        self._updates += limit > 0
        return {GRAD_NORM: 1.0, SKIPPED: float(limit < 0)}

    def _weights_are_finite(self):
        return True


@pytest.mark.parametrize(
    ("correction", "limit", "skipped", "mean"),
    [("bypass", 0.05, 0, 0.02), ("bypass", 0.01, 1, 0.02), ("tis", 0.05, 1, (0.02 + 0.52) / 2)],
)
def test_the_mismatch_is_of_the_updates_before_the_weights_moved(correction, limit, skipped, mean):
    """With ratios to the engine only of the first: later log-probs are of weights that the step has moved."""
    bound = Bound("mismatch_above", "mismatch/logprob_diff_mean", limit, above=True)
    metrics = MovedRank(correction).update([made_groups.batch(seed=s) for s in (1, 2)], [bound])
    assert metrics[SKIPPED] == skipped == metrics.get("health/refused_mismatch_above", 0)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(mean)


@pytest.mark.parametrize("turned", [False, True])
def test_each_stream_is_averaged_over_the_updates_with_its_tokens(turned):
    updates = [ONE | {"demonstrations/nll": 1.0}, DEMONSTRATED]
    metrics = step_metrics(updates[::-1] if turned else updates, [True, True])
    assert metrics["demonstrations/nll"] == 3.0 and metrics[GRAD_NORM] == 2.0
    assert metrics["policy/entropy"] == 2.0 and metrics["mismatch/kl"] == 0.4
