"""Rewards, advantages and loss. A section that a name chooses is a tagged union with settings per name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Choice, Fraction, NonNegative, Section, Tagged, repeated
from grpo_dist.plugins.user_code import (
    ADVANTAGE,
    AGGREGATION,
    KL,
    LOSS,
    AdvantageName,
    AggregationName,
    KLName,
    LossName,
    UserComponent,
)

Share = Annotated[float, Field(gt=0, le=1)]
Kwargs = Annotated[dict[str, Any], Field(description="arguments of the function")]
Deviation = Annotated[
    Literal["group", "batch", "batch_raw", "none"],
    Field(
        description="standard deviation that divides centred rewards: of the group, of the batch's centred "
        "rewards, or of its uncentred ones (batch_raw: TRL, ROLL)"
    ),
]
Epsilon = Annotated[PositiveFloat, Field(description="added to the standard deviation that divides")]


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """Properties of an estimator that checks and loop use.

    Attributes:
        needs_group: compares the samples of a prompt, so a single sample has advantage 0.
        learns_from_equal_rewards: zero-variance groups may have advantages, so steps of them are trained on.
        other_rewards: what it reads besides the total reward of each sample, for messages; None: nothing.
            `algorithm.reward_norm` and `rewards.shuffle` change only the total, so they are refused.
        reads_greedy_answer: needs the reward of a greedy answer to each prompt, which `reward_clip` clips.
        reads_each_reward: reads each reward before weighting.
        only_right_and_wrong: needs total rewards of 0 or 1.
        reads_policy: needs the tokens' score norms under the weights before the update, which costs another
            forward pass of the policy's ranks.
    """

    needs_group: bool = True
    learns_from_equal_rewards: bool = False
    other_rewards: str | None = None
    reads_greedy_answer: bool = False
    reads_each_reward: bool = False
    only_right_and_wrong: bool = False
    reads_policy: bool = False

    @property
    def learns_from_one_sample(self) -> bool:
        """Whether a single sample may have a signal: its baseline does not come from its group."""
        return not self.needs_group and self.other_rewards is not None


# Estimators that use more than differences of total rewards within a group.
ESTIMATOR_TRAITS = {
    "reinforce_pp": EstimatorTraits(needs_group=False, learns_from_equal_rewards=True),
    "flash_reinforce": EstimatorTraits(needs_group=False, learns_from_equal_rewards=True),
    "remax": EstimatorTraits(
        needs_group=False,
        learns_from_equal_rewards=True,
        other_rewards="the reward of the greedy answer as well",
        reads_greedy_answer=True,
    ),
    "gdpo": EstimatorTraits(
        learns_from_equal_rewards=True, other_rewards="each reward separately", reads_each_reward=True
    ),
    "maxrl": EstimatorTraits(only_right_and_wrong=True),
    "process": EstimatorTraits(
        needs_group=False,
        learns_from_equal_rewards=True,
        other_rewards="the rewards of reasoning steps or turns",
    ),
    "turn": EstimatorTraits(learns_from_equal_rewards=True, other_rewards="the rewards of turns as well"),
    # The end of a group's longest sample has no baseline, so equal rewards teach there.
    "otb": EstimatorTraits(learns_from_equal_rewards=True, reads_policy=True),
}


class AdvantageConfig(Choice):
    """The estimator that turns the rewards of a group into advantages."""

    name: str
    whiten: bool = Field(False, description="scale to mean 0, deviation 1 over all tokens")

    @property
    def traits(self) -> EstimatorTraits:
        """The properties of the estimator."""
        return ESTIMATOR_TRAITS.get(self.name, EstimatorTraits())


class NormalisedAdvantage(AdvantageConfig):
    """Estimators that divide by a standard deviation."""

    name: Literal["grpo", "gdpo", "grpo_passk", "process"] = "grpo"
    std: Deviation = "group"
    eps: Epsilon = 1e-6


class LeaveOneOutAdvantage(AdvantageConfig):
    """The mean and the standard deviation of the other samples."""

    name: Literal["rloo_normalized"] = "rloo_normalized"
    eps: Epsilon = 1e-6


class TurnAdvantage(AdvantageConfig):
    """Returns of turns, with the group's returns of the same turn as baseline."""

    name: Literal["turn"] = "turn"
    std: Deviation = "group"
    eps: Epsilon = 1e-6
    discount: Fraction = Field(1.0, description="factor of later turns in the return")


class PassAtKAdvantage(AdvantageConfig):
    """What a sample adds to the best of k."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: PositiveInt = Field(4, description="below batch.samples_per_prompt")
    eps: Epsilon = 1e-6


class ReinforceAdvantage(AdvantageConfig):
    """REINFORCE++, whose baseline is the mean over all tokens."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Share = Field(1.0, description="discount of the reward, and of the KL in it, for each later token")
    whiten: bool = Field(True, description="scale to mean 0, deviation 1 over all tokens")


class ReinforceBaselineAdvantage(AdvantageConfig):
    """REINFORCE++ with a group baseline."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = Field(True, description="scale to mean 0, deviation 1 over all tokens")


class PlainAdvantage(AdvantageConfig):
    """Estimators without settings."""

    name: Literal["dr_grpo", "rloo", "remax", "opo", "gpg", "maxrl", "otb", "flash_reinforce"] = "dr_grpo"


class UserAdvantage(AdvantageConfig):
    """A user-supplied function."""

    name: AdvantageName
    kwargs: Kwargs = Field({})

    @property
    def traits(self) -> EstimatorTraits:
        """Permissive, since the function's properties are unknown: nothing is refused or skipped."""
        return EstimatorTraits(needs_group=False, learns_from_equal_rewards=True)


Advantage = Annotated[
    NormalisedAdvantage
    | LeaveOneOutAdvantage
    | TurnAdvantage
    | PassAtKAdvantage
    | ReinforceAdvantage
    | ReinforceBaselineAdvantage
    | PlainAdvantage
    | UserAdvantage,
    Tagged(),
]


class LossConfig(Choice):
    """The loss of a token, and how it bounds the policy's change."""

    name: str
    # Settings that choose tokens over the whole update, before the loss is computed.
    selection: ClassVar[frozenset[str]] = frozenset()

    @property
    def token_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return {name: value for name, value in self.arguments.items() if name not in self.selection}


class PPOClipLoss(LossConfig):
    """No gain beyond 1 - clip_low and 1 + clip_high."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Share = Field(0.2, description="lower clip bound")
    clip_high: NonNegative = Field(0.2, description="upper clip bound; above clip_low: clip-higher (DAPO)")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="dual-clip bound; null: off")


class PlainLoss(LossConfig):
    """Losses without settings."""

    name: Literal["policy_gradient", "topr", "topr_token"] = "policy_gradient"


class CISPOLoss(LossConfig):
    """The weight is held inside the bounds; every token keeps its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: Share = Field(1.0, description="lower bound of the weight is 1 - this; 1: none")
    clip_high: NonNegative = Field(0.2, description="upper bound of the weight is 1 + this")
    unified_mask: bool = Field(False, description="drop the tokens that ppo_clip drops, too")


class SAPOLoss(LossConfig):
    """A sigmoid gate instead of a hard clip."""

    name: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = Field(1.0, description="temperature for positive advantages")
    tau_negative: PositiveFloat = Field(1.05, description="temperature for negative advantages")


class DPPOTVLoss(LossConfig):
    """Drops tokens whose probability changed too much."""

    name: Literal["dppo_tv"] = "dppo_tv"
    clip_low: Share = Field(0.2, description="largest fall of the probability where the advantage is below 0")
    clip_high: NonNegative = Field(
        0.2, description="largest rise of the probability where the advantage is above 0"
    )
    ratio_cap: PositiveFloat = Field(20.0, description="upper bound of the ratio")


class DPPOKLLoss(LossConfig):
    """Drops tokens whose probability changed too much, by the binary KL."""

    name: Literal["dppo_kl"] = "dppo_kl"
    clip_low: Share = Field(0.05, description="largest KL, nats, of a fall where the advantage is below 0")
    clip_high: NonNegative = Field(0.05, description="largest KL of a rise where the advantage is above 0")
    ratio_cap: PositiveFloat = Field(20.0, description="upper bound of the ratio")


class GSPOLoss(LossConfig):
    """ppo_clip with the geometric mean of the sequence's ratios."""

    name: Literal["gspo"] = "gspo"
    clip_low: Share = Field(3e-4, description="lower clip bound")
    clip_high: NonNegative = Field(4e-4, description="upper clip bound")


class GSPOSegmentLoss(LossConfig):
    """gspo with the ratios of one action of an episode."""

    name: Literal["gspo_segment"] = "gspo_segment"
    clip_low: Share = Field(0.2, description="lower clip bound")
    clip_high: NonNegative = Field(0.2, description="upper clip bound")


class GMPOLoss(LossConfig):
    """The geometric mean of clipped token ratios."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: Share = Field(0.4, description="lower bound of the log-ratio is minus this")
    clip_high: NonNegative = Field(0.4, description="upper bound of the log-ratio")


class DROLoss(LossConfig):
    """A penalty on the squared log-ratio of a token."""

    name: Literal["dro"] = "dro"
    beta: PositiveFloat = Field(0.1, description="weight of the penalty")


class KimiLoss(LossConfig):
    """A penalty on the squared log-ratio of a sequence."""

    name: Literal["kimi15"] = "kimi15"
    tau: PositiveFloat = Field(0.1, description="weight of the penalty")


class ReinforceISLoss(LossConfig):
    """REINFORCE weighted by the sequence's ratio."""

    name: Literal["reinforce_is"] = "reinforce_is"
    ratio_cap: PositiveFloat = Field(2.0, description="upper bound of the sequence's ratio")


class VESPOLoss(LossConfig):
    """A weight of the sequence's ratio that falls to 0 on both sides of 1."""

    name: Literal["vespo"] = "vespo"
    k_positive: NonNegative = Field(2.0, description="power of the ratio for advantages of 0 and above")
    lambda_positive: PositiveFloat = Field(
        3.0, description="decay in the ratio for advantages of 0 and above"
    )
    k_negative: NonNegative = Field(3.0, description="power of the ratio for negative advantages")
    lambda_negative: PositiveFloat = Field(2.0, description="decay in the ratio for negative advantages")


class ClipCovLoss(LossConfig):
    """ppo_clip without some tokens of high covariance."""

    selection = frozenset({"cov_share", "cov_low", "cov_high"})

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: Share = Field(0.2, description="lower clip bound")
    clip_high: NonNegative = Field(0.2, description="upper clip bound")
    cov_share: Share = Field(2e-4, description="share of an update's tokens that are held")
    cov_low: float = Field(1.0, description="lower bound of the covariance of a token that is held")
    cov_high: float = Field(5.0, description="its upper bound")

    def _contradictions(self) -> Iterator[str]:
        if self.cov_low >= self.cov_high:
            yield (
                f"cov_low = {self.cov_low:g} must be below cov_high = {self.cov_high:g}, or no token is ever "
                "held; lower the first or raise the second"
            )


class KLCovLoss(LossConfig):
    """A penalty on the tokens of the highest covariance."""

    selection = frozenset({"cov_share"})

    name: Literal["kl_cov"] = "kl_cov"
    cov_share: Share = Field(2e-4, description="share of an update's tokens that are held")
    cov_kl_coef: PositiveFloat = Field(1.0, description="weight of the penalty on them")


class UserLoss(LossConfig):
    """A user-supplied function."""

    name: LossName
    kwargs: Kwargs = Field({})


Loss = Annotated[
    PPOClipLoss
    | PlainLoss
    | CISPOLoss
    | SAPOLoss
    | DPPOTVLoss
    | DPPOKLLoss
    | GSPOLoss
    | GSPOSegmentLoss
    | GMPOLoss
    | DROLoss
    | KimiLoss
    | ReinforceISLoss
    | VESPOLoss
    | ClipCovLoss
    | KLCovLoss
    | UserLoss,
    Tagged(),
]


class AggregationConfig(Choice):
    """How token losses are reduced."""

    name: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
        "prompt-mean-token-mean",
    ] = "token-mean"  # fmt: skip


class UserAggregation(Choice):
    """A user-supplied function."""

    name: AggregationName
    kwargs: Kwargs = Field({})


class KLEstimatorConfig(Choice):
    """An estimator of the KL of a token."""

    name: Literal["k3", "k1", "k2", "k1+", "k3+", "abs"] = "k3"


class UserKL(Choice):
    """A user-supplied function."""

    name: KLName
    kwargs: Kwargs = Field({})


class KLConfig(Section):
    """The penalty on divergence from the reference."""

    coef: NonNegative = Field(0.0, description="weight of the KL term; 0: no reference worker is created")
    estimator: Annotated[KLEstimatorConfig | UserKL, Tagged()] = Field(
        KLEstimatorConfig(),
        description="k1+, k3+: value of k1 or k3, gradient of k2; abs: absolute log-ratio; or user-supplied",
    )
    in_reward: bool = Field(
        False, description="subtract the KL from the rewards instead of adding it to the loss"
    )
    target: PositiveFloat | None = Field(
        None, description="KL in nats per token that `coef` is adapted to reach; null: `coef` is constant"
    )
    gain: Fraction = Field(0.1, description="largest relative change of `coef` per step, as a share of 0.2")
    bias_correction: bool = Field(
        False,
        description="multiply a token's k1 or k3 in the loss by its ratio to the engine that sampled it: "
        "unbiased also for older weights (DeepSeek-V3.2)",
    )

    @property
    def loss_coef(self) -> float:
        """Weight of the KL term in the loss."""
        return 0.0 if self.in_reward else self.coef

    def _contradictions(self) -> Iterator[str]:
        name = self.estimator.name
        if self.coef == 0 and (self.in_reward or self.target is not None or self.bias_correction):
            which = "in_reward" if self.in_reward else "bias_correction" if self.bias_correction else "target"
            yield f"`coef` = 0 disables the KL term that `{which}` configures; set it above 0, or remove that"
        if self.bias_correction and self.in_reward:
            yield (
                "`bias_correction` = true reweighs the KL term of the loss, but `in_reward` = true makes it "
                "part of the rewards; remove one of them"
            )
        elif self.bias_correction and name not in ("k1", "k3"):
            yield (
                "`bias_correction` = true is for estimators whose value is unbiased, but `estimator` = "
                f"{name}; use k3 or k1"
            )
        if self.in_reward and name.endswith("+"):
            yield (
                f"`estimator` = {name} differs from {name[:-1]} only in its gradient, and a KL term in the "
                "reward has no gradient; remove the +"
            )
        if self.target is None and self.gain != 0.1:
            yield "`gain` has no effect without `target`; set that, or remove `gain`"


class RatioRule(Choice):
    """Bounds the ratio trainer / engine of a token, or its product or geometric mean over a sequence."""

    tag = "rule"
    rule: Literal["token_k1", "segment_mean_k1", "seq_mean_k1", "seq_sum_k1"]
    low: PositiveFloat | None = Field(None, description="lower bound of the ratio")
    high: PositiveFloat | None = Field(None, description="upper bound of the ratio")

    def _contradictions(self) -> Iterator[str]:
        if self.low is None and self.high is None:
            yield f"rule = {self.rule} needs `low` or `high`, e.g. low: 0.5, high: 2.0"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield f"low = {self.low:g} must be below high = {self.high:g}"


class DivergenceRule(Choice):
    """Bounds k2, k3, binary_kl, in nats, or tv, a difference of probabilities, over a token, a segment or a
    sequence.
    """

    tag = "rule"
    rule: Literal[
        "token_k2", "token_k3", "token_binary_kl", "token_tv",
        "segment_mean_k2", "segment_mean_k3", "segment_mean_binary_kl", "segment_mean_tv",
        "seq_mean_k2", "seq_mean_k3", "seq_mean_binary_kl", "seq_mean_tv",
        "seq_sum_k2", "seq_sum_k3", "seq_sum_binary_kl", "seq_sum_tv",
        "seq_max_k2", "seq_max_k3", "seq_max_binary_kl", "seq_max_tv",
    ]  # fmt: skip
    high: PositiveFloat = Field(description="upper bound")


class CorrectionConfig(Choice):
    """Importance weights that correct for engine-trainer mismatch and for samples of older weights."""

    tag = "kind"
    kind: str
    veto: NonNegative = Field(
        0.0, description="drop sequences with a token whose ratio is below this, e.g. 1e-4; 0: never"
    )
    reject: tuple[Annotated[RatioRule | DivergenceRule, Tagged()], ...] = Field(
        (), description="rules that a token must pass, all of them"
    )

    @property
    def bypasses(self) -> bool:
        """Whether ratios are to the engine's log-probs, which saves a forward pass of the trainer."""
        return self.kind == "bypass"

    def _contradictions(self) -> Iterator[str]:
        if twice := repeated([rule.rule for rule in self.reject]):
            yield f"`reject` has the rule {twice[0]} twice; keep one, with both bounds"


class WeightedCorrection(CorrectionConfig):
    """Weights by the ratio trainer / engine."""

    kind: Literal["tis", "mis", "icepop"] = "tis"
    level: Literal["token", "sequence", "geometric", "segment"] = Field(
        "token",
        description="the ratio of a token, the product over its sequence, their geometric mean, or the "
        "geometric mean over an action of an episode",
    )
    low: NonNegative = Field(0.0, description="lower bound of the weight; must be below `high`")
    high: PositiveFloat = Field(2.0, description="upper bound of the weight")
    normalize: bool = Field(
        False, description="divide the weights by their mean over the update; costs a forward pass"
    )

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.low >= self.high:
            yield f"low = {self.low} must be below high = {self.high}"


class UnweightedCorrection(CorrectionConfig):
    """none: no weights, ratios to the trainer's log-probs; bypass: ratios to the engine's log-probs."""

    kind: Literal["none", "bypass"] = "none"


Correction = Annotated[WeightedCorrection | UnweightedCorrection, Tagged()]


class EntropyConfig(Choice):
    """A bonus of constant weight."""

    tag = "kind"
    kind: Literal["constant"] = "constant"
    coef: NonNegative = Field(0.0, description="weight of the entropy bonus; 0: none")


class AdaptiveEntropyConfig(Choice):
    """A bonus whose weight is steered from update to update (Skywork-OR1)."""

    tag = "kind"
    kind: Literal["adaptive"] = "adaptive"
    coef: NonNegative = Field(0.0, description="first weight of the entropy bonus")
    target: PositiveFloat = Field(
        description="entropy to hold, nats per token: below it the coefficient rises with each update; "
        "above, it falls and is not applied"
    )
    delta: PositiveFloat = Field(0.005, description="change of the coefficient with each update")
    low: NonNegative = Field(0.0, description="lower bound of the coefficient")
    high: PositiveFloat = Field(1.0, description="upper bound of the coefficient")

    def _contradictions(self) -> Iterator[str]:
        if not self.low <= self.coef <= self.high or self.low >= self.high:
            yield (
                f"`coef` = {self.coef:g}, where the coefficient starts, must be between `low` = {self.low:g} "
                f"and a larger `high` = {self.high:g}; change one of them"
            )


Entropy = Annotated[EntropyConfig | AdaptiveEntropyConfig, Tagged()]


class NoRewardNorm(Choice):
    """Rewards as they are."""

    name: Literal["none"] = "none"


class RewardNormConfig(Choice):
    """Rewards are normalised over their group, the batch, or all steps so far."""

    name: Literal["group", "batch", "running"] = "batch"
    shift: bool = Field(True, description="subtract the mean")
    scale: bool = Field(True, description="divide by the standard deviation")
    eps: Epsilon = 1e-6

    def _contradictions(self) -> Iterator[str]:
        if not (self.shift or self.scale):
            yield "`shift` and `scale` = false leave rewards as they are; use reward_norm: none"


RewardNorm = Annotated[NoRewardNorm | RewardNormConfig, Tagged()]


class ProcessConfig(Section):
    """Advantages of step rewards, normalised separately and added to `advantage`'s advantages (PRIME)."""

    coef: PositiveFloat = Field(1.0, description="weight of the advantages of steps")
    outcome_coef: PositiveFloat = Field(1.0, description="weight of the advantages of `advantage`")


class AlgorithmConfig(Section):
    """Rewards, advantages and loss: `grpo_dist/algorithms/README.md` has the formulas."""

    preset: str | None = Field(
        None,
        description="name of the preset, set by `+algorithm=NAME`; by itself it has no effect",
    )
    reward_clip: PositiveFloat | None = Field(None, description="clip rewards to +- this; null: off")
    reward_norm: RewardNorm = Field(NoRewardNorm(), description="normalise rewards before the estimator")
    advantage: Advantage = Field(
        NormalisedAdvantage(), description="estimator that turns the rewards of a group into advantages"
    )
    process: ProcessConfig | None = Field(
        None, description="add advantages of step rewards; null: step rewards only enter the total reward"
    )
    advantage_clip: PositiveFloat | None = Field(None, description="clip advantages to +- this; null: off")
    length_weights: bool = Field(
        False,
        description="multiply advantages by 1.5 (shortest sample of the step) to 0.5 (longest), "
        "divided by their mean (ROLL)",
    )
    loss: Loss = Field(PPOClipLoss(), description="loss of a token, and how it bounds the policy's change")
    aggregation: Annotated[AggregationConfig | UserAggregation, Tagged()] = Field(
        AggregationConfig(),
        description="how token losses are reduced; seq-mean...: per sequence first, ...-norm by "
        "sampling.max_new_tokens; prompt-mean...: per prompt first",
    )
    kl: KLConfig = Field(default_factory=KLConfig)
    correction: Correction = Field(
        WeightedCorrection(),
        description="correction for engine-trainer mismatch and samples of older weights; bypass: ratios "
        "are to the engine's log-probs",
    )
    entropy: Entropy = Field(EntropyConfig(), description="the entropy bonus")
    top_entropy_share: Share = Field(
        1.0, description="train only on this share of an update's tokens: those with the highest entropy"
    )
    off_policy_mask_threshold: PositiveFloat | None = Field(
        None,
        description="drop tokens with negative advantage of sequences whose mean log-prob fell by more "
        "than this, nats (DeepSeek-V3.2)",
    )
    mask_truncated: bool = Field(False, description="do not train on completions truncated at max_new_tokens")
    zero_variance_filter: bool = Field(
        False,
        description="leave zero-variance groups out of the loss and of its denominators (ScaleRL); "
        "`dynamic_sampling` replaces them instead",
    )
    skip_idle_rows: bool = Field(True, description="skip samples that add nothing to the gradient")

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether entropy is part of the loss. The weight of an adaptive bonus may start at 0."""
        return self.entropy.coef > 0 or isinstance(self.entropy, AdaptiveEntropyConfig)

    @property
    def normalizes_weights(self) -> bool:
        """Whether correction weights are divided by their mean over the update."""
        return isinstance(self.correction, WeightedCorrection) and self.correction.normalize

    @property
    def user_components(self) -> tuple[UserComponent, ...]:
        """The user-supplied functions."""
        named = (
            (ADVANTAGE, self.advantage), (LOSS, self.loss), (KL, self.kl.estimator),
            (AGGREGATION, self.aggregation),
        )  # fmt: skip
        return tuple(
            UserComponent(kind, member.name, kind.key, member.kwargs)
            for kind, member in named
            if isinstance(member, UserAdvantage | UserLoss | UserKL | UserAggregation)
        )


class SourceKLConfig(Section):
    """The weight of the KL term for the samples of a source."""

    coef: NonNegative = Field(description="overrides `algorithm.kl.coef`, which must be above 0")


class SourceAlgorithmConfig(Section):
    """Overrides of `algorithm` for the samples of a source. Denominators still count the whole update."""

    advantage: Advantage | None = Field(
        None,
        description="overrides `algorithm.advantage`; a step's statistics then cover only this source's "
        "samples",
    )
    loss: Loss | None = Field(
        None,
        description="overrides `algorithm.loss`; not clip_cov and kl_cov, which choose tokens of all sources",
    )
    kl: SourceKLConfig | None = Field(None, description="overrides `algorithm.kl.coef`")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_all_sources_share(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for name in values.keys() & (AlgorithmConfig.model_fields.keys() - cls.model_fields.keys()):
                raise ValueError(
                    f"`{name}` applies to all samples of an update, whatever their source; set "
                    f"`algorithm.{name}` (a source may override {', '.join(cls.model_fields)})"
                )
        return values

    def over(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """Return ``algorithm`` with the overrides of the source."""
        parts: dict[str, Any] = {key: part for key in ("advantage", "loss") if (part := getattr(self, key))}
        if self.kl is not None:
            parts["kl"] = algorithm.kl.model_copy(update={"coef": self.kl.coef})
        return algorithm.model_copy(update=parts)

    def _contradictions(self) -> Iterator[str]:
        if self.loss is not None and self.loss.selection:
            yield (
                f"`loss` = {self.loss.name} chooses tokens over a whole update, of all sources; set "
                "`algorithm.loss` to it, or use another loss"
            )
