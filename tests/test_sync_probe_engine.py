"""The sync probe on the real parts: a whole run in which one tensor of the engine is changed after a sync."""

import json

import pytest

import actors.cluster
from actors.rollout import RolloutPool, RolloutWorker
from grpo_dist.cli import main

pytestmark = pytest.mark.machine

CONFIG = """
name: run
model: {path: "demo:tiny"}
data: {train: [{path: "demo:add3"}], max_prompt_tokens: 32}
batch: {prompts_per_step: 4, samples_per_prompt: 4, micro_batch_tokens: 256}
sampling: {max_new_tokens: 16}
rollout: {kv_cache_gib: 0.25, enforce_eager: true}
policy: {zero_stage: 2, optimizer: {lr: 1.0e-3}}
evaluation: {before: false, after: false}
checkpoint: {export: false, every: 1}
health: {min_signal_groups: 0, action: warn}
weight_sync: {probe_every: 2}
steps: 3
"""


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
def runs(ray_cluster, tmp_path_factory):
    """The run with the changed engine, and the same command again with a sound one: (exit code, what it
    printed to stderr, lines of metrics, messages of events) of each.
    """
    directory = tmp_path_factory.mktemp("probed")
    (directory / "config.yaml").write_text(CONFIG)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for worker in (ChangedWorker, RolloutWorker):
            pool = type("Pool", (RolloutPool,), {"__init__": _init(worker)})
            patch.setattr(actors.cluster, "RolloutPool", pool)
            code = main(["train", "config.yaml"])
            found.append(
                (code, *(lines(directory / "runs/run" / n) for n in ("metrics.jsonl", "events.jsonl")))
            )
    return found


def _init(worker):
    def init(self, spec, **options):
        RolloutPool.__init__(self, spec, worker=worker, **options)

    return init


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_engine_that_is_the_policys_model_passes_in_float32(runs):
    _, metrics, events = runs[0]
    assert metrics[0]["probe/logprob_diff_mean"] < 1e-6
    assert metrics[0]["probe/logprob_diff_mean"] <= metrics[0]["probe/logprob_diff_max"] < 1e-5
    assert "probe/logprob_diff_mean" not in metrics[1]
    assert events[0]["message"].startswith("sync probe of rollout-0 at version 0: ")
    assert "over 64 tokens (bound 0.001 in float32)" in events[0]["message"]


def test_an_engine_with_one_changed_tensor_ends_the_run_before_its_samples_are_trained_on(runs):
    code, metrics, events = runs[0]
    assert code == 3
    assert [line["step"] for line in metrics] == [1, 2, 3] and "policy/lr" not in metrics[-1]
    assert metrics[-1]["probe/logprob_diff_mean"] > 1e-3
    message = events[-1]["message"]
    assert message.startswith("step 3: engine and trainer are not the same model at version 2: rollout-0 and")
    assert "Stopped before the update." in message


def test_the_run_resumes_with_a_sound_engine_and_is_probed_at_once(runs):
    code, metrics, events = runs[1]
    assert code == 0
    assert [line["step"] for line in metrics] == [1, 2, 3] and "policy/lr" in metrics[-1]
    assert metrics[-1]["probe/logprob_diff_mean"] < 1e-6
    assert events[-1]["message"].startswith("sync probe of rollout-0 at version 2: ")
