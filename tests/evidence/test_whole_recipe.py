"""The whole recipe on real parts, from the command line: seven stages, killed once in between. Models have
random weights and seconds of training: they only learn to end an answer early.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.config import SFTConfig
from tests.support.made_groups import load_pairs
from tests.support.patience import HANG_S
from tests.support.real_runs import survivors

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(4 * 3600)]  # six engines start in sequence

ROOT = Path(__file__).resolve().parents[2]
BASE = """
model: {path: "demo:tiny"}
data:
  train: [{path: "demo:add3", max_rows: 8}]
  eval: [{path: "demo:add3", split: test, max_rows: 4}]
  instruction: "Be brief."
  system_prompt: "You add."
  max_prompt_tokens: 64
sft: {model: "demo:tiny", data: short.jsonl, steps: 5, batch_size: 8, lr: 1.0e-2, warmup_steps: 0, threads: 1}
batch: {prompts_per_step: 4, samples_per_prompt: 4, micro_batch_tokens: 512}
sampling: {max_new_tokens: 16}
rewards:
  functions: [{function: math}, {name: digits, function: "end_to_end_rewards:digit_share"}]
  code_paths: [REWARDS]
rejection: {samples_per_prompt: 8, keep_per_prompt: 2, min_reward: 0}
rollout: {kv_cache_gib: 0.25, enforce_eager: true}
policy: {num_workers: 2, optimizer: {lr: 1.0e-3}}
evaluation: {before: false, after: false}
checkpoint: {every: 1}
steps: 2
"""
PIPELINE = """
name: r1
seed: 3
stages:
  - {name: cold, kind: sft, config: base.yaml}
  - {name: reason, kind: grpo, config: base.yaml, overrides: {model.path: "${stage:cold}"}}
  - {name: reject, kind: sample, config: base.yaml, overrides: {model.path: "${stage:reason}"}}
  - name: again
    kind: sft
    config: base.yaml
    overrides: {sft.data: ["${stage:reject}/sft.jsonl", {path: short.jsonl, examples: 2}]}
  - name: reason_again
    kind: grpo
    config: base.yaml
    overrides: {model.path: "${stage:again}", steps: 1}
  - {name: teach, kind: sample, config: base.yaml, overrides: {model.path: "${stage:reason_again}"}}
  - name: distilled
    kind: sft
    config: base.yaml
    overrides: {sft.model: "demo:micro", sft.data: "${stage:teach}/sft.jsonl", evaluation.after: true}
"""
NAMES = ("cold", "reason", "reject", "again", "reason_again", "teach", "distilled")


def run(directory, *overrides, kill_at=None):
    """Run `grpo-dist pipeline` to its end; with ``kill_at``, kill it once that file exists."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "grpo_dist.cli", "pipeline", "p.yaml", *overrides]
    with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
        process = subprocess.Popen(
            command, cwd=directory, stdout=out, stderr=err, env=os.environ | {"GRPO_DIST_TEST_RUN": mark}
        )
        while kill_at and not (directory / kill_at).exists():
            assert process.poll() is None, (directory / "err").read_text()[-5000:]
            time.sleep(0.1)
        if kill_at:
            process.kill()
        process.wait(timeout=3 * HANG_S)
    output, errors = (directory / "out").read_text(), (directory / "err").read_text()
    assert kill_at or process.returncode == 0, output[-3000:] + errors[-5000:]
    assert not survivors(mark, seconds=90 if kill_at else 15)
    return process.returncode, output


def record(directory, number):
    return json.loads((directory / f"runs/r1/{number:02d}_{NAMES[number - 1]}/stage.json").read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Run the pipeline, kill it after the first checkpoint of its first GRPO stage, and rerun it."""
    directory = tmp_path_factory.mktemp("recipe")
    (directory / "base.yaml").write_text(BASE.replace("REWARDS", str(ROOT / "tests/support")))
    (directory / "p.yaml").write_text(PIPELINE)
    short = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(5)]
    (directory / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    code, _ = run(directory, kill_at="runs/r1/02_reason/checkpoints/step_000001")
    assert code == -signal.SIGKILL
    cold = record(directory, 1)
    assert cold["state"] == "complete" and record(directory, 2)["state"] == "started"
    _, output = run(directory)
    assert "stage 1 of 7: cold (sft): already done" in output
    assert "resuming from runs/r1/02_reason/checkpoints/step_00000" in output
    assert record(directory, 1) == cold
    return directory, output


def test_every_stage_is_complete_and_in_the_table(done):
    directory, output = done
    for number, name in enumerate(NAMES, 1):
        assert record(directory, number)["state"] == "complete"
        assert f"runs/r1/{number:02d}_{name}" in output.split("pipeline r1")[-1]
    lines = (directory / "runs/r1/02_reason/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "eval/add3/pass@1" in record(directory, 7)["after"]


def test_kept_samples_become_demonstrations_with_the_same_tokens(done):
    directory, _ = done
    stage = directory / "runs/r1/03_reject"
    parts = sorted((stage / "samples").iterdir())
    sampled = [row for part in parts for row in pq.read_table(part).to_pylist()]
    demonstrations = [json.loads(line) for line in (stage / "sft.jsonl").read_text().splitlines()]
    report = json.loads((stage / "report.json").read_text())
    assert len(parts) == 2 and len(sampled) == 64 == report["samples"]
    assert len(demonstrations) == report["kept"] == report["samples"] - sum(report["dropped"].values()) > 0
    ids = {(row["uid"], row["sample"]): row for row in sampled}
    model = directory / "runs/r1/02_reason/model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    sft = SFTConfig.model_validate({"model": str(model), "data": str(stage / "sft.jsonl")})
    respelled = 0  # a random model may spell "<think>" with single characters
    for row, pair in zip(demonstrations, load_pairs(sft, tokenizer), strict=True):
        prompt_ids, completion_ids = pair.prompt, pair.completion
        source = ids[row["uid"], row["sample"]]
        respelled += completion_ids != source["completion_ids"]
        assert tokenizer.decode(completion_ids) == tokenizer.decode(source["completion_ids"])
        assert completion_ids[-1] == source["completion_ids"][-1] and source["finish_reason"] == "stop"
        assert tokenizer.decode(prompt_ids) == (
            f"<|system|>You add.<|user|>{row['problem']}\nBe brief.<|assistant|>"
        )
    assert respelled == report["respelled"]


def test_the_distilled_model_is_the_smaller_one(done):
    directory, _ = done
    small = AutoModelForCausalLM.from_pretrained(directory / "runs/r1/07_distilled/model")
    large = AutoModelForCausalLM.from_pretrained(directory / "runs/r1/05_reason_again/model")
    assert small.num_parameters() < large.num_parameters() / 2


def test_a_finished_pipeline_starts_nothing(done):
    directory, _ = done
    _, output = run(directory)
    assert output.count("already done") == 7
    assert "pipeline r1" in output
