"""Evaluations of a planned run: how many there are, of how many prompts, and how long one takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.config import CheckpointConfig, DataConfig, DataSourceConfig, EvaluationConfig
from grpo_dist.data.readers import read, source_name
from grpo_dist.errors import expanded
from grpo_dist.evaluation.sampling import EvalSet, evaluate
from grpo_dist.loop.chores import evaluates_export
from grpo_dist.tools.plan import fake_records
from grpo_dist.tools.plan.failures import NO_FAILURES
from grpo_dist.tools.plan.options import Option
from grpo_dist.tools.plan.scenario import Scenario, as_planned
from grpo_dist.tools.plan.simulated_cluster import SimulatedCluster
from grpo_dist.tools.plan.step_recorder import StepRecorder
from grpo_dist.tools.plan.virtual_clock import run_virtually


@dataclass(frozen=True)
class PlannedEvaluation:
    """``prompts``: of the sets whose sizes are known; ``seconds``: one evaluation of them, ``count``: how
    many the run has. ``assumed``, ``left_out``: sets of unknown size, with a bound and without.
    ``waited_s``: seconds that training waits for them; None: for all of them.
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


def planned_evaluation(option: Option, step_s: float) -> PlannedEvaluation | None:
    """Plan the evaluations of a run; None where it has none.

    Set sizes come from local files and `demo:` sets, before too long prompts are dropped. Nothing is fetched.
    """
    config = option.config
    count = evaluations(config.evaluation, config.checkpoint, config.steps)
    if not count or not config.data.eval:
        return None
    sizes, assumed, left_out = [], [], []
    for source in config.data.eval:
        known, size = prompts_of(source, config.evaluation.max_prompts)
        if size is None:
            left_out.append(source_name(source))
            continue
        sizes.append(size)
        if not known:
            assumed.append(source_name(source))
    each = config.evaluation.samples_per_prompt
    seconds = evaluation_s(_scenario(option), sizes) if sizes else 0.0
    exported = config.evaluation.after and config.checkpoint.export
    waited_s = None
    if config.evaluation.num_workers:
        every, steps_s = config.evaluation.every, config.steps * step_s
        waited_s = waited(count - exported, seconds, every * step_s or steps_s) + exported * seconds
    return PlannedEvaluation(sum(sizes), each, seconds, count, tuple(assumed), tuple(left_out), waited_s)


def waited(count: int, seconds: float, between_s: float) -> float:
    """Return the seconds that training waits for ``count`` evaluations of ``seconds`` on own engines:
    what each takes beyond the ``between_s`` until the next, and all of one after the last step.
    """
    return max(0, count - 1) * max(0.0, seconds - between_s) + (seconds if count else 0.0)


def evaluations(settings: EvaluationConfig, checkpoint: CheckpointConfig, steps: int) -> int:
    """Return how often a run of ``steps`` evaluates its sets, in `driver.run` and around it."""
    during = steps // settings.every if settings.every else 0
    if is_due(steps, settings.every) and evaluates_export(settings, checkpoint):
        during -= 1
    return settings.before + during + (settings.after and checkpoint.export)


def evaluation_s(scenario: Scenario, sizes: Sequence[int]) -> float:
    """Return the seconds of the real evaluation on otherwise idle simulated workers.

    ``sizes``: prompts of each set; sets are evaluated one after the other.
    """
    config, tokens = as_planned(scenario), scenario.workload.prompt_tokens
    sets = [EvalSet(str(i), fake_records.prompts(size, tokens)) for i, size in enumerate(sizes)]

    async def session() -> float:
        cluster = SimulatedCluster(scenario, config)
        await evaluate(config, cluster.workers, sets, StepRecorder(cluster.trace), step=0)
        return asyncio.get_running_loop().time()

    return run_virtually(session)


def _scenario(option: Option) -> Scenario:
    """Return the training scenario with the evaluation's length limit and capacity, without failures."""
    config, scenario = option.config, option.scenario
    settings, workload = config.evaluation, scenario.workload
    workload = replace(workload, cap=settings.max_new_tokens or workload.cap)
    held = workload.prompt_tokens / settings.samples_per_prompt + workload.mean
    if settings.num_workers:
        rollout = config.rollout.model_copy(update={"num_workers": settings.num_workers})
        scenario = replace(
            scenario, config=config.model_copy(update={"rollout": rollout}), sharing=frozenset()
        )
    return replace(
        scenario, workload=workload, capacity=max(1, option.engine.sequences_of(held)), failures=NO_FAILURES
    )


def first_epoch_steps(data: DataConfig, prompts_per_step: int) -> int | None:
    """Return the steps until the first prompt comes again; None where the rows cannot be counted, which takes
    a local file or a `demo:` set.
    """
    counted = [prompts_of(source, None) for source in data.train]
    if not all(known for known, _ in counted):
        return None
    return math.ceil(sum(size or 0 for _, size in counted) / prompts_per_step)


def prompts_of(source: DataSourceConfig, most: int | None) -> tuple[bool, int | None]:
    """Return whether the number of rows is known, and how many are evaluated; None: unbounded."""
    bounds = [bound for bound in (source.max_rows, most) if bound is not None]
    bound = min(bounds, default=None)
    if source.path is not None and (source.path.startswith("demo:") or expanded(source.path).exists()):
        try:
            return True, len(read(source.model_copy(update={"max_rows": bound})))
        except (OSError, ValueError):  # the run itself reports it
            pass
    return False, bound
