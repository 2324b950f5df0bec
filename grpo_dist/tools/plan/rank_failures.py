"""The expected cost of failing policy ranks: a plan simulates too few steps to meet one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_dist.config import CheckpointConfig, RestartsConfig

RESTART_S = 120.0  # assumed: a process that loads a model and joins the others


@dataclass(frozen=True, slots=True)
class RankFailures:
    """``every_s``: mean time between two failures of any rank. ``planned_s``: time of the run without
    failures; ``expected_s``: with them, infinity where a float cannot hold it. ``ends``: chance that the run
    ends because `cluster.restarts` are spent.
    """

    every_s: float
    restart_s: float
    planned_s: float
    expected_s: float
    ends: float

    @property
    def share(self) -> float:
        """Return the share of the time that goes into restarts and into repeated or unfinished steps."""
        return 1.0 - self.planned_s / self.expected_s


def rank_failures(
    ranks: int,
    checkpoint: CheckpointConfig,
    restarts: RestartsConfig,
    *,
    steps: int,
    step_s: float,
    unseen_s: float,
    failure_every_s: float,
    restart_s: float,
) -> RankFailures | None:
    """Estimate what failures of policy ranks cost a run; None where ``failure_every_s`` is 0.

    ``failure_every_s``: mean time between failures of one GPU. ``unseen_s``: seconds of a step before the
    policy is called; a failure is noticed only after them. The back-off of `cluster.restarts` is left out.
    """
    if not failure_every_s:
        return None
    every_s = failure_every_s / ranks

    def seconds(count: int) -> float:
        return stretch_s(count, step_s=step_s, unseen_s=unseen_s, every_s=every_s, restart_s=restart_s)

    between = min(checkpoint.every or steps, steps)
    whole, rest = divmod(steps, between)
    expected_s = whole * seconds(between) + (seconds(rest) if rest else 0.0)
    # The run ends when as many failures as it can restart from follow another one within the window.
    spent = expected_s / every_s * at_least(restarts.max_per_worker, restarts.window_s / every_s)
    return RankFailures(every_s, restart_s, steps * step_s, expected_s, -math.expm1(-spent))


def stretch_s(steps: int, *, step_s: float, unseen_s: float, every_s: float, restart_s: float) -> float:
    """Return the expected seconds from one checkpoint to the next, ``steps`` later, with failures.

    With T = steps * step_s, M = every_s, R = restart_s and failures at a constant rate, which also interrupt
    and repeat restarts: M exp(R / M) (exp(T / M) - 1) (J. T. Daly, 2006, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", with a write time of 0). A restart takes
    M (exp(R / M) - 1), and exp(T / M) - 1 attempts fail, each after M on average; here a little later, as a
    failure within ``unseen_s`` is noticed at its end.
    """
    busy_s = step_s - unseen_s
    try:
        failed = math.expm1(steps * step_s / every_s)
        started = every_s * math.expm1(restart_s / every_s)
    except OverflowError:
        return math.inf
    # Mean time of one step until its end or a failure; divided by the chance of a failure: until a failure.
    tried = unseen_s - math.exp(-unseen_s / every_s) * every_s * math.expm1(-busy_s / every_s)
    return failed * (tried / -math.expm1(-step_s / every_s) + started)


def at_least(count: int, mean: float) -> float:
    """Return the chance of ``count`` or more events where ``mean`` are expected (Poisson)."""
    if count > 10 * mean + 20:
        return 0.0  # negligible
    fewer, chance = 0.0, math.exp(-mean)
    for k in range(count):
        fewer += chance
        chance *= mean / (k + 1)
    return max(0.0, 1.0 - fewer)
