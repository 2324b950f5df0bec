"""Settings of the algorithm that contradict each other are refused with what to do."""

import pytest

from grpo_dist.config.files import ConfigError, load_config
from tests.support.good_inputs import CONFIG


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base.yaml").write_text(CONFIG)
    return tmp_path / "base.yaml"


def refusal(base, *overrides):
    with pytest.raises(ConfigError) as refused:
        load_config(base, overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rewards.functions=[{function: cosine_length}]"],
            "`algorithm.advantage` = maxrl needs a reward of 0 and 1, but `cosine_length` has other values",
        ),
        (
            ["rewards.functions=[{function: math}, {function: format, weight: 0.1}]"],
            "but `rewards` sums 2 with their weights; keep one, with `weight` = 1",
        ),
        (["rewards.functions=[{function: math, weight: 2}]"], "keep one, with `weight` = 1"),
        (
            ["rewards.functions=[]", "rewards.models=[{name: quality, path: /a/model}]"],
            "a score of the model quality has other values; set its `weight` to 0",
        ),
        (["algorithm.reward_norm=group"], "`algorithm.reward_norm` = group gives others; remove it"),
    ],
)
def test_maxrl_refuses_rewards_other_than_right_and_wrong(base, overrides, words):
    assert words in refusal(base, "algorithm.advantage=maxrl", *overrides)


def test_maxrl_takes_a_binary_reward_beside_others_that_are_only_reported(base):
    functions = (
        "rewards.functions=[{function: math}, {function: overlong, kwargs: {buffer_tokens: 2}, weight: 0}]"
    )
    assert load_config(base, ["algorithm.advantage=maxrl", functions]).algorithm.advantage == "maxrl"


@pytest.mark.parametrize(
    ("loss", "setting"),
    [("ppo_clip", "beta=1"), ("dro", "tau=1"), ("topr", "clip_low=0.1"), ("gspo", "unified_mask=true")],
)
def test_a_loss_refuses_the_settings_of_another(base, loss, setting):
    words = f"is not a setting of `algorithm.policy_loss` = {loss}"
    assert words in refusal(base, f"algorithm.policy_loss={loss}", f"algorithm.{setting}")
