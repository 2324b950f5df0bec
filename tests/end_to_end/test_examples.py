"""The examples: a plan, a check and two training steps of each, with a real server, tool and tracker."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.cli import main
from tests.support.documents import ROOT
from tests.support.patience import HANG_S
from tests.support.real_runs import metrics
from tests.support.services import StandIn

FOLDER = ROOT / "configs/examples"
CLUSTERS = {
    "agent": "1x1xH100", "http_reward": "1x1xH100", "llm_judge": "1x1xH100",
    "lora_qwen2.5_7b_1gpu": "1x1xH100", "search": "1x1xH100", "slurm_2nodes": "2x8xH100",
    "tool_environment": "1x1xH100", "wandb": "1x1xH100",
}  # fmt: skip
# The model and problems of the demo, as small as possible.
TOY = (
    "model.path=demo:tiny", "steps=2", "batch.prompts_per_step=2", "batch.samples_per_prompt=2",
    "batch.micro_batch_tokens=1024", "sampling.max_new_tokens=16", "data.max_prompt_tokens=512",
    "rewards.num_workers=1", "rewards.processes_per_worker=1", "policy.num_workers=1",
    "rollout.num_workers=1", "rollout.kv_cache_gib=0.25", "rollout.enforce_eager=true",
    "algorithm.kl.coef=0", "evaluation.every=0", "checkpoint.every=0", "checkpoint.export=false",
    # Answers of random weights are wrong and repetitive; these settings train on them anyway.
    "health.min_signal_groups=0", "health.degenerate_above=null",
)  # fmt: skip
SUMS = ('data.train=[{path: "demo:add3", max_rows: 20}]', "data.eval=[]")


def grpo_dist(verb, name, *settings, **variables):
    """Run a command on an example at toy size; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_dist.cli", verb, f"configs/examples/{name}.yaml", *TOY, *settings],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_and_train(name, *settings, **variables):
    """Check an example and train its two steps in the working directory; return the report of the check and
    the metrics of the steps.
    """
    report = grpo_dist("check", name, *settings, **variables)
    grpo_dist("train", name, *settings, **variables)
    (run,) = Path("runs").iterdir()
    steps = [line for line in metrics(Path.cwd(), run.name) if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["train/tokens"] > 0 and math.isfinite(line["loss/total"]) for line in steps)
    return report, steps


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_example_is_planned_here():
    assert sorted(CLUSTERS) == sorted(file.stem for file in FOLDER.glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_an_example_fits_the_cluster_that_it_names(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["plan", f"configs/examples/{name}.yaml", "--cluster", CLUSTERS[name]]) == 0
    assert "as configured" in capsys.readouterr().out


@pytest.mark.slow
def test_the_job_of_two_nodes_asks_for_them(place, capsys):
    command = ["--to", "slurm", "--gpus-per-node", "8", "--time", "12:00:00", "--dry-run"]
    assert main(["submit", "configs/examples/slurm_2nodes.yaml", *command]) == 0
    job = capsys.readouterr().out
    assert "--nodes=2" in job and "--time=12:00:00" in job


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("lora_qwen2.5_7b_1gpu", ""), ("slurm_2nodes", ""), ("wandb", "wandb")]
)
def test_an_example_takes_two_steps(place, name, expected):
    offline = {"WANDB_MODE": "offline", "WANDB_API_KEY": ""}
    report, _ = check_and_train(name, *SUMS, **offline)
    assert expected in report
    assert name != "wandb" or list(Path("runs/wandb-example/wandb").glob("offline-run-*"))


@pytest.mark.machine
@pytest.mark.slow
def test_the_reward_server_scores_the_steps(place):
    server = subprocess.Popen(
        [sys.executable, "configs/examples/reward_server.py", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip()
        report, steps = check_and_train("http_reward", *SUMS, REWARD_URL=url)
    finally:
        server.terminate()
        server.wait(timeout=HANG_S)
    assert "a right and a wrong answer get math 1 and 0, brevity 1 and 1" in report
    assert [line["reward/brevity"] for line in steps] == [1, 1]


@pytest.mark.machine
@pytest.mark.slow
def test_the_judge_and_the_writer_of_scores_are_asked(place):
    def reply(request, number):
        return "Score: 7" if "Score: N" in json.dumps(request) else "No"

    with StandIn(reply) as judge:
        report, steps = check_and_train("llm_judge", *SUMS, JUDGE_URL=judge.base_url)
    assert "judge 1 and 0, clarity 0.7" in report
    assert {"Qwen/Qwen2.5-7B-Instruct"} == {request["model"] for request in judge.requests}
    assert all(line["reward/clarity"] == pytest.approx(0.7) for line in steps)


@pytest.mark.machine
@pytest.mark.slow
def test_the_tool_of_the_shop_is_called(place):
    report, steps = check_and_train("tool_environment")
    assert "stock" in report
    assert [line["reward/unscored"] for line in steps] == [0, 0]
    assert all(line["episode/turns"] for line in steps)


@pytest.mark.machine
@pytest.mark.slow
def test_the_search_answers_and_the_answer_ends(place):
    report, steps = check_and_train("search", "data.max_prompt_tokens=600")
    assert "<information>" in report and "the end of the episode" in report
    assert all(line["episode/turns"] for line in steps)
