"""What goes less well than planned: engines and ranks that are slow, and losses of policy ranks, of which the
few simulated steps of a plan meet none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.tools.plan.engines import EngineTimes

RESTART_S = 120.0  # assumed: a process that loads a model and joins the others


@dataclass(frozen=True, slots=True)
class Slow:
    """``engines``: so many take ``engine`` times as long to sample; ``rank``: times as long as the others
    that the slowest policy rank takes for an update, for which they wait. Syncs and turns take no longer.
    """

    engines: int = 0
    engine: float = 1.0
    rank: float = 1.0


EVEN = Slow()


class SlowTimes:
    """Of an engine that takes ``factor`` times as long as `times` say."""

    def __init__(self, times: EngineTimes, factor: float) -> None:
        self._times, self._factor = times, factor

    def decode_step_s(self, sequences: float, context: float) -> float:
        return self._factor * self._times.decode_step_s(sequences, context)

    def prefill_s(self, tokens: float) -> float:
        return self._factor * self._times.prefill_s(tokens)


@dataclass(frozen=True, slots=True)
class RankLosses:
    """``every_s``: mean time between two losses of any rank; ``planned_s``: of the run without any;
    ``expected_s``: with them, infinity where that is beyond a number; ``ends``: chance that
    `cluster.restarts` are spent before the run is done.
    """

    every_s: float
    restart_s: float
    planned_s: float
    expected_s: float
    ends: float

    @property
    def share(self) -> float:
        """Of the time that goes into restarts, and into what comes again or is begun in vain."""
        return 1.0 - self.planned_s / self.expected_s


def rank_losses(
    config: Config, *, step_s: float, unseen_s: float, lost_every_s: float, restart_s: float
) -> RankLosses | None:
    """``lost_every_s``: mean time between failures of one GPU; 0: none fails, and None is returned.
    ``unseen_s``: of a step, before the policy is asked for anything: a loss is met when that is over. What
    the back-off of `cluster.restarts` adds is left out.
    """
    if not lost_every_s:
        return None
    every_s = lost_every_s / config.policy.num_workers

    def seconds(steps: int) -> float:
        return stretch_s(steps, step_s=step_s, unseen_s=unseen_s, every_s=every_s, restart_s=restart_s)

    between = min(config.checkpoint.every or config.steps, config.steps)
    whole, rest = divmod(config.steps, between)
    expected_s = whole * seconds(between) + (seconds(rest) if rest else 0.0)
    restarts = config.cluster.restarts
    # As many as are made good come within the window after each loss: that one is one too many.
    spent = expected_s / every_s * at_least(restarts.max_per_worker, restarts.window_s / every_s)
    return RankLosses(every_s, restart_s, config.steps * step_s, expected_s, -math.expm1(-spent))


def stretch_s(steps: int, *, step_s: float, unseen_s: float, every_s: float, restart_s: float) -> float:
    """Expected seconds until so many ``steps`` from one checkpoint to the next are made without a loss.

    With T = steps * step_s, M = every_s, R = restart_s, losses at any moment alike, during a restart, too,
    which then begins anew: M exp(R / M) (exp(T / M) - 1) (J. T. Daly, 2006, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", where writing takes no time). A restart takes
    M (exp(R / M) - 1), and exp(T / M) - 1 attempts fail, each met after M on average; here a little later, as
    a loss within ``unseen_s`` is met at their end.
    """
    busy_s = step_s - unseen_s
    try:
        failed = math.expm1(steps * step_s / every_s)
        started = every_s * math.expm1(restart_s / every_s)
    except OverflowError:
        return math.inf
    # Of one step, to its end or to where a loss is met; over the chance of a loss, that of all until one is.
    tried = unseen_s - math.exp(-unseen_s / every_s) * every_s * math.expm1(-busy_s / every_s)
    return failed * (tried / -math.expm1(-step_s / every_s) + started)


def at_least(count: int, mean: float) -> float:
    """Chance of ``count`` events or more where ``mean`` are expected (Poisson)."""
    if count > 10 * mean + 20:
        return 0.0  # next to nothing
    fewer, chance = 0.0, math.exp(-mean)
    for k in range(count):
        fewer += chance
        chance *= mean / (k + 1)
    return max(0.0, 1.0 - fewer)
