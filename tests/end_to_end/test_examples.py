"""The examples: plans of all of them, and checks with a real server, tool and tracker."""

import json
import os
import subprocess
import sys

import pytest

from grpo_dist.cli import main
from tests.support.documents import ROOT
from tests.support.patience import HANG_S
from tests.support.services import StandIn

FOLDER = ROOT / "configs/examples"
CLUSTERS = {
    "http_reward": "1x1xH100",
    "llm_judge": "1x1xH100",
    "lora_qwen2.5_7b_1gpu": "1x1xH100",
    "slurm_2nodes": "2x8xH100",
    "tool_environment": "1x1xH100",
    "wandb": "1x1xH100",
}
# The model and the problems of the demo, as small as they can be.
TOY = (
    "model.path=demo:tiny", "steps=2", "batch.prompts_per_step=2", "batch.samples_per_prompt=2",
    "sampling.max_new_tokens=16", "data.max_prompt_tokens=256", "rewards.num_workers=1",
    "rewards.processes_per_worker=1", "rollout.kv_cache_gib=0.25", "rollout.enforce_eager=true",
    "algorithm.kl.coef=0", "evaluation.every=0", "checkpoint.every=0", "checkpoint.export=false",
)  # fmt: skip
SUMS = ('data.train=[{path: "demo:add3", max_rows: 20}]', "data.eval=[]")


def checked(name, *settings, **variables):
    """Check an example at toy size as a reader does; return what is printed."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_dist.cli", "check", f"configs/examples/{name}.yaml", *TOY, *settings],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


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


@pytest.mark.slow
def test_the_reward_server_scores_the_trial(place):
    server = subprocess.Popen(
        [sys.executable, "configs/examples/reward_server.py", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip()
        told = checked("http_reward", *SUMS, "tracking.wandb=null", REWARD_URL=url)
    finally:
        server.terminate()
        server.wait(timeout=HANG_S)
    assert "a right and a wrong answer get math 1 and 0, brevity 1 and 1" in told


@pytest.mark.slow
def test_the_judge_and_the_writer_of_scores_are_asked(place):
    def reply(request, number):
        return "Score: 7" if "Score: N" in json.dumps(request) else "No"

    with StandIn(reply) as judge:
        told = checked("llm_judge", *SUMS, "tracking.wandb=null", JUDGE_URL=judge.base_url)
    assert "judge 1 and 0, clarity 0.7" in told
    assert {"Qwen/Qwen2.5-7B-Instruct"} == {request["model"] for request in judge.requests}


@pytest.mark.slow
def test_the_tool_of_the_shop_is_called(place):
    assert "stock" in checked("tool_environment")


@pytest.mark.slow
def test_wandb_is_among_the_trackers(place):
    assert "wandb" in checked("wandb", *SUMS, WANDB_MODE="offline", WANDB_API_KEY="")
