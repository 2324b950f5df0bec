"""Ways to run a configuration that must not change its numbers: evaluation on engines of its own, and a loop
of the caller's own. Real engines, two ranks, reference and graders; temperature and length change.
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
    "steps=3",
    "evaluation.every=1",
    "evaluation.samples_per_prompt=4",
    "checkpoint.every=2",
    f"sampling={CHANGING}",
)
OWN = "evaluation.num_workers=1"
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
def usual(tmp_path_factory):
    """Return the directory of a run whose training waits for its evaluations."""
    directory = tmp_path_factory.mktemp("usual")
    run(directory, *EVERY_STEP)
    return directory


def of_the_run(lines):
    """Return the metrics that are no matter of time, or of engines of evaluation alone."""
    leave = (*CLOCK, "restarts/evaluation")
    return [{k: v for k, v in line.items() if not k.startswith(leave)} for line in lines]


def evaluated(directory):
    """Return what every evaluation sampled, by file."""
    files = sorted((directory / "runs/run/samples").glob("eval_*"))
    return {path.name: pq.read_table(path).drop_columns(["score_s"]).to_pylist() for path in files}


def trained(directory):
    """Return what every step sampled, by file, without what the clock decides."""
    files = sorted((directory / "runs/run/samples").glob("step_*"))
    assert len(files) == 3
    return {path.name: repr(pq.read_table(path).drop_columns(["score_s"]).to_pylist()) for path in files}


def assert_same(directory, usual):
    assert of_the_run(metrics(directory)) == of_the_run(metrics(usual))
    assert len(evaluated(usual)) == 4 and repr(evaluated(directory)) == repr(evaluated(usual))


def assert_no_snapshot_is_left(directory):
    assert list((directory / "runs/run/evaluation").iterdir()) == []


@pytest.mark.slow
def test_engine_trainer_and_reference_agree_on_the_log_probs_of_every_temperature(usual):
    """At one version of the weights: otherwise the mismatch would be that of two temperatures, above 0.1."""
    lines = [line for line in metrics(usual) if line["step"]]
    assert [line["sampling/temperature"] for line in lines] == pytest.approx([1.0, 0.7, 0.4])
    assert [line["sampling/max_new_tokens"] for line in lines] == [6, 6, 16]
    assert [line["rollout/length_max_tokens"] for line in lines] == [6, 6, 16]
    assert all(line["mismatch/logprob_diff_max"] < 1e-5 for line in lines)
    assert lines[0]["first_update/ref/kl"] < 1e-9
    table = pq.read_table(usual / "runs/run/samples/step_000003.parquet").to_pylist()
    assert {row["max_new_tokens"] for row in table} == {16}
    assert [row["temperature"] for row in table] == pytest.approx([0.4] * len(table))


@pytest.mark.slow
def test_evaluation_on_an_engine_of_its_own_has_the_same_numbers_to_the_last_digit(usual, tmp_path):
    run(tmp_path, *EVERY_STEP, OWN)
    assert_same(tmp_path, usual)
    assert_no_snapshot_is_left(tmp_path)


@pytest.mark.slow
def test_exact_speculation_has_the_same_numbers_to_the_last_digit(usual, tmp_path):
    """Over three weight syncs and a kill; engines draft all samples. A resumed run has an empty history."""
    run(tmp_path, *EVERY_STEP, *DRAFTING, check=False, kill_after="step_000002")
    run(tmp_path, *EVERY_STEP, *DRAFTING)
    assert_same(tmp_path, usual)
    assert trained(tmp_path) == trained(usual)
    lines = metrics(tmp_path)
    drafts, tokens, right = (
        sum(line.get(f"throughput/rollout_{name}", 0) for line in lines)
        for name in ("drafts", "drafted_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens and right > 0
    for line in (line for line in lines if line.get("throughput/rollout_drafts")):
        gain = line["throughput/rollout_accepted_tokens"] / line["throughput/rollout_drafts"]
        assert line["rollout/acceptance_length"] == 1 + gain


@pytest.mark.slow
def test_a_killed_run_repeats_the_evaluations_that_did_not_finish(usual, tmp_path):
    run(tmp_path, *EVERY_STEP, OWN, check=False, kill_after="step_000002")
    run(tmp_path, *EVERY_STEP, OWN)
    assert_same(tmp_path, usual)
    assert_no_snapshot_is_left(tmp_path)


@pytest.mark.slow
def test_the_default_loop_of_four_verbs_has_the_metrics_of_train(usual):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LOOP, *EVERY_STEP],
        cwd=usual, env=environment, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = [
        json.loads(line.removeprefix("METRICS ")) for line in done.stdout.splitlines() if "METRICS" in line
    ]
    lines = [line for line in metrics(usual) if line["step"] > 0]
    assert len(found) == len(lines) == 3
    for mine, theirs in zip(found, lines, strict=True):
        # Of the loop of train alone: evaluations, restarts, dynamic sampling.
        alone = ("step", "eval/", "restarts/", "group/extra_prompts", *CLOCK)
        expected = {name: value for name, value in theirs.items() if not name.startswith(alone)}
        assert {name: mine[name] for name in expected} == expected
        assert {"loss/total", "policy/grad_norm", "ref/kl", "reward/mean"} <= set(expected)
