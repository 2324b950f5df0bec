"""Checks across sections of a user's own pieces."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.sections import Sections


def own_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for own pieces that contradict other settings, or that nothing would call."""
    rollout, sources = config.rollout, (*config.data.train, *config.data.eval)
    if rollout.function and all(config.data.environment_of(source) for source in sources):
        yield (
            f"`rollout.function` = {rollout.function} draws samples of prompts without environment, and "
            "every source here has one; remove one of them"
        )
    if rollout.function and config.policy.router_replay:
        yield (
            f"`policy.router_replay` needs the experts of every token, and tokens that `rollout.function` = "
            f"{rollout.function} puts in have none; remove one of them"
        )
    if config.data.has_own_order and config.data.pools is not None:
        yield (
            f"`data.pools` divides prompts for `data.order` = pools, but `data.order` = {config.data.order}; "
            "remove `data.pools`"
        )
