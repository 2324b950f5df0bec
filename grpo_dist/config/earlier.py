"""The section `algorithm` of versions in which it was a flat list of keys, read from their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.base import member_called, members

_ADVANTAGE = {
    "std": "std", "advantage_eps": "eps", "pass_k": "k", "turn_discount": "discount", "gamma": "gamma",
    "whiten_advantages": "whiten",
}  # fmt: skip


def translate_algorithm(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved flat section as it is written now, with all defaults; any other as it is.

    Null was the default of the loss or the estimator. Raises ValueError where the result is no configuration.
    """
    if "policy_loss" not in old:
        return dict(old)
    section: Any = {key: value for key, value in old.items() if value is not None}
    kwargs, fields = section.pop("kwargs", {}), AlgorithmConfig.model_fields

    def chosen(key: str, name: str, settings: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
        member = member_called(members(fields[key].annotation), name)
        assert member is not None, "any other name is that of user-supplied code"
        values = {**settings, "kwargs": arguments or {}}
        return {"name": name} | {k: v for k, v in values.items() if k in member.model_fields}

    advantage = {now: section[was] for was, now in _ADVANTAGE.items() if was in section}
    loss = {key: value for key, value in section.items() if key not in fields}
    new = {key: value for key, value in section.items() if key in fields}
    new["advantage"] = chosen("advantage", section["advantage"], advantage, kwargs.get("advantage"))
    new["loss"] = chosen("loss", section["policy_loss"], loss, kwargs.get("policy_loss"))
    new["aggregation"] = chosen("aggregation", section["aggregation"], {}, kwargs.get("aggregation"))
    estimator = {"name": section["kl"]["estimator"]}
    if "kl" in kwargs:
        estimator["kwargs"] = kwargs["kl"]
    in_reward = section.get("add_token_level_kl", False)
    new["kl"] = section["kl"] | {"estimator": estimator, "in_reward": in_reward}
    correction = {key: value for key, value in section["correction"].items() if value is not None}
    kind = "bypass" if section.get("old_logprobs") == "rollout" else correction.pop("kind", "tis")
    if kind in ("none", "bypass"):
        correction = {key: value for key, value in correction.items() if key in ("veto", "reject")}
    new["correction"] = correction | {"kind": kind}
    control = section.get("adaptive_entropy", {})
    steered = {"kind": "adaptive", **control} if control.get("target") is not None else {}
    new["entropy"] = steered | {"coef": section.get("entropy_coef", 0.0)}
    if (norm := section.get("reward_norm", "none")) != "none":
        shift, scale = section.get("reward_shift"), section.get("reward_scale")
        steps = {"shift": _applies(shift, scale), "scale": _applies(scale, shift)}
        new["reward_norm"] = {"name": norm, "eps": section.get("advantage_eps", 1e-6)} | steps
    if section.get("process_coef"):
        weights = {"coef": section["process_coef"], "outcome_coef": section.get("outcome_coef", 1.0)}
        new["process"] = weights
    return AlgorithmConfig.model_validate(new).model_dump(mode="json")


def _applies(step: bool | None, other: bool | None) -> bool:
    """Return whether a step of the normalisation applied: true meant "only this one", both false both."""
    if step is None:
        return not other
    return step or other is False
