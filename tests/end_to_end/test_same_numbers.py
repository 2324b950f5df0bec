"""Options that must not change the numbers of a run: evaluation on separate engines, lossless speculation,
and a user-written loop. Real engines, two ranks, reference and graders; temperature and length change.
"""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.support.patience import HANG_S
from tests.support.real_runs import CLOCK, metrics, run

pytestmark = [pytest.mark.machine, pytest.mark.long]

CHANGING = "{temperature: {schedule: [[0, 1.0], [2, 0.4]]}, max_new_tokens: {schedule: [[0, 6], [2, 16]]}}"
EVERY_STEP = (
    "steps=3", "evaluation.every=1", "evaluation.samples_per_prompt=4", "checkpoint.every=2",
    f"sampling={CHANGING}",
)  # fmt: skip
SEPARATE = "evaluation.num_workers=1"
DRAFTING = ("rollout.speculation.tokens=4", "rollout.speculation.max_sequences=64")
LOOP = """
import asyncio, json, sys
import grpo_dist

async def notebook():  # a loop runs already, as in a notebook
    with grpo_dist.cluster("config.yaml", sys.argv[1:]) as cluster:
        for prompts in cluster.batches():
            groups = cluster.score(cluster.sample(prompts))
            print("METRICS", json.dumps(cluster.update(groups) | cluster.sync()), flush=True)

asyncio.run(notebook())
"""


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """Return the directory of a run whose training waits for its evaluations."""
    directory = tmp_path_factory.mktemp("usual")
    run(directory, *EVERY_STEP)
    return directory


def comparable_metrics(lines):
    """Return the metrics without times and restarts of evaluation engines."""
    leave = (*CLOCK, "restarts/evaluation")
    return [{k: v for k, v in line.items() if not k.startswith(leave)} for line in lines]


def eval_samples(directory):
    """Return the samples of every evaluation, by file."""
    files = sorted((directory / "runs/run/samples").glob("eval_*"))
    return {path.name: pq.read_table(path).drop_columns(["score_s"]).to_pylist() for path in files}


def train_samples(directory):
    """Return the samples of every step, by file, without times."""
    files = sorted((directory / "runs/run/samples").glob("step_*"))
    assert len(files) == 3
    return {path.name: repr(pq.read_table(path).drop_columns(["score_s"]).to_pylist()) for path in files}


def assert_same(directory, expected):
    assert comparable_metrics(metrics(directory)) == comparable_metrics(metrics(expected))
    assert len(eval_samples(expected)) == 4 and repr(eval_samples(directory)) == repr(eval_samples(expected))


def assert_no_snapshot_is_left(directory):
    assert list((directory / "runs/run/evaluation").iterdir()) == []


@pytest.mark.slow
def test_engine_trainer_and_reference_agree_on_the_log_probs_of_every_temperature(plain_run):
    """With the same weights; a mismatch of temperatures would be above 0.1."""
    lines = [line for line in metrics(plain_run) if line["step"]]
    assert [line["sampling/temperature"] for line in lines] == pytest.approx([1.0, 0.7, 0.4])
    assert [line["sampling/max_new_tokens"] for line in lines] == [6, 6, 16]
    assert [line["rollout/length_max_tokens"] for line in lines] == [6, 6, 16]
    assert all(line["mismatch/logprob_diff_max"] < 1e-5 for line in lines)
    assert lines[0]["first_update/ref/kl"] < 1e-9
    table = pq.read_table(plain_run / "runs/run/samples/step_000003.parquet").to_pylist()
    assert {row["max_new_tokens"] for row in table} == {16}
    assert [row["temperature"] for row in table] == pytest.approx([0.4] * len(table))


@pytest.mark.slow
def test_evaluation_on_an_engine_of_its_own_has_the_same_numbers_to_the_last_digit(plain_run, tmp_path):
    run(tmp_path, *EVERY_STEP, SEPARATE)
    assert_same(tmp_path, plain_run)
    assert_no_snapshot_is_left(tmp_path)


@pytest.mark.slow
def test_exact_speculation_has_the_same_numbers_to_the_last_digit(plain_run, tmp_path):
    """Across three weight syncs and a kill; engines draft for all samples. A resumed run has no history."""
    run(tmp_path, *EVERY_STEP, *DRAFTING, check=False, kill_after="step_000002")
    run(tmp_path, *EVERY_STEP, *DRAFTING)
    assert_same(tmp_path, plain_run)
    assert train_samples(tmp_path) == train_samples(plain_run)
    lines = metrics(tmp_path)
    drafts, tokens, accepted = (
        sum(line.get(f"throughput/rollout_{name}", 0) for line in lines)
        for name in ("drafts", "drafted_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens and accepted > 0
    for line in (line for line in lines if line.get("throughput/rollout_drafts")):
        gain = line["throughput/rollout_accepted_tokens"] / line["throughput/rollout_drafts"]
        assert line["rollout/acceptance_length"] == 1 + gain


@pytest.mark.slow
def test_a_killed_run_repeats_the_evaluations_that_did_not_finish(plain_run, tmp_path):
    run(tmp_path, *EVERY_STEP, SEPARATE, check=False, kill_after="step_000002")
    run(tmp_path, *EVERY_STEP, SEPARATE)
    assert_same(tmp_path, plain_run)
    assert_no_snapshot_is_left(tmp_path)


@pytest.mark.slow
def test_the_default_loop_of_four_verbs_has_the_metrics_of_train(plain_run):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LOOP, *EVERY_STEP],
        cwd=plain_run, env=environment, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    logged = [
        json.loads(line.removeprefix("METRICS ")) for line in done.stdout.splitlines() if "METRICS" in line
    ]
    lines = [line for line in metrics(plain_run) if line["step"] > 0]
    assert len(logged) == len(lines) == 3
    for looped, trained in zip(logged, lines, strict=True):
        # Only `train` logs evaluations, restarts and dynamic sampling.
        only_train = ("step", "eval/", "restarts/", "group/extra_prompts", *CLOCK)
        expected = {name: value for name, value in trained.items() if not name.startswith(only_train)}
        assert {name: looped[name] for name in expected} == expected
        assert {"loss/total", "policy/grad_norm", "ref/kl", "reward/mean"} <= set(expected)
