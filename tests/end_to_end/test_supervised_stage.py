"""A supervised stage from the command line, on real ranks: killed, and continued with the same numbers."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from safetensors.torch import load_file

from grpo_dist.config.files import load_config
from tests.support.patience import HANG_S, wait_for_end
from tests.support.real_runs import has_checkpoint, survivors, without_clock

pytestmark = pytest.mark.machine

PIPELINE = """
name: p
seed: 3
stages:
  - name: cold
    kind: sft
    settings:
      model: {path: sft}
      data: {train: [{path: "demo:add3"}]}
      sft: {model: "demo:tiny", data: [{path: "demo:add3", examples: 200}], batch_size: 64, epochs: 6,
            warmup_steps: 2,
            validation_share: 0.1, validate_every: 5}
      batch: {micro_batch_tokens: 1024}
      policy: {num_workers: 2, zero_stage: 2}
      checkpoint: {every: 4}
"""
STEPS = 17  # 6 times 180 rows, 64 a step


def run(directory, *, stop_at=None):
    """Run `grpo-dist pipeline` to its end or, with ``stop_at``, kill it at that checkpoint or a later one."""
    directory.mkdir(exist_ok=True)
    (directory / "p.yaml").write_text(PIPELINE)
    mark = uuid.uuid4().hex
    out, err = directory / "out", directory / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_dist.cli", "pipeline", "p.yaml"],
            cwd=directory, stdout=stdout, stderr=stderr, env=os.environ | {"GRPO_DIST_TEST_RUN": mark},
        )  # fmt: skip
        while stop_at and not has_checkpoint(stage(directory), stop_at):
            assert process.poll() is None, err.read_text()[-5000:]
            time.sleep(0.05)
        if stop_at:
            process.kill()
        wait_for_end(process, lambda: [path.stat().st_size for path in (out, err)])
    assert not survivors(mark, seconds=HANG_S)
    return process.returncode, out.read_text() + err.read_text()


def stage(directory):
    return directory / "runs/p/01_cold"


def metrics(directory):
    lines = (stage(directory) / "metrics.jsonl").read_text().splitlines()
    return without_clock([json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def unbroken_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    code, output = run(directory)
    assert code == 0, output[-5000:]
    return directory


@pytest.mark.slow
def test_the_stage_records_what_a_run_does_and_its_loss_falls(unbroken_run):
    lines = metrics(unbroken_run)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    validation = {line["step"]: line["validation/loss"] for line in lines if "validation/loss" in line}
    assert list(validation) == [0, *range(5, STEPS, 5), STEPS]
    assert validation[STEPS] < 0.7 * validation[0]
    assert lines[-1]["loss/total"] < 0.7 * lines[1]["loss/total"]
    assert lines[-1]["train/epoch"] == pytest.approx(STEPS * 64 / 180)
    assert {line["restarts/policy"] for line in lines[1:]} == {0.0}
    record = json.loads((stage(unbroken_run) / "stage.json").read_text())
    assert record["state"] == "complete" and (stage(unbroken_run) / "DONE").read_text() == f"{STEPS}\n"
    assert load_config(stage(unbroken_run) / "config.yaml").steps == STEPS
    assert (stage(unbroken_run) / "events.jsonl").read_text() == ""


@pytest.mark.slow
def test_a_stage_that_is_killed_continues_with_the_same_numbers(unbroken_run, tmp_path):
    directory = tmp_path / "broken"
    code, output = run(directory, stop_at="step_000004")
    assert code == -signal.SIGKILL, output[-5000:]
    assert len(metrics(directory)) < STEPS and not (stage(directory) / "DONE").exists()
    code, output = run(directory)
    assert code == 0, output[-5000:]
    assert "resuming from runs/p/01_cold/checkpoints/" in output
    assert metrics(directory) == metrics(unbroken_run)
    actual, expected = (load_file(stage(d) / "model/model.safetensors") for d in (directory, unbroken_run))
    assert all((actual[name] == tensor).all() for name, tensor in expected.items())
