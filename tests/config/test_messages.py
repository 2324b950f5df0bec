"""Configuration errors name keys and allowed values of the file, never the validator's notation."""

import pytest

from grpo_dist.config import Config
from grpo_dist.config.files import ConfigError, checked

GOOD = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "x"}]}}


def message(**sections):
    with pytest.raises(ConfigError) as error:
        checked(GOOD | sections, "run.yaml", Config)
    return str(error.value)


@pytest.mark.parametrize(
    ("sections", "begin"),
    [
        (
            {"weight_sync": {"backend": "x"}},
            "`weight_sync.backend` = 'x': input should be 'auto', 'gloo', 'nccl', 'shared_memory' or 'ipc' (",
        ),
        (
            {"policy": {"lora": {"target_modules": "x"}}},
            "`policy.lora.target_modules` = 'x': input should be 'all-linear', or a list (",
        ),
        (
            {"policy": {"lora": {"target_modules": []}}},
            "`policy.lora.target_modules` = []: input should be 'all-linear', or a list of at least 1 (",
        ),
        ({"sft": {"model": "a", "data": 3}}, "`sft.data` = 3: input should be a list ("),
        ({"data": {"train": []}}, "`data.train` = []: input should be a list of at least 1 ("),
        (
            {"cluster": {"grows_to": 3}},
            "`cluster.grows_to` = 3: input should be a mapping of keys to values (",
        ),
        ({"rollout": {"engine": 3}}, "`rollout.engine` = 3: input should be a mapping of keys to values ("),
    ],
)
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
