"""Configuration errors name keys and allowed values, never the validator's notation."""

import pytest
from omegaconf import OmegaConf

from grpo_dist.config import Config
from grpo_dist.config.files import ConfigError, checked, set_from_text, validated

GOOD = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "x"}]}}


def message(**sections):
    with pytest.raises(ConfigError) as error:
        checked(GOOD | sections, "run.yaml", Config)
    return str(error.value)


@pytest.mark.parametrize(
    ("sections", "begin"),
    [
        ({"weight_sync": {"backend": "x"}},
         "`weight_sync.backend` = 'x': input should be 'auto', 'gloo', 'nccl', 'shared_memory' or 'ipc' ("),
        ({"policy": {"lora": {"target_modules": "x"}}},
         "`policy.lora.target_modules` = 'x': input should be 'all-linear', or a list ("),
        ({"policy": {"lora": {"target_modules": []}}},
         "`policy.lora.target_modules` = []: input should be 'all-linear', or a list of at least 1 ("),
        ({"sft": {"model": "a", "data": 3}}, "`sft.data` = 3: input should be a list ("),
        ({"data": {"train": []}}, "`data.train` = []: input should be a list of at least 1 ("),
        ({"cluster": {"grows_to": 3}},
         "`cluster.grows_to` = 3: input should be a mapping of keys to values ("),
        ({"rollout": {"engine": 3}}, "`rollout.engine` = 3: input should be a mapping of keys to values ("),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_message_about_its_key(sections, begin):
    text = message(**sections)
    assert text.startswith(f"run.yaml: {begin}")
    assert "; `" not in text and "literal[" not in text and "tuple" not in text and "instance" not in text


def test_an_invalid_entry_is_named_and_not_counted_as_missing():
    text = message(data={"train": [{"pth": "x"}]})
    assert "unknown key `data.train.0.pth`" in text and "at least 1" not in text


def test_several_bad_values_are_all_named():
    text = message(weight_sync={"backend": "x"}, policy={"zero_stage": 7}, seed=-1)
    assert all(f"`{key}` = " in text for key in ("weight_sync.backend", "policy.zero_stage", "seed"))


def test_all_contradictions_are_in_one_message():
    text = message(
        batch={"prompts_per_step": 4, "updates_per_step": 3},
        algorithm={"advantage": {"name": "pass_at_k", "k": 9}},
        model={"path": "sft"},
        sampling={"max_new_tokens": 8},
        bench={"lengths": {"kind": "fixed", "tokens": 9}},
    )
    for key in ("batch.prompts_per_step", "algorithm.advantage.k", "bench.lengths.tokens"):
        assert text.count(f"`{key}` ") == 1
    assert "`model.path` = sft, `sft` = null: needs an `sft` section" in text


TWO = {"rewards": {"functions": [{"function": "math"}, {"function": "judge"}]}}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        # An argument of a function outside its `kwargs`
        ("rewards.functions.1.url", "an argument of the function is `rewards.functions.1.kwargs.url`"),
        ("rewards.functions.1.model", "`rewards.functions.1.kwargs.model`"),
        ("rewards.functions.1.path", "`rewards.functions.1.kwargs.path`"),
        ("rewards.functions.1.model_path", "`rewards.functions.1.kwargs.model_path`"),
        ("rewards.functions.1.timeout_s", "`rewards.functions.1.kwargs.timeout_s`"),
        ("rewards.functions.0.tokens", "`rewards.functions.0.kwargs.tokens`"),
        ("tracking.sinks=[{function: 'a:f', url: 1}]", "`tracking.sinks.0.kwargs.url`"),
        ("data.order={name: 'a:f', level: 1}", "`data.order.kwargs.level`"),
        ("algorithm.loss={name: 'a:f', shift: 1}", "`algorithm.loss.kwargs.shift`"),
        # A misspelt key, and a key of another member
        ("rewards.functions.1.wieght", "did you mean `rewards.functions.1.weight`?"),
        ("rewards.functions.1.reduce", "no setting of functions outcome; it takes weight, gate,"),
        ("data.order.half_life", "no setting of order epochs; it takes drop_solved; pools has it"),
        # A form of an earlier version
        ("sampling.temperature={start: 1.0, entropy: 0.5}", "`sampling.temperature: {kind: adaptive, "),
        ("sampling.max_new_tokens={start: 8, largest: 9}",
         "run.yaml: `sampling.max_new_tokens` has start, largest of kind adaptive; write `sampling.max"),
        ("rewards.models=[{kind: process, format: qwen, name: m, path: p}]",
         "`rewards.models.0.format`: an earlier version had it; write the format as kind: `rewards."
         "models: [{kind: qwen, ...}]`"),
        # A key of another section
        ("rewards.url", "`rewards.functions: [{function: remote, kwargs: {url: ...}}]`"),
        ("rewards.models=[{name: m, path: p, url: 1}]", "`rewards.models.0.url`; a model behind an address"),
        ("data.train.0.url", "a file, directory or hub id is `data.train.0.path`"),
        # A name that many sections have
        ("rollout.path", "known here: num_workers, max_workers,"),
        ("tracking.url", "known here: console, tensorboard,"),
        ("evaluation.name", "known here: every, before,"),
        ("policy.lr", "did you mean `policy.optimizer.lr`?"),
    ],
)  # fmt: skip
def test_a_wrong_guess_is_answered_with_the_right_key_or_the_keys_of_its_section(override, answer):
    tree = OmegaConf.create(GOOD | TWO)
    set_from_text(tree, override if "=" in override else f"{override}=1")
    with pytest.raises(ConfigError) as refusal:
        validated(tree, "run.yaml", Config)
    assert answer in str(refusal.value)
