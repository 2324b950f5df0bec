"""Decides whether a step is trained on, and compares its metrics with the bounds of `health`.

A batch is judged before it is trained on. With `health.action` skip, each update is held to its bounds before
the weights move (`bounds`); otherwise at the end of the step. What it remembers of earlier steps is a
`HealthState`; checkpoints keep it, so that a resumed run decides and warns the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from grpo_dist.config import Config
from grpo_dist.config.checks import learns_from_equal_rewards
from grpo_dist.config.monitoring import RollbackAction
from grpo_dist.errors import RERUN, Rollback, Unhealthy, count_failures
from grpo_dist.health.bounds import (
    BAD_WEIGHTS,
    GRAD_NORM,
    IN_A_ROW,
    REFUSED,
    SKIPPED,
    UPDATE_METRICS,
    Bound,
    HealthState,
    make_bounds,
    passed,
)
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Group, count_signals

TRAINED_TOKENS = "train/loss_tokens"
_REMEMBERED = 20  # gradient norms
_MOST_IDLE = 50  # steps in a row that trained on no token


class HealthWatch:
    """Watches one run, step by step. Steps are numbered from 1, as in the metrics."""

    def __init__(self, config: Config, recorder: Recorder, state: HealthState) -> None:
        self._settings, self._recorder = config.health, recorder
        self._keeps_samples = config.tracking.samples  # then no batch needs quarantine to be kept
        self._needed = 0 if learns_from_equal_rewards(config) else config.health.min_signal_groups
        self._skips = config.health.action.kind == "skip"
        other_losses = config.distillation.teachers or config.demonstrations is not None
        self._needs_scores = not (config.is_supervised or other_losses)
        self.state = state

    def judge_batch(
        self, step: int, groups: list[Group], metrics: Mapping[str, float], *, user_advantages: bool = False
    ) -> tuple[bool, dict[str, float]]:
        """Decide whether to train on the batch of ``step``; return that, and ``metrics`` with its counts.
        ``user_advantages``: they do not come from the rewards, which then need no signal.

        A batch is not trained on after a rollback from its step, when too few groups carry a signal, or when
        its metrics pass a bound of `health` and the action is skip.
        """
        with_signal = count_signals(groups)
        metrics = {**metrics, "health/low_signal": float(with_signal < self._needed)}
        if unknown := metrics.get("rollout/nan_logprobs"):
            self._recorder.warn(
                f"step {step}: {unknown:.0f} samples are not trained on, the engine gave NaN or infinity as "
                "the log-prob of a token; if this persists, set `model.dtype` = float32 or another attention "
                "backend in `rollout.engine`"
            )
        needs_scores = self._needs_scores and not user_advantages
        unscored = needs_scores and all(np.isnan(group.rewards).all() for group in groups)
        self.state = replace(self.state, unscored=self.state.unscored + 1 if unscored else 0)
        if unscored:
            self._recorder.warn(f"step {step}: no sample could be scored: {_why_unscored(groups)}")
        if step in self.state.avoid:
            self._recorder.warn(f"step {step}: not trained on, the run was rolled back from it")
            return False, metrics
        if with_signal < self._needed and not user_advantages:
            if not unscored:
                rewards = np.concatenate([group.rewards for group in groups])
                failed = int(np.isnan(rewards).sum()) if needs_scores else 0
                why = f"; {failed} of {len(rewards)} samples were not scored: {_why_unscored(groups)}"
                self._recorder.warn(
                    f"step {step}: not trained on, rewards differ within {with_signal} of {len(groups)} "
                    f"groups (`health.min_signal_groups` = {self._needed}){why if failed else ''}"
                )
            return False, metrics
        beyond = passed(make_bounds(self._settings, self.state, "batch"), metrics) if self._skips else []
        if beyond:
            self._recorder.warn(
                f"step {step}: not trained on, {_describe(beyond, metrics)}; its batch is in "
                f"{self._keep(step, groups)}"
            )
            return False, metrics | {SKIPPED: 1.0}
        return True, metrics

    def update_bounds(self) -> list[Bound]:
        """Return the bounds that no update of the next step may pass."""
        return make_bounds(self._settings, self.state, "update") if self._skips else []

    def after_update(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """Quarantine the batch of skipped updates. Raises Unhealthy or Rollback if weights are not finite."""
        if metrics.get(SKIPPED):
            self._recorder.warn(
                f"step {step}: {metrics[SKIPPED]:.0f} update(s) skipped, {_why_skipped(metrics)}. They left "
                f"the weights unchanged; the batch is kept in {self._recorder.quarantine(step, groups)}"
            )
        if metrics.get(BAD_WEIGHTS):
            self._recorder.log(step, metrics)
            problem = (
                f"step {step}: the weights are not finite after the update (gradient norm "
                f"{metrics.get(GRAD_NORM, math.nan):.4g})"
            )
            self._stop(
                step, problem, groups,
                f"{RERUN.capitalize()}; lower `policy.optimizer.lr` in a new run, or "
                "set `model.dtype=float32` to see whether precision is the cause",
            )  # fmt: skip

    def examine(self, step: int, metrics: Mapping[str, float]) -> tuple[list[Bound], dict[str, float]]:
        """Compare the metrics of a finished step with the steps before it, and remember them.

        Returns the bounds that they pass, and the counts to add to the metrics.
        """
        settings, state = self._settings, self.state
        skipped = state.skipped + 1 if metrics.get(SKIPPED) else 0
        idle = state.idle + 1 if metrics.get(TRAINED_TOKENS) == 0 else 0
        counts = {
            SKIPPED: metrics.get(SKIPPED, 0.0),
            IN_A_ROW: float(skipped),
            "health/idle_in_a_row": float(idle),
        }
        bounds = make_bounds(settings, state, "batch", "update", "run")
        alarms = passed(bounds, {**metrics, **counts})
        counts["health/alarms"] = float(len(alarms))
        norm, reward = metrics.get(GRAD_NORM, math.nan), metrics.get("reward/mean", math.nan)
        rewards = [r for r in (reward, state.best_reward) if r is not None and not math.isnan(r)]
        # A step without a trained token has norm 0, which says nothing of the next gradient.
        norms = [norm] if norm > 0 and not counts[SKIPPED] else []
        self.state = replace(
            state,
            best_reward=max(rewards, default=None),
            grad_norms=(*state.grad_norms, *norms)[-_REMEMBERED:],
            skipped=skipped,
            idle=idle,
        )
        return alarms, counts

    def act(
        self, step: int, alarms: Sequence[Bound], metrics: Mapping[str, float], groups: list[Group]
    ) -> None:
        """Warn of ``alarms``, or raise Unhealthy or Rollback, by `health.action`.

        With action skip, the watch has warned already of what was skipped; only too many skipped steps in a
        row stop the run.
        """
        self._stop_if_unscored(step, groups)
        self._stop_if_idle(step, metrics)
        if self._skips:
            alarms = passed(make_bounds(self._settings, self.state, "run"), metrics)
        if not alarms:
            return
        problem = f"step {step}: {_describe(alarms, metrics)}"
        if self._settings.action.kind == "warn":
            self._recorder.warn(f"{problem}; its batch is in {self._keep(step, groups)}")
            return
        self._stop(
            step, problem, groups,
            f"Stopped (`health.action` = {self._settings.action.kind}). This step was not saved: rerunning "
            "the same command resumes from the previous checkpoint, and will pass this bound again unless "
            "you change it",
        )  # fmt: skip

    def _stop_if_unscored(self, step: int, groups: list[Group]) -> None:
        """Raise Unhealthy if no sample was scored in too many steps in a row, whatever `health.action` is."""
        most, steps = self._settings.unscored_steps_above, self.state.unscored
        if most is None or steps <= most:
            return
        in_a_row = f"the last of {steps} steps in a row in which" if steps > 1 else "the first step in which"
        raise Unhealthy(
            f"step {step}: {in_a_row} no sample could be scored: {_why_unscored(groups)}. Stopped "
            f"(`health.unscored_steps_above` = {most}). Correct the reward, try it with `grpo-dist check`, "
            f"and {RERUN}"
        )

    def _stop_if_idle(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise Unhealthy if too many steps in a row trained on nothing, whatever `health.action` is.

        Neither training on nor a rollback would help: both would only sample more.
        """
        if self.state.idle <= _MOST_IDLE:
            return
        seen = ("reward/mean", "reward/unscored", "group/no_signal_share", "rollout/truncated_share")
        numbers = ", ".join(f"{name} = {metrics[name]:.4g}" for name in seen if name in metrics)
        raise Unhealthy(
            f"step {step}: {self.state.idle} steps in a row trained on no token: {numbers}. Stopped. Use "
            "problems of which the model solves some (`data.order=pass_rate`, `dynamic_sampling`), check the "
            "rewards with `grpo-dist check`, or raise `sampling.max_new_tokens` where completions are cut off"
        )

    def _keep(self, step: int, groups: list[Group]) -> str:
        if self._keeps_samples:
            return f"samples/step_{step:06d}.parquet"
        return self._recorder.quarantine(step, groups)

    def _stop(self, step: int, problem: str, groups: list[Group], remedy: str) -> NoReturn:
        """Quarantine the batch. Raises Rollback if `health.action` is rollback and its `max_rollbacks` allows
        another one, else Unhealthy.
        """
        kept = self._recorder.quarantine(step, groups)
        action = self._settings.action
        if isinstance(action, RollbackAction) and len(self.state.avoid) < action.max_rollbacks:
            raise Rollback(f"{problem}; the batch is kept in {kept}, and not trained on", step)
        raise Unhealthy(f"{problem}; the batch is kept in {kept}. {remedy}")


def _why_unscored(groups: Sequence[Group]) -> str:
    """Return up to three reasons, those of most samples first, with how many have them."""
    counts = count_failures(reason for group in groups for reasons in group.failures for reason in reasons)
    listed = (reason if len(counts) == 1 else f"{count} times {reason}" for reason, count in counts[:3])
    return "; ".join(listed) or "the rewards gave no reason"


def _describe(beyond: Sequence[Bound], metrics: Mapping[str, float]) -> str:
    return "; ".join(bound.describe(metrics) for bound in beyond)


def _why_skipped(metrics: Mapping[str, float]) -> str:
    refused = {n.removeprefix(REFUSED): v for n, v in metrics.items() if n.startswith(REFUSED)}
    if not refused:
        loss = metrics.get("loss/total", math.nan)
        return f"the loss or its gradient is not finite (loss {loss:.4g})"
    by = ", ".join(f"{count:.0f} beyond `health.{key}`" for key, count in refused.items())
    seen = (f"{name} = {metrics[name]:.4g}" for name in UPDATE_METRICS if name in metrics)
    return f"{by} ({', '.join(seen)})"
