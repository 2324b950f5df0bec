"""Whole runs in which all roles take turns on the same devices: the same numbers, to the last digit, as where
each has its own. On CPUs the turns are the same calls in the same order as on GPUs.
"""

import json

import pytest

from tests.support import reward_models
from tests.support.real_runs import metrics, run, without_clock

pytestmark = pytest.mark.machine

# One thread each, so that no sum depends on how many cores a role may use. After the checkpoint of each step
# engines get their weights again.
COMMON = (
    "steps=3",
    "checkpoint.every=1",
    "rollout.threads=1",
    "policy.threads=1",
    "weight_sync.probe_every=1",
    "tracking.samples=true",
)
RUNS = {
    "reference, reward model, ZeRO-3": ("policy.zero_stage=3", "MODEL"),
    "adapters": ("policy.zero_stage=1", "policy.lora={rank: 4}", "policy.optimizer.lr=1.0e-2"),
    "a reference that follows, ReMax": (
        "reference.refresh_every=1",
        "reference.refresh_mix=0.5",
        "algorithm.advantage=remax",
    ),
    "a reward model between rounds of sampling": (
        "policy.zero_stage=0",
        "algorithm.kl.coef=0",
        "dynamic_sampling={enabled: true}",
        "MODEL",
    ),
}


def finished(directory, placement, overrides, classifier):
    model = f"rewards.models=[{{name: judge, path: {classifier}, weight: 0.5}}]"
    own = [model if override == "MODEL" else override for override in overrides]
    directory.mkdir()
    run(directory, *COMMON, *own, f"cluster.placement={placement}")
    return directory


def numbers(directory):
    """All metrics but times and restarts, which name the roles that have actors of their own."""
    lines = without_clock(metrics(directory))
    return [{k: v for k, v in line.items() if not k.startswith("restarts/")} for line in lines]


def samples(directory):
    """Everything recorded of the samples but the seconds of their scores, by file."""
    import pyarrow.parquet as pq

    found = sorted((directory / "runs/run").rglob("*.parquet"))
    return {
        path.name: json.dumps(
            pq.read_table(path).drop_columns("score_s").to_pylist(), sort_keys=True, default=str
        )
        for path in found
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_taking_turns_changes_no_digit(tmp_path, name):
    classifier = reward_models.random(tmp_path / "classifier", "outcome")
    apart, turns = (
        finished(tmp_path / placement, placement, RUNS[name], classifier)
        for placement in ("separate", "colocated")
    )
    assert numbers(turns) == numbers(apart)
    assert samples(turns) == samples(apart) and samples(turns)
    last = metrics(turns)[-1]
    assert (
        last["step"] == 3 and last["time/turn_engines_sleep_s"] > 0 and last["time/turn_policy_reload_s"] > 0
    )
    assert not any(key.startswith("time/turn_") for line in metrics(apart) for key in line)
    if name.startswith(("reference", "adapters")):
        assert ("time/turn_reference_wake_s" in last) is ("adapters" not in name)
        assert last["ref/kl"] > 0
