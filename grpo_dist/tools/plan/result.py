"""The result of planning."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.config import SamplingConfig
from grpo_dist.tools.plan.options import Option, Planned, Setting
from grpo_dist.tools.plan.sweep import Cell, Tried, own_cell
from grpo_dist.tools.plan.whole_run import WholeRun


@dataclass(frozen=True)
class Plan:
    """``configured``: the configuration as it is, with ``simulated`` what it would do; None where ``refused``
    is why it cannot run. ``found``: the best option of each cell of the sweep, the configuration's ``own``
    first, or the fastest where none of that can run. ``tried``: what was tried in its own cell. ``whole``:
    the run of ``simulated``, or of the first of ``found``. ``sampling``: of the run; all others are of its
    longest completions.
    """

    setting: Setting
    configured: Option | None
    simulated: Planned | None
    refused: str
    found: list[Planned]
    whole: WholeRun
    tried: list[Tried]
    sampling: SamplingConfig
    own: Cell

    @property
    def is_own(self) -> bool:
        """True where the first of ``found`` trains at the configuration's batch and staleness."""
        config = self.found[0].option.config
        return own_cell(config.batch, config.max_staleness) == self.own

    @property
    def needs_reference(self) -> bool:
        shown = self.configured or self.found[0].option
        return shown.config.needs_reference
