"""Numbers of verl: verl/trainer/ppo/core_algos.py, rollout_corr_helper.py, workers/utils/losses.py."""

import os
import sys
import types
from enum import Enum
from types import SimpleNamespace

import numpy as np
import torch

from tests.algorithms.peers.recording import verl_advantages
from tests.algorithms.peers.recording.source import Settings, definitions

COMMIT = "1dda039b9c6311889a9c9a26040677e1254814f9"
F64, F32 = torch.float64, torch.float32
LOSSES = ("plain", "holes", "short", "far", "empty")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Config(Settings):
    """Stands for ActorConfig and AlgoConfig."""


def record(root, cases):
    peer = _load(root / "verl")
    parts = (
        _losses, _objectives, verl_advantages.record, _kl,
        _aggregation, _correction, _rejection, _bypass, _others,
    )  # fmt: skip
    for part in parts:
        part(cases, peer)


def _load(root):
    masked = definitions(
        root / "utils/torch_functional.py",
        *("masked_sum", "masked_mean", "masked_var", "masked_whiten", "entropy_from_logits"),
        *("logprobs_from_logits_naive", "gather_from_labels"),
    )
    groups = definitions(
        root / "utils/groupwise.py", *("as_torch_index", "group_mean_std"),
        *("_resolve_device", "_to_1d_numpy_object_array"), Any=object, os=os,
        get_device_name=lambda: "cpu",
    )  # fmt: skip
    helper = definitions(
        root / "trainer/ppo/rollout_corr_helper.py",
        *("_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask"),
        *("compute_rs_metrics", "compute_rollout_correction_weights", "compute_is_metrics"),
        "compute_rollout_correction_and_rejection_mask", "compute_offpolicy_metrics",
        verl_F=masked, SAFETY_BOUND=20.0, DataProto=_Proto, **_options(),
    )  # fmt: skip
    names = [
        "grpo", "grpo_vectorized", "gdpo", "grpo_passk", "reinforce_plus_plus_baseline",
        "rloo", "opo", "reinforce_plus_plus", "remax", "gpg",
        "rloo_vectorized",
    ]  # fmt: skip
    estimators = {name: f"compute_{name}_outcome_advantage" for name in names}
    estimators |= {
        "optimal_token_baseline": "compute_optimal_token_baseline_advantage",
        "tir_optimal_token_baseline": "compute_multi_turn_optimal_token_baseline_advantage",
    }
    of_losses = [
        "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo",
        "gpg", "clip_cov", "kl_cov", "geo_mean", "dro",
        "cispo", "bypass_mode",
    ]  # fmt: skip
    losses = {name: f"compute_policy_loss_{name}" for name in of_losses}
    core = definitions(
        root / "trainer/ppo/core_algos.py", *estimators.values(), *losses.values(),
        *("compute_policy_loss_reinforce", "agg_loss", "kl_penalty", "kl_penalty_forward"),
        *("AdaptiveKLController", "compute_rewards"), verl_F=masked, ActorConfig=Config,
        AlgoConfig=type(None),
        as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std, Enum=Enum,
    )  # fmt: skip
    _importable(helper)
    by_name = {name: getattr(core, function) for name, function in losses.items()}
    ppo = definitions(
        root / "workers/utils/losses.py", "ppo_loss", no_padding_2_padding=lambda values, data: values,
        AggregationType=SimpleNamespace(SUM=0, MEAN=0), Metric=_Metric, agg_loss=core.agg_loss,
        kl_penalty=core.kl_penalty, get_policy_loss_fn=by_name.__getitem__,
    )  # fmt: skip
    return SimpleNamespace(
        masked=masked, helper=helper, core=core, losses=by_name, ppo_loss=ppo.ppo_loss,
        estimators={name: getattr(core, function) for name, function in estimators.items()},
    )  # fmt: skip


def _options():
    token = {"token_k1", "token_k2", "token_k3"}
    rest = {f"seq_{over}_{k}" for over in ("sum", "mean") for k in ("k1", "k2", "k3")}
    return {
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": token,
        "SUPPORTED_ROLLOUT_RS_OPTIONS": token | rest | {"seq_max_k2", "seq_max_k3"},
    }


def _importable(helper):
    """Let the import within a function find the helper that is loaded already."""
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        sys.modules.setdefault(name, types.ModuleType(name))
    module = types.ModuleType("verl.trainer.ppo.rollout_corr_helper")
    module.__dict__.update(vars(helper))
    sys.modules[module.__name__] = module


class _Proto:
    def __init__(self, batch):
        self.batch = batch

    @staticmethod
    def from_dict(tensors):
        return _Proto(tensors)


class _Metric:
    def __init__(self, value, aggregation):
        self.value = value

    @staticmethod
    def from_dict(values, aggregation):
        return values


class _Data(dict):
    def select(self, *names):
        return _Data({name: self[name] for name in names})

    def to_padded_tensor(self):
        return self


def _config(settings, **batch):
    base = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    names = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    own = Settings({name: settings.get(name) for name in (*names, "rollout_correction")})
    return Config(base | settings | {"policy_loss": own, "global_batch_info": batch})


LOSS_SETTINGS = {
    "vanilla": (
        {"clip_ratio": 0.2}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
        {"clip_ratio": 0.1, "clip_ratio_c": 1.5},
    ),
    "dppo_tv": ({"clip_ratio": 0.2}, {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2}),
    "dppo_kl": ({"clip_ratio": 0.05}, {"clip_ratio_low": 0.002, "clip_ratio_high": 0.01,
    "clip_ratio_c": 1.2}),
    "gspo": ({"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, {"clip_ratio": 0.2}),
    "sapo": ({"tau_pos": 1.0, "tau_neg": 1.05}, {"tau_pos": 2.0, "tau_neg": 3.0}),
    "gpg": ({},),
    "clip_cov": (
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5},
        {"clip_cov_ratio": 1.0, "clip_cov_lb": -0.3, "clip_cov_ub": 0.3, "clip_ratio": 0.1},
        {"clip_cov_ratio": 0.1, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0},
    ),
    "kl_cov": ({"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}),
    "geo_mean": ({"clip_ratio": 0.4}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "dro": ({"dro_beta": 0.1}, {"dro_beta": 1.5}),
    "cispo": ({"clip_ratio_low": 1.0, "clip_ratio_high": 0.2}, {"clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28}),
}  # fmt: skip


def _loss(peer, call, settings, x, *, weights=None, **batch):
    torch.manual_seed(0)
    mode = settings.get("loss_agg_mode", "token-mean")
    loss, metrics = peer.losses[call](
        x["old"], x["now"], x["advantages"], x["mask"], mode, _config(settings, **batch), weights
    )
    if call != "vanilla" or weights is not None:
        return loss
    shares = {"clip_share": metrics["actor/pg_clipfrac"], "dual_share": metrics["actor/pg_clipfrac_lower"]}
    return loss, shares


def _losses(cases, peer):
    for call, options in LOSS_SETTINGS.items():
        for settings in options:
            for name in LOSSES:
                cases.loss(call, settings, name, lambda x, c=call, s=settings: _loss(peer, c, s, x))
            cases.loss(call, settings, "far", lambda x, c=call, s=settings: _loss(peer, c, s, x), F32)
        first = options[0]
        if call not in ("clip_cov", "kl_cov"):
            cases.loss(call, first, "extreme", lambda x, c=call, s=first: _loss(peer, c, s, x))
        for name in ("holes", "far"):
            weighted = first | {"rollout_is": "token", "rollout_is_threshold": 2.0}
            cases.loss(
                call, weighted, name,
                lambda x, c=call, s=weighted: _loss(peer, c, s, x, weights=_weights(peer, s, x)[0]),
            )  # fmt: skip
    for call in ("vanilla", "cispo", "dro"):
        for mode in MODES[1:]:
            settings = LOSS_SETTINGS[call][0] | {"loss_agg_mode": mode}
            for name in ("holes", "far", "empty"):
                cases.loss(call, settings, name, lambda x, c=call, s=settings: _loss(peer, c, s, x))


def _objectives(cases, peer):
    for kl in ("kl", "abs", "mse", "low_var_kl", "k1+", "k3+"):
        for mode in ("token-mean", "seq-mean-token-mean"):
            settings = {
                "clip_ratio": 0.2, "loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_type": kl,
                "kl_loss_coef": 0.05, "entropy_coeff": 0.01, "loss_mode": "vanilla",
                "loss_scale_factor": None,
            }  # fmt: skip
            for name in ("plain", "holes", "far"):
                cases.loss("ppo_loss", settings, name, lambda x, s=settings: _objective(peer, s, x), F64)


def _objective(peer, settings, x):
    config = _config(settings)
    config["policy_loss"]["loss_mode"] = settings["loss_mode"]
    data = _Data(
        dp_size=1, batch_num_tokens=None, global_batch_size=None, response_mask=x["mask"],
        old_log_probs=x["old"], advantages=x["advantages"], ref_log_prob=x["reference"],
    )  # fmt: skip
    loss, _ = peer.ppo_loss(config, {"log_probs": x["now"], "entropy": x["entropy"]}, data)
    return loss


def _kl(cases, peer):
    for kl in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"):
        for name, dtype in (("plain", F64), ("far", F64), ("extreme", F64), ("plain", F32)):
            x = cases.of(name, dtype)
            x["now"].requires_grad_()
            value = peer.core.kl_penalty(x["now"], x["reference"], kl)
            value.sum().backward()
            cases.add(
                "kl", "kl_penalty", {"kl_penalty": kl}, name, {"value": value, "grad": x["now"].grad}, dtype
            )


def _aggregation(cases, peer):
    for mode in MODES:
        scales = (None, 10) if mode.endswith("norm") else (None,)
        for scale in scales:
            for batch in ({}, {"batch_num_tokens": 64, "global_batch_size": 16}):
                for name in ("plain", "holes", "short", "empty"):
                    settings = {"loss_agg_mode": mode, "loss_scale_factor": scale, **batch}
                    how = settings | {"loss_mat": "now"}
                    cases.loss(
                        "agg_loss", how, name,
                        lambda x, s=settings: peer.core.agg_loss(x["now"], x["mask"], **s),
                        kind="aggregation",
                    )  # fmt: skip


def _weights(peer, settings, x):
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    how = {name: settings[name] for name in names if name in settings}
    return peer.helper.compute_rollout_correction_weights(x["old"] - x["engine"], x["mask"], **how)


def _correction(cases, peer):
    for level in ("token", "sequence"):
        for bound in (2.0, 1.1, "0.5_2.0", "0.8_1.2"):
            for normalize in (False, True):
                settings = {
                    "rollout_is": level, "rollout_is_threshold": bound,
                    "rollout_is_batch_normalize": normalize,
                }  # fmt: skip
                for name in ("plain", "holes", "far", "empty"):
                    found, _ = _weights(peer, settings, cases.of(name))
                    cases.add(
                        "weights", "compute_rollout_correction_weights", settings, name, {"weights": found}
                    )
    for level, bound in (("token", 1e12), ("sequence", 1e12)):
        settings = {"rollout_is": level, "rollout_is_threshold": bound}
        found, _ = _weights(peer, settings, cases.of("extreme"))
        cases.add("weights", "compute_rollout_correction_weights", settings, "extreme", {"weights": found})


RULES = {
    "token_k1": ("0.9_1.1", "0.5_3.0"), "token_k2": (0.01, 0.2), "token_k3": (0.01, 0.3),
    "seq_sum_k1": ("0.7_1.4", "0.2_2.0"), "seq_sum_k2": (0.05, 1.0), "seq_sum_k3": (0.05, 1.0),
    "seq_mean_k1": ("0.95_1.1", "0.8_1.3"), "seq_mean_k2": (0.01, 0.3), "seq_mean_k3": (0.01, 0.3),
    "seq_max_k2": (0.02, 1.0), "seq_max_k3": (0.02, 1.0),
    "seq_mean_k3,token_k1": ("0.3,0.5_3.0",), "seq_max_k2,seq_sum_k1,token_k3": ("1.0,0.2_3.0,0.3",),
}  # fmt: skip


def _rejection(cases, peer):
    for rule, bounds in RULES.items():
        for bound in bounds:
            settings = {"rollout_rs": rule, "rollout_rs_threshold": bound}
            for name in ("plain", "holes", "far"):
                x = cases.of(name)
                kept, _ = peer.helper.compute_rollout_rejection_mask(
                    x["old"] - x["engine"], x["mask"], **settings
                )
                cases.add("kept", "compute_rollout_rejection_mask", settings, name, {"kept": kept.long()})


def _bypass(cases, peer):
    for kind in ("ppo_clip", "reinforce"):
        for level in (None, "token", "sequence"):
            for rule, bound in ((None, None), ("seq_mean_k3", 0.3), ("token_k1", "0.5_3.0")):
                correction = {
                    "loss_type": kind, "rollout_is": level, "rollout_rs": rule, "rollout_rs_threshold": bound,
                }  # fmt: skip
                for name in ("holes", "far"):
                    count = {"batch_num_tokens": float(np.sum(cases.inputs[name]["mask"]))}
                    settings = {"rollout_correction": correction, **count}
                    cases.loss(
                        "bypass_mode", settings, name,
                        lambda x, s=settings, c=count: _loss(peer, "bypass_mode", _inner(s), x, **c),
                    )  # fmt: skip
    settings = {
        "rollout_correction": {
            "loss_type": "ppo_clip",
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.5_3.0",
        }
    }
    for name in ("holes", "far"):
        cases.loss(
            "bypass_mode", settings, name, lambda x, s=settings: _loss(peer, "bypass_mode", _inner(s), x)
        )


def _inner(settings):
    return settings | {"rollout_correction": Settings(settings["rollout_correction"])}


def _others(cases, peer):
    for name in ("plain", "holes", "far"):
        x = cases.of(name)
        found = peer.helper.compute_offpolicy_metrics(x["old"], x["engine"], x["mask"])
        cases.add("metrics", "compute_offpolicy_metrics", {}, name, {"k3_kl": found["k3_kl"]})
    for target, horizon, steps in ((0.1, 10000, 256), (0.02, 500, 64), (6.0, 100, 100)):
        cases.kl_control(peer.core.AdaptiveKLController, target, horizon, steps)
    x = cases.of("logits")
    x["logits"].requires_grad_()
    for call, value in (
        ("logprobs_from_logits_naive", peer.masked.logprobs_from_logits_naive(x["logits"], x["targets"])),
        ("entropy_from_logits", peer.masked.entropy_from_logits(x["logits"])),
    ):
        (grad,) = torch.autograd.grad(value.sum(), x["logits"])
        cases.add("logprobs", call, {}, "logits", {"value": value, "grad": grad})
