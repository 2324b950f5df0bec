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
            ["rewards.functions=[{function: math}, {function: format, weight: 0.1}]"],
            "but `rewards` sums 2 with their weights; keep one, with `weight` = 1",
        ),
        (["rewards.functions=[{function: math, weight: 2}]"], "keep one, with `weight` = 1"),
        (
            ["rewards.functions=[]", "rewards.models=[{name: quality, path: /a/model}]"],
            "a score of the model quality has other values; set its `weight` to 0",
        ),
        (["algorithm.reward_norm=group"], "`algorithm.reward_norm` = group gives others; remove it"),
        (["algorithm.reward_clip=0.5"], "`algorithm.reward_clip` = 0.5 gives others; remove it"),
        (
            ["rewards.by_source={train: {functions: [{function: math, weight: 3}]}}"],
            "but `rewards.by_source.train` sums 1 with their weights",
        ),
    ],
)
def test_maxrl_refuses_rewards_other_than_right_and_wrong(base, overrides, words):
    assert words in refusal(base, "algorithm.advantage=maxrl", *overrides)


def test_maxrl_takes_a_binary_reward_next_to_others_that_are_only_reported(base):
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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["correction.normalize=true", "correction.kind=none"], "its `kind` = none has none; remove it"),
        (
            ["correction.normalize=true", "old_logprobs=rollout"],
            "`algorithm.old_logprobs` = rollout has none; remove it",
        ),
        (
            ["correction.reject=[{rule: token_k2, high: 1}, {rule: token_k2, high: 2}]"],
            "has the rule token_k2 twice",
        ),
        (["correction.reject=[{rule: token_k1}]"], "rule = token_k1 needs `low` or `high`"),
        (["correction.reject=[{rule: token_k1, low: 2, high: 1}]"], "low = 2 must be below high = 1"),
        (["correction.reject=[{rule: seq_mean_k3}]"], "rule = seq_mean_k3 needs `high`"),
        (["correction.reject=[{rule: token_tv, low: 0.1, high: 0.2}]"], "upper bound only; remove `low`"),
        (["correction.reject=[{rule: seq_max_k1, high: 2}]"], "`algorithm.correction.reject.0.rule`"),
        (["kl.bias_correction=true"], "`algorithm.kl.coef` = 0"),
        (["kl.bias_correction=true", "kl.coef=0.1", "kl.estimator=k3+"], "`algorithm.kl.estimator` = k3+"),
        (
            ["kl.bias_correction=true", "kl.coef=0.1", "kl.estimator=k1", "add_token_level_kl=true"],
            "`algorithm.add_token_level_kl` = true; remove it",
        ),
        (["policy_loss=topr"], "topr has a weight of bad samples that depends on the ratio"),
        (["policy_loss=vespo"], "set `algorithm.old_logprobs` to rollout"),
        (["policy_loss=dro"], "dro has a squared log-ratio that depends on the ratio"),
        (["policy_loss=kl_cov"], "set `batch.updates_per_step` to 2 or more"),
        (["policy_loss=clip_cov", "cov_low=7"], "`algorithm.cov_low` = 7 must be below"),
        (["advantage=otb", "old_logprobs=rollout"], "`algorithm.old_logprobs` = rollout saves; set it to"),
        (["cov_share=0.1"], "is not a setting of `algorithm.policy_loss` = ppo_clip"),
        (["adaptive_entropy.delta=0.1"], "no effect without `algorithm.adaptive_entropy.target`"),
        (["adaptive_entropy={target: 1, high: 0.1}", "entropy_coef=0.5"], "must be between"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(base, overrides, words):
    assert words in refusal(base, *(f"algorithm.{setting}" for setting in overrides))


def test_rewards_that_are_normalised_one_by_one_need_a_weight(base):
    """Without any there is nothing to add up."""
    only_logged = "rewards.functions=[{function: math, weight: 0}, {function: repetition, weight: 0}]"
    assert "all of `rewards` have 0: math, repetition" in refusal(
        base, "algorithm.advantage=gdpo", only_logged
    )
    assert load_config(base, [only_logged, "algorithm.advantage=grpo"])


@pytest.mark.parametrize("old", ["trainer", "rollout"])
def test_a_veto_and_rules_need_no_weights(base, old):
    """They compare with the engine, whichever log-probs the ratios are taken to."""
    rules = "algorithm.correction.reject=[{rule: seq_mean_k3, high: 0.1}]"
    config = load_config(
        base,
        [f"algorithm.old_logprobs={old}", "algorithm.correction={kind: none, veto: 1e-4}", rules],
    )
    assert (config.algorithm.correction.veto, len(config.algorithm.correction.reject)) == (1e-4, 1)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "remax"])
def test_one_sample_of_a_prompt_is_enough_without_a_group(base, advantage):
    config = load_config(base, [f"algorithm.advantage={advantage}", "batch.samples_per_prompt=1"])
    assert config.batch.samples_per_prompt == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["batch.samples_per_prompt=1"],
            "compares the samples of a prompt, but `batch.samples_per_prompt` = 1",
        ),
        (
            ["batch.samples_per_prompt=1", "algorithm.advantage=reinforce_pp", "algorithm.reward_norm=group"],
            "`algorithm.reward_norm` = group normalises over the samples of a prompt",
        ),
        (["algorithm.gamma=0.9"], "`algorithm.gamma` = 0.9 discounts returns of tokens"),
    ],
)
def test_settings_of_a_group_that_are_without_meaning_are_refused(base, overrides, words):
    assert words in refusal(base, *overrides)


def test_groups_of_one_are_not_refilled(base):
    alone = ["algorithm.advantage=reinforce_pp", "batch.samples_per_prompt=1", "algorithm.reward_norm=none"]
    words = "replaces groups of equal rewards, but with `batch.samples_per_prompt` = 1 every group is one"
    assert words in refusal(base, *alone, "dynamic_sampling.enabled=true")
    own = ["code_paths=[.]", "algorithm.advantage=mine:median", *alone[1:]]
    assert words in refusal(base, *own, "dynamic_sampling.enabled=true")
    assert load_config(base, own).batch.samples_per_prompt == 1


def test_a_discount_of_outcomes_does_not_go_with_rewards_of_steps(base):
    settings = ["algorithm.advantage=reinforce_pp", "algorithm.gamma=0.5", "algorithm.process_coef=1"]
    assert "`algorithm.gamma` = 0.5, `algorithm.process_coef` = 1: the first discounts the reward" in refusal(
        base, *settings
    )


@pytest.mark.parametrize("loss", ["dro", "kimi15", "topr", "topr_token", "reinforce_is", "vespo"])
@pytest.mark.parametrize("other", ["algorithm.old_logprobs=rollout", "batch.epochs_per_batch=2"])
def test_a_loss_that_looks_at_ratios_is_taken_where_they_differ_from_1(base, loss, other):
    config = load_config(base, [f"algorithm.policy_loss={loss}", "batch.updates_per_step=2", other])
    assert config.algorithm.policy_loss == loss


def test_a_zero_variance_filter_that_leaves_nothing_is_refused(base):
    words = refusal(
        base, "algorithm.advantage=reinforce_pp", "batch.samples_per_prompt=1",
        "algorithm.zero_variance_filter=true",
    )  # fmt: skip
    assert "with `batch.samples_per_prompt` = 1 every group is one" in words
