"""The pipelines in `configs/pipelines`: all can be read, and the demo of all domains passes every check."""

import pytest

from actors.placement.demands import Resources, placement
from actors.placement.fitting import bundles
from grpo_dist.tools.recipe.check import check_stages
from grpo_dist.tools.recipe.config import load_pipeline
from tests.support.documents import ROOT
from tests.support.tiers import slow_after

PIPELINES = sorted((ROOT / "configs/pipelines").glob("*.yaml"))


@pytest.mark.parametrize("path", slow_after(PIPELINES, 1), ids=lambda path: path.stem)
def test_a_pipeline_is_read(path):
    stages = load_pipeline(path).stages
    assert stages[0].kind == "sft" and {stage.kind for stage in stages} <= {"sft", "grpo", "sample"}


@pytest.mark.slow
def test_the_stage_of_all_domains_has_rewards_weights_and_temperatures_by_source():
    *_, stage = load_pipeline(ROOT / "configs/pipelines/all_domains_demo.yaml").stages
    config = stage.config
    assert config.data.weights == {"reasoning": 0.75, "general": 0.25}
    assert config.data.temperatures == {"general": 0.9} and config.sampling.temperature == 0.7
    rewards = {source: config.rewards.select_source(source) for source in config.data.weights}
    names = {source: [f.function for f in settings.functions] for source, settings in rewards.items()}
    assert names["reasoning"] == ["math", "language"]
    assert names["general"] == ["numeric", "repetition", "language"]
    assert config.batch.order.name == "completion" and config.dynamic_sampling.enabled


def test_the_pipeline_of_all_domains_fits_its_two_nodes_with_both_reward_models_on_each_of_two_gpus():
    *_, stage = load_pipeline(ROOT / "configs/pipelines/all_domains_qwen2.5_7b.yaml").stages
    demands = placement(stage.config, Resources(192, 16, 96), training=True)
    assert sum(demand.total_gpus for demand in demands.values()) == 16
    shared = [bundle for bundle in bundles(demands) if bundle.role == "reward_models"]
    assert [bundle.shares for bundle in shared] == [((0, 0.5), (2, 0.5)), ((1, 0.5), (3, 0.5))]
    scored_by = {
        source: [model.name for model in stage.config.rewards.select_source(source).models]
        for source in stage.config.data.weights
    }
    assert scored_by == {"deepscaler": [], "code": [], "general": ["helpful", "harmless"]}


@pytest.mark.slow
@pytest.mark.machine
def test_check_accepts_the_pipeline_of_all_domains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline(ROOT / "configs/pipelines/all_domains_demo.yaml")
    check_stages(pipeline, [stage.name for stage in pipeline.stages])
