"""Numbers of TRL: trl/trainer/grpo_trainer.py, trl/trainer/utils.py, trl/rewards/other_rewards.py."""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from tests.algorithms.peers.recording.source import Settings, definitions

COMMIT = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
F64, F32 = torch.float64, torch.float32
LOSSES = ("plain", "holes", "short", "far", "empty")
REWARDS = ("plain", "holes", "short", "far", "equal", "empty", "binary")
CLIPS = ({"epsilon": 0.2, "epsilon_high": 0.2}, {"epsilon": 0.2, "epsilon_high": 0.28})
SEQUENCE_CLIPS = ({"epsilon": 3e-4, "epsilon_high": 4e-4}, {"epsilon": 0.2, "epsilon_high": 0.2})
DEFAULTS = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.0,
    "importance_sampling_level": "token", "use_bias_correction_kl": False, "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "max_completion_length": 10, "entropy_coef": 0.0, "use_adaptive_entropy": False, "use_vllm": False,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0,
    "scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize",
    "entropy_target": 0.2, "entropy_coef_delta": 0.005, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0,
}  # fmt: skip


def record(root, cases):
    peer = _load(root / "trl")
    parts = (
        _clipped, _other_losses, _sequence_level, _masks_and_terms,
        _engine_weights, _micro_batches, _advantages, _others,
    )  # fmt: skip
    for part in parts:
        part(cases, peer)


def _load(root):
    utils = definitions(
        root / "trainer/utils.py",
        *("nanstd", "nanmax", "nanmin", "selective_log_softmax", "entropy_from_logits", "pad"),
    )
    trainer = definitions(
        root / "trainer/grpo_trainer.py",
        *("_compute_loss", "get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask"),
        "_generate_and_score_completions", nanstd=utils.nanstd, nanmax=utils.nanmax, nanmin=utils.nanmin,
        pad=utils.pad, gather_object=lambda own: own, disable_gradient_checkpointing=lambda *_: nullcontext(),
    )  # fmt: skip
    rewards = definitions(root / "rewards/other_rewards.py", "_SoftOverlongPunishment", "_RepetitionPenalty")
    return SimpleNamespace(utils=utils, trainer=trainer, rewards=rewards)


def _trainer(peer, settings, x, **further):
    """Return what the trainer's methods see of their trainer."""
    how = Settings(DEFAULTS | settings)
    processes = SimpleNamespace(
        num_processes=1, sync_gradients=True, device="cpu", process_index=0, gather=lambda own: own,
        reduce=lambda own, reduction: own, pad_across_processes=lambda own, dim, pad_index: own,
    )  # fmt: skip
    how |= {
        "args": how, "epsilon_low": how["epsilon"], "accelerator": processes,
        "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False,
        "_entropy_bonus_enabled": bool(how["entropy_coef"] or how["use_adaptive_entropy"]),
        "_entropy_window_stats": None, "_last_world_entropy": float("inf"),
        "model": SimpleNamespace(training=True), "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (x["now"], x["entropy"], None),
        "get_off_policy_mask": peer.trainer.get_off_policy_mask,
        "get_gamma_weights": peer.trainer.get_gamma_weights,
    }  # fmt: skip
    own = SimpleNamespace(**(how | further))
    own.get_high_entropy_mask = lambda *given: peer.trainer.get_high_entropy_mask(own, *given)
    return own


def _inputs(settings, x):
    none = torch.zeros(len(x["mask"]), 1, dtype=torch.long)
    old = x["engine"] if settings.get("old") == "engine" else x["old"]
    return {
        "prompt_ids": none, "prompt_mask": none, "completion_ids": torch.zeros_like(x["mask"]),
        "completion_mask": x["mask"], "advantages": x["advantages"], "old_per_token_logps": old,
        "sampling_per_token_logps": x["engine"], "ref_per_token_logps": x["reference"],
        "num_items_in_batch": x["mask"].sum(),
    }  # fmt: skip


def _loss(peer, settings, x, **further):
    return peer.trainer._compute_loss(_trainer(peer, settings, x), None, _inputs(settings, x) | further)


def _record(cases, peer, settings, names, dtypes=(F64,)):
    for name in names:
        for dtype in dtypes:
            cases.loss("_compute_loss", settings, name, lambda x: _loss(peer, settings, x), dtype)


def _clipped(cases, peer):
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
        for clip in CLIPS:
            _record(cases, peer, {"loss_type": kind, **clip}, LOSSES)
        _record(cases, peer, {"loss_type": kind, **CLIPS[0]}, ("far",), (F32,))
    for kind in ("grpo", "dapo"):
        for delta in (1.1, 1.5, 4.0):
            _record(cases, peer, {"loss_type": kind, **CLIPS[0], "delta": delta}, ("holes", "far"))


def _other_losses(cases, peer):
    names = ("plain", "holes", "short", "far")
    for high in (1.2, 5.0):
        _record(cases, peer, {"loss_type": "cispo", "epsilon_high": high}, (*names, "extreme"))
    for up, down in ((1.0, 1.05), (2.0, 3.0)):
        settings = {"loss_type": "sapo", "sapo_temperature_pos": up, "sapo_temperature_neg": down}
        _record(cases, peer, settings, names)
    _record(cases, peer, {"loss_type": "vespo"}, names)
    own = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 4.0}
    _record(cases, peer, {"loss_type": "vespo", **own}, names)


def _sequence_level(cases, peer):
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        for clip in SEQUENCE_CLIPS:
            settings = {"loss_type": kind, "importance_sampling_level": "sequence", **clip}
            _record_rows(cases, peer, settings, ("plain", "holes", "far"))
    _record_rows(cases, peer, {"loss_type": "luspo", **CLIPS[0]}, ("plain", "far"))


def _record_rows(cases, peer, settings, names):
    """The trainer has one advantage a row, which a ratio of sequences needs."""
    for name in names:
        own = settings | {"advantages": "first"}
        cases.loss(
            "_compute_loss", own, name, lambda x, s=own: _loss(peer, s, x, advantages=x["advantages"][:, 0])
        )


def _masks_and_terms(cases, peer):
    for kind in ("grpo", "dapo"):
        for share in (0.2, 0.5):
            _record(
                cases, peer, {"loss_type": kind, "top_entropy_quantile": share}, ("plain", "holes", "far")
            )
        for limit in (0.02, 0.1, 0.5):
            _record(cases, peer, {"loss_type": kind, "off_policy_mask_threshold": limit}, ("holes", "far"))
        _record(cases, peer, {"loss_type": kind, "entropy_coef": 0.01}, ("plain", "holes"))
    for kind in ("grpo", "dapo", "dr_grpo"):
        _record(cases, peer, {"loss_type": kind, "beta": 0.04}, ("plain", "holes", "far"))
    corrected = {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True}
    _record(cases, peer, corrected | {"old": "engine"}, ("plain", "holes", "far"))
    _record(cases, peer, corrected, ("holes",))


def _engine_weights(cases, peer):
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for low, high in ((None, 3.0), (0.5, 1.5)):
            settings = {
                "use_vllm": True, "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high,
            }  # fmt: skip
            for name in ("holes", "far"):
                found = _scored(peer, settings, cases.of(name))["importance_sampling_ratio"]
                cases.add("weights", "_generate_and_score_completions", settings, name, {"weights": found})
                for kind in ("grpo", "dapo"):
                    _record_weighted(cases, peer, settings | {"loss_type": kind}, name)
    plain = {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_clip_max": 1e9}
    for name in ("plain", "holes", "far"):
        _record_weighted(cases, peer, plain, name)
    both = {"use_vllm": True, "loss_type": "dapo", "importance_sampling_level": "sequence"}
    for mode in ("token_truncate", "sequence_truncate"):
        own = both | {"vllm_importance_sampling_mode": mode, "advantages": "first"}
        _record_weighted(cases, peer, own, "far", first=True)


def _record_weighted(cases, peer, settings, name, first=False):
    def compute(x):
        plain = {key: value.detach() for key, value in x.items()}
        ratio = _scored(peer, settings, plain)["importance_sampling_ratio"]
        further = {"advantages": x["advantages"][:, 0]} if first else {}
        return _loss(peer, settings, x, importance_sampling_ratio=ratio, **further)

    cases.loss("_compute_loss", settings, name, compute)


def _micro_batches(cases, peer):
    """Two halves of the rows, one after the other, as with gradient_accumulation_steps 2."""
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
        settings = {"loss_type": kind, "gradient_accumulation_steps": 2}
        for name in ("holes", "far"):
            cases.loss("_compute_loss", settings, name, lambda x, s=settings: _in_halves(peer, s, x))


def _in_halves(peer, settings, x):
    count, losses = x["mask"].sum(), []
    for rows in (slice(0, 4), slice(4, 8)):
        part = {key: value[rows] for key, value in x.items() if key != "parts"}
        own = _trainer(peer, settings, part)
        own.current_gradient_accumulation_steps = 2
        given = _inputs(settings, part) | {"num_items_in_batch": count}
        losses.append(peer.trainer._compute_loss(own, None, given))
    return sum(losses)


def _scored(peer, settings, x, rewards=None, weights=(1.0,)):
    """Return what the trainer makes of sampled completions: advantages and weights of their tokens."""
    rows, groups = len(x["mask"]), int(x["groups"].max()) + 1
    ends = (x["mask"] * torch.arange(1, x["mask"].shape[1] + 1)).amax(dim=1).clamp(min=1).tolist()
    completions = [[5] * end for end in ends]
    tools = [own[:end].tolist() for own, end in zip(x["mask"], ends, strict=True)]
    engine = [own[:end].tolist() for own, end in zip(x["engine"], ends, strict=True)]
    none = [None] * rows
    own = _trainer(
        peer, settings, x | {"now": x["old"]}, environment_factories=None, environments=None, tools=None,
        _generate=lambda prompts: ([[1]] * rows, completions, tools, none, engine, {}, None, None),
        _tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=5), pad_to_multiple_of=None,
        mask_truncated_completions=False, num_iterations=1, processing_class=_Decoder(),
        _calculate_rewards=lambda *_: x["rewards"][:, None] if rewards is None else rewards,
        num_generations=rows // groups, reward_weights=torch.tensor(weights, dtype=x["old"].dtype),
        reward_func_names=[f"reward{i}" for i in range(len(weights))], _logs=defaultdict(_Logs),
        _pending_extra_logs={}, _pending_metrics={}, log_multimodal=False, reward_funcs=list(weights),
        ref_model=None,
    )  # fmt: skip
    own.args = Settings(
        own.args, per_device_train_batch_size=rows, steps_per_generation=1, gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
    )  # fmt: skip
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(x["old"].dtype)  # it makes tensors of the engine's lists
    try:
        return peer.trainer._generate_and_score_completions(own, [{"prompt": "p"}] * rows)
    finally:
        torch.set_default_dtype(dtype)


class _Decoder:
    def batch_decode(self, ids, skip_special_tokens):
        return [""] * len(ids)


class _Logs(defaultdict):
    def __init__(self):
        super().__init__(list)

    def extend(self, own):
        """Keep nothing."""


def _advantages(cases, peer):
    for scale in ("group", "batch", "none"):
        for name in REWARDS:
            dtypes = (F64, F32) if name in ("far", "equal") else (F64,)
            for dtype in dtypes:
                _advantage(cases, peer, {"scale_rewards": scale}, name, dtype=dtype)
        for name in ("plain", "far"):
            _advantage(cases, peer, {"scale_rewards": scale, "unscored": [1, 6]}, name)
        _advantage(cases, peer, {"scale_rewards": scale, "reward_weights": [1.0, 0.5]}, "plain")
    for name in REWARDS:
        summed = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
        _advantage(cases, peer, summed, name)
    _advantage(cases, peer, summed | {"unscored": [1, 6]}, "plain")


def _advantage(cases, peer, settings, name, dtype=F64):
    x = cases.of(name, dtype)
    weights = settings.get("reward_weights", [1.0])
    rewards = (x["rewards"][:, None] if len(weights) == 1 else x["parts"].T).clone()
    rewards[settings.get("unscored", [])] = torch.nan
    found = _scored(peer, settings, x, rewards=rewards, weights=weights)["advantages"]
    cases.add("advantages", "_generate_and_score_completions", settings, name, {"advantages": found}, dtype)


def _others(cases, peer):
    for start, target in ((0.01, 0.2), (0.0, 0.9), (0.999, 2.0)):
        settings = {"entropy_coef": start, "entropy_target": target, "use_adaptive_entropy": True}
        _entropy_control(cases, peer, settings | {"entropies": [0.15, 0.2, 0.25, 1.0, 1.5, 0.1, 0.1]})
    lengths = [1, 10, 14, 15, 16, 19, 20, 21, 80, 90, 99, 100, 120]
    for longest, cache in ((20, 5), (100, 20), (16, 16)):
        found = peer.rewards._SoftOverlongPunishment(longest, cache)([[1] * n for n in lengths])
        settings = {"max_completion_len": longest, "soft_punish_cache": cache, "lengths": lengths}
        cases.add("overlong", "get_soft_overlong_punishment", settings, None, {"rewards": found})
    texts = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 1, 2], [1], [3, 3, 4, 3, 3, 4, 7], [8, 9]]
    for size, most in ((2, -1.0), (3, -0.5)):
        found = peer.rewards._RepetitionPenalty(size, most)(texts)
        settings = {"ngram_size": size, "max_penalty": most, "completions": texts}
        cases.add("repetition", "get_repetition_penalty_reward", settings, None, {"rewards": found})
    x = cases.of("logits")
    x["logits"].requires_grad_()
    for call, value in (
        ("selective_log_softmax", peer.utils.selective_log_softmax(x["logits"][None], x["targets"][None])[0]),
        ("entropy_from_logits", peer.utils.entropy_from_logits(x["logits"])),
    ):
        (grad,) = torch.autograd.grad(value.sum(), x["logits"])
        cases.add("logprobs", call, {}, "logits", {"value": value, "grad": grad})


def _entropy_control(cases, peer, settings):
    x = cases.of("plain")
    own, applied, coefs = _trainer(peer, settings, x), [], []
    for entropy in settings["entropies"]:
        x["entropy"] = torch.full_like(x["now"], entropy).requires_grad_()
        own._get_per_token_logps_and_entropies = lambda *_, **__: (x["now"], x["entropy"], None)
        loss = peer.trainer._compute_loss(own, None, _inputs(settings, x))
        (slope,) = torch.autograd.grad(loss, x["entropy"])
        applied.append(-slope.sum())
        coefs.append(own.entropy_coef)
    cases.add("entropy_control", "_compute_loss", settings, None, {"applied": applied, "coefs": coefs})
