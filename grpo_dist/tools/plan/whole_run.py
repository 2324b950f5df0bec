"""A whole run: its steps, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.checkpoints import COPY, DISK, PlannedCheckpoints, planned_checkpoints
from grpo_dist.tools.plan.evaluation import PlannedEvaluation, planned_evaluation
from grpo_dist.tools.plan.options import Planned
from grpo_dist.tools.plan.phases import Phase


@dataclass(frozen=True)
class WholeRun:
    """``phases``: all steps of the run. ``evaluation``: None where there is none."""

    config: Config
    phases: Sequence[Phase]
    evaluation: PlannedEvaluation | None
    checkpoints: PlannedCheckpoints

    @property
    def steps_s(self) -> float:
        """Seconds of all steps."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.steps_s / self.config.steps

    @property
    def overhead_s(self) -> float:
        """Seconds of evaluations and checkpoints."""
        return self.checkpoints.total_s + (self.evaluation.total_s if self.evaluation else 0.0)

    @property
    def seconds(self) -> float:
        return self.steps_s + self.overhead_s

    def lines(self, *, price: float, failures: bool) -> list[str]:
        """Describe evaluations, checkpoints and the total. ``price``: dollars an hour, 0: unknown.
        ``failures``: the total leaves some out.
        """
        return [*self._steps(), *self._evaluations(), self._checkpoints(), self._all(price, failures)]

    def _steps(self) -> list[str]:
        """Describe the phases where there are several kinds of steps."""
        if len({(phase.max_new_tokens, phase.in_first_epoch) for phase in self.phases}) == 1:
            return []
        parts = [
            f"{phase.steps:,} with up to {phase.max_new_tokens:,} tokens take {written(phase.step_s, 's')}"
            + (", in the first epoch, whose lengths are unknown" if phase.in_first_epoch else "")
            for phase in self.phases
        ]
        return [f"steps: {'; '.join(parts)}; {self.steps_s / 3600:,.2f} h in all"]

    def _evaluations(self) -> list[str]:
        found, lines = self.evaluation, []
        if found is None:
            return []
        if found.prompts:
            names = ", ".join(found.assumed)
            guessed = f", as many prompts in {names} as `evaluation.max_prompts` or `max_rows` allows"
            lines.append(
                f"evaluation: {found.prompts:,} prompt(s) with {found.samples_per_prompt} sample(s) each "
                f"take {written(found.seconds, 's')}, {found.count} time(s){self._beside(found)}: "
                f"{self._share(found.total_s)}; "
                f"assumed: completions as long as in training{guessed if names else ''}"
            )
        if found.left_out:
            lines.append(
                f"warning: evaluation of {', '.join(found.left_out)}, {found.count} time(s), is left out: "
                "their number of prompts is unknown; plan with evaluation.max_prompts"
            )
        return lines

    @staticmethod
    def _beside(found: PlannedEvaluation) -> str:
        if found.waited_s is None:
            return ""
        return f", while training continues, which waits {written(found.waited_s, 's')} in all"

    def _checkpoints(self) -> str:
        found, disk = self.checkpoints, f"{DISK / 1e9:g} GB/s from all ranks to disk"
        holds = f"block the loop for {written(found.held_s, 's')} each"
        if found.background:
            late = f", {written(found.late_s, 's')} more for the previous one" if found.late_s else ""
            holds += f"{late}, and its end for {written(found.last_s, 's')}"
            disk = f"{COPY / 1e9:g} GB/s from a rank to memory, {disk}"
        return (
            f"checkpoints: {found.count} of {written(found.size, 'B')} {holds}: "
            f"{self._share(found.total_s)}; assumed: {disk}"
        )

    def _all(self, price: float, failures: bool) -> str:
        """Describe the total. What it leaves out is short in long runs, or has a warning."""
        left_out, found = ["its start"], self.evaluation
        if failures:
            left_out.append("failures")
        if found and found.left_out:
            left_out.append("evaluations (see the warning)")
        if self.config.checkpoint.export:
            fresh = ", fresh engines for `evaluation.after`" if found and self.config.evaluation.after else ""
            left_out.append(f"the export at its end{fresh}")
        hours = self.seconds / 3600
        cost = f", ${price * hours:,.2f}" if price else ""
        return f"the whole run, with these: {hours:,.2f} h{cost}; left out: {', '.join(left_out)}"

    def _share(self, seconds: float) -> str:
        return f"{written(seconds / self.seconds, '%')} of the run's time"


def whole_run(planned: Planned, phases: Sequence[Phase]) -> WholeRun:
    """Return the run of ``planned``, whose steps are those of ``phases``."""
    option, seconds = planned.option, sum(phase.seconds for phase in phases)
    evaluation = planned_evaluation(option, seconds / option.config.steps)
    return WholeRun(option.config, phases, evaluation, planned_checkpoints(planned))
