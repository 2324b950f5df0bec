"""Checks of `algorithm`: settings that contradict each other or that a run would ignore."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.algorithms.estimators import ESTIMATORS, estimator_of
from grpo_dist.algorithms.loss_settings import LOSS_SPECIFIC, settings_of
from grpo_dist.config.sections import Sections

# Losses whose weight or penalty looks at how far the policy is from what sampled, and what that is.
_OFF_POLICY = {
    "dro": "squared log-ratio",
    "kimi15": "squared log-ratio",
    "topr": "weight of bad samples",
    "topr_token": "weight of bad samples",
    "reinforce_is": "weight",
    "vespo": "weight",
    "kl_cov": "penalty",
}


def algorithm_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for each contradiction between settings of the algorithm."""
    general = (_of_the_algorithm, _of_the_forward_pass, _of_the_updates, _of_the_group)
    of_rewards = (_of_single_rewards, _of_right_and_wrong)
    for check in (*general, *of_rewards, _of_the_correction, _of_the_covariance, _of_the_entropy):
        yield from check(config)


def _of_the_algorithm(config: Sections) -> Iterator[str]:
    a, loss = config.algorithm, config.algorithm.policy_loss
    inputs = estimator_of(a.advantage).inputs
    if "std" not in inputs and a.std not in (None, "none"):
        yield (
            f"`algorithm.std` = {a.std} contradicts `algorithm.advantage` = {a.advantage}, which does not "
            "divide by a standard deviation; remove `algorithm.std` or use advantage grpo"
        )
    own = settings_of(loss)
    for name in sorted(set(LOSS_SPECIFIC) - set(own)):
        if getattr(a, name) is not None:
            yield (
                f"`algorithm.{name}` = {getattr(a, name)} is not a setting of "
                f"`algorithm.policy_loss` = {loss}, which reads "
                f"{', '.join(own) or 'none'}; remove it"
            )
    if "k" in inputs and a.pass_k >= config.batch.samples_per_prompt:
        yield (
            f"`algorithm.pass_k` = {a.pass_k} must be below `batch.samples_per_prompt` = "
            f"{config.batch.samples_per_prompt}: every choice of k out of k samples is the same"
        )
    if a.old_logprobs == "rollout" and a.correction.kind not in (None, "none"):
        yield (
            "`algorithm.old_logprobs` = rollout computes ratios against the engine's log-probs, so "
            f"`algorithm.correction.kind` = {a.correction.kind} has nothing to correct; set it to none"
        )
    if (a.add_token_level_kl or a.kl.target is not None) and a.kl.coef == 0:
        yield (
            "`algorithm.kl.coef` = 0 disables the KL term that `add_token_level_kl` and `kl.target` "
            "configure; set it above 0"
        )
    if config.reference.refresh_every and not config.needs_reference:
        yield (
            "`reference.refresh_every` needs a reference, but with `algorithm.kl.coef` = 0 and no teacher "
            "that is the reference none is created; set `algorithm.kl.coef` above 0, or remove "
            "`reference.refresh_every`"
        )
    if a.kl.bias_correction and (a.kl.coef == 0 or a.add_token_level_kl):
        yield (
            "`algorithm.kl.bias_correction` = true reweighs the KL term of the loss, but there is none: "
            f"`algorithm.kl.coef` = {a.kl.coef:g}, `algorithm.add_token_level_kl` = "
            f"{str(a.add_token_level_kl).lower()}; remove it, or set the coefficient above 0"
        )
    elif a.kl.bias_correction and a.kl.estimator not in ("k1", "k3"):
        yield (
            f"`algorithm.kl.bias_correction` = true is for estimators whose value is unbiased, but "
            f"`algorithm.kl.estimator` = {a.kl.estimator}; use k3 or k1"
        )
    if a.add_token_level_kl and a.kl.estimator.endswith("+"):
        yield (
            f"`algorithm.kl.estimator` = {a.kl.estimator} differs from {a.kl.estimator[:-1]} only in its "
            "gradient, and a KL term in the reward has no gradient; remove the +"
        )


def _of_single_rewards(config: Sections) -> Iterator[str]:
    """Yield what keeps an estimator from taking each reward on its own."""
    a, rewards = config.algorithm, config.rewards
    if "parts" not in estimator_of(a.advantage).inputs:
        return
    gated = [r.gate for r in (*rewards.all_functions, *rewards.models) if r.gate is not None]
    if gated:
        yield (
            f"`algorithm.advantage` = {a.advantage} normalises every reward separately, which contradicts a "
            f"gate between two rewards; remove `gate` = {gated[0]}"
        )
    if not any(rewards.weights.values()):
        yield (
            f"`algorithm.advantage` = {a.advantage} normalises every reward whose `weight` is not 0, but all "
            f"of `rewards` have 0: {', '.join(rewards.names)}; give one a weight"
        )


def _of_the_forward_pass(config: Sections) -> Iterator[str]:
    a = config.algorithm
    if estimator_of(a.advantage).reads_policy and a.old_logprobs == "rollout":
        yield (
            f"`algorithm.advantage` = {a.advantage} takes the policy's own distribution of every token, a "
            "forward pass that `algorithm.old_logprobs` = rollout saves; set it to trainer, or use another "
            "advantage"
        )


def _of_the_updates(config: Sections) -> Iterator[str]:
    a, b = config.algorithm, config.batch
    part, updates = _OFF_POLICY.get(a.policy_loss), b.updates_per_step * b.epochs_per_batch
    if part and a.old_logprobs == "trainer" and updates == 1:
        more = "batch.updates_per_step" if a.policy_loss == "kl_cov" else "algorithm.old_logprobs"
        value = "2 or more" if a.policy_loss == "kl_cov" else "rollout, which compares with the engine"
        yield (
            f"`algorithm.policy_loss` = {a.policy_loss} has a {part} that depends on the ratio, but with "
            "`algorithm.old_logprobs` = trainer and one update per batch every ratio is 1: the loss would be "
            f"-A log pi alone; set `{more}` to {value}, or use policy_gradient"
        )
    if b.shuffle_epochs and 1 in (b.updates_per_step, b.epochs_per_batch):
        yield (
            "`batch.shuffle_epochs` = true deals groups to updates again in every epoch, which needs several "
            f"of both, but `batch.updates_per_step` = {b.updates_per_step} and `batch.epochs_per_batch` = "
            f"{b.epochs_per_batch}; raise them, or remove it"
        )
    if a.policy_loss != "policy_gradient":
        return
    if b.updates_per_step * b.epochs_per_batch > 1:
        yield (
            "`algorithm.policy_loss` = policy_gradient has no ratio, so nothing bounds a second update on "
            f"the same samples: `batch.updates_per_step` = {b.updates_per_step}, "
            f"`batch.epochs_per_batch` = {b.epochs_per_batch}; set both to 1, or use ppo_clip"
        )
    if a.old_logprobs == "rollout":
        yield (
            "`algorithm.old_logprobs` = rollout sets the denominator of ratios, but "
            "`algorithm.policy_loss` = policy_gradient has no ratio; remove it "
            "(`algorithm.correction` corrects the mismatch)"
        )


def _of_right_and_wrong(config: Sections) -> Iterator[str]:
    """Yield what keeps total rewards from being 0 or 1, where the estimator needs that. Before a run
    `rewards.registry.graded_problems` adds which built-in reward has other values.
    """
    advantage = config.algorithm.advantage
    if not estimator_of(advantage).only_right_and_wrong:
        return
    rewards, needs = config.rewards, f"`algorithm.advantage` = {advantage} needs a reward of 0 and 1, but"
    for source, own in rewards.variants.items():
        weighted = [r for r in (*own.functions, *own.models) if r.weight]
        at = f"rewards.by_source.{source}" if source else "rewards"
        if (own.functions or own.models) and (len(weighted) != 1 or weighted[0].weight != 1):
            yield f"{needs} `{at}` sums {len(weighted)} with their weights; keep one, with `weight` = 1"
    for name in (model.name for model in rewards.models if model.weight):
        yield (
            f"{needs} a score of the model {name} has other values; set its `weight` to 0, or use another "
            "advantage"
        )
    if (clip := config.algorithm.reward_clip) is not None and clip < 1:
        yield f"{needs} `algorithm.reward_clip` = {clip:g} gives others; remove it, or use another advantage"
    if config.algorithm.reward_norm != "none":
        yield (
            f"{needs} `algorithm.reward_norm` = {config.algorithm.reward_norm} gives others; remove it, or "
            "use another advantage"
        )


def _of_the_correction(config: Sections) -> Iterator[str]:
    a, correction = config.algorithm, config.algorithm.correction
    bypassed = a.old_logprobs == "rollout"
    if correction.normalize and (bypassed or correction.kind == "none"):
        why = "`algorithm.old_logprobs` = rollout has none" if bypassed else "its `kind` = none has none"
        yield (
            f"`algorithm.correction.normalize` = true divides importance weights by their mean, but {why}; "
            "remove it"
        )
    rules = [r.rule for r in correction.reject]
    if twice := [rule for rule in dict.fromkeys(rules) if rules.count(rule) > 1]:
        yield f"`algorithm.correction.reject` has the rule {twice[0]} twice; keep one, with both bounds"


def _of_the_covariance(config: Sections) -> Iterator[str]:
    a = config.algorithm
    if a.policy_loss != "clip_cov":
        return
    low, high = 1.0 if a.cov_low is None else a.cov_low, 5.0 if a.cov_high is None else a.cov_high
    if low >= high:
        yield (
            f"`algorithm.cov_low` = {low:g} must be below `algorithm.cov_high` = {high:g}, or no token is "
            "ever held; lower the first or raise the second"
        )


def _of_the_entropy(config: Sections) -> Iterator[str]:
    a, control = config.algorithm, config.algorithm.adaptive_entropy
    fields = type(control).model_fields
    unused = [name for name in ("delta", "low", "high") if getattr(control, name) != fields[name].default]
    if control.target is None:
        for name in unused:
            yield (
                f"`algorithm.adaptive_entropy.{name}` has no effect without "
                f"`algorithm.adaptive_entropy.target`; set that, or remove `{name}`"
            )
        return
    if not control.low <= a.entropy_coef <= control.high or control.low >= control.high:
        yield (
            f"`algorithm.entropy_coef` = {a.entropy_coef:g}, where the coefficient starts, must be between "
            f"`algorithm.adaptive_entropy.low` = {control.low:g} and a larger "
            f"`algorithm.adaptive_entropy.high` = {control.high:g}; change one of them"
        )


def _of_the_group(config: Sections) -> Iterator[str]:
    a, samples = config.algorithm, config.batch.samples_per_prompt
    estimator = estimator_of(a.advantage)
    if samples == 1 and estimator.needs_group:
        others = [name for name, other in ESTIMATORS.items() if not other.needs_group]
        yield (
            f"`algorithm.advantage` = {a.advantage} compares the samples of a prompt, but "
            "`batch.samples_per_prompt` = 1: every advantage would be 0; raise it to 2 or more, or use "
            f"{' or '.join(others)}"
        )
    alone = estimator.learns_from_one_sample or a.process_coef > 0
    if samples == 1 and not estimator.needs_group and not alone and config.dynamic_sampling.enabled:
        yield (
            "`dynamic_sampling.enabled` = true replaces groups of equal rewards, but with "
            "`batch.samples_per_prompt` = 1 every group is one; set one of the two"
        )
    if samples == 1 and a.zero_variance_filter and not alone:
        yield (
            "`algorithm.zero_variance_filter` = true leaves out groups of equal rewards, but with "
            "`batch.samples_per_prompt` = 1 every group is one; set one of the two"
        )
    if a.zero_variance_filter and config.distillation.teachers and config.distillation.kl_as == "advantage":
        yield (
            "`algorithm.zero_variance_filter` = true leaves out groups of equal rewards, but "
            "`distillation.kl_as` = advantage gives them advantages; remove one of the two, or set "
            "`distillation.kl_as` to loss"
        )
    if samples == 1 and a.reward_norm == "group":
        yield (
            "`algorithm.reward_norm` = group normalises over the samples of a prompt, but "
            "`batch.samples_per_prompt` = 1; use batch or running"
        )
    if a.gamma < 1 and not estimator.discounts:
        yield (
            f"`algorithm.gamma` = {a.gamma:g} discounts returns of tokens, but `algorithm.advantage` = "
            f"{a.advantage} gives all tokens of a sample one advantage; remove it, or use reinforce_pp"
        )
