"""A whole run: its steps, evaluations and checkpoints.

background      copy to host memory | next steps ......       files are written meanwhile; the next
                                    \\ write ..... published   checkpoint and the end wait for them
in the loop     write .... published | next steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.config import CheckpointConfig, Config, DataSourceConfig, EvaluationConfig
from grpo_dist.data.readers import read
from grpo_dist.errors import expanded
from grpo_dist.loop.chores import evaluates_export
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.memory import rank_bytes, refreshed_bytes
from grpo_dist.tools.plan.options import Option, Planned
from grpo_dist.tools.plan.simulation import Scenario, evaluation_s

# Assumed: a disk shared by all ranks, including checksums, and a rank's copy to pageable memory. The plan
# prints both.
DISK = 1e9  # bytes per second
COPY = 5e9


@dataclass(frozen=True)
class PlannedEvaluation:
    """``prompts``: of sets with known sizes. ``seconds``: one evaluation of these sets. ``count``:
    evaluations in the run. ``assumed``, ``left_out``: sets of unknown size, with and without a bound.
    ``waited_s``: seconds that training waits; None: for all evaluations.
    """

    prompts: int
    samples_per_prompt: int
    seconds: float
    count: int
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    waited_s: float | None = None

    @property
    def total_s(self) -> float:
        return self.count * self.seconds if self.waited_s is None else self.waited_s


@dataclass(frozen=True)
class PlannedCheckpoints:
    """``size``: bytes per checkpoint. The loop waits ``held_s`` at each, ``late_s`` more if the previous one
    is still being written, and ``last_s`` at the end of the run.
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


@dataclass(frozen=True)
class WholeRun:
    """``step_s``: seconds per step with the longest completions. ``evaluation``: None if there is none."""

    config: Config
    step_s: float
    evaluation: PlannedEvaluation | None
    checkpoints: PlannedCheckpoints

    @property
    def seconds(self) -> float:
        evaluations = self.evaluation.total_s if self.evaluation else 0.0
        return self.config.steps * self.step_s + self.checkpoints.total_s + evaluations

    def lines(self, *, price: float) -> list[str]:
        """Describe evaluations, checkpoints and the total. ``price``: dollars per hour, 0: unknown."""
        return [*self._evaluations(), self._checkpoints(), self._all(price)]

    def _evaluations(self) -> list[str]:
        planned, lines = self.evaluation, []
        if planned is None:
            return []
        if planned.prompts:
            names = ", ".join(planned.assumed)
            guessed = f", as many prompts in {names} as `max_rows` allows"
            beside = ""
            if planned.waited_s is not None:
                beside = f", while training continues, which waits {written(planned.waited_s, 's')} in all"
            lines.append(
                f"evaluation: {planned.prompts:,} prompt(s) with {planned.samples_per_prompt} sample(s) each "
                f"take {written(planned.seconds, 's')}, {planned.count} time(s){beside}: "
                f"{self._share(planned.total_s)}; "
                f"assumed: completions as long as in training{guessed if names else ''}"
            )
        if planned.left_out:
            lines.append(
                f"warning: evaluation of {', '.join(planned.left_out)}, {planned.count} time(s), is left "
                "out: their number of prompts is unknown; plan with data.eval.N.max_rows"
            )
        return lines

    def _checkpoints(self) -> str:
        planned, disk = self.checkpoints, f"{DISK / 1e9:g} GB/s from all ranks to disk"
        holds = f"block the loop for {written(planned.held_s, 's')} each"
        if planned.background:
            late = f", {written(planned.late_s, 's')} more for the previous one" if planned.late_s else ""
            holds += f"{late}, and its end for {written(planned.last_s, 's')}"
            disk = f"{COPY / 1e9:g} GB/s from a rank to memory, {disk}"
        return (
            f"checkpoints: {planned.count} of {written(planned.size, 'B')} {holds}: "
            f"{self._share(planned.total_s)}; assumed: {disk}"
        )

    def _all(self, price: float) -> str:
        """Describe the total. What it excludes is short in long runs, or has a warning."""
        left_out, evaluation = ["its start"], self.evaluation
        if evaluation and evaluation.left_out:
            left_out.append("evaluations (see the warning)")
        if self.config.checkpoint.export:
            fresh = evaluation and self.config.evaluation.after
            left_out.append(
                f"the export at its end{', fresh engines for `evaluation.after`' if fresh else ''}"
            )
        hours = self.seconds / 3600
        cost = f", ${price * hours:,.2f}" if price else ""
        return f"the whole run, with these: {hours:,.2f} h{cost}; left out: {', '.join(left_out)}"

    def _share(self, seconds: float) -> str:
        return f"{written(seconds / self.seconds, '%')} of the run's time"


def whole_run(planned: Planned) -> WholeRun:
    """Return the whole run of ``planned``."""
    option, step_s = planned.option, planned.simulated.step_s
    return WholeRun(option.config, step_s, planned_evaluation(option, step_s), planned_checkpoints(planned))


def planned_evaluation(option: Option, step_s: float) -> PlannedEvaluation | None:
    """Plan the evaluations of a run; None if it has none.

    Set sizes come from local files and `demo:` sets, before dropping long prompts. Nothing is downloaded.
    """
    config = option.config
    count = evaluations(config.evaluation, config.checkpoint, config.steps)
    if not count or not config.data.eval:
        return None
    sizes, assumed, left_out = [], [], []
    for source in config.data.eval:
        is_counted, size = prompts_of(source)
        if size is None:
            left_out.append(source.label)
            continue
        sizes.append(size)
        if not is_counted:
            assumed.append(source.label)
    each = config.evaluation.samples_per_prompt
    seconds = evaluation_s(_evaluation_scenario(option), sizes) if sizes else 0.0
    exported = config.evaluation.after and config.checkpoint.export
    waited_s = None
    if config.evaluation.num_workers:
        every, steps_s = config.evaluation.every, config.steps * step_s
        waited_s = waited(count - exported, seconds, every * step_s or steps_s) + exported * seconds
    return PlannedEvaluation(sum(sizes), each, seconds, count, tuple(assumed), tuple(left_out), waited_s)


def waited(count: int, seconds: float, between_s: float) -> float:
    """Return the seconds that training waits for ``count`` evaluations of ``seconds`` on separate engines:
    the excess of each over the interval ``between_s``, and the whole evaluation after the last step.
    """
    return max(0, count - 1) * max(0.0, seconds - between_s) + (seconds if count else 0.0)


def evaluations(settings: EvaluationConfig, checkpoint: CheckpointConfig, steps: int) -> int:
    """Return the number of evaluations of a run of ``steps``, in `driver.run` and around it."""
    during = steps // settings.every if settings.every else 0
    if is_due(steps, settings.every) and evaluates_export(settings, checkpoint):
        during -= 1
    return settings.before + during + (settings.after and checkpoint.export)


def _evaluation_scenario(option: Option) -> Scenario:
    """Return the training scenario with the evaluation's length limit and capacity."""
    config, scenario = option.config, option.scenario
    settings, workload = config.evaluation, scenario.workload
    workload = replace(workload, cap=settings.max_new_tokens or workload.cap)
    cached_tokens = workload.prompt_tokens / settings.samples_per_prompt + workload.mean
    if settings.num_workers:
        rollout = config.rollout.model_copy(update={"num_workers": settings.num_workers})
        config = config.model_copy(update={"rollout": rollout})
        scenario = replace(scenario, config=config, sharing=frozenset())
    return replace(scenario, workload=workload, capacity=max(1, option.engine.sequences_of(cached_tokens)))


def prompts_of(source: DataSourceConfig) -> tuple[bool, int | None]:
    """Return whether the number of rows is known, and the number of evaluated rows; None: unbounded."""
    if source.path is not None and (source.path.startswith("demo:") or expanded(source.path).exists()):
        try:
            return True, len(read(source))
        except (OSError, ValueError):  # the run itself reports it
            pass
    return False, source.max_rows


def planned_checkpoints(planned: Planned) -> PlannedCheckpoints:
    """Plan the checkpoints, without groups sampled ahead, which are small compared to the weights."""
    config, scenario = planned.option.config, planned.option.scenario
    settings, rates = config.checkpoint, scenario.rates
    count = checkpoints(settings.every, config.steps)
    ranks = rank_bytes(config.policy, rates.model, rates.sizes)
    reference = refreshed_bytes(config, rates.model, itemsize=rates.sizes.itemsize)
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
    return PlannedCheckpoints(count, sum(ranks) + reference, settings.background, held_s, late_s, last_s)


def checkpoints(every: int, steps: int) -> int:
    """Return the number of checkpoints: the scheduled ones, and one at the end."""
    return math.ceil(steps / every) if every else 1
