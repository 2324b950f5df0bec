"""Whole runs of mixtures of experts: engine and trainer agree before and after every update."""

import pytest

from tests.support.models import EXPERT_SHAPES, expert_model, tied_model
from tests.support.real_runs import metrics, run

pytestmark = pytest.mark.evidence


@pytest.mark.parametrize("kind", sorted(EXPERT_SHAPES))
def test_engine_and_trainer_agree_in_every_step_of_a_run(model_cache, tmp_path, kind):
    model = expert_model(model_cache, kind)
    run(tmp_path, f"model.path={model}", "weight_sync.probe_every=1", "health.min_signal_groups=0", "steps=3")
    steps = [line for line in metrics(tmp_path) if "probe/logprob_diff_max" in line]
    assert len(steps) == 3 and all(line["policy/grad_norm"] > 0 for line in steps)
    assert max(line["probe/logprob_diff_max"] for line in steps) < 1e-4
    assert max(line["mismatch/logprob_diff_mean"] for line in steps) < 1e-5
    print(kind, [line["probe/logprob_diff_max"] for line in steps])


def test_replayed_routes_keep_engine_and_trainer_the_same_over_real_updates(model_cache, tmp_path):
    """Four experts are nearly tied: rounding decides between them. With replay the trainer's log-probs equal
    the engine's to float32 rounding at every step, before each update and after the weights moved; without
    it, the mismatch metrics show tokens that took other experts. The probe would end that run before its
    first update, so its bound is raised.
    """
    model = tied_model(model_cache, "qwen3_moe")
    steps = {}
    for replay in (True, False):
        (tmp_path / str(replay)).mkdir()
        bound = [] if replay else ["weight_sync.probe_above=10"]
        run(
            tmp_path / str(replay), f"model.path={model}", "health.min_signal_groups=0", "steps=4",
            f"policy.router_replay={str(replay).lower()}", *bound,
        )  # fmt: skip
        steps[replay] = [m for m in metrics(tmp_path / str(replay)) if "mismatch/logprob_diff_max" in m]
        assert len(steps[replay]) == 4 and all(m["policy/grad_norm"] > 0 for m in steps[replay])
    print({replay: [m["mismatch/logprob_diff_max"] for m in lines] for replay, lines in steps.items()})
    assert max(m["mismatch/logprob_diff_max"] for m in steps[True]) < 1e-5
    assert max(m["mismatch/logprob_diff_mean"] for m in steps[True]) < 1e-6
    assert max(m["mismatch/logprob_diff_max"] for m in steps[False]) > 1e-3
