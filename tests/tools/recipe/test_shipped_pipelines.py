"""The pipelines of `configs/pipelines`: all can be read, and the demo of all domains passes every check."""

import pytest

from grpo_dist.tools.recipe.check import check_stages
from grpo_dist.tools.recipe.config import load_pipeline
from tests.support.documents import ROOT

PIPELINES = sorted((ROOT / "configs/pipelines").glob("*.yaml"))


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_a_pipeline_is_read(path):
    stages = load_pipeline(path).stages
    assert stages[0].kind == "sft" and {stage.kind for stage in stages} <= {"sft", "grpo", "sample"}


def test_the_stage_of_all_domains_has_rewards_weights_and_temperatures_by_source():
    *_, stage = load_pipeline(ROOT / "configs/pipelines/all_domains_demo.yaml").stages
    config = stage.config
    assert config.data.weights == {"reasoning": 0.75, "general": 0.25}
    assert config.data.temperatures == {"general": 0.9} and config.sampling.temperature == 0.7
    names = {
        source: [f.function for f in config.rewards.of(source).functions] for source in config.data.weights
    }
    assert names["reasoning"] == ["math", "language"]
    assert names["general"] == ["numeric", "repetition", "language"]
    assert config.batch.order == "finished" and config.dynamic_sampling.enabled


@pytest.mark.machine
def test_check_accepts_the_pipeline_of_all_domains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline(ROOT / "configs/pipelines/all_domains_demo.yaml")
    check_stages(pipeline, [stage.name for stage in pipeline.stages])
