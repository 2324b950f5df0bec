"""The sync probe with real workers: a whole run in which one tensor of the engine is changed after a sync."""

import json

import pytest

import actors.factory
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.cli import main
from tests.support.real_runs import TINY

pytestmark = [pytest.mark.machine, pytest.mark.slow]

CONFIG = (
    TINY
    + """
data: {train: [{path: "demo:add3"}], max_prompt_tokens: 32}
policy: {zero_stage: 2, optimizer: {lr: 1.0e-3}}
evaluation: {before: false, after: false}
checkpoint: {export: false, every: 1}
health: {min_signal_groups: 0, action: warn}
weight_sync: {probe_every: 2}
steps: 3
"""
)


class ChangedWorker(RolloutWorker):
    """An engine whose final norm is 2 percent off once it has taken version 2."""

    async def finish_update(self, version):
        reported = await super().finish_update(version)
        if version == 2:
            await self._engine.call(lambda: self._engine._engine.apply_model(scale_norm))
        return reported


def scale_norm(model):
    model.model.norm.weight.data.mul_(1.02)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("probed")
    (directory / "config.yaml").write_text(CONFIG)
    return directory


@pytest.fixture(scope="module")
def changed(ray_cluster, directory):
    """Run with the engine that changes; return what `train` returns."""
    return train(directory, ChangedWorker)


def train(directory, worker):
    """Train with engines of class ``worker``; return the exit code, the metrics and the events."""

    class Pool(RolloutPool):
        def __init__(self, spec, actors, **others):
            super().__init__(spec, actors, worker=worker, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(actors.factory, "RolloutPool", Pool)
        code = main(["train", "config.yaml"])
    run = directory / "runs/run"
    return code, lines(run / "metrics.jsonl"), lines(run / "events.jsonl")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_engine_that_is_the_policys_model_passes_in_float32(changed):
    _, metrics, events = changed
    assert metrics[0]["probe/logprob_diff_mean"] < 1e-6
    assert metrics[0]["probe/logprob_diff_mean"] <= metrics[0]["probe/logprob_diff_max"] < 1e-5
    assert "probe/logprob_diff_mean" not in metrics[1]
    assert events[0]["message"].startswith("sync probe of rollout-0 at version 0: ")
    assert events[0]["message"].endswith(" tokens (bound 0.001 in float32)")


def test_an_engine_with_one_changed_tensor_ends_the_run_before_any_update(changed):
    code, metrics, events = changed
    assert code == 3
    assert metrics[1]["policy/grad_norm"] > 0  # the weights have moved before
    assert [line["step"] for line in metrics] == [1, 2, 3] and "policy/lr" not in metrics[2]
    assert metrics[2]["probe/logprob_diff_mean"] > 1e-3
    message = events[-1]["message"]
    different = "step 3: engine and trainer are not the same model at version 2: rollout-0 and"
    assert message.startswith(f"the run ended: {different}")
    assert "Stopped before the update." in message


@pytest.mark.slow
def test_the_same_command_resumes_with_a_sound_engine_which_is_probed_at_once(changed, directory):
    code, metrics, events = train(directory, RolloutWorker)
    assert code == 0
    assert [line["step"] for line in metrics] == [1, 2, 3] and "policy/lr" in metrics[2]
    assert metrics[2]["probe/logprob_diff_mean"] < 1e-6
    assert events[-1]["message"].startswith("sync probe of rollout-0 at version 2: ")
