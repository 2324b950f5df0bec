"""Whole runs of mixtures of experts: engine and trainer agree before and after every update."""

import pytest

from tests.support.expert_models import SHAPES, expert_model
from tests.support.real_runs import metrics, run

pytestmark = pytest.mark.evidence


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_engine_and_trainer_agree_in_every_step_of_a_run(model_cache, tmp_path, kind):
    model = expert_model(model_cache, kind)
    run(tmp_path, f"model.path={model}", "weight_sync.probe_every=1", "health.min_signal_groups=0", "steps=3")
    steps = [line for line in metrics(tmp_path) if "probe/logprob_diff_max" in line]
    assert len(steps) == 3 and all(line["policy/grad_norm"] > 0 for line in steps)
    assert max(line["probe/logprob_diff_max"] for line in steps) < 1e-4
    assert max(line["mismatch/logprob_diff_mean"] for line in steps) < 1e-5
    print(kind, [line["probe/logprob_diff_max"] for line in steps])
