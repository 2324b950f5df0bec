"""Complete runs with all roles colocated on the same devices: the same numbers, to the last digit, as on
separate devices. CPUs make the same calls in the same order as GPUs.
"""

import json

import pytest

from tests.support import reward_models
from tests.support.real_runs import metrics, run, without_clock

pytestmark = pytest.mark.machine

# One thread each: no sum depends on the cores of a role. After each checkpoint engines get weights again.
COMMON = (
    "steps=3", "checkpoint.every=1", "rollout.threads=1", "policy.threads=1", "weight_sync.probe_every=1",
    "tracking.samples=true",
)  # fmt: skip
RUNS = {
    "reference, reward model, ZeRO-3": ("policy.zero_stage=3", "MODEL"),
    "adapters": ("policy.zero_stage=1", "policy.lora={rank: 4}", "policy.optimizer.lr=1.0e-2"),
    "a reference that follows, ReMax": (
        "reference.refresh_every=1", "reference.refresh_mix=0.5", "algorithm.advantage=remax",
    ),
    "a reward model between rounds of sampling": (
        "policy.zero_stage=0", "algorithm.kl.coef=0", "dynamic_sampling={enabled: true}", "MODEL",
    ),
}  # fmt: skip


def finished(directory, placement, overrides, classifier):
    model = f"rewards.models=[{{name: judge, path: {classifier}, weight: 0.5}}]"
    settings = [model if override == "MODEL" else override for override in overrides]
    directory.mkdir()
    run(directory, *COMMON, *settings, f"cluster.placement={placement}")
    return directory


def numbers(directory):
    """Return all metrics but times and restarts, whose names depend on the placement."""
    lines = without_clock(metrics(directory))
    return [{k: v for k, v in line.items() if not k.startswith("restarts/")} for line in lines]


def samples(directory):
    """Return all recorded samples without their scoring times, by file."""
    import pyarrow.parquet as pq

    files = sorted((directory / "runs/run").rglob("*.parquet"))
    return {
        path.name: json.dumps(
            pq.read_table(path).drop_columns("score_s").to_pylist(), sort_keys=True, default=str
        )
        for path in files
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_colocation_changes_no_digit(tmp_path, name):
    classifier = reward_models.random(tmp_path / "classifier", "outcome")
    separate, colocated = (
        finished(tmp_path / placement, placement, RUNS[name], classifier)
        for placement in ("separate", "colocated")
    )
    assert numbers(colocated) == numbers(separate)
    assert samples(colocated) == samples(separate) and samples(colocated)
    last = metrics(colocated)[-1]
    assert last["step"] == 3
    assert last["time/turn_engines_sleep_s"] > 0 and last["time/turn_policy_reload_s"] > 0
    assert not any(key.startswith("time/turn_") for line in metrics(separate) for key in line)
    if name.startswith(("reference", "adapters")):
        assert ("time/turn_reference_wake_s" in last) is ("adapters" not in name)
        assert last["ref/kl"] > 0
