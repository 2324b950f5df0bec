"""Metrics of one step, built in and user-supplied. Names carry the unit.

Metrics that depend on the clock or the machine start with `time/`, `throughput/` or `memory/`, so that two
runs can be compared without them. The only exception is `rollout/acceptance_length` of `rollout.speculation`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol, get_args

import numpy as np

from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.config import MetricConfig
from grpo_dist.config.environments import BudgetOutcome
from grpo_dist.data.pools import pool_metrics
from grpo_dist.errors import raised
from grpo_dist.health import TRAINED_TOKENS
from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.plugins.inputs import MetricInputs
from grpo_dist.plugins.user_code import METRIC, call, call_in_time, failures_named, load
from grpo_dist.types import (
    FurtherRow,
    Group,
    Rollout,
    count_signals,
    have_logprobs,
    sampled_logprobs,
    select_sampled,
    training_rows,
)

OUTCOMES = ("correct", "wrong", "no_answer", "timeout", "error")
ENDS = ("stop", *get_args(BudgetOutcome), "error")  # ways in which an episode ends


def rollout_metrics(groups: list[Group], version: int, pools: str | None = None) -> dict[str, float]:
    """Compute rewards, lengths, outcomes and staleness of the groups that a step sampled.

    ``version``: the policy's before the update; a token sampled at that version has staleness 0. ``pools``:
    column of the pools, whose metrics are added.
    """
    rewards = np.concatenate([g.rewards for g in groups]).astype(np.float64)
    scored = rewards[np.isfinite(rewards)]
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([r.num_tokens for r in rollouts])
    rows = training_rows(rollouts)
    logprobs = sampled_logprobs(rows)
    finite = np.isfinite(logprobs)
    metrics = {
        "reward/mean": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std()) if len(scored) else float("nan"),
        "reward/unscored": float(len(rewards) - len(scored)),
        "group/size_mean": len(rollouts) / len(groups),
        "group/size_min": float(min(len(g.rollouts) for g in groups)),
        "group/no_signal_share": (len(groups) - count_signals(groups)) / len(groups),
        "rollout/length_tokens": float(lengths.mean()),
        "rollout/length_max_tokens": float(lengths.max()),
        "rollout/truncated_share": truncated_share(groups),
        "rollout/entropy": _entropy(logprobs, finite),
        "rollout/nan_logprobs": float(np.count_nonzero(~have_logprobs(rollouts, finite))),
        "rollout/degenerate_share": sum(g.degenerate for g in groups) / len(lengths),
        **staleness_metrics(rows, version),
        **_kept_metrics(rows),
    }
    if (first := rollouts[0]).temperature is not None and first.max_new_tokens is not None:
        temperatures = [r.temperature for r in rollouts if r.temperature is not None]
        is_mixed = len(set(temperatures)) > 1  # a mean of equal numbers would be rounded
        metrics["sampling/temperature"] = (
            sum(temperatures) / len(temperatures) if is_mixed else first.temperature
        )
        metrics["sampling/max_new_tokens"] = float(first.max_new_tokens)
    for name in dict.fromkeys(name for g in groups for name in g.reward_parts):
        arrays = [g.reward_parts[name] for g in groups if name in g.reward_parts]
        part = np.concatenate(arrays).astype(np.float64)
        finite_rewards = part[np.isfinite(part)]
        metrics[f"reward/{name}"] = float(finite_rewards.mean()) if len(finite_rewards) else float("nan")
        metrics[f"reward/{name}_unscored"] = float(len(part) - len(finite_rewards))
    outcomes = Counter(chain.from_iterable(g.outcomes for g in groups))
    if any(outcomes):
        metrics |= {f"outcome/{o}": float(outcomes[o]) for o in OUTCOMES}
    if pools is not None:
        metrics |= pool_metrics(groups, pools)
    return metrics | episode_metrics([r for r in rollouts if r.turns])


def _kept_metrics(rows: Sequence[Rollout | FurtherRow]) -> dict[str, float]:
    """Compute how many tokens top_p, top_k and min_p kept; {} if they are not set."""
    counts = [select_sampled(row, row.kept.counts) for row in rows if row.kept is not None]
    if not counts:
        return {}
    together = np.concatenate(counts)
    restricted = together[together > 0]
    return {
        "sampling/kept_tokens_mean": float(restricted.mean()) if len(restricted) else float("nan"),
        "sampling/kept_all_share": 1 - len(restricted) / len(together),
    }


def staleness_metrics(rows: Sequence[Rollout | FurtherRow], version: int) -> dict[str, float]:
    """Compute how much older than ``version`` the sampled tokens are, and count them."""
    arrays = [r.policy_versions if r.sampled is None else r.policy_versions[r.sampled] for r in rows]
    versions = np.concatenate(arrays)
    count = len(versions)
    behind = version * count - int(versions.sum(dtype=np.int64))  # integers: sums do not depend on order
    return {
        "rollout/tokens": float(count),
        "rollout/staleness_mean": behind / count if count else 0.0,
        "rollout/staleness_max": float(max(version - int(versions.min()), 0)) if count else 0.0,
    }


def sampled_entropy(groups: Sequence[Group]) -> float:
    """Return the mean of -log p over all sampled tokens, nats: an unbiased estimate of the entropy at the
    sampling temperature, available before training on them. NaN without any.
    """
    logprobs = sampled_logprobs(training_rows([r for g in groups for r in g.rollouts]))
    return _entropy(logprobs, np.isfinite(logprobs))


def _entropy(logprobs: np.ndarray, finite: np.ndarray) -> float:
    values = (logprobs if finite.all() else logprobs[finite]).astype(np.float64)
    return float(-values.mean()) if len(values) else float("nan")


def truncated_share(groups: Sequence[Group]) -> float:
    """Return the share of samples that were cut off at `sampling.max_new_tokens`."""
    reasons = [r.finish_reason for g in groups for r in g.rollouts]
    return reasons.count("length") / len(reasons)


def episode_metrics(episodes: Sequence[Rollout]) -> dict[str, float]:
    """Compute turns, rows, tool calls and ends of samples with an environment; {} without any."""
    if not episodes:
        return {}
    count, calls = len(episodes), [call for r in episodes for turn in r.turns for call in turn.calls]
    ends = Counter(r.finish_reason for r in episodes)
    tokens = sum(r.num_tokens for r in episodes)
    metrics = {
        "episode/turns": sum(len(r.turns) for r in episodes) / count,
        "episode/rows": sum(len(r.rows) for r in episodes) / count,
        "episode/rewritten": sum(bool(r.further_rows) for r in episodes) / count,
        "episode/given_share": 1 - sum(r.num_sampled for r in episodes) / max(tokens, 1),
        "episode/tool_calls": len(calls) / count,
        "episode/tool_error_share": sum(call.outcome != "ok" for call in calls) / max(len(calls), 1),
    }
    metrics |= {f"episode/end/{reason}": ends[reason] / count for reason in ENDS}
    if calls:
        seconds = np.array([call.seconds for call in calls])
        metrics["time/tool_call_mean_s"] = float(seconds.mean())
        metrics["time/tool_call_p95_s"] = float(np.percentile(seconds, 95))
    return metrics


def distillation_metrics(scored: Sequence[ScoredGroup], with_signal: Collection[int]) -> dict[str, float]:
    """Compute the divergence from each teacher, in nats per sampled token; {} without teachers.

    ``with_signal``: indices of the groups that the step learns from, more of them with a teacher.
    """
    sums, tokens = defaultdict[str, float](float), Counter[str]()
    for scored_group in scored:
        rows = [row for rollout in scored_group.group.rollouts for row in rollout.rows]
        for name, teacher_rows in scored_group.teacher_logprobs.items():
            for row, teacher in zip(rows, teacher_rows, strict=True):
                gap = select_sampled(row, row.logprobs).astype(np.float64) - select_sampled(
                    row, teacher.sampled
                )
                gap = gap[np.isfinite(gap)]  # a token without a log-prob is not trained on
                sums[name] += float(gap.sum())
                tokens[name] += len(gap)
    if not tokens:
        return {}
    metrics = {f"teacher/kl/{name}": sums[name] / max(count, 1) for name, count in tokens.items()}
    return metrics | {
        "teacher/kl": sum(sums.values()) / max(sum(tokens.values()), 1),
        "group/no_signal_share": 1 - len(with_signal) / len(scored),
    }


class StagedCounts(Protocol):
    """How much a step trains on: rows, their tokens, tokens that an update needs, and tokens in the loss."""

    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def needed_tokens(self) -> float: ...
    @property
    def loss_tokens(self) -> int: ...


def trained_metrics(staged: StagedCounts, update: Mapping[str, float], *, trained: bool) -> dict[str, float]:
    """Return counts of what a step trained on. ``update``: metrics of the update."""
    if not trained:
        return {TRAINED_TOKENS: 0.0}
    metrics = {
        TRAINED_TOKENS: float(staged.loss_tokens),
        "train/rows": float(staged.rows),
        "train/tokens": float(staged.tokens),
    }
    if computed := update.get(COMPUTED_TOKENS):
        metrics["throughput/packing_efficiency"] = staged.needed_tokens / computed
    return metrics


def sampling_cost(
    groups: Sequence[Group], discarded: Sequence[Group], with_signal: Collection[int]
) -> dict[str, float]:
    """Compute the samples per sample that the step learns from; no ratio if it learns from none.

    Args:
        groups: groups of the batch.
        discarded: further groups sampled for the step.
        with_signal: indices of ``groups`` that the update learns from.
    """
    metrics = {"group/extra_prompts": float(len(discarded))}
    if with_signal:
        samples = _samples([groups[i] for i in with_signal])
        metrics["group/samples_per_trained"] = (_samples(groups) + _samples(discarded)) / samples
    return metrics


def _samples(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)


def _tokens(groups: Sequence[Group]) -> int:
    """Count the tokens that the policy sampled."""
    return sum(rollout.num_sampled for group in groups for rollout in group.rollouts)


def throughput_metrics(groups: Sequence[Group], times: dict[str, float]) -> dict[str, float]:
    """Return ``times``, seconds of one step by `Stopwatch`, with sampled tokens and samples per second."""
    completion, samples = _tokens(groups), _samples(groups)
    prompts = sum(len(g.prompt.token_ids) * len(g.rollouts) for g in groups)
    return times | {
        "throughput/completion_tokens_per_s": completion / times["time/step_s"],
        "throughput/tokens_per_s": (completion + prompts) / times["time/step_s"],
        "throughput/samples_per_s": samples / times["time/step_s"],
    }


_NOT_AGAIN = "the run continues without it"


class UserMetrics:
    """Calls every metric of `tracking.metrics`. A failing metric is reported once and left out, and the run
    continues. A metric that takes longer than ``limit_s`` seconds is not called again.
    """

    def __init__(
        self,
        metrics: Sequence[MetricConfig],
        code_paths: Sequence[str],
        warn: Callable[[str], None],
        *,
        limit_s: float,
    ) -> None:
        self._metrics, self._code_paths, self._warn = metrics, code_paths, warn
        self._limit_s, self._hung = limit_s, set[str]()
        self._failed: set[str] = set()

    def __call__(self, inputs: MetricInputs) -> dict[str, float]:
        """Return the metrics by name, with the prefix ``user/``."""
        values: dict[str, float] = {}
        for metric in self._metrics:
            if metric.label in self._hung:
                continue
            measure = partial(
                user_metric, metric.function, self._code_paths, metric.kwargs, inputs, metric.label
            )
            what = f"metric {metric.name or metric.function}"
            try:
                values |= call_in_time(measure, self._limit_s, what, _NOT_AGAIN)
            except TimeoutError as error:
                self._hung.add(metric.label)
                self._warn(f"{' '.join(str(error).split())} (step {inputs.step})")
            except Exception as error:  # user code may raise anything
                if metric.label not in self._failed:
                    self._failed.add(metric.label)
                    self._warn(
                        f"{what} failed in step {inputs.step} ({raised(error.__cause__ or error)}); the run "
                        "continues, and this is not repeated for later steps"
                    )
        return values


def user_metric(
    name: str, code_paths: Sequence[str], kwargs: Mapping[str, Any], inputs: MetricInputs, label: str
) -> dict[str, float]:
    """Call the function ``name``: 0.5 -> {"user/LABEL": 0.5}, {"a": 1} -> {"user/LABEL/a": 1.0}. Raises
    ValueError or TypeError for a result that is neither a number nor numbers by name.
    """
    measure = load(METRIC, name, code_paths)
    with failures_named(METRIC, name):
        value = call(measure, inputs, kwargs)
    if isinstance(value, Mapping):
        return {f"user/{label}/{key}": float(each) for key, each in value.items()}
    return {f"user/{label}": float(value)}
