"""verl's settings, and ours."""

from tests.algorithms.peers.counterparts import of_advantages, of_losses
from tests.algorithms.peers.counterparts.base import Counterpart

KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k2+": "k2"}


def _clip(settings):
    both = settings.get("clip_ratio", 0.2)
    return {
        "clip_low": settings.get("clip_ratio_low", both),
        "clip_high": settings.get("clip_ratio_high", both),
    }


def _loss(case, settings):
    if case.call == "bypass_mode":
        return _bypass(case, settings)
    section = _policy_loss("vanilla" if case.call == "ppo_loss" else case.call, settings)
    if "rollout_is" in settings:
        section["correction"] = _correction_of(settings)
    if settings.get("use_kl_loss"):
        name = settings["kl_loss_type"]
        section["kl"] = {"coef": settings["kl_loss_coef"], "estimator": KL.get(name, name)}
        section["entropy"] = {"coef": settings["entropy_coeff"]}
    setup = Counterpart(section)
    if case.call == "gpg":
        return of_losses.value_of_logprob(case, setup)
    if case.call == "clip_cov" and settings["clip_cov_ratio"] < 1 and case.input != "short":  # one to choose
        return of_losses.random_choice(case, setup)
    if case.call == "geo_mean" and case.input == "empty":
        return of_losses.counts_empty_rows(case, setup)
    if case.call == "geo_mean" and "rollout_is" in settings:
        return of_losses.geometric_weights(case, setup)
    return setup


def _policy_loss(call, settings):
    mode = {"aggregation": settings.get("loss_agg_mode", "token-mean")}
    of_sequences = {"aggregation": "seq-mean-token-mean"}
    cap = settings.get("clip_ratio_c", 3.0)
    by_call = {
        "vanilla": lambda: {"loss": "ppo_clip", "dual_clip": cap, **_clip(settings), **mode},
        "dppo_tv": lambda: {"loss": call, "ratio_cap": cap, **_clip(settings), **mode},
        "dppo_kl": lambda: {"loss": call, "ratio_cap": cap, **_clip(settings), **mode},
        "gspo": lambda: {"loss": call, **_clip(settings), **of_sequences},
        "sapo": lambda: {
            "loss": call, "tau_positive": settings["tau_pos"], "tau_negative": settings["tau_neg"],
            **of_sequences,
        },
        "gpg": lambda: {"loss": "policy_gradient", **mode},
        "clip_cov": lambda: {
            "loss": call, "cov_share": settings["clip_cov_ratio"], "cov_low": settings["clip_cov_lb"],
            "cov_high": settings["clip_cov_ub"], **_clip(settings), **mode,
        },
        "kl_cov": lambda: {
            "loss": call, "cov_share": settings["kl_cov_ratio"],
            "cov_kl_coef": settings["ppo_kl_coef"], **mode,
        },
        "geo_mean": lambda: {"loss": "gmpo", **_clip(settings), **of_sequences},
        "dro": lambda: {"loss": call, "beta": settings["dro_beta"], **mode},
        "cispo": lambda: {"loss": call, **_clip(settings), **mode},
    }  # fmt: skip
    return by_call[call]()


def _bypass(case, settings):
    """The old log-probs of this mode are the engine's."""
    rollout = settings["rollout_correction"]
    mode = {"aggregation": "token-mean", "correction": "bypass"}
    section = {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0} | mode
    if rollout["loss_type"] == "reinforce":
        by_level = {
            None: {"loss": "policy_gradient"},
            "token": {"loss": "cispo", "clip_low": 1.0, "clip_high": 1.0},
            "sequence": {"loss": "reinforce_is"},
        }
        section = by_level[rollout["rollout_is"]] | mode
    if rollout["rollout_rs"] is not None:
        section["correction"] = {"kind": "bypass", "reject": _rules(rollout)}
    setup = Counterpart(section, {"bypassed": True})
    if section["loss"] == "policy_gradient":
        return of_losses.value_of_logprob(case, setup)
    rejects_some = case.input == "far"
    return of_losses.kept_only(case, setup) if rejects_some and "batch_num_tokens" not in settings else setup


def _correction_of(settings):
    """One bound truncates; two drop the weights outside."""
    *low, high = (float(bound) for bound in str(settings["rollout_is_threshold"]).split("_"))
    section = {"kind": "mis" if low else "tis", "level": settings["rollout_is"], "high": high}
    section["normalize"] = settings.get("rollout_is_batch_normalize", False)
    return section | ({"low": low[0]} if low else {})


def _weights(case, settings):
    return Counterpart({"correction": _correction_of(settings)})


def _kept(case, settings):
    return Counterpart({"correction": {"kind": "none", "reject": _rules(settings)}})


def _rules(settings):
    """verl bounds k1 as engine / trainer, we as trainer / engine."""
    names = settings["rollout_rs"].split(",")
    bounds = str(settings["rollout_rs_threshold"]).split(",")
    rules = []
    for name, pair in zip(names, bounds, strict=True):
        *low, high = (float(bound) for bound in pair.split("_"))
        rules.append(
            {"rule": name, "low": 1 / high, "high": 1 / low[0]} if low else {"rule": name, "high": high}
        )
    return rules


def _advantages(case, settings):
    if case.call.endswith("optimal_token_baseline"):
        setup = Counterpart({"advantage": "otb"}, {"estimate": {}})
        by_place = case.call.startswith("optimal") and case.input == "holes"
        return of_advantages.token_baseline_by_place(case, setup) if by_place else setup
    names = {
        "grpo_vectorized": "grpo", "reinforce_plus_plus": "reinforce_pp", "rloo_vectorized": "rloo",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    }  # fmt: skip
    section, how = {"advantage": names.get(case.call, case.call)}, {"estimate": {}}
    if "norm_adv_by_std_in_grpo" in settings:
        section["std"] = "group" if settings["norm_adv_by_std_in_grpo"] else "none"
        how["estimate"] = {"std": section["std"]}
    if case.call == "gdpo":
        section["whiten"] = True
        how["weights"] = {"part0": 1.0, "part1": 0.5}
    if "gamma" in settings:
        section["gamma"] = settings["gamma"]
    if "kl_coef" in settings:
        name = KL.get(settings["kl_penalty"], settings["kl_penalty"])
        section |= {"kl": {"in_reward": True, "coef": settings["kl_coef"], "estimator": name}}
    if section["advantage"].startswith("reinforce") or case.call == "gdpo":
        how.pop("estimate")  # whitened over tokens
    tolerance = 1e-5 if case.call in ("grpo_vectorized", "gdpo") else None  # float32 within
    if case.call == "grpo_vectorized" and case.input == "ragged":
        tolerance = 1e-4  # its numbers near 100 are 8e-6 apart, and the rewards differ by 0.1
    setup = Counterpart(section, how, tolerance=tolerance)
    if case.call == "gpg" and case.input != "holes":
        return of_advantages.counts_nonzero(case, setup)
    if case.call == "grpo_vectorized" and case.input == "equal" and section["std"] == "group":
        return of_advantages.float32_statistics(case, setup)
    single = section["advantage"] in ("grpo", "opo", "reinforce_pp_baseline") or case.call == "rloo"
    if case.input == "ragged" and single:
        scale = 1 / (1 + 1e-6) if section.get("std") == "group" else 1.0
        return of_advantages.group_of_one(case, setup, scale=scale)
    if settings.get("kl_penalty") == "low_var_kl" and case.input == "far":
        return of_advantages.by_hand(case, setup, "clamps the KL of a token at 10", max_kl=10.0)
    return setup


def _kl(case, settings):
    name = settings["kl_penalty"]
    setup = Counterpart({"kl": {"estimator": KL.get(name, name)}})
    clamps = setup.section["kl"]["estimator"].startswith("k3") and case.input == "extreme"
    return of_advantages.clamped_kl(case, setup) if clamps else setup


def _aggregation(case, settings):
    how = {"max_tokens": settings["loss_scale_factor"]}
    if "batch_num_tokens" in settings:
        how |= {"num_tokens": settings["batch_num_tokens"], "num_sequences": settings["global_batch_size"]}
    return Counterpart({"aggregation": settings["loss_agg_mode"]}, how)


def _metrics(case, settings):
    return Counterpart()


def _kl_control(case, settings):
    how = {"start": settings["kl_coef"], "target": settings["target_kl"], "observed": settings["kl"]}
    return Counterpart(how=how | {"gain": settings["n_steps"] / settings["horizon"]})


def _logprobs(case, settings):
    return Counterpart(how={"entropy": case.call.startswith("entropy")})
