"""A table documents each algorithm preset; runs and reports name the preset and the differences from it."""

import re
from pathlib import Path

import pytest

from grpo_dist.config import presets
from grpo_dist.config.differences import flat
from grpo_dist.config.files import load_config
from tests.support.good_inputs import CONFIG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base.yaml").write_text(CONFIG)
    return tmp_path / "base.yaml"


@pytest.mark.parametrize("name", presets.names())
def test_the_documents_list_what_every_preset_sets(name):
    """Everything in the file except default values."""
    page = (ROOT / "configs" / "README.md").read_text()
    part = page.partition("<!-- begin generated: presets -->")[2]
    (row,) = [line for line in part.splitlines() if line.startswith(f"| `{name}` | ")]
    changed = presets.differences(name)
    assert changed and set(changed) <= set(presets.settings(name))
    for key in changed:
        setting = re.sub(r"\.(name|kind|enabled)$", "", key.removeprefix("algorithm."))
        assert f"`{setting}` " in row


def test_what_grpo_and_dapo_change_from_the_defaults():
    grpo = {"algorithm.aggregation.name": "seq-mean-token-mean", "algorithm.kl.coef": 0.04}
    assert presets.differences("grpo") == grpo
    dapo = {"algorithm.loss.clip_high": 0.28, "dynamic_sampling.enabled": True}
    assert presets.differences("dapo") == dapo | {"rewards.overlong_buffer.penalty": 1.0}
    default = "| none (the default) | | `advantage` grpo, `advantage.std` group, `loss` ppo_clip"
    assert default in presets.table()


def test_a_configuration_carries_the_name_of_its_preset(base):
    assert load_config(base).algorithm.preset is None
    assert load_config(base, ["+algorithm=dapo"]).algorithm.preset == "dapo"
    built = base.with_name("built.yaml")
    built.write_text(f"defaults: [base.yaml, {ROOT}/configs/algorithms/grpo.yaml]\nseed: 3\n")
    assert load_config(built).algorithm.preset == "grpo"
    presets_dir = base.parent / "algorithms"
    presets_dir.mkdir()
    (presets_dir / "mine.yaml").write_text("algorithm: {loss: gspo}\n")
    assert load_config(base, ["+algorithm=mine"]).algorithm.preset == "mine"


def test_another_preset_replaces_everything_that_the_first_one_set(base):
    built = base.with_name("built.yaml")
    dapo = ROOT / "configs/algorithms/dapo.yaml"
    built.write_text(f"defaults: [base.yaml, {dapo}]\nrewards: {{timeout_s: 3}}\n")
    config = load_config(built, ["+algorithm=dr_grpo"])
    assert not config.dynamic_sampling.enabled and config.rewards.overlong_buffer.penalty == 0
    assert config.rewards.timeout_s == 3
    assert label_of(config) == "dr_grpo"
    assert load_config(base, ["+algorithm=gspo", "+algorithm=dr_grpo"]).batch.updates_per_step == 1
    # A value that the file sets stays.
    built.write_text(f"defaults: [base.yaml, {dapo}]\nrewards: {{overlong_buffer: {{penalty: 0.5}}}}\n")
    config = load_config(built, ["+algorithm=grpo"])
    assert config.rewards.overlong_buffer.penalty == 0.5
    assert label_of(config) == "grpo, changed: rewards.overlong_buffer.penalty=0.5"


def test_other_sections_that_differ_from_the_presets_defaults_are_reported(base):
    config = load_config(base, ["+algorithm=grpo", "dynamic_sampling.enabled=true"])
    assert label_of(config) == "grpo, changed: dynamic_sampling=true"
    assert label_of(load_config(base, ["+algorithm=olmo3", "dynamic_sampling.enabled=true"])) == "olmo3"


def test_a_value_on_the_command_line_survives_a_later_preset(base):
    values = ["algorithm.kl.coef=0.05", "batch.updates_per_step=2"]
    before = load_config(base, [*values, "+algorithm=gspo"])
    after = load_config(base, ["+algorithm=gspo", *values])
    assert before == after and (before.algorithm.kl.coef, before.batch.updates_per_step) == (0.05, 2)
    assert label_of(before) == "gspo, changed: algorithm.kl.coef=0.05, batch.updates_per_step=2"


def test_the_name_alone_is_reported_with_every_setting_that_differs(base):
    config = load_config(base, ["algorithm.preset=dapo"])
    differ = "algorithm.loss.clip_high=0.2, dynamic_sampling=false, rewards.overlong_buffer.penalty=0.0"
    assert presets.described(config) == f"algorithm: preset dapo; changed from it: {differ}"
    assert label_of(config) == f"dapo, changed: {differ}"
    more = load_config(base, ["+algorithm=dapo", "algorithm.top_entropy_share=0.2"])
    assert label_of(more) == "dapo, changed: algorithm.top_entropy_share=0.2"
    by_hand = ["algorithm.preset=dapo", "algorithm.loss.clip_high=0.28", "dynamic_sampling.enabled=true"]
    by_hand += ["rewards.overlong_buffer.penalty=1"]
    assert label_of(load_config(base, by_hand)) == "dapo"
    assert label_of(load_config(base)) is None
    other = load_config(base, ["+algorithm=grpo", "algorithm.loss={name: sapo, tau_positive: 2}"])
    assert label_of(other) == "grpo, changed: algorithm.loss=sapo, algorithm.loss.tau_positive=2.0"
    config = load_config(base, ["algorithm.preset=mine"])
    assert presets.described(config) == "algorithm: preset mine (not one of this project's)"


def label_of(config):
    return presets.label(flat(config.model_dump(mode="json")))
