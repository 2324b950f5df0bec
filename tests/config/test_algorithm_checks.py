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
    assert load_config(base, ["algorithm.advantage=maxrl", functions]).algorithm.advantage.name == "maxrl"


@pytest.mark.parametrize(
    ("loss", "setting", "others"),
    [
        ("ppo_clip", "beta=1", "dro has it"),
        ("dro", "tau=1", "kimi15 has it"),
        ("topr", "clip_low=0.1", "it takes none; ppo_clip, cispo"),
        ("gspo", "unified_mask=true", "it takes clip_low, clip_high; cispo has it"),
        ("ppo_clip", "cov_share=0.1", "clip_cov, kl_cov have it"),
    ],
)
def test_a_loss_refuses_the_settings_of_another(base, loss, setting, others):
    message = refusal(base, f"algorithm.loss={loss}", f"algorithm.loss.{setting}")
    key = setting.partition("=")[0]
    assert f"`algorithm.loss.{key}` is no setting of loss {loss}; " in message and others in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["correction={kind: none, normalize: true}"], "no setting of correction none"),
        (["correction={kind: bypass, high: 3}"], "no setting of correction bypass; it takes veto, reject"),
        (["correction=tas"], "`algorithm.correction` = 'tas': input should be 'tis', 'mis', "),
        (
            ["correction.reject=[{rule: token_k2, high: 1}, {rule: token_k2, high: 2}]"],
            "has the rule token_k2 twice",
        ),
        (["correction.reject=[{rule: token_k1}]"], "rule = token_k1 needs `low` or `high`"),
        (["correction.reject=[{rule: token_k1, low: 2, high: 1}]"], "low = 2 must be below high = 1"),
        (["correction.reject=[{rule: seq_mean_k3}]"], "`algorithm.correction.reject.0.high` is missing"),
        (["correction.reject=[{rule: token_tv, low: 0.1, high: 0.2}]"], "token_k1, segment_mean_k1"),
        (["correction.reject=[{rule: seq_max_k1, high: 2}]"], "`algorithm.correction.reject.0.rule` = 'seq_"),
        (["kl.bias_correction=true"], "`coef` = 0 disables the KL term that `bias_correction` configures"),
        (["kl={bias_correction: true, coef: 0.1, estimator: k3+}"], "`estimator` = k3+; use k3 or k1"),
        (
            ["kl={bias_correction: true, coef: 0.1, estimator: k1, in_reward: true}"],
            "`in_reward` = true makes it part of the rewards",
        ),
        (["kl.gain=0.5"], "`gain` has no effect without `target`"),
        (["loss=topr"], "every ratio to the trainer's own log-probs is 1 in a first update"),
        (["loss=vespo"], "set `algorithm.correction` to bypass"),
        (["loss=kl_cov"], "set `batch.updates_per_step` to 2 or more"),
        (["loss={name: clip_cov, cov_low: 7}"], "cov_low = 7 must be below cov_high = 5"),
        (["advantage=otb", "correction=bypass"], "a forward pass that bypass saves"),
        (["advantage={name: rloo, std: group}"], "no setting of advantage rloo; it takes whiten; grpo, gdpo"),
        (["advantage.gamma=0.9"], "no setting of advantage grpo"),
        (["reward_norm={name: batch, shift: false, scale: false}"], "use reward_norm: none"),
        (["reward_norm.shift=false"], "no setting of reward_norm none; it takes none; group, batch"),
        (["entropy.delta=0.1"], "no setting of entropy constant; it takes coef; adaptive has it"),
        (["entropy={kind: adaptive, target: 1, high: 0.1, coef: 0.5}"], "must be between"),
        (["entropy.kind=adaptive"], "`algorithm.entropy.target` is missing: entropy to hold"),
        (["process.outcome_coef=0"], "`algorithm.process.outcome_coef` = 0: input should be greater than 0"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_together_are_refused(base, overrides, words):
    assert words in refusal(base, *(f"algorithm.{setting}" for setting in overrides))


def test_rewards_that_are_normalised_one_by_one_need_a_weight(base):
    """Without any there is nothing to add up."""
    only_logged = "rewards.functions=[{function: math, weight: 0}, {function: repetition, weight: 0}]"
    assert "all of `rewards` have 0: math, repetition" in refusal(
        base, "algorithm.advantage=gdpo", only_logged
    )
    assert load_config(base, [only_logged, "algorithm.advantage=grpo"])


@pytest.mark.parametrize("kind", ["none", "bypass"])
def test_a_veto_and_rules_need_no_weights(base, kind):
    """They compare with the engine, whichever log-probs the ratios are taken to."""
    rules = "algorithm.correction.reject=[{rule: seq_mean_k3, high: 0.1}]"
    config = load_config(
        base,
        [f"algorithm.correction={{kind: {kind}, veto: 1e-4}}", rules],
    )
    assert (config.algorithm.correction.veto, len(config.algorithm.correction.reject)) == (1e-4, 1)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "flash_reinforce", "remax"])
def test_one_sample_of_a_prompt_is_enough_without_a_group(base, advantage):
    config = load_config(base, [f"algorithm.advantage={advantage}", "batch.samples_per_prompt=1"])
    assert config.batch.samples_per_prompt == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["batch.samples_per_prompt=1"],
            "`batch.samples_per_prompt` = 1: it compares the samples of a prompt",
        ),
        (
            ["batch.samples_per_prompt=1", "algorithm.advantage=reinforce_pp", "algorithm.reward_norm=group"],
            "`algorithm.reward_norm` = group, `batch.samples_per_prompt` = 1: rewards are normalised over",
        ),
    ],
)
def test_settings_of_a_group_that_are_without_meaning_are_refused(base, overrides, words):
    assert words in refusal(base, *overrides)


def test_groups_of_one_are_not_refilled(base):
    alone = ["algorithm.advantage=reinforce_pp", "batch.samples_per_prompt=1", "algorithm.reward_norm=none"]
    words = "groups of equal rewards are replaced, and every group of one is such a group"
    assert words in refusal(base, *alone, "dynamic_sampling.enabled=true")
    overrides = ["code_paths=[.]", "algorithm.advantage=mine:median", *alone[1:]]
    assert words in refusal(base, *overrides, "dynamic_sampling.enabled=true")
    assert load_config(base, overrides).batch.samples_per_prompt == 1


@pytest.mark.parametrize("name", ["gae", "ppo"])
def test_an_estimator_with_a_critic_is_refused_with_what_to_use(base, name):
    words = f"`algorithm.advantage` = '{name}': it needs a critic, and there is none; use grpo"
    assert words in refusal(base, f"algorithm.advantage={name}")


OF_SOURCE = "data.train=[{path: a, algorithm: %s}, {path: b}]"


@pytest.mark.parametrize(
    ("own", "others", "words"),
    [
        ("{aggregation: token-sum}", [],
         "`aggregation` is of all samples of an update, whatever their source; set "
         "`algorithm.aggregation` (a source may have advantage, loss, kl of its own)"),
        ("{loss: clip_cov}", [], "`loss` = clip_cov chooses tokens over a whole update, of all sources"),
        ("{loss: gspo}", ["algorithm.loss=kl_cov", "batch.updates_per_step=2"],
         "`loss` = gspo cannot stand beside `algorithm.loss` = kl_cov"),
        ("{kl: {coef: 0.1}}", [],
         "`kl.coef` = 0.1 needs a reference, and `algorithm.kl.coef` = 0 makes none"),
        ("{kl: {estimator: k1}}", ["algorithm.kl.coef=1"],
         "unknown key `data.train.0.algorithm.kl.estimator`"),
        ("{advantage: grpo}", ["batch.samples_per_prompt=1", "algorithm.advantage=reinforce_pp"],
         "`data.train.0.algorithm`: `algorithm.advantage` = grpo, `batch.samples_per_prompt` = 1: it"),
        ("{loss: policy_gradient}", ["batch.epochs_per_batch=2"],
         "`data.train.0.algorithm`: `algorithm.loss` = policy_gradient"),
        ("{advantage: turn}", [],
         "`data.train.0.algorithm`: `algorithm.advantage` = turn needs the rewards of"),
        ("{advantage: maxrl}", ["rewards.functions=[{function: math, weight: 2}]"],
         "`data.train.0.algorithm`: `algorithm.advantage` = maxrl needs a reward of 0 and 1"),
        ("{advantage: sppo}", [], "data.train.0.algorithm.advantage"),
    ],
)  # fmt: skip
def test_what_a_source_cannot_have_of_its_own_is_refused(base, own, others, words):
    assert words in refusal(base, OF_SOURCE % own, *others)


def test_sources_with_the_same_name_and_sets_of_evaluation_have_no_algorithm_of_their_own(base):
    twice = "data.train=[{path: a, name: x, algorithm: {loss: gspo}}, {path: b, name: x}]"
    assert "several sources have the name x" in refusal(base, twice)
    words = "`data.eval.0.algorithm` has no effect: it is of training sources"
    assert words in refusal(base, "data.eval=[{path: e, algorithm: {loss: gspo}}]")


def test_a_source_is_checked_by_its_own_estimator_alone(base):
    """`turn` of the run is for b, whose environment it needs; a has none."""
    sources = "data.train=[{path: a, algorithm: {advantage: rloo}}, {path: b, environment: calculator}]"
    config = load_config(base, [sources, "algorithm.advantage=turn"])
    assert [estimator.name for estimator in config.estimators] == ["turn", "rloo"]
    one, three = "{functions: [{function: math}]}", "{functions: [{function: math, weight: 3}]}"
    rewards = f"rewards.by_source={{a: {three}, b: {one}}}"
    with_maxrl = "data.train=[{path: a}, {path: b, algorithm: {advantage: maxrl}}]"
    assert load_config(base, [with_maxrl, rewards]).source_algorithms["b"].advantage.name == "maxrl"
    assert load_config(base, [OF_SOURCE % "{advantage: grpo}", rewards, "algorithm.advantage=maxrl"])
    parts = OF_SOURCE % "{loss: {clip_high: 0.3}, kl: {coef: 0}}"
    config = load_config(base, [parts, "algorithm.kl.coef=0.1"])
    assert load_config(base, [parts, "algorithm.kl.coef=0.1", "reference.refresh_every=5"])
    own = config.source_algorithms["a"]
    assert (own.loss.clip_high, own.kl.coef, own.advantage.name) == (0.3, 0.0, "grpo")


def test_a_discount_of_outcomes_does_not_go_with_rewards_of_steps(base):
    settings = ["algorithm.advantage={name: reinforce_pp, gamma: 0.5}", "algorithm.process.coef=1"]
    words = "`algorithm.advantage.gamma` = 0.5: it discounts the reward at the end of a sample"
    assert words in refusal(base, *settings)


@pytest.mark.parametrize("loss", ["dro", "kimi15", "topr", "topr_token", "reinforce_is", "vespo"])
@pytest.mark.parametrize("other", ["algorithm.correction=bypass", "batch.epochs_per_batch=2"])
def test_a_loss_that_looks_at_ratios_is_taken_where_they_differ_from_1(base, loss, other):
    config = load_config(base, [f"algorithm.loss={loss}", "batch.updates_per_step=2", other])
    assert config.algorithm.loss.name == loss


def test_a_zero_variance_filter_that_leaves_nothing_is_refused(base):
    words = refusal(
        base, "algorithm.advantage=reinforce_pp", "batch.samples_per_prompt=1",
        "algorithm.zero_variance_filter=true",
    )  # fmt: skip
    assert "every group of one is such a group" in words
