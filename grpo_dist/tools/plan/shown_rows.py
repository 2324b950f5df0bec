"""Demonstrations in the updates of a planned step (`demonstrations`): rows beside the samples."""

from __future__ import annotations

from grpo_dist.config import Config
from grpo_dist.tools.plan.supervised import assumed_row


def shown_rows(config: Config) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the demonstrations of one update: tokens of prompt and completion of each; () without any."""
    settings = config.demonstrations
    if settings is None:
        return ()
    prompt, completion = assumed_row(settings.max_length or config.max_length)
    return ((prompt, (completion,)),) * (settings.rows_per_step // config.batch.updates_per_step)


def shown_line(config: Config) -> list[str]:
    """Describe what a plan assumes of demonstrations; [] without any."""
    if config.demonstrations is None:
        return []
    prompt, completion = assumed_row(config.demonstrations.max_length or config.max_length)
    return [
        f"assumed: each of the {config.demonstrations.rows_per_step} demonstrations of a step has "
        f"{prompt} + {completion} tokens, half of `demonstrations.max_length`"
    ]
