"""Numbers of OpenRLHF: openrlhf/models/loss.py and utils.py, trainer/ppo_utils, trainer/ray/ppo_actor.py."""

from types import SimpleNamespace
from typing import ClassVar

import torch

from tests.algorithms.peers.recording.source import Settings, definitions

COMMIT = "3c3be6234e0cb353e76bb8019947db9dfe99fca7"
F64, F32 = torch.float64, torch.float32
LOSSES = ("plain", "holes", "short", "far")
REWARDS = ("plain", "holes", "short", "far", "equal", "binary")


def record(root, cases):
    peer = _load(root / "openrlhf")
    for part in (_losses, _corrections, _objectives, _advantages, _others):
        part(cases, peer)


def _load(root):
    utils = definitions(
        root / "models/utils.py", "compute_approx_kl", "compute_reward", "masked_mean",
        "log_probs_from_logits",
        "_logsumexp_by_chunk",
    )  # fmt: skip
    losses = definitions(
        root / "models/loss.py", "PolicyLoss", "aggregate_loss", masked_mean=utils.masked_mean
    )
    step = definitions(
        root / "trainer/ray/ppo_actor.py", "training_step", masked_mean=utils.masked_mean,
        compute_approx_kl=utils.compute_approx_kl, aggregate_loss=losses.aggregate_loss,
        fields=lambda _: [], Experience=None,
    )  # fmt: skip
    maker = definitions(
        root / "trainer/ppo_utils/experience_maker.py",
        *("compute_advantages_and_returns", "get_cumulative_returns"),
        compute_reward=utils.compute_reward, apply_length_penalties=lambda *_: None, logger=_Logger,
    )  # fmt: skip
    lengths = definitions(
        root / "trainer/ppo_utils/length_penalty.py", "apply_overlong_penalty", "apply_stop_properly_penalty"
    )
    control = definitions(root / "trainer/ppo_utils/kl_controller.py", "AdaptiveKLController")
    return SimpleNamespace(
        utils=utils, losses=losses, step=step, maker=maker, lengths=lengths, control=control
    )


class _Logger:
    warning = print


def _loss(peer, settings, x, **batch):
    loss, clipped, _, _ = peer.losses.PolicyLoss(**settings)(
        x["now"], x["old"], x["advantages"], x["mask"], rollout_log_probs=x["engine"], **batch
    )
    return loss, {"clip_share": clipped}


def _record(cases, peer, settings, names, dtype=F64, **batch):
    how = settings | batch
    for name in names:
        cases.loss("PolicyLoss", how, name, lambda x: _loss(peer, settings, x, **batch), dtype)


def _losses(cases, peer):
    for own in (
        {"clip_eps_low": 0.2, "clip_eps_high": 0.2}, {"clip_eps_low": 0.2, "clip_eps_high": 0.28},
        {"dual_clip": 3.0}, {"dual_clip": 1.5},
    ):  # fmt: skip
        for by_token in (True, False):
            _record(
                cases,
                peer,
                own | {"token_level_loss": by_token},
                LOSSES if by_token else LOSSES[:2] + LOSSES[3:],
            )
            _record(cases, peer, own | {"token_level_loss": by_token}, ("far",), F32)
    _record(cases, peer, {"token_level_loss": True}, ("extreme", "empty"))
    for by_token in (True, False):
        own = {"token_level_loss": by_token}
        _record(cases, peer, own, ("holes", "empty"), batch_num_tokens=50.0, global_batch_size=12.0)
    for own in ({"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}, {"clip_eps_low": 0.2, "clip_eps_high": 0.2}):
        _record(cases, peer, own | {"policy_loss_type": "gspo"}, ("plain", "holes", "far"))
        engine = {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.5, 5.0]}
        _record(cases, peer, own | {"policy_loss_type": "gspo"} | engine, ("holes", "far"))


def _corrections(cases, peer):
    for kind in ("tis", "icepop", "seq-mask-tis"):
        for bounds in ([0.5, 5.0], [0.9, 1.2]):
            for by_token in (True, False):
                settings = {
                    "token_level_loss": by_token, "enable_vllm_is_correction": True,
                    "vllm_is_truncated_threshold": bounds, "vllm_is_correction_type": kind,
                }  # fmt: skip
                _record(cases, peer, settings, ("plain", "holes", "far"))


def _objectives(cases, peer):
    for kl in ("k1", "k2", "k3"):
        for by_token in (True, False):
            settings = {
                "kl_estimator": kl, "kl_coef": 0.05, "entropy_coef": 0.01, "token_level_loss": by_token,
            }  # fmt: skip
            for name in ("plain", "holes", "far"):
                cases.loss("training_step", settings, name, lambda x, s=settings: _objective(peer, s, x))


def _objective(peer, settings, x):
    found = []
    kl = Settings(use_loss=True, init_coef=settings["kl_coef"], estimator=settings["kl_estimator"])
    how = Settings(
        algo=Settings(kl=kl), actor=Settings(entropy_coef=settings["entropy_coef"]),
        train=Settings(dynamic_batch_enable=False),
    )  # fmt: skip
    strategy = SimpleNamespace(
        backward=lambda loss, *_: found.append(loss), optimizer_step=lambda *_, **__: None,
        get_grad_norm=lambda _: 0.0, ring_attn_group=None,
    )  # fmt: skip
    loss = peer.losses.PolicyLoss(token_level_loss=settings["token_level_loss"])
    own = SimpleNamespace(
        actor=_Actor(x), args=how, actor_loss_fn=loss, aux_loss=False, strategy=strategy, ema_model=None,
        actor_optim=None, actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
    )  # fmt: skip
    sampled = SimpleNamespace(
        sequences=None, attention_mask=None, action_mask=x["mask"], action_log_probs=x["old"],
        advantages=x["advantages"], base_action_log_probs=x["reference"], rollout_log_probs=x["engine"],
        info={},
    )  # fmt: skip
    batch = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
    peer.step.training_step(own, sampled, settings["kl_coef"], 0, batch)
    return found[0]


class _Actor:
    is_vlm: ClassVar[bool] = False

    def __init__(self, x):
        self._x = x

    def train(self):
        """Do nothing."""

    def __call__(self, *_, **__):
        return self._x["now"], SimpleNamespace(entropy=self._x["entropy"])


def _advantages(cases, peer):
    for estimator in ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"):
        for name in REWARDS:
            _advantage(cases, peer, {"estimator": estimator}, name)
        for kl in ("k1", "k2", "k3"):
            _advantage(cases, peer, {"estimator": estimator, "kl_estimator": kl, "kl_coef": 0.1}, "holes")
        _advantage(cases, peer, {"estimator": estimator, "kl_estimator": "k1", "kl_coef": 0.1}, "far")
        _advantage(cases, peer, {"estimator": estimator, "clip_range": [-1.0, 1.0]}, "far")
    for name in ("plain", "binary"):
        _advantage(cases, peer, {"estimator": "reinforce", "gamma": 0.9}, name)
        _advantage(cases, peer, {"estimator": "reinforce", "no_std_norm": True}, name)
        _advantage(cases, peer, {"estimator": "reinforce_baseline", "no_std_norm": True}, name)
    _advantage(cases, peer, {"estimator": "reinforce", "gamma": 0.9}, "holes")
    own = {"estimator": "reinforce", "gamma": 0.95, "kl_estimator": "k1", "kl_coef": 0.1}
    _advantage(cases, peer, own, "plain")


def _advantage(cases, peer, settings, name):
    x = cases.of(name)
    how = Settings(
        algo=Settings(advantage=Settings(
            estimator=settings["estimator"], gamma=settings.get("gamma", 1.0), lambd=1.0,
            no_std_norm=settings.get("no_std_norm", False),
        )),
        rollout=Settings(n_samples_per_prompt=len(x["mask"]) // (int(x["groups"].max()) + 1)),
        reward=Settings(clip_range=settings.get("clip_range")),
    )  # fmt: skip
    kl = torch.zeros_like(x["engine"])
    if "kl_coef" in settings:
        kl = peer.utils.compute_approx_kl(x["engine"], x["reference"], settings["kl_estimator"])
    own = SimpleNamespace(
        strategy=SimpleNamespace(args=how), advantage_estimator=settings["estimator"],
        kl_ctl=SimpleNamespace(value=settings.get("kl_coef", 0.0)),
        get_cumulative_returns=lambda *given: peer.maker.get_cumulative_returns(None, *given),
    )  # fmt: skip
    sampled = SimpleNamespace(
        index=list(range(len(x["mask"]))), rewards=x["rewards"], kl=kl, action_mask=x["mask"], info={}
    )
    (found,) = peer.maker.compute_advantages_and_returns(own, [sampled])
    out = {"advantages": found.advantages * x["mask"]}
    cases.add("advantages", "compute_advantages_and_returns", settings, name, out)


def _others(cases, peer):
    for kl in ("k1", "k2", "k3"):
        for name in ("plain", "far", "extreme"):
            x = cases.of(name, F32)  # it computes in float32 whatever it is given
            x["now"].requires_grad_()
            value = peer.utils.compute_approx_kl(x["now"], x["reference"], kl)
            value.sum().backward()
            out = {"value": value, "grad": x["now"].grad}
            cases.add("kl", "compute_approx_kl", {"kl_estimator": kl}, name, out, F32)
    for by_token in (True, False):
        for name in ("plain", "holes", "short", "empty"):
            settings = {"token_level_loss": by_token, "loss": "now"}
            cases.loss(
                "aggregate_loss", settings, name,
                lambda x, t=by_token: peer.losses.aggregate_loss(x["now"], x["mask"], t), kind="aggregation",
            )  # fmt: skip
    for target, horizon, steps in ((0.1, 10000, 256), (6.0, 100, 100)):
        cases.kl_control(peer.control.AdaptiveKLController, target, horizon, steps)
    _length_penalties(cases, peer)
    x = cases.of("logits")
    for temperature in (1.0, 0.7):
        logits = x["logits"].clone().requires_grad_()
        scaled = logits * 1.0  # it divides in place
        value = peer.utils.log_probs_from_logits(scaled, x["targets"], temperature)
        (grad,) = torch.autograd.grad(value.sum(), logits)
        settings = {"temperature": temperature}
        cases.add("logprobs", "log_probs_from_logits", settings, "logits", {"value": value, "grad": grad})


def _length_penalties(cases, peer):
    lengths = [1, 10, 14, 15, 16, 19, 20, 21, 80, 90, 99, 100, 120]
    for longest, cache, factor in ((20, 5, 1.0), (100, 20, 0.5)):
        sampled = SimpleNamespace(
            response_length=torch.tensor(lengths), rewards=torch.zeros(len(lengths)).double()
        )
        peer.lengths.apply_overlong_penalty([sampled], longest, cache, factor)
        settings = {
            "max_new_tokens": longest, "overlong_buffer_len": cache, "overlong_penalty_factor": factor,
            "lengths": lengths,
        }  # fmt: skip
        cases.add("overlong", "apply_overlong_penalty", settings, None, {"rewards": sampled.rewards})
