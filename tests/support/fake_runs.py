"""The real driver loop on fake workers, from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from grpo_dist.config import Config
from grpo_dist.driver import run
from grpo_dist.types import Prompt
from tests.support import fakes


def train(world: fakes.World, config: Config, prompts: Sequence[Prompt], **how: Any) -> fakes.World:
    """Run the loop on ``world``, with whose workers it begins, and return it. ``how``: as for `driver.run`;
    ``eval_sets`` are none unless given.
    """
    workers, eval_sets = world.workers(reference=config.needs_reference), how.pop("eval_sets", [])
    asyncio.run(run(config, workers, prompts, eval_sets, world, world, **how))
    return world
