"""Whether a run still learns: steps that are not trained on, and metrics that are out of bounds.

A watch compares what a step's metrics say with a bound of `health`; what it must remember of earlier steps
is a `HealthState`, which checkpoints keep, so that a resumed run decides the same. A metric that a step
lacks, or that is not a number, passes no bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from grpo_dist.config import Config, Health
from grpo_dist.config_checks import equal_rewards_teach
from grpo_dist.errors import Rollback, Unhealthy
from grpo_dist.progress import HealthState
from grpo_dist.types import Group, has_signal

SKIPPED = "health/skipped_updates"  # of the step: a loss or gradient was not finite
BAD_WEIGHTS = "health/bad_weights"  # 1: weights are not finite after the step
_REMEMBERED = 20  # gradient norms
_ENOUGH = 5  # of them for a median

# Key of `health` and the metric it bounds, on the side that the key's name ends with.
_BOUNDS = (
    ("skipped_steps_above", "health/skipped_in_a_row"),
    ("entropy_below", "policy/entropy"),
    ("length_above", "rollout/length_tokens"),
    ("truncated_above", "rollout/truncated_share"),
    ("mismatch_above", "mismatch/logprob_diff_mean"),
    ("kl_above", "ref/kl"),
)


class Record(Protocol):
    """The part of a recorder that is told of a run's health."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def aside(self, step: int, groups: list[Group]) -> str: ...
    def warn(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Alarm:
    """A bound that was passed; ``beyond`` says which in words."""

    key: str
    metric: str
    value: float
    beyond: str

    def __str__(self) -> str:
        return f"{self.metric} = {self.value:.4g} is {self.beyond} (`health.{self.key}`)"


class HealthWatch:
    """Follows one run, step by step."""

    def __init__(self, config: Config, record: Record, state: HealthState) -> None:
        self._settings, self._record = config.health, record
        self._samples = config.tracking.samples  # every batch is kept anyway
        self._needed = 0 if equal_rewards_teach(config) else config.health.min_signal_groups
        self.state = state

    def teaches(self, step: int, groups: Sequence[Group]) -> bool:
        """Whether enough groups carry a signal for the step to be trained on, and it is not one to avoid."""
        if step in self.state.avoid:
            self._record.warn(f"step {step}: not trained on, the run was rolled back from it")
            return False
        carrying = sum(has_signal(group.rewards) for group in groups)
        if carrying < self._needed:
            self._record.warn(
                f"step {step}: not trained on, rewards differ within {carrying} of {len(groups)} groups "
                f"(`health.min_signal_groups` = {self._needed})"
            )
        return carrying >= self._needed

    def after_update(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Keeps aside the batch of updates that were not made. Raises Unhealthy when the weights are lost."""
        if metrics.get(SKIPPED):
            where = self._record.aside(step, groups)
            self._record.warn(
                f"step {step}: {metrics[SKIPPED]:.0f} update(s) not made, the loss or its gradient is not "
                f"finite (loss {metrics.get('loss/total', math.nan):.4g}); the weights are as before, and "
                f"the batch is kept in {where}"
            )
        if metrics.get(BAD_WEIGHTS):
            self._record.log(step, metrics)
            found = (
                f"step {step}: the weights are not finite after the update (gradient norm "
                f"{metrics.get('policy/grad_norm', math.nan):.4g})"
            )
            kept = self._record.aside(step, groups)
            self._roll_back(step, found, kept)
            raise Unhealthy(
                f"{found}; the batch is kept in {kept}. The same command goes on from the last checkpoint; "
                "lower `policy.optimizer.lr` in a new run, or set `model.dtype=float32` to see whether it is "
                "a matter of precision"
            )

    def examine(self, metrics: dict[str, float]) -> list[Alarm]:
        """Bounds that a step's ``metrics`` pass, compared with the steps before it; adds to them what watches
        count.
        """
        skipped = self.state.skipped + 1 if metrics.get(SKIPPED) else 0
        metrics.update({SKIPPED: metrics.get(SKIPPED, 0.0), "health/skipped_in_a_row": float(skipped)})
        alarms = list(_alarms(self._settings, metrics, self.state))
        metrics["health/alarms"] = float(len(alarms))
        norm, reward = _known(metrics, "policy/grad_norm"), _known(metrics, "reward/mean")
        best = self.state.best_reward
        self.state = replace(
            self.state,
            best_reward=best if reward is None else max(reward, reward if best is None else best),
            grad_norms=(*self.state.grad_norms, *([] if norm is None else [norm]))[-_REMEMBERED:],
            skipped=skipped,
        )
        return alarms

    def act(self, step: int, alarms: Sequence[Alarm], groups: list[Group]) -> None:
        """Warn of ``alarms``, or raise Unhealthy or Rollback: as `health.action` says."""
        if not alarms:
            return
        found = f"step {step}: {'; '.join(map(str, alarms))}"
        if self._settings.action == "warn":
            kept = f"samples/step_{step:06d}.parquet" if self._samples else self._record.aside(step, groups)
            self._record.warn(f"{found}; its batch is in {kept}")
            return
        kept = self._record.aside(step, groups)
        self._roll_back(step, found, kept)
        raise Unhealthy(
            f"{found}. Stopped (`health.action` = {self._settings.action}); the batch is kept in {kept}. "
            "Nothing of this step is in a checkpoint: the same command goes on from the one before, and "
            "comes to this step again unless the bound is another"
        )

    def _roll_back(self, step: int, found: str, kept: str) -> None:
        """Raises Rollback where `health.action` says so, until the run has been rolled back too often."""
        if self._settings.action == "rollback" and len(self.state.avoid) < self._settings.max_rollbacks:
            raise Rollback(f"{found}; the batch is kept in {kept}, and not trained on", step)


def _alarms(settings: Health, metrics: Mapping[str, float], state: HealthState) -> Iterator[Alarm]:
    for key, metric in _BOUNDS:
        bound, value = getattr(settings, key), _known(metrics, metric)
        if bound is None or value is None:
            continue
        side = key.rpartition("_")[2]
        if value > bound if side == "above" else value < bound:
            yield Alarm(key, metric, value, f"{side} {bound:g}")
    share, best, reward = settings.reward_below_share, state.best_reward, _known(metrics, "reward/mean")
    # A share of what is not above 0 is no bound from below.
    if share is not None and reward is not None and best is not None and best > 0 and reward < share * best:
        yield Alarm(
            "reward_below_share", "reward/mean", reward, f"below {share:g} x {best:.4g}, its greatest"
        )
    spike, norm = settings.grad_norm_spike, _known(metrics, "policy/grad_norm")
    if spike is not None and norm is not None and len(state.grad_norms) >= _ENOUGH:
        median = statistics.median(state.grad_norms)
        if norm > spike * median:
            yield Alarm(
                "grad_norm_spike", "policy/grad_norm", norm, f"above {spike:g} x {median:.4g}, its median"
            )


def _known(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or math.isnan(value) else value
