"""What goes less well than planned: engines and ranks that are slow, and losses of policy ranks, of which the
few simulated steps of a plan meet none.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.plan.engines import EngineTimes

RESTART_S = 120.0  # assumed: a process that loads a model and joins the others


@dataclass(frozen=True, slots=True)
class Slow:
    """``engines``: so many take ``engine`` times as long for all they do; ``rank``: times as long as the
    others that the slowest policy rank takes, for which they wait.
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
    """``every_s``: mean time between two losses of any rank; ``cost_s``: what one costs on average, from the
    loss until the run is as far as it was.
    """

    every_s: float
    restart_s: float
    repeated_s: float

    @property
    def cost_s(self) -> float:
        return self.restart_s + self.repeated_s

    @property
    def share(self) -> float:
        """Of the time of a run that goes on until it is done: each stretch of ``every_s`` that gets it on is
        followed by ``cost_s`` that do not (losses within these left out).
        """
        return self.cost_s / (self.every_s + self.cost_s)


def rank_losses(config: Config, *, step_s: float, lost_every_s: float, restart_s: float) -> RankLosses | None:
    """``lost_every_s``: mean time between failures of one GPU; 0: none fails, and None is returned. A loss is
    as likely at any moment between two checkpoints, so half of the steps between them come again (J. W.
    Young, 1974, "A first order approximation to the optimum checkpoint interval").
    """
    if not lost_every_s:
        return None
    between = config.checkpoint.every or config.steps
    return RankLosses(
        lost_every_s / config.policy.num_workers, restart_s, min(between, config.steps) * step_s / 2
    )
