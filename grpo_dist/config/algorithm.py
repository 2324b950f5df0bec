"""From rewards to the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Fraction, NonNegative, Section


class KLConfig(Section):
    """The divergence from the reference that is held down."""

    coef: NonNegative = Field(0.0, description="weight of the KL term; 0: no reference worker is created")
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        "k3", description="k1+, k3+: value of k1, k3 and gradient of k2"
    )
    target: PositiveFloat | None = Field(
        None, description="KL in nats a token that `coef` is steered to; null: `coef` stays"
    )
    gain: Fraction = Field(0.1, description="largest change of `coef` a step, as a share of 0.2")


class CorrectionConfig(Section):
    """Importance weights for what the engine computed otherwise, or older weights sampled."""

    kind: Literal["none", "tis", "mis", "icepop"] | None = Field(
        None, description="null: tis, or none where ratios are to the engine's log-probs already"
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="the ratio is a token's, the product over its sequence, or the geometric mean"
    )
    low: NonNegative = Field(0.0, description="lower bound of the weight; must be below `high`")
    high: PositiveFloat = Field(2.0, description="upper bound of the weight")
    veto: NonNegative = Field(
        0.0, description="a token whose ratio is below this drops its sequence, e.g. 1e-4; 0: none does"
    )

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionConfig:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


RewardNorm = Annotated[
    Literal["none", "group", "batch", "running"],
    BeforeValidator(lambda value: "none" if value is None else value),
]


class AlgorithmConfig(Section):
    """From rewards to the loss: `grpo_dist/algorithms/README.md` has the formulas."""

    preset: str | None = Field(
        None,
        description="name of the preset that these settings come from; `+algorithm=NAME` and "
        "`defaults: [algorithms/NAME.yaml]` set it, and it changes nothing",
    )
    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "pass_at_k",
        "gdpo", "process",
    ] = Field("grpo", description="estimator: from the rewards of a group to advantages")  # fmt: skip
    std: Literal["group", "batch", "batch_raw", "none"] | None = Field(
        None,
        description="deviation that a centred reward is divided by: of its group; of all centred rewards of "
        "the batch; of all rewards of the batch as they are (TRL, ROLL); null: group, where the estimator "
        "divides",
    )
    advantage_eps: PositiveFloat = Field(1e-6, description="added to a deviation that is divided by")
    pass_k: PositiveInt = Field(4, description="k of advantage pass_at_k; below batch.samples_per_prompt")
    reward_clip: PositiveFloat | None = Field(None, description="rewards are held within +- this")
    reward_norm: RewardNorm = Field(
        "none",
        description="normalise rewards before the estimator: over their group, the batch, or all steps so "
        "far; null: none",
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
        None, description="mean 0, deviation 1 over all tokens; null: with reinforce_pp and its baseline form"
    )
    advantage_clip: PositiveFloat | None = Field(None, description="advantages are held within +- this")
    add_token_level_kl: bool = Field(False, description="the KL term is part of the reward, not of the loss")
    policy_loss: Literal["policy_gradient", "ppo_clip", "cispo", "sapo", "dppo_tv", "gspo", "gmpo"] = Field(
        "ppo_clip", description="loss of a token, and what bounds a step"
    )
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="lower bound of the policy loss; null: its own, e.g. 0.2 for ppo_clip"
    )
    clip_high: PositiveFloat | None = Field(
        None, description="upper bound of the policy loss; null: its own; above clip_low: clip-higher (DAPO)"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="of ppo_clip; null: off")
    tau_positive: PositiveFloat | None = Field(None, description="of sapo; null: 1.0")
    tau_negative: PositiveFloat | None = Field(None, description="of sapo; null: 1.05")
    ratio_cap: PositiveFloat | None = Field(None, description="of dppo_tv; null: 20")
    old_logprobs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="what ratios are taken to; rollout: the engine's, and no forward pass computes others",
    )
    entropy_coef: NonNegative = Field(0.0, description="weight of the entropy bonus")
    top_entropy_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="train on this share of an update's tokens, those of the highest entropy"
    )
    mask_truncated: bool = Field(False, description="train nothing of completions cut at max_new_tokens")
    skip_idle_rows: bool = Field(
        True, description="leave samples out of training that add nothing to the gradient"
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = Field(
        "token-mean",
        description="from losses of tokens to one: over all tokens, or by sequence first; "
        "seq-mean-token-sum-norm divides each sum by sampling.max_new_tokens",
    )
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    @property
    def shifts_rewards(self) -> bool:
        """Whether `reward_norm` subtracts the mean."""
        return _takes_part(self.reward_shift, self.reward_scale)

    @property
    def scales_rewards(self) -> bool:
        """Whether `reward_norm` divides by the deviation."""
        return _takes_part(self.reward_scale, self.reward_shift)


def _takes_part(own: bool | None, other: bool | None) -> bool:
    """ROLL's keys say "only this step": both false is the default there, and means both steps."""
    if own is None:
        return not other
    return own or other is False
