"""Whether a run still learns: steps that are not trained on, and metrics that are out of bounds.

A watch compares what is known of a step with the bounds of `health`: of its batch before it is trained on, of
its updates before each moves the weights where `health.action` is skip, and at the end of the step otherwise.
Of slow drift, which no bound is needed for, it warns (`drift`). What it must remember of earlier steps is a
`HealthState`, which checkpoints keep, so that a resumed run decides and warns the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from grpo_dist.config import Config
from grpo_dist.config.checks import equal_rewards_teach
from grpo_dist.errors import Rollback, Unhealthy
from grpo_dist.health.bounds import (
    GRAD_NORM,
    IN_A_ROW,
    UPDATE_METRICS,
    Bound,
    of_batch,
    of_run,
    of_update,
    passed,
)
from grpo_dist.health.drift import DRIFTING, begun, drifting, follow
from grpo_dist.health.state import HealthState
from grpo_dist.types import Group, has_signal

SKIPPED = "health/skipped_updates"  # of the step: not finite, or beyond a bound
REFUSED = "health/refused_"  # and the key of a bound: of those, how many were beyond it
BAD_WEIGHTS = "health/bad_weights"  # 1: weights are not finite after the step
TRAINED_TOKENS = "train/loss_tokens"
_REMEMBERED = 20  # gradient norms


class Record(Protocol):
    """The part of a recorder that is told of a run's health."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def aside(self, step: int, groups: list[Group]) -> str: ...
    def warn(self, message: str) -> None: ...


class HealthWatch:
    """Follows one run, step by step."""

    def __init__(self, config: Config, record: Record, state: HealthState) -> None:
        self._settings, self._record = config.health, record
        self._samples = config.tracking.samples  # every batch is kept anyway
        self._needed = 0 if equal_rewards_teach(config) else config.health.min_signal_groups
        self._skips = config.health.action == "skip"
        self.state = state

    def teaches(self, step: int, groups: list[Group], metrics: dict[str, float]) -> bool:
        """Whether the step is one to train on: not one to avoid, enough groups carry a signal, and
        ``metrics`` of its batch pass no bound for which it is skipped. Adds to them what it counted.
        """
        carrying = sum(has_signal(group.rewards) for group in groups)
        metrics["health/low_signal"] = float(carrying < self._needed)
        if unknown := metrics.get("rollout/nan_logprobs"):
            self._record.warn(
                f"step {step}: {unknown:.0f} samples are not trained on, the engine gave NaN or infinity as "
                "the log-prob of a token; if this goes on, set `model.dtype` = float32 or another attention "
                "backend in `rollout.engine`"
            )
        if step in self.state.avoid:
            self._record.warn(f"step {step}: not trained on, the run was rolled back from it")
            return False
        if carrying < self._needed:
            self._record.warn(
                f"step {step}: not trained on, rewards differ within {carrying} of {len(groups)} groups "
                f"(`health.min_signal_groups` = {self._needed})"
            )
            return False
        beyond = passed(of_batch(self._settings, self.state), metrics) if self._skips else []
        if beyond:
            metrics[SKIPPED] = 1.0
            self._record.warn(
                f"step {step}: not trained on, {_said(beyond, metrics)}; its batch is in "
                f"{self._kept(step, groups)}"
            )
        return not beyond

    def bounds_of_update(self) -> list[Bound]:
        """That no update of the next step may pass."""
        return of_update(self._settings, self.state) if self._skips else []

    def after_update(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Keeps aside the batch of updates that were not made. Raises Unhealthy when the weights are lost."""
        if metrics.get(SKIPPED):
            self._record.warn(
                f"step {step}: {metrics[SKIPPED]:.0f} update(s) not made, {_why_not_made(metrics)}; for them "
                f"the weights are as before, and the batch is kept in {self._record.aside(step, groups)}"
            )
        if metrics.get(BAD_WEIGHTS):
            self._record.log(step, metrics)
            found = (
                f"step {step}: the weights are not finite after the update (gradient norm "
                f"{metrics.get(GRAD_NORM, math.nan):.4g})"
            )
            kept = self._record.aside(step, groups)
            self._roll_back(step, found, kept)
            raise Unhealthy(
                f"{found}; the batch is kept in {kept}. The same command goes on from the last checkpoint; "
                "lower `policy.optimizer.lr` in a new run, or set `model.dtype=float32` to see whether it is "
                "a matter of precision"
            )

    def examine(self, step: int, metrics: dict[str, float]) -> list[Bound]:
        """Bounds that a step's ``metrics`` pass, compared with the steps before it; adds to them what watches
        count.
        """
        skipped = self.state.skipped + 1 if metrics.get(SKIPPED) else 0
        metrics.update({SKIPPED: metrics.get(SKIPPED, 0.0), IN_A_ROW: float(skipped)})
        settings, state = self._settings, self.state
        idle = state.idle + 1 if metrics.get(TRAINED_TOKENS) == 0 else 0
        metrics["health/idle_in_a_row"] = float(idle)
        bounds = [*of_batch(settings, state), *of_update(settings, state), *of_run(settings)]
        alarms = passed(bounds, metrics)
        followed = follow(state.followed, step, metrics)
        metrics.update({"health/alarms": float(len(alarms)), DRIFTING: float(drifting(followed))})
        norm, reward = metrics.get(GRAD_NORM, math.nan), metrics.get("reward/mean", math.nan)
        rewards = [r for r in (reward, state.best_reward) if r is not None and not math.isnan(r)]
        norms = [] if math.isnan(norm) or metrics[SKIPPED] else [norm]
        self.state = replace(
            state,
            best_reward=max(rewards, default=None),
            grad_norms=(*state.grad_norms, *norms)[-_REMEMBERED:],
            skipped=skipped,
            followed=followed,
            idle=idle,
        )
        return alarms

    def act(self, step: int, alarms: Sequence[Bound], metrics: dict[str, float], groups: list[Group]) -> None:
        """Warn of ``alarms``, or raise Unhealthy or Rollback: as `health.action` says. What was skipped has
        been told of, so that only a run that skips on and on is stopped. Warns of drift in any case.
        """
        for message in begun(self.state.followed, step):
            self._record.warn(f"step {step}: {message}")
        self._stop_if_idle(step, metrics)
        if self._skips:
            alarms = passed(of_run(self._settings), metrics)
        if not alarms:
            return
        found = f"step {step}: {_said(alarms, metrics)}"
        if self._settings.action == "warn":
            self._record.warn(f"{found}; its batch is in {self._kept(step, groups)}")
            return
        kept = self._record.aside(step, groups)
        self._roll_back(step, found, kept)
        raise Unhealthy(
            f"{found}. Stopped (`health.action` = {self._settings.action}); the batch is kept in {kept}. "
            "Nothing of this step is in a checkpoint: the same command goes on from the one before, and "
            "comes to this step again unless the bound is another"
        )

    def _stop_if_idle(self, step: int, metrics: dict[str, float]) -> None:
        """Raises Unhealthy where too many steps in a row trained on nothing, whatever `health.action` is: to
        go on, or to go back, would only sample on.
        """
        most = self._settings.idle_steps_above
        if most is None or self.state.idle <= most:
            return
        seen = ("reward/mean", "reward/unscored", "group/no_signal_share", "rollout/truncated_share")
        numbers = ", ".join(f"{name} = {metrics[name]:.4g}" for name in seen if name in metrics)
        raise Unhealthy(
            f"step {step}: {self.state.idle} steps in a row trained on no token (`health.idle_steps_above` = "
            f"{most}): {numbers}. Stopped. Use problems of which the model solves some "
            "(`data.order=pass_rate`, `dynamic_sampling`), check the rewards with `grpo-dist check`, raise "
            "`sampling.max_new_tokens` where completions are cut off, or set `health.idle_steps_above=null`"
        )

    def _kept(self, step: int, groups: list[Group]) -> str:
        return f"samples/step_{step:06d}.parquet" if self._samples else self._record.aside(step, groups)

    def _roll_back(self, step: int, found: str, kept: str) -> None:
        """Raises Rollback where `health.action` says so, until the run has been rolled back too often."""
        if self._settings.action == "rollback" and len(self.state.avoid) < self._settings.max_rollbacks:
            raise Rollback(f"{found}; the batch is kept in {kept}, and not trained on", step)


def _said(beyond: Sequence[Bound], metrics: dict[str, float]) -> str:
    return "; ".join(bound.said(metrics) for bound in beyond)


def _why_not_made(metrics: dict[str, float]) -> str:
    refused = {n.removeprefix(REFUSED): v for n, v in metrics.items() if n.startswith(REFUSED)}
    if not refused:
        loss = metrics.get("loss/total", math.nan)
        return f"the loss or its gradient is not finite (loss {loss:.4g})"
    by = ", ".join(f"{count:.0f} beyond `health.{key}`" for key, count in refused.items())
    seen = (f"{name} = {metrics[name]:.4g}" for name in UPDATE_METRICS if name in metrics)
    return f"{by} ({', '.join(seen)})"
