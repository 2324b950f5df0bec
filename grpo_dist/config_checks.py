"""Settings of `algorithm` that contradict each other, found before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_dist.config import Config

# What each choice of `algorithm` listens to; setting anything else with it would be ignored without a word.
_USE_STD = ("grpo", "gdpo", "process")
_OWN_SETTINGS = {
    "policy_gradient": (),
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo_tv": ("clip_low", "clip_high", "ratio_cap"),
    "gspo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
}


def contradictions(config: Config) -> Iterator[str]:
    """Settings of `algorithm` that cannot hold together, or that one of them would ignore."""
    a, loss = config.algorithm, config.algorithm.policy_loss
    if a.advantage not in _USE_STD and a.std not in (None, "none"):
        yield (
            f"`algorithm.std` = {a.std} contradicts `algorithm.advantage` = {a.advantage}, which does not "
            "divide by a deviation; remove `algorithm.std` or use advantage grpo"
        )
    for name in sorted({n for own in _OWN_SETTINGS.values() for n in own} - set(_OWN_SETTINGS[loss])):
        if getattr(a, name) is not None:
            yield (
                f"`algorithm.{name}` = {getattr(a, name)} is no setting of `algorithm.policy_loss` = {loss}, "
                f"which has {', '.join(_OWN_SETTINGS[loss]) or 'none'}; remove it"
            )
    if a.advantage == "pass_at_k" and a.pass_k >= config.batch.samples_per_prompt:
        yield (
            f"`algorithm.pass_k` = {a.pass_k} must be below `batch.samples_per_prompt` = "
            f"{config.batch.samples_per_prompt}: with k of k samples every try is the same"
        )
    if a.old_logprobs == "rollout" and a.correction.kind not in (None, "none"):
        yield (
            "`algorithm.old_logprobs` = rollout takes ratios to the engine's log-probs, which leaves "
            f"`algorithm.correction.kind` = {a.correction.kind} nothing to correct; set it to none"
        )
    if (a.add_token_level_kl or a.kl.target is not None) and a.kl.coef == 0:
        yield (
            "`algorithm.kl.coef` = 0 leaves `add_token_level_kl` and `kl.target` nothing to do; set it above "
            "0"
        )
    rewards = config.rewards
    if a.advantage == "process" and not any(m.kind == "process" for m in rewards.models):
        yield (
            "`algorithm.advantage` = process needs the scores of steps, and `rewards.models` has no model of "
            "`kind: process`; add one"
        )
    gated = [r.gate for r in (*rewards.functions, *rewards.models) if r.gate is not None]
    if a.advantage == "gdpo" and gated:
        yield (
            "`algorithm.advantage` = gdpo normalises every reward on its own, which a gate between two of "
            f"them contradicts; remove `gate` = {gated[0]}"
        )
    if config.reference.refresh_every and a.kl.coef == 0:
        yield "`reference.refresh_every` needs a reference, and `algorithm.kl.coef` = 0 asks for none"
    if a.add_token_level_kl and a.kl.estimator.endswith("+"):
        yield (
            f"`algorithm.kl.estimator` = {a.kl.estimator} differs from {a.kl.estimator[:-1]} in its gradient "
            "alone, and a KL term in the reward has none; remove the +"
        )
