"""Numbers of ROLL: roll/utils/functionals.py, train_infer_corrections.py, the workers of its pipelines."""

from types import SimpleNamespace
from typing import ClassVar

import torch

from tests.algorithms.peers.recording.source import Settings, definitions

COMMIT = "8eb27cc2dc34c4d1310b169d9b86d339004d811a"
F64, F32 = torch.float64, torch.float32
LOSSES = ("plain", "holes", "short", "far")
REWARDS = ("plain", "holes", "short", "far", "equal", "binary")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DEFAULTS = {
    "importance_sampling": "token", "pg_clip": 0.2, "pg_clip_low": 0.2, "pg_clip_high": 0.28,
    "use_pg_clip_range": False, "dual_clip_loss": False, "loss_agg_mode": "seq-mean-token-mean",
    "use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_loss_coef": 0.0, "rl_loss_coef": 1.0,
    "difficulty_loss_weight": False, "length_loss_weight": False, "enable_old_logprobs_recompute": False,
    "ratio_type": "token",
}  # fmt: skip
NO_WEIGHT = {"enabled": False, "weight_type": "token", "upper_bound": 1.2, "detach": True}
FILTER = {
    "enabled": True, "agg_type": "token", "ratio_enabled": True, "ratio_low": 0.8, "ratio_high": 1.2,
    "diff_enabled": False, "diff_low": -0.2, "diff_high": 0.2,
}  # fmt: skip


def record(root, cases):
    peer = _load(root / "roll")
    for part in (_clipped, _variants, _corrected, _corrections, _reward_norm, _advantages, _others):
        part(cases, peer)


def _load(root):
    functions = definitions(
        root / "utils/functionals.py",
        *("RunningMoments", "compute_approx_kl", "log_probs_from_logits", "entropy_from_logits", "agg_loss"),
        *("masked_mean", "masked_sum", "masked_var", "masked_whiten", "compute_reinforce_return"),
        *("expand_to_token_level", "reward_norm", "compute_token_reward", "compute_advantage"),
        *("reward_postprocess", "compute_clip_fraction"), logger=None,
    )  # fmt: skip
    segments = definitions(root / "pipeline/agentic/utils.py", "compute_segment_masked_mean")
    corrections = definitions(
        root / "utils/train_infer_corrections.py",
        *("_compute_all_granularity", "compute_train_infer_correction"),
        *("_infer_global_valid_samples_from_mask", "_infer_global_valid_tokens_from_mask"),
        **{name: getattr(functions, name) for name in ("masked_mean", "masked_sum", "agg_loss")},
        **vars(segments),
    )  # fmt: skip
    given = {name: getattr(functions, name) for name in ("masked_mean", "agg_loss", "compute_approx_kl")}
    given |= {"compute_train_infer_correction": corrections.compute_train_infer_correction}
    given |= vars(segments) | {"current_platform": SimpleNamespace(device_type="cpu")}
    workers = {}
    for name, path in (
        ("ActorWorker", "rlvr/actor_worker.py"), ("ActorPGWorker", "rlvr/actor_pg_worker.py"),
        ("agentic", "agentic/agentic_actor_pg_worker.py"),
    ):  # fmt: skip
        cls = "ActorWorker" if name == "agentic" else name
        base = workers.get("ActorWorker", _Base) if name == "ActorPGWorker" else _Base
        bases = {"ActorWorker": base} if name == "ActorPGWorker" else {"BaseActorWorker": base}
        found = definitions(
            root / "pipeline" / path, cls, **given, **bases,
            get_episode_scores=lambda data: data.batch["scores"],
        )  # fmt: skip
        workers[name] = getattr(found, cls)
    control = definitions(root / "utils/kl_controller.py", "AdaptiveKLController", "FixedKLController")
    return SimpleNamespace(
        functions=functions, segments=segments, corrections=corrections, workers=workers, control=control
    )


class _Base:
    """Stands for the worker on a GPU: its model gives the current log-probs."""

    logger: ClassVar[object] = SimpleNamespace(info=lambda _: None, warning=print)

    def __init__(self, pipeline_config=None, x=None):
        if x is not None:
            self.pipeline_config = pipeline_config
            self.strategy = SimpleNamespace(
                op_compute_log_probs=lambda **_: x["now"],
                op_compute_entropy=lambda logits, attention_mask: x["entropy"],
            )
            self.get_old_log_probs_with_cache = lambda data, own: x["old"]


class _Batch(dict):
    def size(self):
        return self["batch_size"]


def _correction_config(settings):
    weight = NO_WEIGHT | settings.get("is_weight", {})
    filters = [Settings(FILTER | own) for own in settings.get("filters", [])]
    return Settings(is_weight=Settings(weight), filters=filters)


def _loss(peer, worker, settings, x):
    rows, tokens = float((x["mask"].sum(dim=1) > 0).sum()), float(x["mask"].sum())
    actor = Settings(
        {k: v for k, v in settings.items() if k.startswith(("pg_variant", "tis", "topr", "cispo", "kimi"))}
    )
    how = Settings(
        DEFAULTS | settings | {"train_infer_correction": _correction_config(settings), "actor_train": actor}
    )
    own = peer.workers[worker](pipeline_config=how, x=x)
    own._pg_config_cache = {**actor}
    batch = Settings(
        response_mask=torch.cat([torch.zeros(len(x["mask"]), 1).long(), x["mask"]], dim=1),
        ref_log_probs=x["reference"], advantages=x["advantages"], infer_logprobs=x["engine"], input_ids=None,
        scores=x["rewards"],
    )  # fmt: skip
    data = SimpleNamespace(
        batch=batch, non_tensor_batch={},
        meta_info={
            "batch_num_tokens": {"response_mask": tokens}, "global_valid_samples": {"response_mask": rows},
        },
    )  # fmt: skip
    return own.loss_func(data, None)[0]


def _record(cases, peer, worker, settings, names, dtype=F64):
    for name in names:
        cases.loss(f"{worker}.loss_func", settings, name, lambda x: _loss(peer, worker, settings, x), dtype)


def _clipped(cases, peer):
    for own in (
        {},
        {"use_pg_clip_range": True},
        {"dual_clip_loss": True},
        {"pg_clip": 0.1, "dual_clip_loss": True},
    ):
        _record(cases, peer, "ActorWorker", own, LOSSES)
        _record(cases, peer, "ActorWorker", own, ("far",), F32)
    for mode in MODES:
        _record(cases, peer, "ActorWorker", {"loss_agg_mode": mode}, ("plain", "holes", "empty"))
        kl = {"loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_loss_coef": 0.01}
        _record(cases, peer, "ActorWorker", kl, ("plain", "holes"))
    for clip in (0.2, 0.001):
        own = {"importance_sampling": "seq", "pg_clip": clip}
        _record(cases, peer, "ActorWorker", own, ("plain", "holes", "far"))
    _record(cases, peer, "ActorWorker", {"use_kl_loss": True, "kl_loss_coef": 0.05}, ("extreme",))
    _record(cases, peer, "ActorWorker", {"length_loss_weight": True}, ("plain",))


def _variants(cases, peer):
    variants = (
        {"pg_variant": "vanilla"}, {"pg_variant": "ppo"}, {"pg_variant": "tis"},
        {"pg_variant": "tis", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0}, {"pg_variant": "topr"},
        {"pg_variant": "cispo"},
        {"pg_variant": "cispo", "cispo_epsilon_low": 0.2, "cispo_epsilon_high": 0.28,
        "cispo_use_unified_mask": True},
        {"pg_variant": "kimi15"}, {"pg_variant": "kimi15", "kimi15_tau": 1.0},
    )  # fmt: skip
    for own in variants:
        _record(cases, peer, "ActorPGWorker", own, LOSSES)
    for own in variants[2::3]:
        _record(cases, peer, "ActorPGWorker", own | {"loss_agg_mode": "seq-mean-token-sum"}, ("holes",))
    for own in ({"pg_variant": "ppo", "ratio_type": "segment"},):
        _record(cases, peer, "agentic", own, ("plain", "holes"))


def _corrected(cases, peer):
    for level in ("token", "segment", "geometric", "sequence"):
        for bound in (1.2, 3.0):
            weight = {"is_weight": {"enabled": True, "weight_type": level, "upper_bound": bound}}
            _record(cases, peer, "ActorWorker", weight, ("holes", "far"))
        own = {"filters": [{"agg_type": level}]}
        for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
            _record(cases, peer, "ActorWorker", own | {"loss_agg_mode": mode}, ("holes", "far"))


def _corrections(cases, peer):
    for level in ("token", "segment", "geometric", "sequence"):
        for bound in (1.1, 3.0):
            own = {"is_weight": {"enabled": True, "weight_type": level, "upper_bound": bound}}
            _correction(cases, peer, own, ("plain", "holes", "far"), "weights")
        for low, high in ((0.8, 1.2), (0.3, 4.0)):
            own = {"filters": [{"agg_type": level, "ratio_low": low, "ratio_high": high}]}
            _correction(cases, peer, own, ("plain", "holes", "far"), "kept")
        difference = {"ratio_enabled": False, "diff_enabled": True, "diff_low": -0.05, "diff_high": 0.05}
        _correction(cases, peer, {"filters": [{"agg_type": level} | difference]}, ("holes", "far"), "kept")
    several = [
        {"agg_type": "geometric", "ratio_low": 0.7, "ratio_high": 1.4},
        {"ratio_low": 0.5, "ratio_high": 2.0},
    ]
    _correction(cases, peer, {"filters": several}, ("holes", "far"), "kept")


def _correction(cases, peer, settings, names, kind):
    for name in names:
        x = cases.of(name)
        weights, kept, _ = peer.corrections.compute_train_infer_correction(
            _correction_config(settings), x["mask"], x["old"], x["engine"]
        )
        out = {"weights": weights * x["mask"]} if kind == "weights" else {"kept": (kept * x["mask"]).long()}
        cases.add(kind, "compute_train_infer_correction", settings, name, out)


def _reward_norm(cases, peer):
    kinds = (
        ("group", "group"), ("group", "batch"), ("group", None), ("batch", "batch"), ("batch", None),
        (None, "batch"), ("group", "running"), ("running", "running"), ("running", None), (None, "running"),
        (None, None),
    )  # fmt: skip
    for mean, std in kinds:
        for name in REWARDS:
            settings = {"norm_mean_type": mean, "norm_std_type": std}
            x = cases.of(name)
            size = len(x["mask"]) // (int(x["groups"].max()) + 1)
            control = {"domain": peer.functions.RunningMoments()}
            if "running" in (mean, std):
                settings["earlier"] = [[0.5, -1.0, 2.0], [0.25, 0.75]]
                for own in settings["earlier"]:
                    control["domain"].update(torch.tensor(own, dtype=x["rewards"].dtype))
            found = peer.functions.reward_norm(x["rewards"], size, control, mean, std)
            cases.add("rewards", "reward_norm", settings, name, {"rewards": found})


def _advantages(cases, peer):
    for own in (
        {}, {"whiten_advantages": True}, {"advantage_clip": 0.8}, {"whiten_advantages": True,
        "advantage_clip": 1.0},
        {"gamma": 0.9}, {"kl_penalty": "kl", "kl_coef": 0.1}, {"kl_penalty": "k3", "kl_coef": 0.1},
        {"kl_penalty": "mse", "kl_coef": 0.1, "whiten_advantages": True},
    ):  # fmt: skip
        for estimator in ("reinforce", "grpo"):
            for name in ("plain", "holes", "far"):
                if estimator == "reinforce" or own in ({}, {"whiten_advantages": True}):
                    _advantage(cases, peer, own | {"adv_estimator": estimator}, name)
    for clip in (0.5, 10):
        _advantage(cases, peer, {"adv_estimator": "grpo", "reward_clip": clip}, "far")


def _advantage(cases, peer, settings, name):
    """Run the pipeline's steps: rewards normalised, put on the last token, summed up, whitened, clipped."""
    x = cases.of(name)
    size = len(x["mask"]) // (int(x["groups"].max()) + 1)
    generating = Settings(generating_args=Settings(num_return_sequences=size))
    how = Settings(
        {
            "norm_mean_type": None, "norm_std_type": None, "reward_clip": None, "kl_penalty": "kl",
            "add_token_level_kl": "kl_coef" in settings, "actor_infer": generating,
        }
        | settings
    )  # fmt: skip
    mask = torch.cat([torch.zeros(len(x["mask"]), 1).long(), x["mask"]], dim=1)
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    batch = _Columns(
        response_level_rewards=x["rewards"], attention_mask=mask, position_ids=columns, response_mask=mask,
        old_log_probs=x["engine"], ref_log_probs=x["reference"],
    )  # fmt: skip
    data = SimpleNamespace(batch=batch, meta_info={})
    functions = peer.functions
    data, _ = functions.reward_postprocess(data, how, {})
    if "kl_coef" in settings:
        how["reward_clip"] = None
    data, _ = functions.compute_token_reward(
        data, how, peer.control.FixedKLController(settings.get("kl_coef", 0.0))
    )
    found = functions.compute_advantage(
        data, settings.get("gamma", 1.0), 1.0, settings["adv_estimator"],
        advantage_clip=settings.get("advantage_clip"),
        whiten_advantages=settings.get("whiten_advantages", False),
    )  # fmt: skip
    cases.add("advantages", "compute_advantage", settings, name, {"advantages": found.batch["advantages"]})


class _Columns(Settings):
    @property
    def batch_size(self):
        return (len(self["response_mask"]),)


def _others(cases, peer):
    for kl in ("kl", "abs", "mse", "k3"):
        for name in ("plain", "far", "extreme"):
            x = cases.of(name)
            x["now"].requires_grad_()
            value = peer.functions.compute_approx_kl(x["now"], x["reference"], None, kl)
            value.sum().backward()
            cases.add(
                "kl", "compute_approx_kl", {"kl_penalty": kl}, name, {"value": value, "grad": x["now"].grad}
            )
    for mode in MODES:
        for name in ("plain", "holes", "short", "empty"):
            settings = {"loss_agg_mode": mode, "loss_mat": "now"}
            cases.loss(
                "agg_loss", settings, name, lambda x, m=mode: peer.functions.agg_loss(x["now"], x["mask"], m),
                kind="aggregation",
            )  # fmt: skip
    for name in ("plain", "holes"):
        x = cases.of(name)
        found = peer.functions.masked_whiten(x["advantages"], x["mask"]) * x["mask"]
        cases.add("whiten", "masked_whiten", {"values": "advantages"}, name, {"values": found})
        found = peer.segments.compute_segment_masked_mean(x["now"], x["mask"])
        cases.add("segments", "compute_segment_masked_mean", {"values": "now"}, name, {"values": found})
    x = cases.of("logits", F32)  # it computes in float32 whatever it is given
    x["logits"].requires_grad_()
    for call, value in (
        ("log_probs_from_logits", peer.functions.log_probs_from_logits(x["logits"], x["targets"])),
        ("entropy_from_logits", peer.functions.entropy_from_logits(x["logits"])),
    ):
        (grad,) = torch.autograd.grad(value.sum(), x["logits"])
        cases.add("logprobs", call, {}, "logits", {"value": value, "grad": grad}, F32)
