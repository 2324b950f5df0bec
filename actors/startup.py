"""Wait for actors that start, and log which of them are not up yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.colocation import Colocation
from actors.workers.environment import EnvironmentPool
from actors.workers.policy_group import PolicyGroup
from actors.workers.reference import ReferencePool
from actors.workers.reward import RewardPool
from actors.workers.reward_model import RewardModelPool
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.runtime.stage_log import names_of, stage

# By class of a role's handle: the name of its stage of the start, and what the actors do in it.
STAGES: dict[type, tuple[str, str]] = {
    RolloutPool: ("engines", "load the model, compile, and answer a first request"),
    EnvironmentPool: ("environments", "start their sandbox"),
    RewardPool: ("reward workers", "start grader processes"),
    RewardModelPool: ("reward models", "load"),
    ReferencePool: ("reference", "loads the model"),
    PolicyGroup: ("policy ranks", "join, load the model and set up DeepSpeed"),
}


async def wait_until_ready(handle: Any) -> None:
    """Wait for the actors of one role, as a stage of the log."""
    found = (words for kind, words in STAGES.items() if isinstance(handle, kind))
    name, what = next(found, ("actors", ""))
    if isinstance(handle, RolloutPool) and handle.role == "evaluation":
        name = "evaluation engines"
    with stage(name, what, lambda: names_of(_starting([handle]))):
        await handle.ready()


async def wait_until_ready_colocated(colocation: Colocation, handles: Sequence[Any]) -> None:
    what = "they load one after the other, on the same devices"
    with stage("engines, policy ranks and models", what, lambda: names_of(_starting(handles))):
        await colocation.start()


def _starting(handles: Sequence[Any]) -> list[str]:
    """Return the names of the actors that are not ready yet."""
    return sorted(name for handle in handles for name in handle.team.starting)
