"""OpenRLHF's settings, and ours."""

from tests.algorithms.peers.counterparts import of_advantages, of_losses
from tests.algorithms.peers.counterparts.base import Counterpart

CORRECTIONS = {
    "tis": {"kind": "tis"}, "icepop": {"kind": "icepop"},
    "seq-mask-tis": {"kind": "icepop", "level": "geometric"},
}  # fmt: skip
ESTIMATORS = {
    "reinforce": "reinforce_pp", "rloo": "rloo", "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo", "dr_grpo": "dr_grpo",
}  # fmt: skip


def _mode(settings):
    by_token = settings.get("token_level_loss", True) and settings.get("policy_loss_type") != "gspo"
    return "token-mean" if by_token else "seq-mean-token-mean"


def _loss(case, settings):
    clips = {"clip_low": settings.get("clip_eps_low", 0.2), "clip_high": settings.get("clip_eps_high", 0.2)}
    section = {"loss": "ppo_clip", **clips, "aggregation": _mode(settings)}
    if "dual_clip" in settings:
        section["dual_clip"] = settings["dual_clip"]
    if settings.get("policy_loss_type") == "gspo":
        section["loss"] = "gspo"
        if settings.get("enable_vllm_is_correction"):
            section["correction"] = "bypass"
    elif settings.get("enable_vllm_is_correction"):
        low, high = settings["vllm_is_truncated_threshold"]
        section["correction"] = CORRECTIONS[settings["vllm_is_correction_type"]] | {"low": low, "high": high}
    if case.call == "training_step":
        section["kl"] = {"coef": settings["kl_coef"], "estimator": settings["kl_estimator"]}
        section["entropy"] = {"coef": settings["entropy_coef"]}
    how = {}
    if "batch_num_tokens" in settings:
        how = {"num_tokens": settings["batch_num_tokens"], "num_sequences": settings["global_batch_size"]}
    setup = Counterpart(section, how)
    if settings.get("policy_loss_type") == "gspo" and case.input != "plain":
        return of_losses.sequence_gradient(case, setup)
    if case.call == "training_step" and not settings["token_level_loss"]:
        return of_losses.terms_over_tokens(case, setup)
    return setup


def _advantages(case, settings):
    section = {"advantage": ESTIMATORS[settings["estimator"]], "eps": 1e-9}
    how = {"estimate": {"eps": 1e-9}}
    if "kl_coef" in settings:
        kl = {"coef": settings["kl_coef"], "estimator": settings["kl_estimator"]}
        section |= {"kl": kl | {"in_reward": True}}
    if "gamma" in settings:
        section["gamma"] = settings["gamma"]
    if "kl_coef" in settings or section["advantage"].startswith("reinforce"):
        how = {}
    if "clip_range" in settings:
        section["reward_clip"] = settings["clip_range"][1]
        how = {}
    setup, whitens = Counterpart(section, how), section["advantage"].startswith("reinforce")
    change = {"centres": "mean" if settings.get("no_std_norm") else "population"} if whitens else {}
    reason = "divides by the population deviation" if whitens else ""
    if settings.get("no_std_norm"):
        reason = "only subtracts the mean over tokens"
    if settings.get("gamma") and case.input == "holes":
        change, reason = change | {"every_place": True}, "counts observed tokens as steps of time"
    if "clip_range" in settings:
        change, reason = change | {"clip_after": 1.0}, "clips what the estimator gives, not the reward"
    return of_advantages.by_hand(case, setup, reason, **change) if change else setup


def _kl(case, settings):
    setup = Counterpart({"kl": {"estimator": settings["kl_estimator"]}})
    return of_advantages.clamped_kl(case, setup, low=-10) if case.input == "extreme" else setup


def _aggregation(case, settings):
    return Counterpart({"aggregation": _mode(settings)})


def _kl_control(case, settings):
    how = {"start": settings["kl_coef"], "target": settings["target_kl"], "observed": settings["kl"]}
    return Counterpart(how=how | {"gain": settings["n_steps"] / settings["horizon"]})


def _overlong(case, settings):
    return Counterpart(how={
        "lengths": settings["lengths"], "max_tokens": settings["max_new_tokens"],
        "buffer_tokens": settings["overlong_buffer_len"], "factor": settings["overlong_penalty_factor"],
    })  # fmt: skip


def _logprobs(case, settings):
    return Counterpart(how={"entropy": False, "temperature": settings["temperature"]})
