"""The published recipes in configs/recipes: each is valid, is planned, and takes two steps at toy size."""

import asyncio
import json
import sys
from importlib import import_module

import pytest

from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from grpo_dist.environments.base import Problem
from tests.end_to_end.test_examples import TOY
from tests.support.documents import ROOT
from tests.support.real_runs import metrics
from tests.support.services import StandIn, replied

RECIPES = {
    "dapo_qwen2.5_32b": "16x8xH100", "deepscaler_1.5b_8k": "1x8xA100-80GB",
    "deepscaler_1.5b_16k": "2x8xA100-80GB", "deepscaler_1.5b_24k": "2x8xA100-80GB",
    "grpo_zero_countdown": "1x1xH100", "olmo3_7b_rlzero_math": "9x8xH100", "open_r1_qwen2.5_1.5b": "1x8xH100",
    "polaris_4b_40k": "4x8xH800", "polaris_4b_48k": "4x8xH800", "polaris_4b_52k": "4x8xH800",
    "retool_qwen2.5_7b": "1x8xH100", "search_r1_qwen2.5_7b": "1x8xH100", "skywork_or1_7b_8k": "1x8xH100",
    "x_r1_qwen2.5_0.5b": "1x4xH100",
}  # fmt: skip
# A row with the columns of all data sets of the recipes.
ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}], "reward_model": {"ground_truth": "5"},
    "messages": [{"role": "user", "content": "What is 2 + 3?"}], "ground_truth": "5", "problem": "2 + 3 = ?",
    "answer": "5", "solution": "5", "nums": [2, 3], "target": 5,
}  # fmt: skip
ONE_PROCESS = (
    "epochs=null", "batch.updates_per_step=1", "dynamic_sampling=false", "policy.sequence_parallel=1",
    "policy.zero_stage=0", "policy.offload={}", "rollout.tensor_parallel_size=1", "model.attention=auto",
    "model.dtype=float32", "rewards.overlong_buffer.tokens=null", "data.train.0.split=train",
    "data.train.0.subset=null", "data.overlong=refuse", "max_staleness=0", "weight_sync={}",
    "rollout.engine={}", "rollout.gpu_memory_utilization=null", "cluster.placement=auto",
    "environments.num_workers=1", "tracking.wandb=null",
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


WRITTEN = "Emma\nA novel by Jane Austen."


@pytest.fixture
def search_r1(monkeypatch):
    for folder in ("recipes", "examples"):
        monkeypatch.syspath_prepend(ROOT / "configs" / folder)
    yield import_module("search_r1").SearchR1
    for name in ("search_r1", "search"):
        del sys.modules[name]


@pytest.mark.parametrize("has_server", [False, True])
def test_search_r1_finds_passages_in_its_form_and_takes_any_gold(search_r1, tmp_path, has_server):
    """In a local index, and by the server that the published recipe starts."""
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"contents": WRITTEN}) + "\n")
    response = {"result": [[{"document": {"contents": WRITTEN}, "score": 1.0}]]}
    with StandIn(lambda body, number: replied(response)) as server:
        url = f"{server.base_url}/retrieve" if has_server else None
        settings = {"url": url, "corpus": str(tmp_path / "wiki.jsonl")}
        search_r1.preload(**settings)
        episode = search_r1(**settings)
        problem = Problem("Answer the given question. Who wrote Emma?", '["Austen", "Jane Austen"]')
        assert episode.start(problem) == problem.text
        step = asyncio.run(episode.step("<search> the author of Emma </search>"))
    passage = "<information>Doc 1(Title: Emma) A novel by Jane Austen.\n</information>"
    assert step.observation.strip() == passage and not step.done
    requests = [{"queries": ["the author of Emma"], "topk": 3, "return_scores": True}]
    assert server.requests == (requests if has_server else [])
    for text, reward in (("jane austen", 1.0), ("The Austen.", 1.0), ("Emma", 0.0)):
        assert asyncio.run(episode.step(f"<answer>{text}</answer>")).reward == reward
    assert "My previous action is invalid." in asyncio.run(episode.step("Emma?")).observation
    assert search_r1.stop == ("</search>", "</answer>")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROW) + "\n" for _ in range(20)))
    monkeypatch.chdir(tmp_path)
    return ("data.train.0.path=rows.jsonl", "data.eval=[]")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RECIPES if not n.startswith("olmo3")])  # needs the hub
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
    if name.startswith("search_r1"):
        (tmp_path / "wiki.jsonl").write_text(json.dumps({"contents": WRITTEN}) + "\n")
        index = "data.train.0.environment_kwargs={url: null, corpus: wiki.jsonl}"
        settings += (index, "data.train.0.answer_column=answer")
    assert main(["train", f"configs/recipes/{name}.yaml", *settings]) == 0
    steps = [line for line in metrics(tmp_path, "toy") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
