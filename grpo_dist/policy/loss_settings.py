"""What the objective of the policy's ranks is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_dist.algorithms.entropy_control import EntropyControl
from grpo_dist.algorithms.rejection import RejectionRule
from grpo_dist.plugins.algorithm import NO_OWN_CODE, OwnCode


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the objective is made of; the names are those of the registries in `grpo_dist.algorithms`."""

    # cross_entropy: the mean of -log p over the trained tokens, in place of all terms below.
    objective: Literal["policy", "cross_entropy"] = "policy"
    policy_loss: str = "ppo_clip"
    # Settings of the policy loss; None: its own default. `POLICY_LOSS_SETTINGS` lists those it takes.
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    ratio_cap: float | None = None
    unified_mask: bool | None = None
    beta: float | None = None
    tau: float | None = None
    k_positive: float | None = None
    lambda_positive: float | None = None
    k_negative: float | None = None
    lambda_negative: float | None = None
    cov_kl_coef: float | None = None
    # Which tokens clip_cov and kl_cov select; None: `cov_share` 2e-4, `cov_low` 1, `cov_high` 5.
    cov_share: float | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    # Whose log-probs ratios are taken to: the trainer's before the step, or those of the rollout engine,
    # where the trainer computes none.
    old_policy: str = "trainer"
    top_entropy_share: float = 1.0  # of an update's tokens that the policy loss is taken over
    entropy_coef: float = 0.0
    entropy_control: EntropyControl | None = None  # of the weight from update to update; None: it is constant
    aggregation: str = "token-mean"
    kl_coef: float = 0.0  # 0: no KL term, and no reference log-probs are looked at
    kl_estimator: str = "k3"
    kl_bias_correction: bool = False  # each token's KL times its ratio to the engine
    correction_kind: str = "none"  # none: samples count as the trainer's own
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0
    correction_veto: float = 0.0
    correction_normalize: bool = False  # divide weights by their mean over the update
    reject: tuple[RejectionRule, ...] = ()
    off_policy_mask_threshold: float | None = None  # nats per token; None: no such mask
    # Of the divergence from a teacher, where it is no part of the advantages, and of the cross-entropy.
    teacher_coef: float = 0.0
    teacher_estimator: str = "k3+"
    teacher_divergence: str = "reverse"  # where the batch has the teacher's likeliest tokens
    demonstration_coef: float = 0.0
    own: OwnCode = NO_OWN_CODE  # where names that are not built in are found
