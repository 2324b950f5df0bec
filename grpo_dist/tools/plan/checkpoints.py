"""Checkpoints of a planned run: what ranks write, and how long the loop waits for it.

background      copy to host memory | next steps ......       the files are written meanwhile, which the
                                    \\ write ..... published   next checkpoint and the end wait for
in the loop     write .... published | next steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_dist.config import ReferenceConfig
from grpo_dist.tools.plan.memory import rank_bytes
from grpo_dist.tools.plan.options import Planned
from grpo_dist.tools.plan.rates import Rates

# Assumed: a disk that all ranks write to at once, checksums included, and a rank's copy to pageable memory.
# The plan prints both.
DISK = 1e9  # bytes a second
COPY = 5e9


@dataclass(frozen=True)
class PlannedCheckpoints:
    """``size``: bytes of one. The loop waits ``held_s`` at each, ``late_s`` more where the previous one
    is still being written, and ``last_s`` at its end.
    """

    count: int
    size: int
    background: bool
    held_s: float
    late_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        return self.count * self.held_s + (self.count - 1) * self.late_s + self.last_s


def planned_checkpoints(planned: Planned) -> PlannedCheckpoints:
    """Plan the checkpoints, without groups sampled ahead: their tokens are few bytes next to the weights."""
    config, scenario = planned.option.config, planned.option.scenario
    settings, rates, count = (
        config.checkpoint,
        scenario.rates,
        checkpoints(config.checkpoint.every, config.steps),
    )
    ranks, reference = (
        rank_bytes(config.policy, rates.model, rates.sizes),
        reference_bytes(config.reference, config.needs_reference, rates),
    )
    write_s = sum(ranks) / DISK
    held_s = reference / DISK  # its worker writes them while the loop waits
    if scenario.sharing:  # the policy returns to its GPUs, sends the engines their weights, and leaves
        held_s += 2 * rates.turn_s() + rates.sync_s()
    late_s = last_s = 0.0
    if settings.background:
        held_s += max(ranks) / COPY
        late_s = max(0.0, write_s - settings.every * planned.simulated.step_s) if count > 1 else 0.0
        last_s = write_s
    else:
        held_s += write_s
    size = sum(ranks) + reference
    return PlannedCheckpoints(count, size, settings.background, held_s, late_s, last_s)


def checkpoints(every: int, steps: int) -> int:
    """Return how many a run writes: those that are due, and one at its end."""
    return math.ceil(steps / every) if every else 1


def reference_bytes(reference: ReferenceConfig, needs_reference: bool, rates: Rates) -> int:
    """Return the bytes of a reference that is renewed during the run."""
    renewed = needs_reference and reference.refresh_every
    return rates.model.parameters * rates.sizes.itemsize if renewed else 0
