"""The metrics of a step are means over the updates with trained tokens."""

import pytest

from grpo_dist.health import GRAD_NORM, SKIPPED
from grpo_dist.policy.trainer import step_metrics

ONE = {"policy/entropy": 2.0, "policy/ratio_max": 1.5, "mismatch/kl": 0.4, GRAD_NORM: 1.0, SKIPPED: 1.0}
TWO = {"policy/entropy": 4.0, "policy/ratio_max": 1.2, "mismatch/kl": 0.8, GRAD_NORM: 2.0, SKIPPED: 0.0}
NONE = {GRAD_NORM: 0.0, SKIPPED: 0.0}
DEMONSTRATED = {"demonstrations/nll": 5.0, GRAD_NORM: 3.0, SKIPPED: 0.0}


def test_an_update_without_tokens_is_in_no_mean():
    metrics = step_metrics([NONE, ONE, TWO], [False, True, True], unmoved=3)
    assert (metrics["policy/entropy"], metrics["policy/ratio_max"], metrics[SKIPPED]) == (3.0, 1.5, 1.0)
    assert metrics["mismatch/kl"] == pytest.approx(0.6) and metrics[GRAD_NORM] == 1.5


def test_the_mismatch_covers_the_updates_before_the_weights_moved():
    assert step_metrics([ONE, TWO], [True, True], unmoved=1)["mismatch/kl"] == 0.4
    assert "mismatch/kl" not in step_metrics([DEMONSTRATED, TWO], [True, True], unmoved=1)


@pytest.mark.parametrize("turned", [False, True])
def test_each_stream_is_averaged_over_the_updates_with_its_tokens(turned):
    updates = [ONE | {"demonstrations/nll": 1.0}, DEMONSTRATED]
    metrics = step_metrics(updates[::-1] if turned else updates, [True, True], unmoved=2)
    assert metrics["demonstrations/nll"] == 3.0 and metrics[GRAD_NORM] == 2.0
    assert metrics["policy/entropy"] == 2.0 and metrics["mismatch/kl"] == 0.4
