"""Health checks of a run: bounds of `health` on the metrics of a step, and the action once one is exceeded.

The metrics of a batch are checked before it is trained on. With `health.action` skip, the metrics of each
update are checked before the weights change (`update_bounds`); otherwise at the end of the step. Checkpoints
keep the `HealthState` of earlier steps, so that a resumed run decides and warns the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import TypeAdapter

from grpo_dist.config import Config, HealthConfig
from grpo_dist.config.checks import learns_from_equal_rewards
from grpo_dist.config.monitoring import RollbackAction
from grpo_dist.errors import RERUN, Rollback, Unhealthy, count_failures
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Group, count_signals

GRAD_NORM = "policy/grad_norm"
IN_A_ROW = "health/skipped_in_a_row"
SKIPPED = "health/skipped_updates"  # updates that were not finite, or beyond a bound
REFUSED = "health/refused_"  # + key of a bound: updates skipped because of it
BAD_WEIGHTS = "health/bad_weights"  # 1: weights are not finite after the step
TRAINED_TOKENS = "train/loss_tokens"
_REMEMBERED = 20  # gradient norms
_MOST_IDLE = 50  # steps in a row that trained on no token
_ENOUGH = 5  # gradient norms for a median

# Keys of `health`, with the direction as suffix, and the metrics that they bound, of
# `loop.metrics.rollout_metrics`, of policy updates, and of `HealthWatch.examine`.
_BOUNDED = {
    "batch": {"truncated_above": "rollout/truncated_share", "degenerate_above": "rollout/degenerate_share"},
    "update": {
        "entropy_below": "policy/entropy",
        "mismatch_above": "mismatch/logprob_diff_mean",
        "kl_above": "ref/kl",
    },
    "run": {"skipped_steps_above": IN_A_ROW},
}
UPDATE_METRICS = (*_BOUNDED["update"].values(), GRAD_NORM)  # metrics of an update that have bounds


@dataclass(frozen=True, slots=True)
class HealthState:
    """State after the steps so far.

    Attributes:
        best_reward: greatest mean reward of a step.
        grad_norms: of the latest steps that trained, all above 0, oldest first.
        skipped: latest consecutive steps with a skipped update.
        avoid: steps that the run was rolled back from; they are not trained on.
        idle: latest consecutive steps that trained on no token.
        unscored: latest consecutive steps in which no sample could be scored.
    """

    best_reward: float | None = None
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    avoid: tuple[int, ...] = ()
    idle: int = 0
    unscored: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HealthState:
        """Undo `dataclasses.asdict`."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit on one metric. ``words``: where ``value`` comes from, if it is not in the configuration."""

    key: str
    metric: str
    value: float
    above: bool
    words: str = ""

    def is_passed(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric is beyond the bound; a missing or NaN metric never is."""
        value = metrics.get(self.metric, math.nan)
        return value > self.value if self.above else value < self.value

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Describe how ``metrics`` are beyond the bound."""
        side = "above" if self.above else "below"
        limit = self.words or f"{self.value:g}"
        return f"{self.metric} = {metrics[self.metric]:.4g} is {side} {limit} (`health.{self.key}`)"


def passed(bounds: Sequence[Bound], metrics: Mapping[str, float]) -> list[Bound]:
    """Return the ``bounds`` that ``metrics`` exceed."""
    return [bound for bound in bounds if bound.is_passed(metrics)]


def make_bounds(
    settings: HealthConfig, state: HealthState, *kinds: Literal["batch", "update", "run"]
) -> list[Bound]:
    """Return the bounds on the metrics of a batch, of an update of the policy, or of the run."""
    bounds = [
        Bound(key, metric, float(value), above=key.endswith("_above"))
        for kind in kinds
        for key, metric in _BOUNDED[kind].items()
        if (value := getattr(settings, key)) is not None
    ]
    share, best, norms = settings.reward_below_share, state.best_reward, state.grad_norms
    # A share of a negative best would be above it.
    if "batch" in kinds and share is not None and best is not None and best > 0:
        words = f"{share:g} x {best:.4g}, its greatest"
        bounds.append(Bound("reward_below_share", "reward/mean", share * best, above=False, words=words))
    if "update" in kinds and (spike := settings.grad_norm_spike) is not None and len(norms) >= _ENOUGH:
        median = statistics.median(norms)
        words = f"{spike:g} x {median:.4g}, its median"
        bounds.append(Bound("grad_norm_spike", GRAD_NORM, spike * median, above=True, words=words))
    return bounds


class HealthWatch:
    """Watches one run, step by step. Steps are numbered from 1, as in the metrics."""

    def __init__(self, config: Config, recorder: Recorder, state: HealthState) -> None:
        self._settings, self._recorder = config.health, recorder
        self._keeps_samples = config.tracking.samples  # if so, no batch needs quarantine
        self._needed = 0 if learns_from_equal_rewards(config) else config.health.min_signal_groups
        self._skips = config.health.action.kind == "skip"
        other_losses = config.distillation.teachers or config.demonstrations is not None
        self._needs_scores = not (config.is_supervised or other_losses)
        self.state = state

    def judge_batch(
        self, step: int, groups: list[Group], metrics: Mapping[str, float], *, user_advantages: bool = False
    ) -> tuple[bool, dict[str, float]]:
        """Decide whether to train on the batch of ``step``; return the decision, and ``metrics`` with counts.
        ``user_advantages``: the caller computed the advantages, so the rewards need no signal.

        A batch is not trained on after a rollback from its step, when too few groups carry a signal, or when
        its metrics exceed a bound of `health` and the action is skip.
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
        """Return the bounds that no update of the next step may exceed."""
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
        """Check the metrics of a finished step against the bounds, and update the state. A step that the run
        was rolled back from has only the bounds of the run.

        Returns the exceeded bounds, and the counts to add to the metrics.
        """
        settings, state = self._settings, self.state
        skipped = state.skipped + 1 if metrics.get(SKIPPED) else 0
        idle = state.idle + 1 if metrics.get(TRAINED_TOKENS) == 0 else 0
        counts = {
            SKIPPED: metrics.get(SKIPPED, 0.0),
            IN_A_ROW: float(skipped),
            "health/idle_in_a_row": float(idle),
        }
        bounds = make_bounds(settings, state, "run")
        if step not in state.avoid:  # such a step has the same batch again, but was not trained on
            bounds += make_bounds(settings, state, "batch", "update")
        alarms = passed(bounds, {**metrics, **counts})
        counts["health/alarms"] = float(len(alarms))
        norm, reward = metrics.get(GRAD_NORM, math.nan), metrics.get("reward/mean", math.nan)
        rewards = [r for r in (reward, state.best_reward) if r is not None and not math.isnan(r)]
        # A step without a trained token has norm 0, which says nothing about the next gradient.
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

        Too many consecutive skipped steps end the run also with action warn: nothing is trained. With action
        skip only they do, since each skip has been reported already.
        """
        self._stop_if_unscored(step, groups)
        self._stop_if_idle(step, metrics)
        ends = passed(make_bounds(self._settings, self.state, "run"), metrics)
        if self._skips:
            alarms = ends
        if not alarms:
            return
        problem = f"step {step}: {_describe(alarms, metrics)}"
        if self._settings.action.kind == "warn" and not ends:
            self._recorder.warn(f"{problem}; its batch is in {self._keep(step, groups)}")
            return
        reason = (
            f"`health.skipped_steps_above` = {self._settings.skipped_steps_above}"
            if ends
            else f"`health.action` = {self._settings.action.kind}"
        )
        self._stop(
            step, problem, groups,
            f"Stopped ({reason}). This step was not saved: rerunning "
            "the same command resumes from the previous checkpoint, and will pass this bound again unless "
            "you change it",
        )  # fmt: skip

    def _stop_if_unscored(self, step: int, groups: list[Group]) -> None:
        """Raise Unhealthy after too many consecutive steps without a score, with any `health.action`."""
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
        """Raise Unhealthy after too many consecutive steps without a trained token, with any `health.action`.

        Neither training on nor a rollback would help: both would only sample more.
        """
        if self.state.idle <= _MOST_IDLE:
            return
        names = ("reward/mean", "reward/unscored", "group/no_signal_share", "rollout/truncated_share")
        numbers = ", ".join(f"{name} = {metrics[name]:.4g}" for name in names if name in metrics)
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
        """Quarantine the batch. Raises Rollback if `health.action` is rollback, its `max_rollbacks` allows
        another one, and the run was not rolled back from ``step`` before, else Unhealthy.
        """
        path = self._recorder.quarantine(step, groups)
        action, avoid = self._settings.action, self.state.avoid
        most = action.max_rollbacks if isinstance(action, RollbackAction) else 0
        if step not in avoid and len(avoid) < most:
            raise Rollback(f"{problem}; the batch is kept in {path}, and not trained on", step)
        raise Unhealthy(f"{problem}; the batch is kept in {path}. {remedy}")


def _why_unscored(groups: Sequence[Group]) -> str:
    """Return up to three reasons with their numbers of samples, the most frequent first."""
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
    values = (f"{name} = {metrics[name]:.4g}" for name in UPDATE_METRICS if name in metrics)
    return f"{by} ({', '.join(values)})"
