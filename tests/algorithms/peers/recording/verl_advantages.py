"""Advantages of verl: the estimators of verl/trainer/ppo/core_algos.py."""

import torch

from tests.algorithms.peers.recording.source import Settings

F64, F32 = torch.float64, torch.float32
REWARDS = ("plain", "holes", "short", "far", "equal", "ragged", "binary")


def record(cases, peer):
    for call in peer.estimators:
        for settings in _advantage_settings(call):
            for name in REWARDS:
                if (call == "grpo_passk" and name == "ragged") or (call == "gdpo" and name == "ragged"):
                    continue
                if call.endswith("baseline") and "token" in call and name not in ("plain", "holes", "short"):
                    continue
                for dtype in (F64, F32) if (call, name) in (("grpo", "equal"), ("grpo", "far")) else (F64,):
                    found = _advantage(peer, call, settings, cases.of(name, dtype))
                    cases.add("advantages", call, settings, name, {"advantages": found}, dtype)


def _advantage_settings(call):
    if call in ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"):
        yield {"norm_adv_by_std_in_grpo": True}
        yield {"norm_adv_by_std_in_grpo": False}
    elif call == "reinforce_plus_plus":
        yield {"gamma": 1.0}
        yield {"gamma": 0.9}
        for kl in ("kl", "mse", "low_var_kl"):
            yield {"gamma": 0.95, "kl_penalty": kl, "kl_coef": 0.1}
    else:
        yield {}


def _advantage(peer, call, settings, x):
    rewards, mask, index = _token_rewards(x), x["mask"].to(x["now"].dtype), x["groups"].numpy()
    if "kl_penalty" in settings:
        kl = peer.core.kl_penalty(x["engine"], x["reference"], settings["kl_penalty"]) * mask
        rewards = rewards - settings["kl_coef"] * kl
    how = {"config": Settings({"norm_adv_by_std_in_grpo": True, "gamma": 1.0} | settings)}
    if "norm_adv_by_std_in_grpo" in settings and call != "grpo_passk":
        how["norm_adv_by_std_in_grpo"] = settings["norm_adv_by_std_in_grpo"]
    if call == "remax":
        how["reward_baselines"] = x["greedy"]
    if call == "gdpo":
        parts = {f"part{i}": own.numpy() for i, own in enumerate(x["parts"])}
        weights = [1.0, 0.5]
        how["config"] |= {"gdpo_reward_keys": list(parts), "gdpo_reward_weights": weights}
        attended = torch.ones(len(mask), 2 + mask.shape[1]).long()
        how["non_tensor_batch"] = parts
        how["batch"] = {"prompts": torch.zeros(len(mask), 2), "attention_mask": attended}
    if call.endswith("optimal_token_baseline"):
        how |= {
            "old_log_probs": x["old"],
            "sum_pi_squared": x["old"].exp().square(),
        }
    if call != "remax" and call != "reinforce_plus_plus":
        how["index"] = index
    return peer.estimators[call](token_level_rewards=rewards, response_mask=mask, **how)[0]


def _token_rewards(x):
    last = (x["mask"] * torch.arange(1, x["mask"].shape[1] + 1)).argmax(dim=1)
    out = torch.zeros_like(x["now"])
    out[torch.arange(len(out)), last] = x["rewards"]
    return out
