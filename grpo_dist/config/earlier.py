"""Configurations of earlier versions, read from their checkpoints: what they say is written as it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.base import member_called, members
from grpo_dist.config.differences import drop

_ADVANTAGE = {
    "std": "std", "advantage_eps": "eps", "pass_k": "k", "turn_discount": "discount", "gamma": "gamma",
    "whiten_advantages": "whiten",
}  # fmt: skip
# Keys that no longer exist, and decided nothing in a run.
_GONE = (
    "rewards.code_paths", "environments.code_paths", "cluster.restarts.health_s",
    "cluster.restarts.window_s",
    "distillation.teachers.*.threads", "environments.sandbox.backend", "evaluation.threads",
    "profile.memory", "profile.shapes", "profile.stacks", "tracking.mlflow", "bench.other_kwargs",
    "demonstrations.max_length", "distillation.teachers.*.micro_batch_tokens", "health.idle_steps_above",
    "policy.logprob_chunk_mib", "reference.threads", "rejection.chunk_prompts",
    "rollout.speculation.history_tokens", "sft.threads",
)  # fmt: skip
# Keys that no longer exist, with the value that all runs have now: any other is refused, as it decided.
_FIXED = {
    "environments.sandbox.output_kb": 64, "evaluation.max_prompts": None, "rejection.prefer": "shortest",
    "rewards.overlong_buffer.share": 0.2, "rewards.prompt_opens_thought": None, "sft.betas": [0.9, 0.95],
    "sft.max_grad_norm": 1.0,
}  # fmt: skip
# Section, its earlier key, and that of now.
_RENAMED = (
    (("health",), "garbage_above", "degenerate_above"),
    (("health",), "length_above", "truncated_above"),
    (("cluster", "timeouts"), "room_s", "placement_timeout_s"),
)


def translate(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration of an earlier version as it is written now; any other as it is.

    Raises ValueError where the result is no configuration.
    """
    new: dict[str, Any] = dict(old)
    for key in _GONE:
        new = drop(new, key.split("."))
    for key, value in (_FIXED | {"demonstrations.seed": new.get("seed")}).items():
        if _value(new, key.split(".")) == value:
            new = drop(new, key.split("."))
    for path, was, now in _RENAMED:
        new = _renamed(new, path, was, now)
    if isinstance(new.get("algorithm"), dict):
        new["algorithm"] = translate_algorithm(new["algorithm"])
    if isinstance(batch := new.get("batch"), dict) and batch.get("min_samples", "") is None:
        new["batch"] = drop(batch, ["min_samples"])
    if isinstance(batch := new.get("batch"), dict) and isinstance(batch.get("order"), str):
        kept = drop(batch, ["oversample"])
        finished = {"name": "completion", "oversample": batch.get("oversample")}
        new["batch"] = kept | {"order": finished if batch["order"] == "finished" else {"name": "launched"}}
    if isinstance(distillation := new.get("distillation"), dict) and "kl_as" in distillation:
        new["distillation"] = _translate_distillation(distillation)
    for name in ("sft", "demonstrations"):
        if isinstance(section := new.get(name), dict) and "noise" in section:
            of_all = {key: section[key] for key in ("examples", "noise") if key in section}
            kept = {key: value for key, value in section.items() if key not in of_all}
            new[name] = kept | {"data": [_fill_defaults(source, of_all) for source in section["data"]]}
    if isinstance(data := new.get("data"), dict) and isinstance(data.get("order"), str):
        new["data"] = _translate_order(data)
    if new.get("dynamic_sampling", {}).get("enabled") is False:
        new["dynamic_sampling"] = {"enabled": False}
    if isinstance(bench := new.get("bench"), dict) and isinstance(lengths := bench.get("lengths"), dict):
        # null was the default, or what another kind had
        new["bench"] = bench | {"lengths": {key: item for key, item in lengths.items() if item is not None}}
    if isinstance(health := new.get("health"), dict) and isinstance(health.get("action"), str):
        kept = drop(health, ["max_rollbacks"])
        limit = {"max_rollbacks": health.get("max_rollbacks", 3)} if health["action"] == "rollback" else {}
        new["health"] = kept | {"action": {"kind": health["action"]} | limit}
    rollout = new.get("rollout")
    if isinstance(rollout, dict) and (rollout.get("speculation") or {}).get("tokens") == 0:
        new["rollout"] = rollout | {"speculation": None}
    if isinstance(rewards := new.get("rewards"), dict):
        new["rewards"] = _translate_rewards(rewards)
    if isinstance(sampling := new.get("sampling"), dict):
        new["sampling"] = {key: _translate_schedule(value) for key, value in sampling.items()}
    tracking = new.get("tracking")
    if isinstance(tracking, dict) and isinstance(wandb := tracking.get("wandb"), dict):
        new["tracking"] = tracking | {"wandb": wandb["project"] if wandb.get("enabled") else None}
    return new


def _translate_order(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return section `data` with the settings of its order in it."""
    pools = old.get("pools") or {}
    settings = {
        "epochs": {"drop_solved": old.get("drop_solved")},
        "length": {"drop_solved": old.get("drop_solved"), "window": old.get("length_window") or 8},
        "pass_rate": {},
        "pools": {"half_life": pools.get("half_life", 10.0)},
    }.get(old["order"], {"kwargs": old.get("order_kwargs") or {}})
    kept = {k: v for k, v in old.items() if k not in ("length_window", "order_kwargs", "drop_solved")}
    return kept | {"order": {"name": old["order"]} | settings, "pools": pools.get("by")}


_MARKED = ("classifier", "qwen", "skywork", "math_shepherd")


def _translate_rewards(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return section `rewards` with the kind of each reward, which has its own settings alone."""

    def translate_model(model: Mapping[str, Any]) -> dict[str, Any]:
        if "format" not in model:
            return dict(model)
        kind = model["format"] if model["kind"] == "process" else "outcome"
        unused = ["format"]
        unused += ["reduce", "step_separator"] if kind == "outcome" else []
        unused += ["step_mark"] if kind not in _MARKED else []
        unused += ["verdict_tokens"] if kind not in ("math_shepherd", "rlhflow") else []
        return {key: value for key, value in model.items() if key not in unused} | {"kind": kind}

    def translate_function(function: Mapping[str, Any]) -> dict[str, Any]:
        unused = () if function.get("kind") == "process" else ("reduce", "step_separator")
        return {key: value for key, value in function.items() if key not in unused}

    def translate_functions(rewards: Mapping[str, Any]) -> dict[str, Any]:
        return {**rewards, "functions": [translate_function(each) for each in rewards.get("functions", ())]}

    by_source = {source: translate_functions(each) for source, each in old.get("by_source", {}).items()}
    models = [translate_model(each) for each in old.get("models", ())]
    # Nothing required a box before there was the key, whatever the prompt asks for.
    return {"require_box": False} | translate_functions(old) | {"models": models, "by_source": by_source}


def _translate_schedule(value: Any) -> Any:
    """Return a temperature or length with its kind: null was what the other kind has."""
    if not isinstance(value, dict) or "kind" in value:
        return value
    if value.get("schedule") is not None:
        return {"kind": "schedule", "schedule": value["schedule"]}
    return {"kind": "adaptive"} | {key: item for key, item in value.items() if item is not None}


def _fill_defaults(source: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``source`` with the value of ``defaults`` for each key that it lacks or has as null."""
    return {**source, **{key: value for key, value in defaults.items() if source.get(key) is None}}


def _value(tree: Any, path: Sequence[str]) -> Any:
    """Return the value at ``path``; ... where there is none."""
    for name in path:
        tree = tree.get(name, ...) if isinstance(tree, dict) else ...
    return tree


def _renamed(tree: Any, path: Sequence[str], was: str, now: str) -> Any:
    """Return ``tree`` with the value of key ``was`` in the section at ``path`` under ``now``."""
    if not isinstance(tree, dict):
        return tree
    if path:
        name, *rest = path
        return tree | {name: _renamed(tree[name], rest, was, now)} if name in tree else tree
    return {now if key == was else key: value for key, value in tree.items()}


def _translate_distillation(old: Mapping[str, Any]) -> dict[str, Any]:
    if old["kl_as"] == "advantage":
        kl = {"name": "advantage"}
    elif old.get("top_k"):
        kl = {"name": "top_k", "k": old["top_k"], "divergence": old.get("divergence", "reverse")}
    else:
        kl = {"name": "sampled", "estimator": old.get("estimator", "k3+")}
    earlier = ("kl_as", "estimator", "top_k", "divergence")
    return {key: value for key, value in old.items() if key not in earlier} | {"kl": kl}


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
