"""The parts of a run whose steps take different times, each simulated with its own settings.

longest completions    known before the run where `sampling.max_new_tokens` has a schedule; a length that
                       is raised where completions are cut off is the largest throughout: an upper bound
tail batching          `data.order: length` knows no lengths in the first epoch: steps as they come
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_dist.config import SamplingConfig
from grpo_dist.tools.plan.engine_memory import EngineFootprint
from grpo_dist.tools.plan.options import Planned
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.simulation import Simulated, simulate
from grpo_dist.tools.plan.workload import workload_of


@dataclass(frozen=True, slots=True)
class Phase:
    """``steps`` of ``step_s`` seconds each. ``max_new_tokens``: of their completions. ``in_first_epoch``: no
    length of a prompt is known, which tail batching would need.
    """

    steps: int
    step_s: float
    max_new_tokens: int
    in_first_epoch: bool = False

    @property
    def seconds(self) -> float:
        return self.steps * self.step_s


@dataclass(frozen=True, slots=True)
class RunLengths:
    """What differs between the steps of a run.

    Attributes:
        sampling: of the run, with its schedule.
        unknown_steps: those before the first prompt comes again.
    """

    sampling: SamplingConfig
    unknown_steps: int = 0

    def parts(self, steps: int) -> Iterator[tuple[int, int, bool]]:
        """Yield steps, longest completion and whether these are of the first epoch, for a run of ``steps``.

        schedule [[0, 8], [4, 16]], 6 unknown, 10 steps -> (4, 8, True), (2, 16, True), (4, 16, False)
        """
        length = self.sampling.max_new_tokens
        schedule = None if isinstance(length, int) else length.schedule
        changes = schedule or ((0, self.sampling.longest),)
        begins = sorted({0, self.unknown_steps, *(step for step, _ in changes)} & set(range(steps)))
        for begin, end in zip(begins, [*begins[1:], steps], strict=True):
            tokens = changes[bisect_right([step for step, _ in changes], begin) - 1][1]
            yield end - begin, tokens, begin < self.unknown_steps


def phases_of(planned: Planned, lengths: RunLengths) -> list[Phase]:
    """Return the phases of the whole run; each kind of step is simulated once."""
    option, found = planned.option, list[Phase]()
    by_length = option.config.data.order == "length"
    own, timed = option.config.sampling.longest, planned.simulated.timed
    runs: dict[tuple[int, bool], Simulated] = {(own, False): planned.simulated}
    for steps, tokens, is_first in lengths.parts(option.config.steps):
        kind = (tokens, is_first and by_length)
        if kind not in runs:
            scenario = replace(option.scenario, steps=timed.stop - timed.start, lengths_known=not kind[1])
            if tokens != own:
                scenario = _with_length(scenario, planned.option.engine, tokens)
            runs[kind] = simulate(scenario)
        found.append(Phase(steps, runs[kind].step_s, *kind))
    return found


def _with_length(scenario: Scenario, engine: EngineFootprint, tokens: int) -> Scenario:
    """Return ``scenario`` with completions of at most ``tokens`` on engines that are made for longer ones."""
    sampling = scenario.config.sampling.model_copy(update={"max_new_tokens": tokens})
    config, longest = scenario.config.model_copy(update={"sampling": sampling}), scenario.workload
    workload = workload_of(
        config,
        prompt_tokens=longest.prompt_tokens,
        shared_tokens=longest.shared_tokens,
        measured=longest.measured,
        turns=longest.turns,
        tool_s=longest.tool_s,
    )
    held = workload.prompt_tokens / config.batch.samples_per_prompt + workload.mean
    capacity = max(1, engine.sequences_of(held))
    return replace(scenario, config=config, workload=workload, capacity=capacity)
