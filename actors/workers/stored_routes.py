"""Routes of samples in the object store, put there by engines and fetched by policy ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from grpo_dist.types import Rollout

_FETCH_S = 120.0  # for the routes of one sample, megabytes, perhaps from another node


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """Routes that an engine has put into the object store; they are lost with that engine."""

    reference: Any  # ray.ObjectRef

    def fetch(self) -> np.ndarray:
        """Fetch them. Raises RuntimeError when they are lost."""
        try:
            routes: np.ndarray = ray.get(self.reference, timeout=_FETCH_S)  # bounded: by its timeout
        except RayError as error:
            why = " ".join(str(error).split())[:200]
            raise RuntimeError(f"policy.router_replay: the routes of a sample are lost: {why}") from error
        return routes


def stored(rollout: Rollout) -> Rollout:
    """Return ``rollout`` with the routes of all its rows in the object store."""
    if rollout.routes is None:
        return rollout
    further = tuple(replace(row, routes=_put(row.routes)) for row in rollout.further_rows)
    return replace(rollout, routes=_put(rollout.routes), further_rows=further)


def _put(routes: Any) -> StoredRoutes:
    return StoredRoutes(ray.put(routes.fetch()))
