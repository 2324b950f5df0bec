"""Demonstrations in a plan: a rank of an sft stage, and rows beside the samples of a step.

The memory of an sft stage is that of a policy rank whose micro-batches hold demonstrations, which are taken
to share no tokens, and no engine sleeps there.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_dist.config import DemonstrationStreamConfig, LengthsConfig, SupervisedConfig
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.memory import USABLE, Footprint, Sizes, policy_rank
from grpo_dist.tools.plan.models import ModelShape
from grpo_dist.tools.plan.workload import Workload

# Of `sft.max_length`, where no rows are known: mean tokens of a prompt and of a completion.
_PROMPT_SHARE, _COMPLETION_SHARE = 1 / 8, 3 / 8


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


def assumed_row(max_length: int) -> tuple[int, int]:
    """Return the tokens of prompt and completion of a demonstration of which nothing but a bound is known."""
    return round(_PROMPT_SHARE * max_length), max(1, round(_COMPLETION_SHARE * max_length))


def demonstration_rows(
    settings: DemonstrationStreamConfig | None, *, updates: int, longest: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the demonstrations of one of a step's ``updates``: tokens of prompt and completion of each; ()
    without any. ``longest``: tokens of the run's longest sequence.
    """
    if settings is None:
        return ()
    prompt, completion = assumed_row(settings.max_length or longest)
    return ((prompt, (completion,)),) * (settings.rows_per_step // updates)


def demonstration_line(settings: DemonstrationStreamConfig | None, *, longest: int) -> list[str]:
    """Describe what a plan assumes of demonstrations; [] without any."""
    if settings is None:
        return []
    prompt, completion = assumed_row(settings.max_length or longest)
    return [
        f"assumed: each of the {settings.rows_per_step} demonstrations of a step has {prompt} + {completion} "
        "tokens, half of the longest that may be (`demonstrations.max_length`)"
    ]
