"""The configuration of supervised training on the policy's ranks."""

import pytest

from grpo_dist.config import SFTConfig, SupervisedConfig
from grpo_dist.config.files import ConfigError, changed, dump_config, load_config
from grpo_dist.runs.identity import changes, fingerprint
from tests.support import fakes

SFT = {"model": "demo:tiny", "data": "demo:add3", "lr": 1e-3, "steps": 30, "seed": 5, "warmup_steps": 3}


def config(**more):
    return fakes.config(**{"model": {"path": "sft", "dtype": "bfloat16"}, "sft": SFT} | more)


def test_steps_seed_and_optimiser_come_from_sft_and_ranks_from_policy():
    policy = {"num_workers": 2, "zero_stage": 3, "lora": {}, "optimizer": {"lr": 1e-6, "eps": 1e-7}}
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 2, "epochs_per_batch": 3}
    algorithm = {"kl": {"coef": 0.1}, "entropy": {"coef": 0.1}}
    supervised = SupervisedConfig.from_config(config(policy=policy, batch=batch, algorithm=algorithm))
    assert (supervised.steps, supervised.total_updates, supervised.seed) == (30, 30, 5)
    optimizer = supervised.policy.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.eps) == (1e-3, 3, 1e-7)
    assert (optimizer.schedule, optimizer.min_lr_ratio, optimizer.weight_decay) == ("linear", 0.1, 0.01)
    assert supervised.policy.zero_stage == 3 and supervised.policy.lora is not None
    assert supervised.model.dtype == "bfloat16"
    assert not supervised.needs_reference and supervised.is_supervised
    assert supervised.sampling.temperature == 1.0


@pytest.mark.parametrize(
    "reinforcement",
    [
        {"algorithm": {"advantage": "reinforce_pp"}, "batch": {"samples_per_prompt": 1}},
        {"max_staleness": 2, "batch": {"order": "completion"}},
        {"max_staleness": 2, "batch": {"order": {"name": "completion", "oversample": 1.5}}},
        {"batch": {"updates_per_step": 2, "epochs_per_batch": 2, "shuffle_epochs": True}},
    ],
)
def test_rl_settings_contradict_nothing_in_the_supervised_stage(reinforcement):
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2} | reinforcement["batch"]
    whole = config(policy={"num_workers": 2}, **(reinforcement | {"batch": batch}))
    supervised = SupervisedConfig.from_config(whole)
    assert (supervised.steps, supervised.policy.num_workers, supervised.max_staleness) == (30, 2, 0)


def test_it_is_written_as_a_configuration_that_loads(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(SupervisedConfig.from_config(config())))
    assert load_config(path).steps == 30


def test_contradictions_are_refused_by_key():
    words = r"supervised training: .*`profile.steps` = \[6\], `steps` = 5: the run ends before"
    with pytest.raises(ConfigError, match=words):
        SupervisedConfig.from_config(config(profile={"steps": [6]}), steps=5)


@pytest.mark.parametrize(("demonstrations", "steps"), [(8, 4), (9, 5), (1, 1)])
def test_epochs_give_the_steps(demonstrations, steps):
    assert SFTConfig.model_validate(SFT | {"epochs": 2, "batch_size": 4}).steps_for(demonstrations) == steps
    assert SFTConfig.model_validate(SFT).steps_for(demonstrations) == 30


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"sft.validate_every": 7}, True),
        ({"policy.num_workers": 2, "policy.zero_stage": 3, "batch.micro_batch_tokens": 64}, True),
        ({"sampling.max_new_tokens": 9, "algorithm.loss": "cispo", "rewards.timeout_s": 3.0}, True),
        ({"sft.validation_share": 0.5}, False),
        ({"sft.batch_size": 5}, False),
        ({"policy.lora": {"rank": 4}}, False),
        ({"model.dtype": "float32"}, False),
    ],
)
def test_only_settings_that_change_the_numbers_make_it_another_training(change, same):
    before, after = (SupervisedConfig.from_config(c) for c in (config(), changed(config(), change)))
    assert (fingerprint(before) == fingerprint(after)) == same
    decisive = [c for c in changes(dump_config(before), after) if not c.is_layout and c.decides(after)]
    assert (decisive == []) == same
