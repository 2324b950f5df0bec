"""A run with every kind of state is killed and resumed: the same numbers, line by line."""

import pytest

from tests.support.real_runs import metrics, run, without_clock

pytestmark = pytest.mark.evidence

EVERYTHING = (
    "steps=4", "checkpoint.every=2", "max_staleness=1", "policy.optimizer.schedule=constant",
    "algorithm.advantage=opo", "algorithm.loss=gspo", "algorithm.entropy.coef=0.01",
    "algorithm.top_entropy_share=0.5", "algorithm.kl.estimator=k3+", "algorithm.kl.target=0.01",
    "batch.updates_per_step=2", "batch.epochs_per_batch=2", "dynamic_sampling.enabled=true",
    "dynamic_sampling.max_extra_prompts=2", "reference.refresh_every=1", "reference.refresh_mix=0.5",
    "data.order=pass_rate", "evaluation.before=false",
)  # fmt: skip


def test_a_resumed_run_with_every_kind_of_state_has_the_same_numbers(tmp_path):
    """Refreshed reference, adapted KL weight, prompts by pass rate with replacements, one step ahead."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
    run(whole, *EVERYTHING)
    run(killed, *EVERYTHING, check=False, kill_after="step_000002")
    done = run(killed, *EVERYTHING)
    assert "resuming from runs/run/checkpoints/step_000002" in done.stdout
    lines = without_clock(metrics(whole))
    assert without_clock(metrics(killed)) == lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["rollout/staleness_max"] == 1
    assert len({line["ref/kl_coef"] for line in lines}) > 1
    assert all(line["mismatch/logprob_diff_max"] < 1e-5 for line in lines[:1])
