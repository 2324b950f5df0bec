"""Memory and time of a pipeline's sft stage: the policy's ranks alone, and one update a step.

The memory is that of a policy rank whose micro-batches hold demonstrations, which are taken to share no
tokens, and no engine sleeps there. A step is the update of `rates`, a validation loss a forward pass over
what is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_dist.config import LengthsConfig, SupervisedConfig
from grpo_dist.data.demonstrations import count_held_out
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.memory import USABLE, Footprint, Sizes, policy_rank
from grpo_dist.tools.plan.models import ModelShape
from grpo_dist.tools.plan.peaks import Peaks
from grpo_dist.tools.plan.rates import Rates, Reached, UpdateWork
from grpo_dist.tools.plan.workload import Workload

# Of `sft.max_length`, where no rows are known: mean tokens of a prompt and of a completion.
_PROMPT_SHARE, _COMPLETION_SHARE = 1 / 8, 3 / 8


@dataclass(frozen=True, slots=True)
class SupervisedTimes:
    """``tokens``: of a step, with prompts. ``steps``: None with `sft.epochs`, where the rows are unknown."""

    step_s: float
    validation_s: float
    tokens: float
    steps: int | None
    validations: int

    @property
    def seconds(self) -> float | None:
        """Seconds of all steps and validation losses, without the start of the ranks."""
        return None if self.steps is None else self.steps * self.step_s + self.validations * self.validation_s


def supervised_rank(config: SupervisedConfig, model: ModelShape, sizes: Sizes) -> Footprint:
    """Return the peak memory of a rank."""
    sft = config.sft
    assert sft is not None  # the configuration was checked
    longest = config.model.model_copy(update={"max_length": sft.max_length})
    own = config.model_copy(update={"model": longest})
    rows = -(-sft.batch_size // config.policy.replicas)  # of a rank in one step: its micro-batch has no more
    sizes = replace(sizes, micro_batch=min(sizes.micro_batch, rows * sft.max_length))
    alone = LengthsConfig(kind="fixed", tokens=sft.max_length)
    return policy_rank(own, model, sizes, Workload(0, alone, sft.max_length))


def supervised_problem(config: SupervisedConfig, need: Footprint, cluster: ClusterShape) -> str | None:
    """Return why a rank does not fit on a GPU of ``cluster``, and the remedy."""
    if cluster.card is None or need.total <= (limit := int(cluster.card.memory * USABLE)):
        return None
    steps = [] if config.model.gradient_checkpointing else ["set `model.gradient_checkpointing`=true"]
    steps.append("lower `batch.micro_batch_tokens`")
    steps += ["raise `policy.zero_stage`"] if config.policy.zero_stage < 3 else []
    return (
        f"supervised training: a policy rank needs {need.total / GIB:.1f} GiB and a {cluster.card.name} has "
        f"{limit / GIB:.1f} GiB for it; {', '.join(steps)}, or add policy ranks or `policy.sequence_parallel`"
    )


def supervised_times(
    config: SupervisedConfig,
    model: ModelShape,
    sizes: Sizes,
    peaks: Peaks,
    reached: Reached,
    *,
    rows: Sequence[tuple[int, int]] = (),
    demonstrations: int | None = None,
) -> SupervisedTimes:
    """Return the seconds of the stage.

    Args:
        rows: tokens of prompt and completion of some demonstrations; empty: assumed shares of
            `sft.max_length`.
        demonstrations: rows of all sources, with those that are held out; None: unknown.
    """
    sft = config.sft
    assert sft is not None  # the configuration was checked
    rows = rows or [assumed_row(sft.max_length)]
    work = UpdateWork(tuple((p, (c,)) for p, c in _repeated(rows, sft.batch_size)))
    rates = Rates(config, model, sizes, peaks, reached)
    held_out = count_held_out(sft, demonstrations) if demonstrations else 0
    steps = config.steps if sft.epochs is None else None
    if steps is None and demonstrations:
        steps = sft.steps_for(demonstrations - held_out)
    every = sft.validate_every or (steps or 0)
    validations = 2 + (((steps or 1) - 1) // every if every else 0) if held_out else 0
    tokens = sum(p + c[0] for p, c in work.groups)
    forward_s = rates.compute_s([work]) / (4 if config.model.gradient_checkpointing else 3)
    step_s = rates.update_s([work]) + reached.overhead_s
    return SupervisedTimes(step_s, forward_s * held_out / sft.batch_size, tokens, steps, validations)


def assumed_row(max_length: int) -> tuple[int, int]:
    """Return the tokens of prompt and completion of a demonstration of which nothing but a bound is known."""
    return round(_PROMPT_SHARE * max_length), max(1, round(_COMPLETION_SHARE * max_length))


def _repeated(rows: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return ``count`` rows, spread evenly over ``rows``."""
    return [rows[i * len(rows) // count] for i in range(count)]
