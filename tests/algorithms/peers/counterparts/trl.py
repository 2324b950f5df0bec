"""TRL's settings, and ours."""

from tests.algorithms.peers.counterparts import of_losses
from tests.algorithms.peers.counterparts.base import Counterpart

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean",
    "cispo": "token-mean", "vespo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}  # fmt: skip
KINDS = {"truncate": "tis", "mask": "mis"}


def _loss(case, settings):
    kind = settings.get("loss_type", "dapo")
    section = _policy_loss(kind, settings) | {"aggregation": AGGREGATIONS[kind]}
    how = {"first": settings.get("advantages") == "first"}
    how |= {"max_tokens": 10} if kind == "dr_grpo" else {}
    if settings.get("beta"):
        corrected = settings.get("use_bias_correction_kl", False)
        section["kl"] = {"coef": settings["beta"], "estimator": "k3", "bias_correction": corrected}
    if settings.get("old") == "engine":
        section["correction"] = "bypass"
    if "top_entropy_quantile" in settings:
        section["top_entropy_share"] = settings["top_entropy_quantile"]
    if "off_policy_mask_threshold" in settings:
        section["off_policy_mask_threshold"] = settings["off_policy_mask_threshold"]
    if settings.get("entropy_coef"):
        section["entropy"] = {"coef": settings["entropy_coef"]}
    if settings.get("use_vllm") and kind == "vespo":
        section["correction"] = "bypass"  # its weights are in the sequence's ratio
    elif settings.get("use_vllm"):
        section["correction"] = _correction(settings)
    tolerance = 1e-5 if kind == "sapo" else None  # its temperatures are float32
    setup = Counterpart(section, how, tolerance=tolerance)
    differs = _difference(case, kind, settings)
    return differs(case, setup) if differs else setup


def _difference(case, kind, settings):
    if case.input == "empty" and kind in ("grpo", "dr_grpo"):
        return of_losses.counts_empty_rows
    if kind == "luspo" and settings.get("importance_sampling_level") != "sequence":
        return of_losses.length_weighted_tokens
    if settings.get("top_entropy_quantile") == 0.2 and case.input == "plain":
        return of_losses.quantile_share
    if kind == "grpo" and settings.get("entropy_coef"):
        return of_losses.terms_over_tokens
    if settings.get("use_bias_correction_kl") and "old" not in settings:
        return of_losses.bias_from_old
    if settings.get("importance_sampling_level") == "sequence" and settings.get("use_vllm"):
        by_token = settings["vllm_importance_sampling_mode"].startswith("token")
        return of_losses.sequence_gradient if by_token else None
    if kind == "bnpo" and settings.get("gradient_accumulation_steps") == 2:
        return of_losses.micro_batch_means
    return None


def _policy_loss(kind, settings):
    low, high = settings.get("epsilon", 0.2), settings.get("epsilon_high", 0.2)
    if kind == "cispo":
        return {"loss": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    if kind == "sapo":
        up, down = (settings[f"sapo_temperature_{sign}"] for sign in ("pos", "neg"))
        return {"loss": "sapo", "tau_positive": up, "tau_negative": down}
    if kind == "vespo":
        names = {"k_positive": "vespo_k_pos", "lambda_positive": "vespo_lambda_pos",
                 "k_negative": "vespo_k_neg", "lambda_negative": "vespo_lambda_neg"}  # fmt: skip
        return {"loss": "vespo"} | {key: settings[n] for key, n in names.items() if n in settings}
    clips = {"clip_low": low, "clip_high": high}
    if settings.get("importance_sampling_level") == "sequence":
        return {"loss": "gspo", **clips}
    if settings.get("delta"):
        # Below 1 + epsilon_high it bounds good tokens itself, and bad ones are cut at 1 + epsilon_high.
        clips["clip_high"] = min(high, settings["delta"] - 1)
        clips["dual_clip"] = max(1 + high, settings["delta"])
    return {"loss": "ppo_clip", **clips}


def _correction(settings):
    level, kind = settings.get("vllm_importance_sampling_mode", "token_truncate").split("_")
    low = settings.get("vllm_importance_sampling_clip_min") or 0.0
    high = settings.get("vllm_importance_sampling_clip_max", 3.0)
    return {"kind": KINDS[kind], "level": level, "low": low, "high": high}


def _weights(case, settings):
    return Counterpart({"correction": _correction(settings)})


def _advantages(case, settings):
    eps = {"eps": 1e-4}
    if settings.get("multi_objective_aggregation") == "normalize_then_sum":
        return Counterpart(
            {"advantage": "gdpo", **eps},
            {"weights": {"part0": 1.0, "part1": 0.5}, "unscored": settings.get("unscored")},
        )
    std = {"batch": "batch_raw"}.get(settings["scale_rewards"], settings["scale_rewards"])
    how = {"estimate": {"std": std, "eps": 1e-4}, "unscored": settings.get("unscored")}
    if "reward_weights" in settings:
        how["summed"] = settings["reward_weights"]
    return Counterpart({"advantage": "grpo", "std": std, **eps}, how)


def _entropy_control(case, settings):
    section = {
        "entropy": {
            "kind": "adaptive", "coef": settings["entropy_coef"], "target": settings["entropy_target"],
        }
    }  # fmt: skip
    return Counterpart(section, {"observed": settings["entropies"]})


def _overlong(case, settings):
    return Counterpart(how={
        "lengths": settings["lengths"], "max_tokens": settings["max_completion_len"],
        "buffer_tokens": settings["soft_punish_cache"],
    })  # fmt: skip


def _repetition(case, settings):
    return Counterpart(how={
        "completions": settings["completions"], "n": settings["ngram_size"],
        "factor": settings["max_penalty"],
    })  # fmt: skip


def _logprobs(case, settings):
    return Counterpart(how={"entropy": case.call.startswith("entropy")})
