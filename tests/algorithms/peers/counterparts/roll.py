"""ROLL's settings, and ours."""

from tests.algorithms.peers.counterparts import of_advantages, of_losses
from tests.algorithms.peers.counterparts.base import Counterpart

KL = {"kl": "k1", "mse": "k2"}


def _loss(case, settings):
    section = _policy_loss(case.call, settings)
    section["aggregation"] = settings.get("loss_agg_mode", "seq-mean-token-mean")
    if settings.get("use_kl_loss"):
        section["kl"] = {"coef": settings["kl_loss_coef"], "estimator": "k3"}
        section["entropy"] = {"coef": settings.get("entropy_loss_coef", 0.0)}
    if "is_weight" in settings:
        section["correction"] = _correction(settings)
    if "filters" in settings:
        section["correction"] = {"kind": "none", "reject": _rules(settings)}
    setup = Counterpart(section)
    if settings.get("length_loss_weight"):
        section["length_weights"] = True
        setup = Counterpart(section, tolerance=1e-6)  # its weights are float32
    differs = _difference(case, settings, section["aggregation"])
    return differs(case, setup) if differs else setup


def _difference(case, settings, mode):
    if mode == "token-mean":
        return of_losses.forgets_mask
    if mode == "seq-mean-token-sum-norm":
        return of_losses.no_mean_of_rows
    if settings.get("importance_sampling") == "seq" and case.input != "plain":
        return of_losses.sequence_gradient
    if settings.get("ratio_type") == "segment" and case.input == "holes":
        return of_losses.sequence_gradient
    if settings.get("use_kl_loss") and case.input == "extreme":
        return of_losses.clamped_kl_term
    if "filters" in settings and mode == "seq-mean-token-mean" and "token" in str(settings["filters"]):
        return of_losses.kept_only
    variants = {"vanilla": of_losses.value_of_logprob, "topr": of_losses.sign_of_score}
    return variants.get(settings.get("pg_variant"))


def _policy_loss(call, settings):
    clip = settings.get("pg_clip", 0.2)
    clips = {"clip_low": clip, "clip_high": clip}
    if settings.get("use_pg_clip_range"):
        clips = {"clip_low": 0.2, "clip_high": 0.28}
    variant = settings.get("pg_variant", "ppo")
    if settings.get("importance_sampling") == "seq":
        return {"loss": "gspo", **clips}
    if settings.get("ratio_type") == "segment":
        return {"loss": "gspo_segment", **clips}
    if variant == "ppo":
        dual = {"dual_clip": 1 + 2 * clip} if settings.get("dual_clip_loss") else {}
        return {"loss": "ppo_clip", **clips, **dual}
    if variant == "tis":
        low, high = settings.get("tis_lower_bound", 0.0), settings.get("tis_upper_bound", 1.0)
        return {"loss": "cispo", "clip_low": 1 - low, "clip_high": high - 1}
    if variant == "cispo":
        low, high = settings.get("cispo_epsilon_low", 0.1), settings.get("cispo_epsilon_high", 0.1)
        unified = settings.get("cispo_use_unified_mask", False)
        return {"loss": "cispo", "clip_low": low, "clip_high": high, "unified_mask": unified}
    if variant == "kimi15":
        return {"loss": "dro", "beta": settings.get("kimi15_tau", 0.1)}
    return {"loss": {"vanilla": "policy_gradient", "topr": "topr_token"}[variant]}


def _correction(settings):
    weight = settings["is_weight"]
    return {"kind": "tis", "level": weight["weight_type"], "high": weight["upper_bound"]}


def _weights(case, settings):
    return Counterpart({"correction": _correction(settings)})


RULES = {
    "token": "token", "segment": "segment_mean", "geometric": "seq_mean", "sequence": "seq_sum",
}  # fmt: skip


def _rules(settings):
    rules = []
    for rule in settings["filters"]:
        scope = RULES[rule.get("agg_type", "token")]
        if rule.get("ratio_enabled", True):
            low, high = rule.get("ratio_low", 0.8), rule.get("ratio_high", 1.2)
            rules.append({"rule": f"{scope}_k1", "low": low, "high": high})
        if rule.get("diff_enabled"):
            rules.append({"rule": f"{scope}_tv", "high": rule["diff_high"]})
    return rules


def _kept(case, settings):
    setup = Counterpart({"correction": {"kind": "none", "reject": _rules(settings)}})
    first = settings["filters"][0]
    signed = first.get("diff_enabled") and first["agg_type"] != "token"
    if (first.get("agg_type"), case.input) == ("sequence", "far"):
        signed = False  # no sequence is within the bound, signed or not
    return of_advantages.signed_differences(case, setup) if signed else setup


def _rewards(case, settings):
    mean, std = settings["norm_mean_type"], settings["norm_std_type"]
    how = {"earlier": settings.get("earlier")}
    if (mean, std) == (None, None):
        return Counterpart({"advantage": "reinforce_pp", "whiten": False}, how)
    if mean == "group" and std != "running":
        kind = {"batch": "batch_raw", None: "none"}.get(std, std)
        return Counterpart({"advantage": "grpo", "std": kind}, how | {"estimate": {"std": kind}})
    scale = std is not None
    shift = mean is not None and mean != "group"
    section = {
        "reward_norm": std or mean, "reward_scale": scale, "reward_shift": shift,
        "advantage": "dr_grpo" if mean == "group" else "reinforce_pp", "whiten": False,
    }  # fmt: skip
    return Counterpart(section, how)


def _advantages(case, settings):
    section = {
        "advantage": {"grpo": "grpo", "reinforce": "reinforce_pp"}[settings["adv_estimator"]],
        "whiten": settings.get("whiten_advantages", False),
        "advantage_clip": settings.get("advantage_clip"), "gamma": settings.get("gamma", 1.0),
    }  # fmt: skip
    if "kl_coef" in settings:
        name = KL.get(settings["kl_penalty"], settings["kl_penalty"])
        section |= {"kl": {"in_reward": True, "coef": settings["kl_coef"], "estimator": name}}
    section["reward_clip"] = settings.get("reward_clip")
    setup = Counterpart(section)
    if settings.get("gamma") and case.input == "holes":
        return of_advantages.by_hand(case, setup, "counts observed tokens as steps of time", every_place=True)
    if settings.get("kl_penalty") == "k3" and case.input == "far":
        return of_advantages.by_hand(case, setup, "clamps the KL of a token at 10", max_kl=10.0)
    if settings.get("reward_clip") == 0.5:
        reason = "clips what the estimator gives, not the reward"
        return of_advantages.by_hand(case, setup, reason, clip_after=0.5)
    return setup


def _kl(case, settings):
    setup = Counterpart({"kl": {"estimator": KL.get(settings["kl_penalty"], settings["kl_penalty"])}})
    clamps = settings["kl_penalty"] == "k3" and case.input == "extreme"
    return of_advantages.clamped_kl(case, setup) if clamps else setup


def _aggregation(case, settings):
    setup, mode = Counterpart({"aggregation": settings["loss_agg_mode"]}), settings["loss_agg_mode"]
    if mode == "token-mean":
        return of_losses.forgets_mask(case, setup)
    if mode == "seq-mean-token-sum-norm":
        return of_losses.no_mean_of_rows(case, setup)
    return of_losses.counts_empty_rows(case, setup) if case.input == "empty" else setup


def _whiten(case, settings):
    return Counterpart()


_segments = _whiten


def _logprobs(case, settings):
    return Counterpart(how={"entropy": case.call.startswith("entropy")})
