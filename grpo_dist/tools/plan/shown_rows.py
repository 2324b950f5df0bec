"""Demonstrations in the updates of a planned step (`demonstrations`): rows beside the samples."""

from __future__ import annotations

from grpo_dist.config import DemonstrationStreamConfig
from grpo_dist.tools.plan.supervised import assumed_row


def shown_rows(
    settings: DemonstrationStreamConfig | None, *, updates: int, longest: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the demonstrations of one of a step's ``updates``: tokens of prompt and completion of each; ()
    without any. ``longest``: tokens of the run's longest sequence.
    """
    if settings is None:
        return ()
    prompt, completion = assumed_row(settings.max_length or longest)
    return ((prompt, (completion,)),) * (settings.rows_per_step // updates)


def shown_line(settings: DemonstrationStreamConfig | None, *, longest: int) -> list[str]:
    """Describe what a plan assumes of demonstrations; [] without any."""
    if settings is None:
        return []
    prompt, completion = assumed_row(settings.max_length or longest)
    return [
        f"assumed: each of the {settings.rows_per_step} demonstrations of a step has {prompt} + {completion} "
        "tokens, half of the longest that may be (`demonstrations.max_length`)"
    ]
