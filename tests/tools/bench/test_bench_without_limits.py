"""A benchmark keeps the measurements of the loop where its limits cannot be measured."""

import json
from types import SimpleNamespace

import pytest

from grpo_dist.tools.bench import limits, run
from grpo_dist.tools.bench.result import BenchResult
from tests.support.fakes import config
from tests.tools.bench.test_bench import SPANS, step

DECODER = {
    "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 2, "intermediate_size": 8, "vocab_size": 10,
}  # fmt: skip


@pytest.fixture
def run_bench(tmp_path, monkeypatch):
    """Return a function that runs a benchmark whose loop takes no time, on a cluster with ``gpus``."""

    def run_with(gpus=0):
        (tmp_path / "config.json").write_text(json.dumps(DECODER))
        inputs = SimpleNamespace(model_dir=tmp_path, teacher_dirs=())

        async def loop(config, inputs, directory):
            return [step(10 * i, SPANS) for i in range(config.steps)]

        monkeypatch.setattr("actors.connection.fit", lambda config: SimpleNamespace(gpus=gpus))
        monkeypatch.setattr(run, "load_inputs", lambda config, say, device: inputs)
        monkeypatch.setattr(run, "_loop", loop)
        bench = {"warmup_steps": 1, "steps": 2}
        return BenchResult.read(
            run.bench(config(name="made", output_dir=str(tmp_path), bench=bench)) / "bench.json"
        )

    return run_with


def test_a_limit_that_fails_leaves_the_result_without_it(run_bench, monkeypatch, capsys):
    def run_jobs(measure, jobs, **_):
        if measure is limits.measure_sync:
            return [[0.5] * 2 for _ in jobs]
        raise RuntimeError(f"{measure.__name__}: exit code 1; CUDA out of memory")

    monkeypatch.setattr(limits, "run_jobs", run_jobs)
    values = run_bench().figures
    assert values["loop/step_s"] == 10 and values["limit/sync_bytes_per_s"] == 200
    assert values["of_limit/sync"] == pytest.approx(0.5)
    limit_keys = {key for key in values if key.startswith(("limit/", "of_limit/", "loop/step_over"))}
    assert limit_keys == {"limit/sync_bytes_per_s", "limit/sync_step_s", "of_limit/sync"}
    output = capsys.readouterr().out
    for what in ("generation", "training"):
        assert f"warning: {what}: no limit was measured" in output
    assert "CUDA out of memory" in output


def test_limits_of_a_cluster_with_gpus_are_not_measured_on_a_machine_without(run_bench, monkeypatch, capsys):
    monkeypatch.setattr(limits, "run_jobs", lambda *_, **__: pytest.fail("a limit was measured"))
    result = run_bench(gpus=8)
    assert result.figures["loop/step_s"] == 10 and not result.limit_settings
    assert "this machine has no GPUs, and the cluster has 8" in capsys.readouterr().out
