"""The recipes of others in configs/recipes: each is valid, is planned, and takes two steps at toy size."""

import json
from importlib import import_module

import pytest

from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from tests.end_to_end.test_examples import TOY
from tests.support.documents import ROOT
from tests.support.real_runs import metrics

RECIPES = {
    "dapo_qwen2.5_32b": "16x8xH100",
    "deepscaler_1.5b_8k": "1x8xA100-80GB",
    "deepscaler_1.5b_16k": "2x8xA100-80GB",
    "deepscaler_1.5b_24k": "2x8xA100-80GB",
    "grpo_zero_countdown": "1x1xH100",
    "olmo3_7b_rlzero_math": "9x8xH100",
    "open_r1_qwen2.5_1.5b": "1x8xH100",
    "polaris_4b_40k": "4x8xH800",
    "polaris_4b_48k": "4x8xH800",
    "polaris_4b_52k": "4x8xH800",
    "retool_qwen2.5_7b": "1x8xH100",
    "skywork_or1_7b_8k": "1x8xH100",
    "x_r1_qwen2.5_0.5b": "1x4xH100",
}
# A row with the columns of all these data sets.
ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}], "reward_model": {"ground_truth": "5"},
    "messages": [{"role": "user", "content": "What is 2 + 3?"}], "ground_truth": "5", "problem": "2 + 3 = ?",
    "answer": "5", "solution": "5", "nums": [2, 3], "target": 5,
}  # fmt: skip
ONE_PROCESS = (
    "epochs=null", "batch.updates_per_step=1", "dynamic_sampling=false", "policy.sequence_parallel=1",
    "policy.zero_stage=0", "policy.offload={}", "rollout.tensor_parallel_size=1", "model.attention=auto",
    "model.dtype=float32", "rewards.overlong_buffer.tokens=null", "data.train.0.split=train",
    "data.train.0.subset=null", "data.overlong=refuse", "max_staleness=0", "rollout.engine={}",
    "rollout.gpu_memory_utilization=null", "cluster.placement=auto", "environments.num_workers=1",
    "tracking.wandb=null",
)  # fmt: skip


def test_every_recipe_is_tested_and_valid():
    assert sorted(RECIPES) == sorted(file.stem for file in (ROOT / "configs/recipes").glob("*.yaml"))
    for name in RECIPES:
        load_config(ROOT / f"configs/recipes/{name}.yaml")


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("</think>\n<answer>(3 - 1) * 4</answer>", 1.0),
        ("<answer>4 / (3 - 1)</answer>", 0.0),
        ("<answer>4 * 2</answer>", 0.0),
        ("<answer>4 + 3 + 1</answer>", 1.0),
        ("<answer>4 / (1 - 1 * 3 / 3)</answer>", 0.0),
        ("<answer>(</answer>", 0.0),
        ("8", 0.0),
    ],
)
def test_countdown_counts_each_number_once(completion, value, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "configs/recipes")
    countdown = import_module("countdown")
    assert countdown.equation(completion, "8", [1, 3, 4]) == value
    assert countdown.tags("so</think>\n<answer>1</answer>") == 1.0


@pytest.fixture
def rows(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROW) + "\n" for _ in range(20)))
    monkeypatch.chdir(tmp_path)
    return ("data.train.0.path=rows.jsonl", "data.eval=[]")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RECIPES if not n.startswith("olmo3")])  # sizes are on the hub
def test_a_recipe_is_planned_on_its_cluster(rows, name, capsys):
    columns = ("data.train.0.split=train", "data.train.0.subset=null")
    command = ["plan", f"configs/recipes/{name}.yaml", *rows, *columns, "--cluster", RECIPES[name]]
    assert main(command) == 0, capsys.readouterr().err
    assert "as configured" in capsys.readouterr().out


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RECIPES if not n.endswith(("16k", "24k", "48k", "52k"))])
def test_a_recipe_takes_two_steps(rows, name, tmp_path):
    settings = (*TOY, *ONE_PROCESS, *rows, "name=toy", "output_dir=runs")
    if name.startswith("retool"):  # the toy's chat template knows no tools
        settings += ("environments.call_format=code",)
    assert main(["train", f"configs/recipes/{name}.yaml", *settings]) == 0
    steps = [line for line in metrics(tmp_path, "toy") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
