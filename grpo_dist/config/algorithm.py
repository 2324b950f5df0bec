"""From rewards to the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from grpo_dist.algorithms.estimators import ESTIMATORS, estimator_of
from grpo_dist.config.base import Fraction, NonNegative, Section, choices
from grpo_dist.plugins.user_code import (
    ADVANTAGE,
    AGGREGATION,
    KL,
    LOSS,
    OwnAdvantage,
    OwnAggregation,
    OwnKL,
    OwnLoss,
    OwnPiece,
)

if TYPE_CHECKING:
    BuiltinAdvantage = str
else:  # the names of the registry, which a type checker cannot read
    BuiltinAdvantage = Literal[tuple(ESTIMATORS)]


class KLConfig(Section):
    """The penalty on divergence from the reference."""

    coef: NonNegative = Field(0.0, description="weight of the KL term; 0: no reference worker is created")
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "abs"] | OwnKL = Field(
        "k3",
        description="k1+, k3+: value of k1 or k3 with the gradient of k2; abs: the absolute log-ratio; or "
        "your own",
    )
    target: PositiveFloat | None = Field(
        None, description="KL in nats per token that `coef` is adapted to reach; null: `coef` is constant"
    )
    gain: Fraction = Field(0.1, description="largest relative change of `coef` per step, as a share of 0.2")
    bias_correction: bool = Field(
        False,
        description="multiply a token's KL by its ratio to the engine that sampled it: unbiased also for "
        "samples of older weights (DeepSeek-V3.2); for k1 and k3 in the loss",
    )


Rule = Literal[
    "token_k1", "token_k2", "token_k3", "token_binary_kl", "token_tv",
    "segment_mean_k1", "segment_mean_k2", "segment_mean_k3", "segment_mean_binary_kl", "segment_mean_tv",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_mean_binary_kl", "seq_mean_tv",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_sum_binary_kl", "seq_sum_tv",
    "seq_max_k2", "seq_max_k3", "seq_max_binary_kl", "seq_max_tv",
]  # fmt: skip


class RejectConfig(Section):
    """A rule that drops tokens, segments or sequences that are too far from the trainer."""

    rule: Rule = Field(
        description="what is bounded, over a token, a segment or a sequence: k1, the ratio trainer / engine "
        "(over a sequence its product or geometric mean); k2, k3, binary_kl in nats; tv, a difference of "
        "probabilities"
    )
    low: PositiveFloat | None = Field(None, description="lower bound of the ratio; k1 only")
    high: PositiveFloat | None = Field(None, description="upper bound; null: none, with k1 only")

    def _contradictions(self) -> Iterator[str]:
        if self.rule.endswith("_k1"):
            if self.low is None and self.high is None:
                yield f"rule = {self.rule} needs `low` or `high`, e.g. low: 0.5, high: 2.0"
            if self.low is not None and self.high is not None and self.low >= self.high:
                yield f"low = {self.low:g} must be below high = {self.high:g}"
            return
        if self.high is None:
            yield f"rule = {self.rule} needs `high`, e.g. high: 0.1"
        if self.low is not None:
            yield f"low = {self.low:g}: rule = {self.rule} has an upper bound only; remove `low`"


class CorrectionConfig(Section):
    """Importance weights that correct for engine-trainer mismatch and for samples of older weights."""

    kind: Literal["none", "tis", "mis", "icepop"] | None = Field(
        None, description="null: tis, or none if ratios are already computed against the engine's log-probs"
    )
    level: Literal["token", "sequence", "geometric", "segment"] = Field(
        "token",
        description="the ratio of each token, the product over its sequence, their geometric mean, or that "
        "over neighbouring sampled tokens (an action of an episode)",
    )
    low: NonNegative = Field(0.0, description="lower bound of the weight; must be below `high`")
    high: PositiveFloat = Field(2.0, description="upper bound of the weight")
    veto: NonNegative = Field(
        0.0, description="drop sequences with a token whose ratio is below this, e.g. 1e-4; 0: never"
    )
    normalize: bool = Field(
        False, description="divide the weights by their mean over the update; costs a forward pass"
    )
    reject: tuple[RejectConfig, ...] = Field((), description="rules that a token must pass, all of them")

    def _contradictions(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low = {self.low} must be below high = {self.high}"


class AdaptiveEntropyConfig(Section):
    """Steers `algorithm.entropy_coef` from update to update (Skywork-OR1)."""

    target: PositiveFloat | None = Field(
        None,
        description="entropy to hold, nats per token: below it the coefficient rises by `delta` with each "
        "update, above it falls and is not applied; null: `entropy_coef` is constant",
    )
    delta: PositiveFloat = Field(0.005, description="change of the coefficient with each update")
    low: NonNegative = Field(0.0, description="lower bound of the coefficient")
    high: PositiveFloat = Field(1.0, description="upper bound of the coefficient")


RewardNorm = Annotated[
    Literal["none", "group", "batch", "running"],
    BeforeValidator(lambda value: "none" if value is None else value),
]


class AlgorithmConfig(Section):
    """From rewards to the loss: `grpo_dist/algorithms/README.md` has the formulas."""

    preset: str | None = Field(
        None,
        description="name of the preset that these settings come from; set by `+algorithm=NAME` and "
        "`defaults: [algorithms/NAME.yaml]`. A name alone sets nothing: run and report add what differs",
    )
    advantage: BuiltinAdvantage | OwnAdvantage = Field(
        "grpo", description="estimator that turns the rewards of a group into advantages; or your own"
    )
    std: Literal["group", "batch", "batch_raw", "none"] | None = Field(
        None,
        description="standard deviation that divides centred rewards. group: of the group; batch: of all "
        "centred rewards of the batch; batch_raw: of all uncentred rewards of the batch (TRL, ROLL); null: "
        "group, if the estimator divides",
    )
    advantage_eps: PositiveFloat = Field(1e-6, description="added to the standard deviation that divides")
    pass_k: PositiveInt = Field(4, description="k of advantage pass_at_k; below batch.samples_per_prompt")
    outcome_coef: NonNegative = Field(
        1.0, description="with process_coef: weight of the advantages of `advantage`, those of outcomes"
    )
    process_coef: NonNegative = Field(
        0.0,
        description="weight of the advantages of step rewards, which are normalised by themselves and added "
        "to those of `advantage` (PRIME); 0: step rewards only enter the total reward",
    )
    turn_discount: Fraction = Field(1.0, description="factor of later turns in the return of advantage turn")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="discount of the reward, and of the KL in it, for each later token; for reinforce_pp"
    )
    reward_clip: PositiveFloat | None = Field(None, description="clip rewards to +- this; null: off")
    reward_norm: RewardNorm = Field(
        "none",
        description="normalise rewards before the estimator: over their group, the batch, or all steps so "
        "far; null means none",
    )
    reward_shift: bool | None = Field(
        None,
        description="with reward_norm, as in ROLL: true: only subtract the mean; equal to `reward_scale`: "
        "subtract and divide; null: the opposite of `reward_scale`, or both where that is null",
    )
    reward_scale: bool | None = Field(
        None,
        description="with reward_norm, as in ROLL: true: only divide by the deviation; equal to "
        "`reward_shift`: subtract and divide; null: the opposite of `reward_shift`, or both where that is "
        "null",
    )
    whiten_advantages: bool | None = Field(
        None,
        description="scale to mean 0, deviation 1 over all tokens; null: only with reinforce_pp and "
        "reinforce_pp_baseline",
    )
    advantage_clip: PositiveFloat | None = Field(None, description="clip advantages to +- this; null: off")
    length_weights: bool = Field(
        False,
        description="multiply advantages by 1.5 for the shortest sample of the step down to 0.5 for the "
        "longest, divided by their mean (ROLL)",
    )
    add_token_level_kl: bool = Field(False, description="add the KL term to the rewards instead of the loss")
    policy_loss: Literal[
        "policy_gradient", "ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "gspo", "gspo_segment", "gmpo",
        "dro", "kimi15", "topr", "topr_token", "reinforce_is", "vespo", "clip_cov", "kl_cov",
    ] | OwnLoss = Field(
        "ppo_clip", description="loss of a token, and how it bounds the policy's change; or your own"
    )  # fmt: skip
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="lower clip bound; null: the default of the policy loss, e.g. 0.2 for ppo_clip"
    )
    clip_high: NonNegative | None = Field(
        None,
        description="upper clip bound; null: default of the policy loss; above clip_low: clip-higher (DAPO)",
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="dual-clip bound of ppo_clip; null: off"
    )
    tau_positive: PositiveFloat | None = Field(
        None, description="sapo: temperature for positive advantages; null: 1.0"
    )
    tau_negative: PositiveFloat | None = Field(
        None, description="sapo: temperature for negative advantages; null: 1.05"
    )
    ratio_cap: PositiveFloat | None = Field(
        None,
        description="dppo_tv, dppo_kl: upper bound of the ratio; null: 20; reinforce_is: of the sequence's "
        "ratio; null: 2",
    )
    unified_mask: bool | None = Field(
        None, description="cispo: drop the tokens that ppo_clip drops, too; null: false"
    )
    beta: PositiveFloat | None = Field(
        None, description="dro: weight of the squared log-ratio of a token; null: 0.1"
    )
    tau: PositiveFloat | None = Field(
        None, description="kimi15: weight of the squared log-ratio of a sequence; null: 0.1"
    )
    k_positive: NonNegative | None = Field(
        None, description="vespo: power of the sequence's ratio for advantages of 0 and above; null: 2"
    )
    lambda_positive: PositiveFloat | None = Field(
        None, description="vespo: decay in the sequence's ratio for advantages of 0 and above; null: 3"
    )
    k_negative: NonNegative | None = Field(
        None, description="vespo: power of the sequence's ratio for negative advantages; null: 3"
    )
    lambda_negative: PositiveFloat | None = Field(
        None, description="vespo: decay in the sequence's ratio for negative advantages; null: 2"
    )
    cov_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="clip_cov, kl_cov: share of an update's tokens that are held; null: 0.0002"
    )
    cov_low: float | None = Field(
        None, description="clip_cov: lower bound of the covariance of a token that is held; null: 1"
    )
    cov_high: float | None = Field(None, description="clip_cov: its upper bound; null: 5")
    cov_kl_coef: PositiveFloat | None = Field(
        None, description="kl_cov: weight of the penalty on the tokens that are held; null: 1"
    )
    off_policy_mask_threshold: PositiveFloat | None = Field(
        None,
        description="drop tokens with negative advantage of sequences whose mean log-prob fell by more than "
        "this, nats per token (DeepSeek-V3.2); null: off",
    )
    old_logprobs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="denominator of the ratios; rollout: the engine's log-probs, without a forward pass of "
        "the trainer",
    )
    entropy_coef: NonNegative = Field(0.0, description="weight of the entropy bonus")
    top_entropy_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="train only on this share of an update's tokens, those with the highest entropy"
    )
    mask_truncated: bool = Field(False, description="do not train on completions truncated at max_new_tokens")
    zero_variance_filter: bool = Field(
        False,
        description="leave groups without a signal, e.g. of equal rewards, out of the loss and of its "
        "denominators (ScaleRL); `dynamic_sampling` replaces them instead",
    )
    skip_idle_rows: bool = Field(True, description="skip samples that add nothing to the gradient")
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
        "prompt-mean-token-mean",
    ] | OwnAggregation = Field(
        "token-mean",
        description="how token losses are reduced: over all tokens, or per sequence first; token-sum: not "
        "divided at all; prompt-mean-token-mean: per prompt first, over all tokens of its samples; "
        "seq-mean-token-sum-norm divides each sum by the sampling.max_new_tokens of its step; or your own",
    )  # fmt: skip
    kwargs: dict[str, dict[str, Any]] = Field(
        {},
        description="arguments of your own estimator, loss, KL or aggregation, e.g. {policy_loss: {beta: 2}}",
    )
    adaptive_entropy: AdaptiveEntropyConfig = AdaptiveEntropyConfig()
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    def _contradictions(self) -> Iterator[str]:
        own = {piece.key.split(".")[1] for piece in self.own_pieces}
        for name in self.kwargs:
            if name not in own:
                yield (
                    f"kwargs.{name}: expected arguments of a piece of your own, named by "
                    f"{', '.join(sorted(own)) or 'none here'}; built-in ones have their own keys"
                )

    @property
    def own_pieces(self) -> tuple[OwnPiece, ...]:
        """The pieces that are not built in."""
        named = (
            (ADVANTAGE, self.advantage, choices(AlgorithmConfig, "advantage"), "advantage"),
            (LOSS, self.policy_loss, choices(AlgorithmConfig, "policy_loss"), "policy_loss"),
            (KL, self.kl.estimator, choices(KLConfig, "estimator"), "kl"),
            (AGGREGATION, self.aggregation, choices(AlgorithmConfig, "aggregation"), "aggregation"),
        )
        return tuple(
            OwnPiece(kind, name, kind.key, self.kwargs.get(key, {}))
            for kind, name, builtin, key in named
            if name not in builtin
        )

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened. REINFORCE++ has no baseline but the mean of all tokens."""
        by_default = estimator_of(self.advantage).whitens
        return by_default if self.whiten_advantages is None else self.whiten_advantages

    @property
    def shifts_rewards(self) -> bool:
        """Whether `reward_norm` subtracts the mean."""
        return _takes_part(self.reward_shift, self.reward_scale)

    @property
    def scales_rewards(self) -> bool:
        """Whether `reward_norm` divides by the deviation."""
        return _takes_part(self.reward_scale, self.reward_shift)


def _takes_part(own: bool | None, other: bool | None) -> bool:
    """Return whether one of the two steps applies: in ROLL a key means "only this step"; both false: both."""
    if own is None:
        return not other
    return own or other is False
